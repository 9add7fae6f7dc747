//! The list of loaded modules and their symbols, read together.
//!
//! The caller brings types and symbols of the running kernel, and memory that stands still. What of the modules is broken is
//! told beside what could be read.

use super::btf::Btf;
use super::list::Partial;
use super::loaded_modules::LoadedModules;
use super::module_symbols::{ModuleSymbolsError, ModuleSymbolsLayout};
use super::modules::{Module, ModulesError, ModulesLayout, ModulesLayoutError};
use super::symbols::Symbols;
use crate::MemoryView;

/// What of the modules could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModuleError {
    /// Their list, or one on it: there are more modules than those that were read.
    #[error(transparent)]
    Modules(#[from] ModulesError),
    /// The symbols of one.
    #[error(transparent)]
    Symbols(#[from] ModuleSymbolsError),
}

/// Where a kernel keeps its modules and their symbols.
pub struct ModuleReaders {
    modules: ModulesLayout,
    symbols: ModuleSymbolsLayout,
}

impl ModuleReaders {
    /// Finds the offsets; `None` for a kernel that cannot load modules. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If types or symbols do not tell.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Option<Self>, ModulesLayoutError> {
        let modules = match ModulesLayout::new(btf, symbols) {
            Err(ModulesLayoutError::NoModules) => return Ok(None),
            modules => modules?,
        };
        let symbols = ModuleSymbolsLayout::new(btf)?;
        Ok(Some(Self { modules, symbols }))
    }

    /// The modules that are loaded now.
    #[must_use]
    pub fn list(&self, view: MemoryView<'_>) -> Partial<Module, ModulesError> {
        self.modules.modules(view)
    }

    /// The symbols of these modules, and what could not be read of the modules.
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
