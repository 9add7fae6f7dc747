//! The kernel's modules and their symbols.

use super::{Look, Lost, Part};
use crate::kernel::btf::Btf;
use crate::kernel::list::Walk;
use crate::kernel::loaded_modules::LoadedModules;
use crate::kernel::module_symbols::{ModuleSymbolsError, ModuleSymbolsLayout};
use crate::kernel::modules::{Module, ModulesError, ModulesLayout};
use crate::kernel::symbols::Symbols;

/// The readers of modules.
pub(super) struct ModuleParts {
    modules: ModulesLayout,
    symbols: ModuleSymbolsLayout,
}

impl ModuleParts {
    pub(super) fn new(types: Result<&Btf, &str>, symbols: &Symbols) -> Part<Self> {
        let lost = |reason| Lost {
            what: "modules",
            reason,
        };
        let btf = types.map_err(|why| lost(why.to_owned()))?;
        Ok(Self {
            modules: ModulesLayout::new(btf, symbols).map_err(|e| lost(e.to_string()))?,
            symbols: ModuleSymbolsLayout::new(btf).map_err(|e| lost(e.to_string()))?,
        })
    }
}

impl Look<'_> {
    /// The modules that are loaded now.
    ///
    /// # Errors
    /// If the kernel has none or does not tell of them.
    pub fn modules(&self) -> Result<Walk<Module, ModulesError>, Lost> {
        let parts = self.system.modules.as_ref().map_err(Lost::clone)?;
        Ok(parts.modules.modules(self.view))
    }

    /// The symbols of all loaded modules, and what could not be read of them.
    ///
    /// # Errors
    /// If the kernel has no modules or does not tell of them.
    pub fn module_symbols(&self) -> Result<(LoadedModules, Vec<ModuleSymbolsError>), Lost> {
        let parts = self.system.modules.as_ref().map_err(Lost::clone)?;
        let modules = parts.modules.modules(self.view).items;
        Ok(parts.symbols.read_all(self.view, modules))
    }
}
