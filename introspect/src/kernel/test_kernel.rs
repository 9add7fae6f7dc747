//! Kernels for tests of readers of kernel structures: memory, and types with members at chosen
//! offsets.
#![allow(clippy::unwrap_used)]

use std::ops::Range;

use super::btf::test_types::TestBtf;
use super::btf::{Btf, Kind};
use super::module_memory::{ModuleRange, RangeKind};
use super::modules::{Module, ModuleState};
use super::symbols::{Symbols, SymbolsBuilder};
use crate::test_memory::{Flags, TestMemory};
use crate::x86_64::{AddressSpace, translate};
use crate::{Gva, MemoryView, PausedMemory};

/// The address at which the kernel's memory is mapped: 2 MiB of zeroes.
pub(crate) const BASE: u64 = 0xffff_8880_0100_0000;
/// The address at which the same memory is mapped again, for an array of `struct page`.
pub(crate) const VMEMMAP: u64 = 0xffff_ea00_0000_0000;
/// The address of structures in tests that leave room before them.
pub(crate) const FREE: u64 = BASE + 0x1_0000;
/// The physical address of the memory.
pub(crate) const RAM: u64 = 0x100_0000;
/// Size of the memory in bytes. As many bytes before it hold the page tables.
pub(crate) const SIZE: u64 = 0x20_0000;
/// An address that is not mapped.
pub(crate) const WILD: u64 = BASE + SIZE;

/// The memory of a kernel.
pub(crate) struct TestKernel {
    pub(crate) memory: TestMemory,
    pub(crate) space: AddressSpace,
}

impl Default for TestKernel {
    fn default() -> Self {
        let mut memory = TestMemory::new(RAM - SIZE, (2 * SIZE) as usize);
        let space = memory.address_space(4);
        let flags = Flags::default().writable();
        for gva in [BASE, VMEMMAP] {
            memory.map(space, gva, RAM, SIZE, flags);
        }
        Self { memory, space }
    }
}

impl TestKernel {
    /// Maps pages of the kernel's memory, from the byte at `offset` on, at another address as well.
    pub(crate) fn map(&mut self, gva: u64, pages: u64, offset: u64) {
        let flags = Flags::default().writable();
        for at in (0..pages).map(|page| page * 4096) {
            let gpa = RAM + offset + at;
            self.memory.map(self.space, gva + at, gpa, 4096, flags);
        }
    }

    /// Writes bytes.
    pub(crate) fn put(&mut self, gva: u64, bytes: impl AsRef<[u8]>) {
        self.memory.write(self.physical(gva), bytes.as_ref());
    }

    /// Writes numbers: (address, value, size in bytes).
    pub(crate) fn put_all(&mut self, numbers: &[(u64, u64, usize)]) {
        for (gva, value, size) in numbers {
            self.put(*gva, &value.to_le_bytes()[..*size]);
        }
    }

    /// Writes consecutive numbers of 8 bytes.
    pub(crate) fn words(&mut self, gva: u64, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.put(gva, bytes);
    }

    /// Returns the physical address of an address.
    pub(crate) fn physical(&self, gva: u64) -> u64 {
        translate(&self.memory, self.space, Gva(gva)).unwrap().gpa.0
    }

    /// Returns a view of the memory.
    pub(crate) fn view<'p>(&self, paused: &'p PausedMemory<'p>) -> MemoryView<'p> {
        paused.view(self.space)
    }

    /// Calls `with` on a view of the memory.
    pub(crate) fn look<T>(&self, with: impl FnOnce(MemoryView<'_>) -> T) -> T {
        with(PausedMemory::new(&self.memory).view(self.space))
    }
}

/// A builder of types that consist of numbers.
pub(crate) struct Types {
    btf: TestBtf,
    /// The size and type of integers of 1, 2, 4 and 8 bytes.
    integers: [(u32, u32); 4],
}

impl Default for Types {
    fn default() -> Self {
        let mut btf = TestBtf::default();
        let integers = [1, 2, 4, 8].map(|size| {
            let name = format!("u{}", size * 8);
            (size, btf.add(&name, Kind::Int, 0, size, &[size * 8]))
        });
        Self { btf, integers }
    }
}

impl Types {
    /// Returns the type of a number of `size` bytes.
    pub(crate) fn integer(&self, size: u32) -> u32 {
        self.integers.iter().find(|(s, _)| *s == size).unwrap().1
    }

    /// Adds an array of `count` numbers of `size` bytes.
    pub(crate) fn array(&mut self, size: u32, count: u32) -> u32 {
        let (element, index) = (self.integer(size), self.integer(4));
        self.btf
            .add("", Kind::Array, 0, 0, &[element, index, count])
    }

    /// Adds a struct of numbers: (name, offset, size).
    pub(crate) fn numbers(&mut self, name: &str, members: &[(&str, u32, u32)]) -> u32 {
        let members: Vec<_> = members
            .iter()
            .map(|(name, offset, size)| (*name, *offset, self.integer(*size)))
            .collect();
        self.structure(name, 512, &members)
    }

    /// Adds a struct: (name, offset, type).
    pub(crate) fn structure(&mut self, name: &str, size: u32, members: &[(&str, u32, u32)]) -> u32 {
        let members: Vec<_> = members
            .iter()
            .map(|(name, offset, kind)| (*name, *kind, offset * 8))
            .collect();
        self.btf
            .composite(name, Kind::Struct, false, size, &members)
    }

    /// Adds an enum: (name, value).
    pub(crate) fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) {
        let words: Vec<u32> = values
            .iter()
            .flat_map(|(name, value)| [self.btf.string(name), *value])
            .collect();
        let count = u32::try_from(values.len()).unwrap();
        self.btf.add(name, Kind::Enum, count, 4, &words);
    }

    pub(crate) fn finish(&self) -> Btf {
        Btf::parse(&self.btf.bytes()).unwrap()
    }
}

/// The type of a member.
#[derive(Clone, Copy)]
pub(crate) enum Member {
    /// An unspecified type of this size in bytes.
    Bytes(u32),
    /// A struct defined before.
    Of(&'static str),
}

/// A pointer or `long`.
pub(crate) const WORD: Member = Member::Bytes(8);
/// An `int`.
pub(crate) const HALF: Member = Member::Bytes(4);

/// A struct's name and its members: name, byte offset and type.
pub(crate) type Struct<'a> = (&'static str, &'a [(&'static str, u32, Member)]);

/// Makes types of the members of each struct with their byte offsets.
pub(crate) fn types(structs: &[Struct<'_>]) -> Btf {
    let mut types = Types::default();
    add_types(&mut types, structs);
    types.finish()
}

/// Adds types of the members of each struct with their byte offsets.
pub(crate) fn add_types(types: &mut Types, structs: &[Struct<'_>]) {
    let mut known: Vec<(&str, u32, u32)> = Vec::new();
    for (name, members) in structs {
        let mut size = 0;
        let mut list = Vec::new();
        for (member, offset, kind) in *members {
            let (id, length) = match kind {
                Member::Bytes(count) => (types.array(1, *count), *count),
                Member::Of(inner) => {
                    let found = known.iter().find(|(known, ..)| known == inner);
                    let (_, id, length) = found.unwrap();
                    (*id, *length)
                }
            };
            size = size.max(offset + length);
            list.push((*member, *offset, id));
        }
        known.push((*name, types.structure(name, size, &list), size));
    }
}

/// Makes data symbols.
pub(crate) fn symbols(list: &[(&str, u64)]) -> Symbols {
    all_symbols(
        list.iter().map(|(name, at)| (*name, *at, b'D', false)),
        None,
    )
}

/// Makes symbols of (name, address, letter, whether absolute) in an image that ends at `end`.
pub(crate) fn all_symbols<'a>(
    list: impl IntoIterator<Item = (&'a str, u64, u8, bool)>,
    end: Option<u64>,
) -> Symbols {
    let mut builder = SymbolsBuilder::default();
    for (name, address, kind, absolute) in list {
        let pushed = builder.push(name.as_bytes(), address, kind, absolute);
        pushed.unwrap();
    }
    builder.finish(end)
}

/// Makes a live module with these ranges.
pub(crate) fn module(address: u64, name: &str, ranges: &[(RangeKind, Range<u64>)]) -> Module {
    let range = |(kind, addresses): &(RangeKind, Range<u64>)| ModuleRange {
        kind: *kind,
        addresses: addresses.clone(),
    };
    Module {
        address: Gva(address),
        name: name.to_owned(),
        state: ModuleState::Live,
        ranges: ranges.iter().map(range).collect(),
    }
}
