//! The symbols of loaded modules, by address and by name.
//!
//! The caller reads them ([`module_symbols`](super::module_symbols)). Results are valid as long as
//! no module is loaded or removed.

use std::fmt;

use super::modules::Module;
use super::symbols::{Function, Symbol, Symbols};

/// A module with its symbols.
#[derive(Debug, Clone)]
pub struct ModuleSymbols {
    /// The module.
    pub module: Module,
    symbols: Symbols,
}

/// A symbol of a module, shown as the kernel does: `name [module]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleSymbol<'a> {
    /// The name of the module.
    pub module: &'a str,
    /// The symbol, at its running address.
    pub symbol: Symbol<'a>,
}

impl fmt::Display for ModuleSymbol<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.symbol.name, self.module)
    }
}

impl ModuleSymbols {
    /// Pairs a module with its symbols, which have no slide.
    #[must_use]
    pub fn new(module: Module, symbols: Symbols) -> Self {
        Self { module, symbols }
    }

    /// Returns all symbols, at their running addresses.
    #[must_use]
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// Returns the symbol that contains an address of the module, and the distance to its first
    /// byte.
    #[must_use]
    pub fn resolve(&self, address: u64) -> Option<(ModuleSymbol<'_>, u64)> {
        let range = self.module.range_of(address)?;
        let (symbol, offset) = self.symbols.resolve(address)?;
        let inside = range.addresses.contains(&symbol.address);
        inside.then(|| (self.named(symbol), offset))
    }

    /// Returns the module's functions, ascending, each no longer than its range.
    pub fn text_functions(&self) -> impl Iterator<Item = Function<'_>> {
        self.symbols.text_functions().map(|function| {
            let range = self.module.range_of(function.symbol.address);
            let end = range.map_or(function.symbol.address, |range| range.addresses.end);
            let most = end - function.symbol.address;
            Function {
                size: function.size.min(most),
                ..function
            }
        })
    }

    fn named<'a>(&'a self, symbol: Symbol<'a>) -> ModuleSymbol<'a> {
        ModuleSymbol {
            module: &self.module.name,
            symbol,
        }
    }
}

/// All modules with symbols, found by address and by name.
#[derive(Debug, Clone, Default)]
pub struct LoadedModules {
    modules: Vec<ModuleSymbols>,
    /// The first and past-the-end address of each range, and the module's index; ascending.
    ranges: Vec<(u64, u64, usize)>,
}

impl LoadedModules {
    /// Indexes modules by their ranges, which should not overlap. Of modules that do, any may be
    /// found.
    #[must_use]
    pub fn new(modules: Vec<ModuleSymbols>) -> Self {
        let mut all = Self::default();
        for module in modules {
            all.push(module);
        }
        all.ranges.sort_unstable();
        all
    }

    /// Adds a module.
    pub fn add(&mut self, module: ModuleSymbols) {
        self.push(module);
        self.ranges.sort_unstable();
    }

    fn push(&mut self, module: ModuleSymbols) {
        let place = self.modules.len();
        let of_module = module.module.ranges.iter();
        let ranges = of_module.map(|r| (r.addresses.start, r.addresses.end, place));
        self.ranges.extend(ranges);
        self.modules.push(module);
    }

    /// Returns the modules, in the order passed.
    #[must_use]
    pub fn modules(&self) -> &[ModuleSymbols] {
        &self.modules
    }

    /// Returns the module that contains an address, even if none of its symbols does.
    #[must_use]
    pub fn module_at(&self, address: u64) -> Option<&ModuleSymbols> {
        let after = self.ranges.partition_point(|(start, ..)| *start <= address);
        let (_, end, place) = self.ranges.get(after.checked_sub(1)?)?;
        self.modules.get(*place).filter(|_| address < *end)
    }

    /// Returns the symbol that contains an address, and the distance to its first byte.
    #[must_use]
    pub fn resolve(&self, address: u64) -> Option<(ModuleSymbol<'_>, u64)> {
        self.module_at(address)?.resolve(address)
    }

    /// Returns every symbol of a name, in all modules or in the one called `module`.
    pub fn all_of<'a>(
        &'a self,
        name: &'a str,
        module: Option<&'a str>,
    ) -> impl Iterator<Item = ModuleSymbol<'a>> {
        self.modules
            .iter()
            .filter(move |of| module.is_none_or(|module| module == of.module.name))
            .flat_map(move |of| of.symbols.all_of(name).map(|symbol| of.named(symbol)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::module_memory::RangeKind;
    use crate::kernel::test_kernel::{self, all_symbols};

    /// Makes a module with a page of text and, a page later, a page of data.
    fn module(name: &str, start: u64, symbols: &[(&str, u64, u8)]) -> ModuleSymbols {
        let ranges = [
            (RangeKind::Text, start..start + 0x1000),
            (RangeKind::Data, start + 0x2000..start + 0x3000),
        ];
        let symbols = symbols.iter();
        let symbols = symbols.map(|(name, offset, kind)| (*name, start + offset, *kind, false));
        let symbols = all_symbols(symbols, Some(start + 0x3000));
        ModuleSymbols::new(test_kernel::module(start, name, &ranges), symbols)
    }

    const KVM: u64 = 0xffff_ffff_c010_0000;
    const NET: u64 = KVM + 0x1_0000;

    fn loaded() -> LoadedModules {
        let symbols = [
            ("init", 0, b't'),
            ("run", 0x800, b't'),
            ("state", 0x2100, b'd'),
        ];
        LoadedModules::new(vec![
            module("net", NET, &symbols[..1]),
            module("kvm", KVM, &symbols),
        ])
    }

    #[test]
    fn addresses_resolve_within_their_range_only() {
        let loaded = loaded();
        for (address, expected) in [
            (KVM - 1, None),
            (KVM, Some(("init [kvm]", 0))),
            (KVM + 0xfff, Some(("run [kvm]", 0x7ff))),
            (KVM + 0x1000, None),
            (KVM + 0x20ff, None),
            (KVM + 0x2fff, Some(("state [kvm]", 0xeff))),
            (KVM + 0x3000, None),
            (NET + 0xff, Some(("init [net]", 0xff))),
            (u64::MAX, None),
        ] {
            let found = loaded.resolve(address);
            let found = found.map(|(symbol, offset)| (symbol.to_string(), offset));
            let expected = expected.map(|(name, offset): (&str, u64)| (name.to_owned(), offset));
            assert_eq!(found, expected, "{address:#x}");
        }
        let module = loaded.module_at(KVM + 0x2000).map(|m| &m.module.name[..]);
        assert_eq!(module, Some("kvm"), "no symbol, but of the module");
    }

    #[test]
    fn names_are_found_in_all_modules_or_in_one() {
        let loaded = loaded();
        let found = |name, module| -> Vec<String> {
            let found = loaded.all_of(name, module);
            found.map(|symbol| symbol.to_string()).collect()
        };
        assert_eq!(found("init", None), ["init [net]", "init [kvm]"]);
        assert_eq!(found("init", Some("kvm")), ["init [kvm]"]);
        assert_eq!(found("state", Some("net")), Vec::<String>::new());
    }

    #[test]
    fn functions_end_with_their_range() {
        let kvm = module("kvm", KVM, &[("run", 0x800, b't'), ("state", 0x2100, b'd')]);
        let sizes: Vec<u64> = kvm.text_functions().map(|f| f.size).collect();
        assert_eq!(sizes, [0x800]);
    }
}
