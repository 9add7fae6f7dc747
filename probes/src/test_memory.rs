//! A guest without KVM for tests: RAM, and four levels of page tables built in its first pages.
#![allow(clippy::unwrap_used)]

use std::ops::Range;

use introspect::x86_64::paging::AddressSpace;
use introspect::{Gpa, PhysicalMemory, PhysicalReadError};

const TABLE: u64 = 4096;
const PRESENT_WRITABLE: u64 = 0b11;

pub(crate) struct TestMemory {
    base: u64,
    bytes: Vec<u8>,
    next_table: u64,
}

impl TestMemory {
    /// `size` bytes of zeroed RAM at `base`.
    pub(crate) fn new(base: u64, size: usize) -> Self {
        Self {
            base,
            bytes: vec![0; size],
            next_table: base,
        }
    }

    /// Empty page tables.
    pub(crate) fn address_space(&mut self) -> AddressSpace {
        AddressSpace {
            root: Gpa(self.new_table()),
            levels: 4,
        }
    }

    /// Maps the 4 KiB page at `gva`.
    pub(crate) fn map(&mut self, space: AddressSpace, gva: u64, gpa: u64) {
        let mut table = space.root.0;
        for level in (2..=4u32).rev() {
            let slot = table + (gva >> (12 + 9 * (level - 1)) & 0x1ff) * 8;
            if self.read(slot) == 0 {
                let new = self.new_table();
                self.write(slot, &(new | PRESENT_WRITABLE).to_le_bytes());
            }
            table = self.read(slot) & !0xfff;
        }
        self.write(
            table + (gva >> 12 & 0x1ff) * 8,
            &(gpa | PRESENT_WRITABLE).to_le_bytes(),
        );
    }

    /// Puts bytes at a physical address.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) {
        let start = usize::try_from(address - self.base).unwrap();
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn new_table(&mut self) -> u64 {
        self.next_table += TABLE;
        self.next_table - TABLE
    }

    fn read(&self, address: u64) -> u64 {
        let mut bytes = [0; 8];
        self.read_physical(Gpa(address), &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }
}

impl PhysicalMemory for TestMemory {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        let length = buf.len();
        let start = address
            .0
            .checked_sub(self.base)
            .and_then(|start| usize::try_from(start).ok());
        let bytes = start.and_then(|start| self.bytes.get(start..start.checked_add(length)?));
        buf.copy_from_slice(bytes.ok_or(PhysicalReadError { address, length })?);
        Ok(())
    }

    fn ram(&self) -> Vec<Range<u64>> {
        let end = self.base + self.bytes.len() as u64;
        std::iter::once(self.base..end).collect()
    }
}
