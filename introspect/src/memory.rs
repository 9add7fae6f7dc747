//! The two traits through which `introspect` accesses a machine: physical memory and one CPU's
//! registers.
//!
//! The caller owns consistency: reads while vCPUs run may be torn.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

use crate::x86_64::paging::{self, AddressSpace, TranslateError, Translation};

/// The number of 8-byte words in a page of 4 KiB.
pub const PAGE_WORDS: usize = paging::PAGE as usize / 8;

/// A guest-physical address (GPA), in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Gpa(pub u64);

/// A guest-virtual (linear) address (GVA), in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Gva(pub u64);

macro_rules! hex_format {
    ($type:ident) => {
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($type), "({:#x})"), self.0)
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}
hex_format!(Gpa);
hex_format!(Gva);

/// The error of a read that is not wholly in guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guest-physical {address}, {length} bytes: not in guest RAM")]
pub struct PhysicalReadError {
    /// The first byte of the requested range.
    pub address: Gpa,
    /// The number of bytes requested.
    pub length: usize,
}

/// Guest-physical memory, readable at any byte.
pub trait PhysicalMemory {
    /// Fills `buf` from `address`. Nothing is promised about `buf` after an error.
    ///
    /// # Errors
    /// If any byte of the range is not guest RAM.
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError>;

    /// Reads the little-endian word at `address`. Page walks and stack walks use it, so it deserves
    /// a fast path.
    ///
    /// # Errors
    /// As [`read_physical`](Self::read_physical).
    fn read_word(&self, address: Gpa) -> Result<u64, PhysicalReadError> {
        let mut bytes = [0; 8];
        self.read_physical(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Returns the words of the 4 KiB page that holds `address`, if they can be read in place. The
    /// guest may change them at any time.
    fn page_words(&self, address: Gpa) -> Option<&[AtomicU64; PAGE_WORDS]> {
        let _ = address;
        None
    }

    /// Walks the page tables for one byte, as [`translate`](crate::x86_64::paging::translate) does.
    /// Memory that caches page walks has a faster implementation.
    ///
    /// # Errors
    /// If the address is not mapped for access, or a table is out of reach.
    fn walk(&self, space: AddressSpace, gva: Gva) -> Result<Translation, TranslateError> {
        paging::walk(self, space, gva)
    }

    /// Reads the little-endian word at a virtual address that is a multiple of 8. Returns `None` if
    /// the address is not aligned or not mapped to RAM. Memory that caches page walks has a faster
    /// implementation.
    fn word_at(&self, space: AddressSpace, gva: Gva) -> Option<u64> {
        if !gva.0.is_multiple_of(8) {
            return None;
        }
        let place = paging::translate(self, space, gva).ok()?;
        self.read_word(place.gpa).ok()
    }

    /// Returns the words of the 4 KiB page that holds a virtual address, if they can be read in
    /// place, as [`page_words`](Self::page_words) does. Memory that caches page walks has a faster
    /// implementation.
    fn page_at(&self, space: AddressSpace, gva: Gva) -> Option<&[AtomicU64; PAGE_WORDS]> {
        let place = paging::translate(self, space, gva).ok()?;
        self.page_words(place.gpa)
    }

    /// Returns the ranges of RAM in bytes, ascending and disjoint.
    fn ram(&self) -> Vec<Range<u64>>;
}

/// The registers of one paused CPU that introspection needs.
pub trait CpuRegisters {
    /// Returns the physical address of the top page table: CR3 without its low 12 bits and flags.
    fn page_table_root(&self) -> Gpa;
    /// Checks whether 5-level paging is on (CR4.LA57).
    fn five_level_paging(&self) -> bool;
    /// Returns the base of the kernel's per-CPU data: GS base in kernel mode, IA32_KERNEL_GS_BASE
    /// in user mode.
    fn kernel_gs_base(&self) -> Gva;
    /// Returns the instruction pointer.
    fn instruction_pointer(&self) -> Gva;
    /// Checks whether the CPU is in user mode (CPL 3).
    fn in_user_mode(&self) -> bool;
}
