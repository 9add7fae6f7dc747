//! The kernel's modules and their symbols.

use super::{PausedSystem, Unavailable, known};
use crate::kernel::list::Partial;
use crate::kernel::loaded_modules::LoadedModules;
use crate::kernel::module_readers::{ModuleError, ModuleReaders};
use crate::kernel::modules::{Module, ModulesError};

impl PausedSystem<'_> {
    /// Returns the modules that are loaded now, or none in a kernel that cannot load any.
    ///
    /// # Errors
    /// If the kernel's layout for them is unknown.
    pub fn modules(&self) -> Result<Partial<Module, ModulesError>, Unavailable> {
        let readers = known(&self.system.modules)?;
        let none = Partial {
            items: Vec::new(),
            error: None,
        };
        let list = |readers: &ModuleReaders| readers.list(self.view);
        Ok(readers.as_ref().map_or(none, list))
    }

    /// Returns the symbols of these [`modules`](Self::modules), and the parts of the modules that
    /// could not be read.
    ///
    /// # Errors
    /// If the kernel's layout for modules is unknown.
    pub fn module_symbols(
        &self,
        modules: Partial<Module, ModulesError>,
    ) -> Result<(LoadedModules, Vec<ModuleError>), Unavailable> {
        let readers = known(&self.system.modules)?;
        let read = |readers: &ModuleReaders| readers.symbols(self.view, modules);
        Ok(readers.as_ref().map(read).unwrap_or_default())
    }
}
