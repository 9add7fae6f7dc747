//! Arrays that the linker collects from all source files. The kernel's own lies between two
//! symbols. A module's is given by a pointer and a count in its `struct module`.
//!
//! The caller knows the size and meaning of an entry. This bounds the reads, because a guest's
//! counts are not trusted.

use std::ops::Range;

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::modules::{Module, ModuleState};
use super::structure::{Structure, StructureError};
use super::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The names and bounds of an array.
pub(super) struct SectionNames {
    /// The array's name in errors: `jump table`.
    pub kind: &'static str,
    /// The symbols of its first byte and of its end.
    pub bounds: [&'static str; 2],
    /// The function that is lost without it: `lists its jump labels`.
    pub used_for: &'static str,
    /// The members of `module` with the address of the module's own array, and the number of its
    /// entries.
    pub module: [&'static str; 2],
    /// Size of an entry in bytes.
    pub entry: u64,
    /// The maximum number of entries, including those of all modules.
    pub most: u64,
}

/// The location of such an array in a kernel and its modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SectionTable {
    kind: &'static str,
    kernel: Range<u64>,
    /// Offsets of pointer and count in `module`; `None` in a kernel without modules.
    module: Option<[u64; 2]>,
    entry: u64,
    most: u64,
}

/// The bytes of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Table {
    address: Gva,
    entry: usize,
    bytes: Vec<u8>,
}

impl Table {
    /// Returns each entry and its address.
    pub(super) fn entries(&self) -> impl Iterator<Item = (Gva, &[u8])> {
        let entries = self.bytes.chunks_exact(self.entry.max(1)).enumerate();
        entries.map(|(index, entry)| {
            let distance = index.wrapping_mul(self.entry) as u64;
            (Gva(self.address.0.wrapping_add(distance)), entry)
        })
    }
}

/// The owner of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableOwner {
    /// The kernel itself.
    Kernel,
    /// The module of this name.
    Module(String),
}

impl TableOwner {
    /// Returns a module as owner.
    pub(super) fn of(module: &Module) -> Self {
        Self::Module(module.name.clone())
    }

    /// Returns the module's name; `None` for the kernel.
    #[must_use]
    pub fn module(&self) -> Option<&str> {
        match self {
            Self::Kernel => None,
            Self::Module(name) => Some(name),
        }
    }
}

impl std::fmt::Display for TableOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kernel => f.write_str("the kernel"),
            Self::Module(name) => write!(f, "module {name}"),
        }
    }
}

/// An error in reading such an array.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SectionTableError {
    /// The array or the module's structure is not in memory.
    #[error("{owner}: {source}")]
    Structure {
        /// The array's owner.
        owner: TableOwner,
        /// The cause.
        source: StructureError,
    },
    /// The array's bounds are invalid.
    #[error(
        "{owner}: invalid {kind}: expected an array of entries of {entry} bytes, found {start} to {end}"
    )]
    Bounds {
        /// The array's name.
        kind: &'static str,
        /// The array's owner.
        owner: TableOwner,
        /// The address of its first byte.
        start: Gva,
        /// The address after its last byte.
        end: Gva,
        /// Size of an entry in bytes.
        entry: u64,
    },
    /// The number of entries is absurd.
    #[error("{owner}: invalid {kind}: expected at most {most} entries in all, found {found}")]
    TooMany {
        /// The array's name.
        kind: &'static str,
        /// The array's owner.
        owner: TableOwner,
        /// The number of entries claimed.
        found: u64,
        /// The maximum number of entries.
        most: u64,
    },
}

impl SectionTable {
    /// Looks up symbols and offsets.
    ///
    /// # Errors
    /// If the symbols do not exist, or modules store the array otherwise.
    pub(super) fn new(
        btf: &Btf,
        symbols: &Symbols,
        names: &SectionNames,
    ) -> Result<Self, LayoutError> {
        let bound = |name| {
            let used_for = names.used_for;
            symbols
                .address_of(name)
                .ok_or(LayoutError::Symbol { name, used_for })
        };
        let [first, behind] = names.bounds;
        let [pointer, count] = names.module;
        let module = match btf.member("module.state").is_ok() {
            true => Some([offset(btf, pointer, 8)?, offset(btf, count, 4)?]),
            false => None,
        };
        Ok(Self {
            kind: names.kind,
            kernel: bound(first)?..bound(behind)?,
            module,
            entry: names.entry,
            most: names.most,
        })
    }

    /// Returns the maximum number of entries of all such arrays together: the initial value of
    /// `left`.
    pub(super) fn most(&self) -> u64 {
        self.most
    }

    /// Reads the kernel's own array; its entries are subtracted from `left`.
    ///
    /// # Errors
    /// If it is not all in memory, or too long.
    pub(super) fn kernel(
        &self,
        view: MemoryView<'_>,
        left: &mut u64,
    ) -> Result<Table, SectionTableError> {
        let (start, end) = (self.kernel.start, self.kernel.end);
        let bytes = end.checked_sub(start);
        let bytes = bytes.filter(|bytes| bytes.is_multiple_of(self.entry));
        let count = bytes.map(|bytes| bytes / self.entry);
        let bounds = SectionTableError::Bounds {
            kind: self.kind,
            owner: TableOwner::Kernel,
            start: Gva(start),
            end: Gva(end),
            entry: self.entry,
        };
        self.read(
            view,
            TableOwner::Kernel,
            Gva(start),
            count.ok_or(bounds)?,
            left,
        )
    }

    /// Reads a module's array, which is empty while the module is unformed. Its entries are
    /// subtracted from `left`.
    ///
    /// # Errors
    /// If it is not all in memory, or too long.
    pub(super) fn module(
        &self,
        view: MemoryView<'_>,
        module: &Module,
        left: &mut u64,
    ) -> Result<Table, SectionTableError> {
        let owner = TableOwner::of(module);
        let broken = |source| SectionTableError::Structure {
            owner: owner.clone(),
            source,
        };
        let Some([pointer, count]) = self.module else {
            return Ok(self.table(module.address, Vec::new()));
        };
        if module.state == ModuleState::Unformed {
            return Ok(self.table(module.address, Vec::new()));
        }
        let structure = Structure::at(view, "module", module.address).map_err(broken)?;
        let count = structure.u32(count).map_err(broken)?;
        let start = structure.u64(pointer).map_err(broken)?;
        self.read(view, owner, Gva(start), count.into(), left)
    }

    fn read(
        &self,
        view: MemoryView<'_>,
        owner: TableOwner,
        address: Gva,
        count: u64,
        left: &mut u64,
    ) -> Result<Table, SectionTableError> {
        // The pointer of an empty array may have any value.
        if count == 0 {
            return Ok(self.table(address, Vec::new()));
        }
        let Some(rest) = left.checked_sub(count) else {
            return Err(SectionTableError::TooMany {
                kind: self.kind,
                owner,
                found: count,
                most: self.most,
            });
        };
        *left = rest;
        // At most `most` entries, so neither the product nor the buffer is large.
        let length = usize::try_from(count.saturating_mul(self.entry)).unwrap_or_default();
        let table = Structure::at(view, self.kind, address).and_then(|structure| {
            let mut bytes = vec![0; length];
            structure.read(0, &mut bytes).map(|()| bytes)
        });
        let bytes = table.map_err(|source| SectionTableError::Structure { owner, source })?;
        Ok(self.table(address, bytes))
    }

    fn table(&self, address: Gva, bytes: Vec<u8>) -> Table {
        Table {
            address,
            entry: usize::try_from(self.entry).unwrap_or(usize::MAX),
            bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::test_kernel::{self, BASE, HALF, TestKernel, WILD, WORD, symbols, types};
    use crate::test_says::assert_says;

    const NAMES: SectionNames = SectionNames {
        kind: "table",
        bounds: ["__start_it", "__stop_it"],
        used_for: "lists them",
        module: ["module.them", "module.num_them"],
        entry: 4,
        most: 8,
    };
    const MODULE: u64 = BASE + 0x1000;

    fn module(state: ModuleState) -> Module {
        let live = test_kernel::module(MODULE, "it", &[]);
        Module { state, ..live }
    }

    fn table(start: u64, end: u64) -> SectionTable {
        let btf = types(&[(
            "module",
            &[("state", 0, HALF), ("num_them", 4, HALF), ("them", 8, WORD)],
        )]);
        let bounds = symbols(&[("__start_it", start), ("__stop_it", end)]);
        SectionTable::new(&btf, &bounds, &NAMES).unwrap()
    }

    fn read(start: u64, end: u64, left: u64) -> Result<Vec<u8>, String> {
        let mut kernel = TestKernel::default();
        kernel.put(BASE, "some more bytes");
        let found = kernel.look(|view| table(start, end).kernel(view, &mut { left }));
        found
            .map(|table| table.bytes)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_kernels_table_is_between_its_symbols() {
        assert_eq!(read(BASE, BASE + 8, 8), Ok(b"some mor".to_vec()));
        assert_eq!(read(BASE, BASE + 8, 2), Ok(b"some mor".to_vec()));
        assert_eq!(read(BASE, BASE, 0), Ok(Vec::new()));
        for (start, end, left, part) in [
            (
                BASE,
                BASE + 7,
                8,
                "the kernel: invalid table: expected an array of entries of 4 bytes, found \
                 0xffff888001000000 to 0xffff888001000007",
            ),
            (BASE + 8, BASE, 8, "expected an array of entries of 4 bytes"),
            (
                BASE,
                BASE + 36,
                8,
                "expected at most 8 entries in all, found 9",
            ),
            (BASE, BASE + 8, 1, "entries in all, found 2"),
            (
                WILD - 8,
                WILD + 8,
                8,
                "table at 0xffff8880011ffff8 cannot be read",
            ),
            (0x1000, 0x1008, 8, "its pointer is 0x1000"),
        ] {
            assert_says(read(start, end, left).unwrap_err(), part);
        }
    }

    #[test]
    fn a_modules_table_is_where_it_says() {
        for (state, count, pointer, expected) in [
            (ModuleState::Live, 2, BASE, Ok(&b"some mor"[..])),
            (ModuleState::Live, 0, 0, Ok(b"")),
            (ModuleState::Unformed, 77, 77, Ok(b"")),
            (
                ModuleState::Coming,
                u64::from(u32::MAX),
                BASE,
                Err("module it: invalid table"),
            ),
            (
                ModuleState::Live,
                1,
                0x5555,
                Err("module it: table: its pointer is 0x5555"),
            ),
            (
                ModuleState::Live,
                8,
                u64::MAX - 8,
                Err("module it: table at 0xfffffffffffffff7 cannot be read"),
            ),
        ] {
            let mut kernel = TestKernel::default();
            kernel.put(BASE, "some more bytes");
            kernel.put_all(&[(MODULE + 4, count, 4), (MODULE + 8, pointer, 8)]);
            let found =
                kernel.look(|view| table(BASE, BASE).module(view, &module(state), &mut { 8 }));
            match expected {
                Ok(bytes) => assert_eq!(found.unwrap().bytes, bytes),
                Err(part) => {
                    assert_says(found.unwrap_err(), part);
                }
            }
        }
    }

    #[test]
    fn a_table_may_end_with_the_address_space() {
        const LAST: u64 = 0u64.wrapping_sub(4096);
        let mut kernel = TestKernel::default();
        kernel.map(LAST, 1, 0);
        kernel.put(BASE + 4088, "12345678");
        kernel.put_all(&[(MODULE + 4, 2, 4), (MODULE + 8, LAST + 4088, 8)]);
        let live = module(ModuleState::Live);
        let found = kernel.look(|view| table(BASE, BASE).module(view, &live, &mut { 8 }));
        let found = found.unwrap();
        let entries: Vec<_> = found.entries().collect();
        let expected = [
            (Gva(LAST + 4088), &b"1234"[..]),
            (Gva(LAST + 4092), b"5678"),
        ];
        assert_eq!(entries, expected);
    }

    #[test]
    fn what_the_kernel_does_not_name_is_named() {
        let without = types(&[("thing", &[("state", 0, HALF)])]);
        let error = SectionTable::new(&without, &symbols(&[("__start_it", 1)]), &NAMES);
        assert_says(error.unwrap_err(), "names no __stop_it, which lists them");
        let other = types(&[("module", &[("state", 0, HALF), ("them", 8, HALF)])]);
        let bounds = symbols(&[("__start_it", 1), ("__stop_it", 1)]);
        assert_says(
            SectionTable::new(&other, &bounds, &NAMES).unwrap_err(),
            "module.them is 4 bytes",
        );
    }
}
