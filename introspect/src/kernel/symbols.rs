//! A kernel's symbols, sorted by address, found by name or by address.
//!
//! The caller fills a [`SymbolsBuilder`] (kallsyms and the ELF symbol table do) and gets an
//! immutable table. [`Symbols::with_slide`] shares the table for a relocated kernel.
//!
//! The table is flat bytes, the same in memory and in a file ([`cached`](super::cached)).

use std::sync::Arc;

use super::nearest;
use super::shared_bytes::SharedBytes;
use super::symbol_table::{ENTRY, Entry, Table, TableShape};

/// The prefixes of symbols of padding. Some kernels have one before each function
/// (`CONFIG_CALL_PADDING`, since Linux 6.2). It is never executed as a function.
const PADDING_PREFIXES: [&str; 2] = ["__pfx_", "__cfi_"];

/// A symbol at its address in the guest (slide applied).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// The virtual address, or for an [`absolute`](Self::absolute) symbol its plain value.
    pub address: u64,
    /// The name, without the kind.
    pub name: &'a str,
    /// The letter of nm(1): `t`/`T` text, `d`/`D` data, `b`/`B` bss, `r`/`R` read-only, `w`/`W`
    /// weak, `v`/`V` weak object, `a`/`A` absolute. Upper case is global.
    pub kind: char,
    /// Whether the value is not an address in the image but an offset into each CPU's per-CPU area.
    /// The slide of a relocated kernel is not added to it.
    pub absolute: bool,
}

impl Symbol<'_> {
    /// Checks whether this names code: nm's `t`, `T`, `w` and `W`.
    #[must_use]
    pub fn is_text(&self) -> bool {
        matches!(self.kind, 't' | 'T' | 'w' | 'W')
    }
}

/// A text symbol and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function<'a> {
    /// The symbol at the function's first byte.
    pub symbol: Symbol<'a>,
    /// Size in bytes up to the next symbol at a higher address, including padding; 0 if nothing
    /// bounds it.
    pub size: u64,
}

/// A kernel's symbols. Cheap to clone: the table is shared.
#[derive(Debug, Clone)]
pub struct Symbols {
    table: Arc<Table>,
    slide: u64,
}

impl Symbols {
    /// Returns the number of symbols.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.entries().len()
    }

    /// Checks whether there are no symbols.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.entries().is_empty()
    }

    /// Returns the same symbols in a kernel that runs `slide` bytes above its link address.
    /// Replaces an earlier slide. Absolute symbols keep their value.
    #[must_use]
    pub fn with_slide(&self, slide: u64) -> Self {
        Self {
            table: Arc::clone(&self.table),
            slide,
        }
    }

    /// Returns the number of bytes that the kernel runs above its link address.
    #[must_use]
    pub fn slide(&self) -> u64 {
        self.slide
    }

    /// Returns all symbols, absolute ones first, each part ascending by address.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Symbol<'_>> + Clone {
        let (names, entries, _) = self.table.parts();
        entries.iter().map(|entry| self.symbol(names, entry))
    }

    /// Returns the address of the symbol called `name`; of several, the lowest (see
    /// [`all_of`](Self::all_of)).
    #[must_use]
    pub fn address_of(&self, name: &str) -> Option<u64> {
        self.all_of(name).next().map(|symbol| symbol.address)
    }

    /// Returns every symbol called `name`, ascending by address. Static functions of different
    /// files may share a name.
    pub fn all_of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Symbol<'a>> {
        let (names, entries, by_name) = self.table.parts();
        by_name
            .candidates(name.as_bytes())
            .filter_map(|index| entries.get(index as usize))
            .map(move |entry| self.symbol(names, entry))
            .filter(move |symbol| symbol.name == name)
    }

    /// Returns the symbol that contains `address` and the distance to its first byte. Of several
    /// symbols at one address, it is the first in the kernel's own order. Returns `None` before the
    /// first symbol, past the end of the image, and for per-CPU offsets.
    #[must_use]
    pub fn resolve(&self, address: u64) -> Option<(Symbol<'_>, u64)> {
        let address = address.checked_sub(self.slide)?;
        let (names, entries) = (self.table.parts().0, self.table.relocatable());
        let after = entries.partition_point(|entry| Entry::address_in(entry) <= address);
        let found = Entry::address_in(entries.get(after.checked_sub(1)?)?);
        let end = self.table.shape.end;
        let inside = after < entries.len() || found == address || end.is_some_and(|e| address < e);
        let first = entries.partition_point(|entry| Entry::address_in(entry) < found);
        let entry = entries.get(first).filter(|_| inside)?;
        let offset = address.checked_sub(Entry::address_in(entry))?;
        Some((self.symbol(names, entry), offset))
    }

    /// Returns every text symbol that a function may start at, ascending, with its size. Padding
    /// symbols before functions are left out; labels inside assembly code are not.
    pub fn text_functions(&self) -> impl Iterator<Item = Function<'_>> {
        let (names, entries) = (self.table.parts().0, self.table.relocatable());
        let mut next_higher = 0;
        entries
            .iter()
            .enumerate()
            .filter_map(move |(index, entry)| {
                let symbol = self.symbol(names, entry);
                let address = Entry::address_in(entry);
                if !symbol.is_text() || PADDING_PREFIXES.iter().any(|p| symbol.name.starts_with(p))
                {
                    return None;
                }
                next_higher = next_higher.max(index);
                while entries
                    .get(next_higher)
                    .is_some_and(|e| Entry::address_in(e) <= address)
                {
                    next_higher += 1;
                }
                let end = entries
                    .get(next_higher)
                    .map(Entry::address_in)
                    .or(self.table.shape.end);
                let size = end.map_or(0, |end| end.saturating_sub(address));
                Some(Function { symbol, size })
            })
    }

    /// Returns up to `count` text symbol names that look like `name`, best first, for the error
    /// that a function does not exist. Empty if nothing comes close.
    #[must_use]
    pub fn nearest_names(&self, name: &str, count: usize) -> Vec<&str> {
        let names = self.text_functions().map(|function| function.symbol.name);
        nearest::nearest(name, names, count)
    }

    /// Returns the symbols, which have running addresses and no slide, as link addresses with a
    /// slide. Replaces an earlier slide.
    pub(super) fn moved_back(&self, slide: u64) -> Self {
        Self {
            table: Arc::new(self.table.lowered(slide)),
            slide,
        }
    }

    /// Returns the same symbols with another end of the image, a running address.
    pub(super) fn ending_at(&self, end: Option<u64>) -> Self {
        let mut table = Table::clone(&self.table);
        table.shape.end = end.map(|end| end.wrapping_sub(self.slide));
        Self {
            table: Arc::new(table),
            slide: self.slide,
        }
    }

    /// Returns the flat table at link addresses, and its shape.
    pub(super) fn table(&self) -> (&[u8], TableShape) {
        (self.table.bytes.as_bytes(), self.table.shape)
    }

    /// Makes symbols with slide 0 from what [`table`](Self::table) returned. Returns `None` if the
    /// bytes are too few for the shape. Bytes from elsewhere make wrong symbols.
    pub(super) fn from_table(bytes: SharedBytes, shape: TableShape) -> Option<Self> {
        Some(Self {
            table: Arc::new(Table::new(bytes, shape)?),
            slide: 0,
        })
    }

    fn symbol<'a>(&self, names: &'a [u8], entry: &[u8; ENTRY]) -> Symbol<'a> {
        let entry = Entry::from_bytes(entry);
        Symbol {
            address: match entry.absolute {
                true => entry.address,
                false => entry.address.wrapping_add(self.slide),
            },
            name: std::str::from_utf8(entry.name(names)).unwrap_or_default(),
            kind: char::from(entry.kind),
            absolute: entry.absolute,
        }
    }
}

/// A builder of [`Symbols`], which accepts symbols in any order.
#[derive(Debug, Default)]
pub struct SymbolsBuilder {
    names: Vec<u8>,
    entries: Vec<Entry>,
}

/// The error that a table would hold more than a kernel has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{symbols} symbols with {names} bytes of names are more than any kernel has: refused")]
pub struct TooManySymbols {
    /// The number of symbols when the limit was reached.
    pub symbols: usize,
    /// The number of bytes of names at that time.
    pub names: usize,
}

/// The maximum size of all names in bytes; a distribution kernel has about 5 MiB.
pub(super) const MAX_NAME_BYTES: usize = 256 << 20;

impl SymbolsBuilder {
    /// Makes an empty table with room for `symbols`.
    #[must_use]
    pub fn with_capacity(symbols: usize) -> Self {
        Self {
            names: Vec::with_capacity(symbols.saturating_mul(24).min(MAX_NAME_BYTES)),
            entries: Vec::with_capacity(symbols),
        }
    }

    /// Adds a symbol. `kind` is nm's letter; see [`Symbol`] for `absolute`. Invalid UTF-8 in a name
    /// becomes replacement characters. A name longer than 21,845 bytes is cut.
    ///
    /// # Errors
    /// If the table grew past the range of its indices.
    pub fn push(
        &mut self,
        name: &[u8],
        address: u64,
        kind: u8,
        absolute: bool,
    ) -> Result<(), TooManySymbols> {
        let name_start = self.names.len();
        if self.entries.len() >= u32::MAX as usize || name_start >= MAX_NAME_BYTES {
            return Err(TooManySymbols {
                symbols: self.entries.len(),
                names: name_start,
            });
        }
        // A replacement character takes three bytes, and a name's length must fit 16 bits.
        let limited = name.get(..usize::from(u16::MAX) / 3).unwrap_or(name);
        self.names.extend_from_slice(limited);
        self.entries.push(Entry {
            address,
            name_start: u32::try_from(name_start).unwrap_or(u32::MAX),
            name_length: u16::try_from(self.names.len() - name_start).unwrap_or(u16::MAX),
            kind,
            absolute,
        });
        Ok(())
    }

    /// Marks the text symbols between `_etext` and `_sinittext` as data, because the kernel has no
    /// text there. Does nothing without these two.
    pub(super) fn untext_data(&mut self) {
        let address_of = |name: &[u8]| {
            let named = self.entries.iter().find(|e| e.name(&self.names) == name);
            named.map(|entry| entry.address)
        };
        let (Some(after), Some(before)) = (address_of(b"_etext"), address_of(b"_sinittext")) else {
            return;
        };
        for entry in &mut self.entries {
            if !entry.absolute && entry.address > after && entry.address < before {
                entry.kind = match entry.kind {
                    b't' => b'd',
                    b'T' => b'D',
                    b'w' => b'v',
                    b'W' => b'V',
                    other => other,
                };
            }
        }
    }

    /// Returns the finished table, with slide 0. `end` is the first address past the image, if
    /// known: it bounds the last symbol. Symbols at one address stay in the order in which they
    /// were added.
    #[must_use]
    pub fn finish(mut self, end: Option<u64>) -> Symbols {
        // Checked once for all, because names are ASCII unless damaged.
        if !self.names.is_ascii() {
            self.names = self.readable_names();
        }
        self.entries
            .sort_by_key(|entry| (!entry.absolute, entry.address));
        Symbols {
            table: Arc::new(Table::build(self.names, &self.entries, end)),
            slide: 0,
        }
    }

    /// Replaces invalid UTF-8 in the names by replacement characters. Returns the names and points
    /// the entries to them.
    fn readable_names(&mut self) -> Vec<u8> {
        let mut readable = Vec::with_capacity(self.names.len());
        for entry in &mut self.entries {
            let name = String::from_utf8_lossy(entry.name(&self.names));
            entry.name_start = u32::try_from(readable.len()).unwrap_or(u32::MAX);
            entry.name_length = u16::try_from(name.len()).unwrap_or(u16::MAX);
            readable.extend_from_slice(name.as_bytes());
        }
        readable
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::test_kernel::all_symbols;

    fn kernel() -> Symbols {
        let all = [
            ("_etext", 0xffff_ffff_8100_0300, b'T', false),
            ("current_task", 0x1fbc0, b'D', true),
            ("startup_64", 0xffff_ffff_8100_0000, b'T', false),
            ("_text", 0xffff_ffff_8100_0000, b'T', false),
            ("do_sys_open", 0xffff_ffff_8100_0100, b'T', false),
            ("__pfx_do_sys_openat2", 0xffff_ffff_8100_0130, b't', false),
            ("do_sys_openat2", 0xffff_ffff_8100_0140, b't', false),
            ("cleanup", 0xffff_ffff_8100_0180, b't', false),
            ("cleanup", 0xffff_ffff_8100_0200, b't', false),
            ("jiffies", 0xffff_ffff_8200_0000, b'D', false),
        ];
        all_symbols(all, Some(0xffff_ffff_8200_1000))
    }

    #[test]
    fn names_lead_to_addresses_with_and_without_slide() {
        let linked = kernel();
        let running = linked.with_slide(0x1e00_0000);
        for (name, address, moves) in [
            ("do_sys_open", Some(0xffff_ffff_8100_0100), true),
            ("jiffies", Some(0xffff_ffff_8200_0000), true),
            ("current_task", Some(0x1fbc0), false),
            ("cleanup", Some(0xffff_ffff_8100_0180), true),
            ("do_sys_ope", None, true),
            ("", None, true),
        ] {
            assert_eq!(linked.address_of(name), address, "{name}");
            let moved = address.map(|at: u64| at + if moves { 0x1e00_0000 } else { 0 });
            assert_eq!(running.address_of(name), moved, "{name} slid");
        }
    }

    #[test]
    fn all_symbols_of_one_name_come_in_address_order() {
        let symbols = kernel();
        let found: Vec<u64> = symbols.all_of("cleanup").map(|s| s.address).collect();
        assert_eq!(found, [0xffff_ffff_8100_0180, 0xffff_ffff_8100_0200]);
    }

    #[test]
    fn addresses_resolve_to_the_symbol_they_lie_in() {
        let slide = 0x40_0000;
        let symbols = kernel().with_slide(slide);
        for (address, expected) in [
            (0xffff_ffff_80ff_ffff, None),
            (0xffff_ffff_8100_0000, Some(("startup_64", 0))),
            (0xffff_ffff_8100_00ff, Some(("startup_64", 0xff))),
            (0xffff_ffff_8100_0147, Some(("do_sys_openat2", 7))),
            (0xffff_ffff_8200_0fff, Some(("jiffies", 0xfff))),
            (0xffff_ffff_8200_1000, None),
        ] {
            let found = symbols
                .resolve(address + slide)
                .map(|(s, offset)| (s.name, offset));
            assert_eq!(found, expected, "{address:#x}");
        }
        assert_eq!(
            symbols.resolve(0x1fbc0),
            None,
            "a per-CPU offset is no address"
        );
        assert_eq!(symbols.resolve(u64::MAX), None);
    }

    #[test]
    fn functions_reach_to_the_next_higher_symbol() {
        let symbols = kernel();
        let functions: Vec<(&str, u64)> = symbols
            .text_functions()
            .map(|f| (f.symbol.name, f.size))
            .collect();
        assert_eq!(
            functions,
            [
                ("startup_64", 0x100),
                ("_text", 0x100),
                ("do_sys_open", 0x30),
                ("do_sys_openat2", 0x40),
                ("cleanup", 0x80),
                ("cleanup", 0x100),
                ("_etext", 0xff_fd00),
            ]
        );
    }

    #[test]
    fn names_that_are_no_text_are_made_readable() {
        let mut builder = SymbolsBuilder::default();
        // Two halves of one character, which are valid only together.
        for (name, address) in [
            (&b"half_\xc3"[..], 0x1000),
            (b"\xa9_half", 0x1001),
            (b"whole", 0x1002),
        ] {
            builder.push(name, address, b't', false).unwrap();
        }
        let symbols = builder.finish(None);
        let names: Vec<&str> = symbols.iter().map(|s| s.name).collect();
        assert_eq!(names, ["half_\u{fffd}", "\u{fffd}_half", "whole"]);
        assert_eq!(symbols.address_of("\u{fffd}_half"), Some(0x1001));
    }

    #[test]
    fn running_addresses_become_link_addresses_and_a_slide() {
        let (linked, slide) = (kernel(), 0x1e00_0000);
        let moved = linked.with_slide(slide);
        let all = moved
            .iter()
            .map(|s| (s.name, s.address, s.kind as u8, s.absolute));
        let running = all_symbols(all, Some(0xffff_ffff_8200_1000 + slide));
        let told = running.moved_back(slide);
        assert!(told.iter().eq(linked.with_slide(slide).iter()));
        assert!(told.with_slide(0).iter().eq(linked.iter()));
        assert_eq!(told.table().1, linked.table().1);
    }

    #[test]
    fn a_mistyped_function_finds_its_neighbours() {
        let symbols = kernel();
        assert_eq!(
            symbols.nearest_names("do_sys_opena", 2),
            ["do_sys_open", "do_sys_openat2"]
        );
        assert_eq!(symbols.nearest_names("zzzzzzzz", 3), Vec::<&str>::new());
    }
}
