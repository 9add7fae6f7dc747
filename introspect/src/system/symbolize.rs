//! Names of kernel addresses, and addresses of kernel names, modules included.

use super::PausedSystem;
use crate::kernel::loaded_modules::LoadedModules;
use crate::kernel::symbols::Symbol;

/// A named address in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SymbolizedAddress {
    /// The address.
    pub address: u64,
    /// The name of the symbol.
    pub name: String,
    /// The distance from the symbol, in bytes.
    pub offset: u64,
    /// The type letter, as in nm(1).
    pub kind: char,
    /// The module, or `None` for the kernel itself.
    pub module: Option<String>,
}

impl PausedSystem<'_> {
    /// Finds the symbol at a kernel address. `modules` are
    /// [`module_symbols`](Self::module_symbols).
    #[must_use]
    pub fn place(
        &self,
        address: u64,
        modules: Option<&LoadedModules>,
    ) -> Option<SymbolizedAddress> {
        if let Some(modules) = modules
            && let Some((found, offset)) = modules.resolve(address)
        {
            return Some(SymbolizedAddress {
                address,
                name: found.symbol.name.to_owned(),
                offset,
                kind: found.symbol.kind,
                module: Some(found.module.to_owned()),
            });
        }
        let (symbol, offset) = self.system.symbols.resolve(address)?;
        Some(SymbolizedAddress {
            address,
            name: symbol.name.to_owned(),
            offset,
            kind: symbol.kind,
            module: None,
        })
    }

    /// Finds every symbol of this name, in the kernel and in its modules.
    #[must_use]
    pub fn places_named(
        &self,
        name: &str,
        modules: Option<&LoadedModules>,
    ) -> Vec<SymbolizedAddress> {
        let symbols = self.system.symbols.all_of(name);
        let place = |symbol: Symbol<'_>, module: Option<&str>| SymbolizedAddress {
            address: symbol.address,
            name: symbol.name.to_owned(),
            offset: 0,
            kind: symbol.kind,
            module: module.map(str::to_owned),
        };
        let of_modules = modules.into_iter().flat_map(|all| all.all_of(name, None));
        symbols
            .map(|symbol| place(symbol, None))
            .chain(of_modules.map(|found| place(found.symbol, Some(found.module))))
            .collect()
    }
}
