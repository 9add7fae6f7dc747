//! A small guest for tests, also of other crates (feature `test-utils`). It has RAM at a base
//! address, and page tables in its first pages.
//!
//! The test keeps its own pages clear of the tables. Invalid requests (a page of odd size, bytes
//! outside the RAM) panic.
#![allow(clippy::unwrap_used)]

use std::fmt;
use std::ops::Range;

use crate::x86_64::paging::ADDRESS;
use crate::x86_64::{AddressSpace, PAGE};
use crate::{Gpa, PhysicalMemory, PhysicalReadError};

const PRESENT_ALL_RIGHTS: u64 = 0b111;

/// The RAM of the guest.
pub struct TestMemory {
    base: u64,
    bytes: Vec<u8>,
    next_table: u64,
}

impl fmt::Debug for TestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestMemory")
            .field("base", &self.base)
            .field("length", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

/// The rights of a mapping. By default the kernel may read and execute it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Flags(u64);

impl Flags {
    /// Allows writes.
    #[must_use]
    pub fn writable(self) -> Self {
        Self(self.0 | 2)
    }
    /// Allows access in user mode.
    #[must_use]
    pub fn user(self) -> Self {
        Self(self.0 | 4)
    }
    /// Forbids execution.
    #[must_use]
    pub fn no_execute(self) -> Self {
        Self(self.0 | 1 << 63)
    }
}

impl TestMemory {
    /// Makes `size` bytes of zeroed RAM at `base`.
    pub fn new(base: u64, size: usize) -> Self {
        Self {
            base,
            bytes: vec![0; size],
            next_table: base,
        }
    }

    /// Makes empty page tables of 4 or 5 `levels`.
    pub fn address_space(&mut self, levels: u8) -> AddressSpace {
        let root = Gpa(self.new_table());
        AddressSpace { root, levels }
    }

    fn new_table(&mut self) -> u64 {
        let table = self.next_table;
        self.next_table += PAGE;
        table
    }

    /// Maps the page of `size` bytes at `gva`: 4 KiB, 2 MiB or 1 GiB.
    pub fn map(&mut self, space: AddressSpace, gva: u64, gpa: u64, size: u64, flags: Flags) {
        let (level, large) = match size {
            0x1000 => (1, 0),
            0x20_0000 => (2, 0x80),
            0x4000_0000 => (3, 0x80),
            other => panic!("no page has {other:#x} bytes"),
        };
        self.map_entry(space, gva, level, gpa | large | flags.0 | 1);
    }

    /// Sets the entry of `gva` at `level`, and makes the tables above it.
    pub fn map_entry(&mut self, space: AddressSpace, gva: u64, level: u8, entry: u64) {
        let slot = self.slot(space, gva, level);
        self.write(slot, &entry.to_le_bytes());
    }

    /// Clears and sets bits in the entry of `gva` at `level`.
    pub fn restrict(&mut self, space: AddressSpace, gva: u64, level: u8, clear: u64, set: u64) {
        let slot = self.slot(space, gva, level);
        let entry = self.read_u64(slot) & !clear | set;
        self.write(slot, &entry.to_le_bytes());
    }

    fn slot(&mut self, space: AddressSpace, gva: u64, level: u8) -> u64 {
        let mut table = space.root.0;
        let mut at = space.levels;
        loop {
            let slot = table + (gva >> (12 + 9 * (u32::from(at) - 1)) & 0x1ff) * 8;
            if at == level {
                return slot;
            }
            if self.read_u64(slot) == 0 {
                let new = self.new_table();
                self.write(slot, &(new | PRESENT_ALL_RIGHTS).to_le_bytes());
            }
            table = self.read_u64(slot) & ADDRESS;
            at -= 1;
        }
    }

    fn read_u64(&self, address: u64) -> u64 {
        let mut bytes = [0; 8];
        self.read_physical(Gpa(address), &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Writes bytes at a physical address.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        let start = usize::try_from(address - self.base).unwrap();
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    }
}

impl PhysicalMemory for TestMemory {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        let length = buf.len();
        let error = PhysicalReadError { address, length };
        let start = address
            .0
            .checked_sub(self.base)
            .and_then(|start| usize::try_from(start).ok());
        let bytes = start.and_then(|start| self.bytes.get(start..start.checked_add(length)?));
        buf.copy_from_slice(bytes.ok_or(error)?);
        Ok(())
    }

    fn ram(&self) -> Vec<Range<u64>> {
        let end = self.base + self.bytes.len() as u64;
        std::iter::once(self.base..end).collect()
    }
}
