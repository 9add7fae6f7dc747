//! `kallsyms_offsets` and `kallsyms_relative_base`: a 32-bit value for each symbol, in ascending
//! order of address, and the 64-bit base address. Since Linux 7.0 there is no base: each value
//! counts from its own address.

use crate::bytes::{u32_at, u64_at};

/// The lowest virtual address of the kernel's half with 4-level paging. The kernel image is always
/// above it.
const KERNEL_HALF: u64 = 0xffff_8000_0000_0000;

/// The encoding of an address in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Encoding {
    /// An unsigned distance from the base.
    Unsigned,
    /// `CONFIG_KALLSYMS_ABSOLUTE_PERCPU` (x86-64 SMP up to Linux 6.14), as a signed number. From 0
    /// up it is the symbol's value itself. Below 0, the address is the base minus 1 minus the
    /// number.
    AbsolutePerCpu,
    /// A signed distance from the address of the entry itself (Linux 7.0 and later).
    FromEntry,
}

/// The table and its base.
#[derive(Debug, Clone, Copy)]
pub(super) struct Addresses {
    offsets: usize,
    count: usize,
    /// The base address; with [`Encoding::FromEntry`], the address of the first value.
    base: u64,
    encoding: Encoding,
}

impl Addresses {
    /// Finds the table after a token index that ends at `end` (Linux 6.4 and later).
    pub(super) fn after(bytes: &[u8], end: usize, count: usize) -> Option<Self> {
        let offsets = end.checked_next_multiple_of(8)?;
        let past = offsets.checked_add(count.checked_mul(4)?)?;
        Self::check(bytes, offsets, past.checked_next_multiple_of(8)?, count)
    }

    /// Finds the table before the symbol count at `count_offset` (up to Linux 6.3).
    pub(super) fn before(bytes: &[u8], count_offset: usize, count: usize) -> Option<Self> {
        let base_offset = (count_offset & !7).checked_sub(8)?;
        let size = count.checked_mul(4)?.checked_next_multiple_of(8)?;
        Self::check(bytes, base_offset.checked_sub(size)?, base_offset, count)
    }

    /// Finds the table after a token index that ends at `end`, whose values count from themselves
    /// (Linux 7.0 and later). Those kernels align their tables to 4 bytes. `address_of` returns the
    /// address of the byte at an offset.
    pub(super) fn from_entries(
        bytes: &[u8],
        end: usize,
        count: usize,
        address_of: impl Fn(usize) -> Option<u64>,
    ) -> Option<Self> {
        let offsets = end.checked_next_multiple_of(4)?;
        let table = Self {
            offsets,
            count,
            base: address_of(offsets).filter(|address| *address >= KERNEL_HALF)?,
            encoding: Encoding::FromEntry,
        };
        table.rises(bytes).then_some(table)
    }

    /// Accepts the table if its base is a kernel address and its addresses never decrease.
    fn check(bytes: &[u8], offsets: usize, base_offset: usize, count: usize) -> Option<Self> {
        let base = u64_at(bytes, base_offset).filter(|base| *base >= KERNEL_HALF)?;
        [Encoding::Unsigned, Encoding::AbsolutePerCpu]
            .into_iter()
            .map(|encoding| Self {
                offsets,
                count,
                base,
                encoding,
            })
            .find(|table| table.rises(bytes))
    }

    /// Checks whether all entries are present, none wraps around, and the addresses ascend.
    fn rises(&self, bytes: &[u8]) -> bool {
        let table = || self.iter(bytes);
        let lowest = match self.encoding {
            Encoding::FromEntry => KERNEL_HALF,
            Encoding::Unsigned | Encoding::AbsolutePerCpu => self.base,
        };
        let in_range = table().all(|(address, absolute)| absolute || address >= lowest);
        in_range
            && table().is_sorted_by_key(|(address, _)| address)
            && table().count() == self.count
    }

    /// Returns the address of each symbol, and whether it is absolute.
    pub(super) fn iter<'a>(&self, bytes: &'a [u8]) -> impl Iterator<Item = (u64, bool)> + 'a {
        let Self {
            offsets,
            base,
            encoding,
            ..
        } = *self;
        (0..self.count).map_while(move |index| {
            let value = u32_at(bytes, offsets + index * 4)?;
            let entry = base.wrapping_add(index as u64 * 4);
            Some(match (encoding, value.cast_signed()) {
                (Encoding::FromEntry, distance) => {
                    (entry.wrapping_add_signed(distance.into()), false)
                }
                (Encoding::Unsigned, _) => (base.wrapping_add(u64::from(value)), false),
                (Encoding::AbsolutePerCpu, 0..) => (u64::from(value), true),
                // -1 is the base itself, -2 the next byte.
                (Encoding::AbsolutePerCpu, _) => (base.wrapping_add(u64::from(!value)), false),
            })
        })
    }

    /// Returns the offset of the base of a table written after the token index.
    #[cfg(test)]
    pub(super) fn base_offset(&self) -> usize {
        (self.offsets + self.count * 4).next_multiple_of(8)
    }
}
