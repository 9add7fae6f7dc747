//! The kernel's modules and their symbols, and those of BPF programs, which `/proc/kallsyms` shows
//! as a module's.

use super::{PausedSystem, Unavailable, known};
use crate::kernel::bpf_symbols::BpfSymbolsError;
use crate::kernel::list::Partial;
use crate::kernel::loaded_modules::{LoadedModules, ModuleSymbols};
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

    /// Returns the symbols of these [`modules`](Self::modules) and of BPF programs, and the parts
    /// of them that could not be read.
    ///
    /// # Errors
    /// If the kernel's layout for modules is unknown.
    pub fn module_symbols(
        &self,
        modules: Partial<Module, ModulesError>,
    ) -> Result<(LoadedModules, Vec<ModuleError>), Unavailable> {
        let readers = known(&self.system.modules)?;
        let read = |readers: &ModuleReaders| readers.symbols(self.view, modules);
        let (mut loaded, mut errors) = readers.as_ref().map(read).unwrap_or_default();
        if let Some((programs, error)) = self.bpf_programs() {
            if !programs.symbols().is_empty() {
                loaded.add(programs);
            }
            errors.extend(error.map(ModuleError::from));
        }
        Ok((loaded, errors))
    }

    /// Returns the BPF programs as the symbols of a module, and the first error; `None` in a kernel
    /// without BPF.
    #[must_use]
    pub fn bpf_programs(&self) -> Option<(ModuleSymbols, Option<BpfSymbolsError>)> {
        let layout = self.system.bpf.as_ref();
        layout.map(|layout| layout.read(self.view))
    }
}
