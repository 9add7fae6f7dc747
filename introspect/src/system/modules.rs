//! The kernel's modules and their symbols.

use super::{PausedSystem, Unavailable};
use crate::kernel::list::Partial;
use crate::kernel::loaded_modules::LoadedModules;
use crate::kernel::module_readers::{ModuleError, ModuleReaders};
use crate::kernel::modules::{Module, ModulesError};

impl PausedSystem<'_> {
    /// The modules that are loaded now; none in a kernel that cannot load any.
    ///
    /// # Errors
    /// If the kernel does not tell of them.
    pub fn modules(&self) -> Result<Partial<Module, ModulesError>, Unavailable> {
        let readers = self.system.modules.as_ref().map_err(Unavailable::clone)?;
        let none = Partial {
            items: Vec::new(),
            error: None,
        };
        let list = |readers: &ModuleReaders| readers.list(self.view);
        Ok(readers.as_ref().map_or(none, list))
    }

    /// The symbols of these [`modules`](Self::modules), and what could not be read of the modules.
    ///
    /// # Errors
    /// If the kernel does not tell of modules.
    pub fn module_symbols(
        &self,
        modules: Partial<Module, ModulesError>,
    ) -> Result<(LoadedModules, Vec<ModuleError>), Unavailable> {
        let readers = self.system.modules.as_ref().map_err(Unavailable::clone)?;
        let read = |readers: &ModuleReaders| readers.symbols(self.view, modules);
        Ok(readers.as_ref().map(read).unwrap_or_default())
    }
}
