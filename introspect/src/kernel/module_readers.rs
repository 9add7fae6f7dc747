//! The list of loaded modules and their symbols, read together.
//!
//! The caller passes types and symbols of the running kernel, and paused memory. Errors are
//! reported beside the modules that could be read.

use super::bpf_symbols::BpfSymbolsError;
use super::btf::Btf;
use super::list::Partial;
use super::loaded_modules::{LoadedModules, ModuleSymbols};
use super::module_symbols::{ModuleSymbolsError, ModuleSymbolsLayout};
use super::modules::{Module, ModulesError, ModulesLayout, ModulesLayoutError};
use super::symbols::Symbols;
use crate::{Gva, MemoryView};

/// An error in reading modules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModuleError {
    /// The list, or a module on it, is broken. Some modules are missing from the result.
    #[error(transparent)]
    Modules(#[from] ModulesError),
    /// The symbols of a module cannot be read.
    #[error(transparent)]
    Symbols(#[from] ModuleSymbolsError),
    /// The names of BPF programs cannot be read.
    #[error(transparent)]
    Bpf(#[from] BpfSymbolsError),
}

/// The location of a kernel's modules and their symbols.
#[derive(Debug)]
pub struct ModuleReaders {
    modules: ModulesLayout,
    symbols: ModuleSymbolsLayout,
}

impl ModuleReaders {
    /// Looks up the offsets. Returns `None` for a kernel that cannot load modules. `symbols` must
    /// have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel's types or symbols do not describe them.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Option<Self>, ModulesLayoutError> {
        let modules = match ModulesLayout::new(btf, symbols) {
            Err(ModulesLayoutError::NoModules) => return Ok(None),
            modules => modules?,
        };
        let symbols = ModuleSymbolsLayout::new(btf)?;
        Ok(Some(Self { modules, symbols }))
    }

    /// Reads the list of loaded modules.
    #[must_use]
    pub fn list(&self, view: MemoryView<'_>) -> Partial<Module, ModulesError> {
        self.modules.modules(view)
    }

    /// Reads the name of the module whose `struct module` is at `address`.
    ///
    /// # Errors
    /// If the structure cannot be read.
    pub fn name_at(&self, view: MemoryView<'_>, address: Gva) -> Result<String, ModuleError> {
        Ok(self.modules.name_at(view, address)?)
    }

    /// Reads the module whose `struct module` is at `address`, with its symbols.
    ///
    /// # Errors
    /// If the structure or a table of symbols cannot be read.
    pub fn module_at(
        &self,
        view: MemoryView<'_>,
        address: Gva,
    ) -> Result<ModuleSymbols, ModuleError> {
        let module = self.modules.module_at(view, address)?;
        Ok(self.symbols.read(view, module)?)
    }

    /// Reads the symbols of these modules, with the errors.
    #[must_use]
    pub fn symbols(
        &self,
        view: MemoryView<'_>,
        modules: Partial<Module, ModulesError>,
    ) -> (LoadedModules, Vec<ModuleError>) {
        let (loaded, broken) = self.symbols.read_all(view, modules.items);
        let errors = modules.error.map(ModuleError::from).into_iter();
        let errors = errors.chain(broken.into_iter().map(ModuleError::from));
        (loaded, errors.collect())
    }
}
