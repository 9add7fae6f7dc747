//! The kernel's modules and their symbols.

use super::{Look, Lost};
use crate::kernel::btf::Btf;
use crate::kernel::list::Walk;
use crate::kernel::loaded_modules::LoadedModules;
use crate::kernel::module_symbols::{ModuleSymbolsError, ModuleSymbolsLayout};
use crate::kernel::modules::{Module, ModulesError, ModulesLayout, ModulesLayoutError};
use crate::kernel::symbols::Symbols;

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

/// The readers of modules.
pub(super) struct ModuleParts {
    modules: ModulesLayout,
    symbols: ModuleSymbolsLayout,
}

impl ModuleParts {
    /// `None` for a kernel that cannot load modules.
    pub(super) fn new(btf: &Btf, symbols: &Symbols) -> Result<Option<Self>, ModulesLayoutError> {
        let modules = match ModulesLayout::new(btf, symbols) {
            Err(ModulesLayoutError::NoModules) => return Ok(None),
            modules => modules?,
        };
        let symbols = ModuleSymbolsLayout::new(btf)?;
        Ok(Some(Self { modules, symbols }))
    }
}

impl Look<'_> {
    /// The modules that are loaded now; none in a kernel that cannot load any.
    ///
    /// # Errors
    /// If the kernel does not tell of them.
    pub fn modules(&self) -> Result<Walk<Module, ModulesError>, Lost> {
        let parts = self.system.modules.as_ref().map_err(Lost::clone)?;
        let none = Walk {
            items: Vec::new(),
            error: None,
        };
        let read = |parts: &ModuleParts| parts.modules.modules(self.view);
        Ok(parts.as_ref().map_or(none, read))
    }

    /// The symbols of all loaded modules, and what could not be read of them.
    ///
    /// # Errors
    /// If the kernel does not tell of modules.
    pub fn module_symbols(&self) -> Result<(LoadedModules, Vec<ModuleError>), Lost> {
        let Some(parts) = self.system.modules.as_ref().map_err(Lost::clone)? else {
            return Ok((LoadedModules::default(), Vec::new()));
        };
        let modules = parts.modules.modules(self.view);
        let (loaded, broken) = parts.symbols.read_all(self.view, modules.items);
        let errors = modules.error.map(ModuleError::from).into_iter();
        let errors = errors.chain(broken.into_iter().map(ModuleError::from));
        Ok((loaded, errors.collect()))
    }
}
