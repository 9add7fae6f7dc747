//! The functions of a program or library, sorted by address, found by address or by name.
//!
//! The caller provides the object's headers, and keeps the table as long as the file does not
//! change. Function symbols come from `.symtab`. Those of a stripped object come from `.dynsym` and
//! the `.symtab` packed into `.gnu_debugdata`. [`FunctionSymbols::lost`] reports the parts that are
//! not in the guest's memory, and the rest is used.
//!
//! Names are as in the object, without symbol versions. [`demangle`](super::demangle) makes them
//! readable.

use object::elf;

use super::code_ranges::CodeRanges;
use super::lost::LostPart;
use super::object_file::ObjectFile;
use super::symbol_tables;
use crate::kernel::nearest;

/// The maximum number of symbols of an object. A browser has about a million.
pub(super) const MAX_SYMBOLS: usize = 4 << 20;
/// The maximum size of an object's names in bytes.
pub(super) const MAX_NAME_BYTES: usize = 256 << 20;
/// The maximum length of a name in bytes. Longer ones are omitted.
pub(super) const MAX_NAME: usize = 64 << 10;
/// The maximum number of lower addresses with symbols that are searched for a function that reaches
/// an address. Also the maximum number of names of each.
const MAX_OVERLAPPING: usize = 256;

/// A function of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function<'a> {
    /// The link-time address.
    pub address: u64,
    /// The size in bytes. If the object has 0, it extends to the next symbol or the end of the
    /// code.
    pub size: u64,
    /// The name.
    pub name: &'a str,
    /// The kind of symbol.
    pub kind: FunctionKind,
    /// The visibility.
    pub binding: Binding,
}

/// The kind of a symbol of code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FunctionKind {
    /// A function (`STT_FUNC`).
    Function,
    /// A function that returns the address of the one to be called in its place (`STT_GNU_IFUNC`).
    Indirect,
    /// A global label of code that its author did not declare as a function, such as `_start` of
    /// some C libraries.
    Label,
}

/// The visibility of a symbol. The order is that of preference between names of one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Binding {
    /// Visible to all objects (`STB_GLOBAL`, `STB_GNU_UNIQUE`).
    Global,
    /// Visible to all objects, unless another defines it (`STB_WEAK`).
    Weak,
    /// Visible to its own source file (`STB_LOCAL`).
    Local,
}

/// A source table of symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SymbolTable {
    /// `.symtab`: all functions.
    Full,
    /// `.dynsym`: those that other objects may call.
    Dynamic,
    /// `.symtab` packed into `.gnu_debugdata`: the functions that `.dynsym` lacks.
    DebugData,
}

/// A stored symbol. Its name is a range of [`FunctionSymbols::names`].
#[derive(Debug, Clone, Copy)]
struct Entry {
    address: u64,
    size: u64,
    /// The highest end of this and all earlier functions.
    reach: u64,
    name_start: u32,
    name_length: u32,
    kind: FunctionKind,
    binding: Binding,
}

impl Entry {
    fn name<'a>(&self, names: &'a str) -> &'a str {
        let start = self.name_start as usize;
        names
            .get(start..start + self.name_length as usize)
            .unwrap_or_default()
    }

    fn end(&self) -> u64 {
        self.address.saturating_add(self.size)
    }

    /// Checks whether the symbol contains an address. One of unknown size contains only its own.
    fn contains(&self, address: u64) -> bool {
        self.address == address || (self.address < address && address < self.end())
    }
}

/// The functions of one object, at link-time addresses.
#[derive(Debug, Clone, Default)]
pub struct FunctionSymbols {
    /// All names, concatenated.
    names: String,
    /// The symbols, ascending by address. Of one address, the preferred name is first.
    entries: Vec<Entry>,
    tables: Vec<SymbolTable>,
    lost: Vec<LostPart>,
}

impl FunctionSymbols {
    /// Reads the functions of an object, as far as its tables are available.
    #[must_use]
    pub fn read(object: &ObjectFile<'_>) -> Self {
        symbol_tables::read(object)
    }

    /// Returns the number of functions. Every name of a function counts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the size in bytes of the table in memory.
    #[must_use]
    pub fn size(&self) -> usize {
        self.names.len() + self.entries.len() * size_of::<Entry>()
    }

    /// Checks whether there are none. [`lost`](Self::lost) may have the reason.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the source tables. With [`SymbolTable::Dynamic`] alone, only exported functions are
    /// known.
    #[must_use]
    pub fn tables(&self) -> &[SymbolTable] {
        &self.tables
    }

    /// Returns the parts of the object that could not be read.
    #[must_use]
    pub fn lost(&self) -> &[LostPart] {
        &self.lost
    }

    /// Iterates over all functions, ascending by address.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Function<'_>> + Clone {
        self.entries.iter().map(|entry| self.function(entry))
    }

    /// Returns the function that holds a link-time address, and the distance from its first byte.
    /// Of several names, it prefers exported ones, then those without leading underscores, then
    /// short ones. It returns a label only if no function reaches the address.
    #[must_use]
    pub fn resolve(&self, address: u64) -> Option<(Function<'_>, u64)> {
        let mut end = self
            .entries
            .partition_point(|entry| entry.address <= address);
        let mut label: Option<&Entry> = None;
        // Downwards over the addresses that have symbols, with all names of one address at a time.
        for _ in 0..MAX_OVERLAPPING {
            let Some(last) = end.checked_sub(1).and_then(|last| self.entries.get(last)) else {
                break;
            };
            if last.reach <= address && last.address != address {
                break;
            }
            let start = self
                .entries
                .partition_point(|entry| entry.address < last.address);
            let names = self.entries.get(start..end).unwrap_or_default();
            let mut names = names.iter().take(MAX_OVERLAPPING);
            let found = names.find(|entry| entry.contains(address));
            match found {
                Some(entry) if entry.kind != FunctionKind::Label => {
                    return Some((self.function(entry), address - entry.address));
                }
                found => label = label.or(found),
            }
            end = start;
        }
        label.map(|entry| (self.function(entry), address - entry.address))
    }

    /// Returns every function called `name`, ascending by address, because static functions of
    /// several source files may share one. It searches all names.
    pub fn all_of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Function<'a>> {
        self.iter().filter(move |function| function.name == name)
    }

    /// Returns the function called `name`. Of several, it is the exported one, else the lowest. It
    /// searches all names.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Function<'_>> {
        let named = self.iter().filter(|function| function.name == name);
        named.min_by_key(|function| function.binding)
    }

    /// Returns up to `count` names similar to `name`, best first, for the error message that a
    /// function does not exist.
    #[must_use]
    pub fn nearest_names(&self, name: &str, count: usize) -> Vec<&str> {
        nearest::nearest(name, self.iter().map(|function| function.name), count)
    }

    fn function(&self, entry: &Entry) -> Function<'_> {
        Function {
            address: entry.address,
            size: entry.size,
            name: entry.name(&self.names),
            kind: entry.kind,
            binding: entry.binding,
        }
    }
}

/// A collector of symbols in any order.
#[derive(Debug, Default)]
pub(super) struct Builder {
    names: String,
    entries: Vec<Entry>,
    pub(super) tables: Vec<SymbolTable>,
    pub(super) lost: Vec<LostPart>,
}

impl Builder {
    /// Returns the number of symbols so far.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds a symbol without its version. Returns `false` if there is no room.
    #[must_use]
    pub(super) fn push(&mut self, name: &[u8], symbol: RawFunction) -> bool {
        let version = memchr::memchr(b'@', name).filter(|at| *at > 0);
        let name = name.get(..version.unwrap_or(name.len())).unwrap_or(name);
        let name_start = self.names.len();
        if self.entries.len() >= MAX_SYMBOLS
            || name_start.saturating_add(name.len()) > MAX_NAME_BYTES
        {
            return false;
        }
        match std::str::from_utf8(name) {
            Ok(name) => self.names.push_str(name),
            Err(_) => self.names.push_str(&String::from_utf8_lossy(name)),
        }
        let name_length = self.names.len() - name_start;
        self.entries.push(Entry {
            address: symbol.address,
            size: symbol.size,
            reach: 0,
            name_start: u32::try_from(name_start).unwrap_or(u32::MAX),
            name_length: u32::try_from(name_length).unwrap_or(0),
            kind: symbol.kind,
            binding: symbol.binding,
        });
        true
    }

    /// Returns the finished table. `code` bounds functions of unknown size.
    pub(super) fn finish(self, code: &CodeRanges) -> FunctionSymbols {
        let Self {
            names,
            mut entries,
            tables,
            lost,
        } = self;
        entries.sort_unstable_by_key(|entry| preference(entry, &names));
        entries.dedup_by(|later, kept| {
            later.address == kept.address && later.name(&names) == kept.name(&names)
        });
        let higher = higher_addresses(&entries);
        let mut reach = 0;
        for (entry, higher) in entries.iter_mut().zip(higher) {
            if entry.size == 0 {
                let code = code.end_of(entry.address).unwrap_or(entry.address);
                let mut end = higher.min(code);
                if reach > entry.address {
                    // Inside of a function, it ends with that function at the latest.
                    end = end.min(reach);
                }
                entry.size = end.saturating_sub(entry.address);
            }
            reach = entry.end().max(reach);
            entry.reach = reach;
        }
        FunctionSymbols {
            names,
            entries,
            tables,
            lost,
        }
    }
}

/// Returns for each entry the next higher address of an entry, or the highest possible if there is
/// none.
fn higher_addresses(entries: &[Entry]) -> Vec<u64> {
    let mut higher = vec![u64::MAX; entries.len()];
    let (mut above, mut here) = (u64::MAX, u64::MAX);
    for (entry, higher) in entries.iter().zip(&mut higher).rev() {
        if entry.address != here {
            (above, here) = (here, entry.address);
        }
        *higher = above;
    }
    higher
}

/// A symbol without its name.
#[derive(Debug, Clone, Copy)]
pub(super) struct RawFunction {
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) kind: FunctionKind,
    pub(super) binding: Binding,
}

impl Binding {
    /// Converts the low-level number (`STB_...`).
    pub(super) fn of(binding: u8) -> Self {
        match binding {
            elf::STB_GLOBAL | elf::STB_GNU_UNIQUE => Self::Global,
            elf::STB_WEAK => Self::Weak,
            _ => Self::Local,
        }
    }
}

/// Returns the sort key of the table. Libraries export most functions under a weak plain name,
/// beside a name with underscores for their own use. The plain one is preferred, because programs
/// and people use it.
fn preference<'a>(
    entry: &Entry,
    names: &'a str,
) -> (u64, bool, bool, bool, usize, Binding, &'a str) {
    let name = entry.name(names);
    (
        entry.address,
        entry.kind == FunctionKind::Label,
        entry.binding == Binding::Local,
        name.starts_with('_'),
        name.len(),
        entry.binding,
        name,
    )
}
