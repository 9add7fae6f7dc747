//! Page walks from a guest-virtual to a guest-physical address, as the CPU does them.
//!
//! The caller passes the top page table and the number of levels, from one CPU's registers. Page
//! tables are only read, never written (no accessed or dirty bits). Permissions are reported, not
//! enforced.
//!
//! Format: Intel SDM volume 3A, chapter 4 ("Paging"), 4-level and 5-level paging.

use crate::{CpuRegisters, Gpa, Gva, PhysicalMemory};

/// The size of the smallest page in bytes.
pub const PAGE: u64 = 4096;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// The bit that ends the walk at a 2 MiB or 1 GiB page.
const LARGE: u64 = 1 << 7;
/// Linux's `_PAGE_PROTNONE` (arch/x86/include/asm/pgtable_types.h), which it sets only if `PRESENT`
/// is clear.
const PROT_NONE: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;
/// Bits 12 to 51 of an entry, or of CR3: the address of a table or page.
pub(crate) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The bit of the root that distinguishes the two page tables of a process under page table
/// isolation. Linux sets it in the table for user mode (`PTI_USER_PGTABLE_BIT`).
const ISOLATED_USER_TABLE: u64 = 1 << 12;

/// A set of page tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AddressSpace {
    /// The physical address of the top table. The low 12 bits are ignored.
    pub root: Gpa,
    /// The number of table levels: 4 or 5.
    pub levels: u8,
}

/// The physical address of a virtual one, and the rights of its mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Translation {
    /// The physical address of this byte.
    pub gpa: Gpa,
    /// The size of the page in bytes: 4 KiB, 2 MiB or 1 GiB.
    pub page_size: u64,
    /// True if writable at all levels.
    pub writable: bool,
    /// True if accessible from user mode at all levels.
    pub user: bool,
    /// True if execution is forbidden at some level.
    pub no_execute: bool,
}

impl Translation {
    /// Returns the number of bytes from this one to the end of its page, itself included.
    #[must_use]
    pub fn bytes_left_in_page(&self) -> u64 {
        self.page_size - (self.gpa.0 & (self.page_size - 1))
    }
}

/// The reason why an address has no translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TranslateError {
    /// The upper bits do not repeat the sign bit.
    #[error("{gva} is not a canonical address with {levels} page table levels")]
    NonCanonical {
        /// The requested address.
        gva: Gva,
        /// The levels of the address space.
        levels: u8,
    },
    /// The address is not mapped.
    #[error("{gva} is not mapped: the level {level} entry is {entry:#x}, not present")]
    NotPresent {
        /// The requested address.
        gva: Gva,
        /// The level of the entry: 5 or 4 at the top, 1 for the table of 4 KiB pages.
        level: u8,
        /// The entry, not zero for a page that Linux moved to swap.
        entry: u64,
    },
    /// Linux keeps a page there without any access (`PROT_NONE`, or a page watched for NUMA
    /// placement).
    #[error("{gva} is mapped without any access (PROT_NONE, level {level}); its page is at {gpa}")]
    NoAccess {
        /// The requested address.
        gva: Gva,
        /// The level of the entry.
        level: u8,
        /// The physical address of the byte.
        gpa: Gpa,
    },
    /// A page table is not in RAM.
    #[error("{gva}: the level {level} page table entry at {entry} is not in guest RAM")]
    TableOutsideRam {
        /// The requested address.
        gva: Gva,
        /// The level of the table.
        level: u8,
        /// The physical address of the entry.
        entry: Gpa,
    },
    /// The caller's [`AddressSpace::levels`] is neither 4 nor 5.
    #[error("invalid number of page table levels: expected 4 or 5, found {levels}")]
    BadLevels {
        /// The number of levels passed.
        levels: u8,
    },
}

impl AddressSpace {
    /// Returns the address space in which a CPU runs.
    #[must_use]
    pub fn of(registers: &impl CpuRegisters) -> Self {
        Self {
            root: registers.page_table_root(),
            levels: if registers.five_level_paging() { 5 } else { 4 },
        }
    }

    /// Returns the kernel's view of the same process, for a Linux guest with page table isolation
    /// (PTI). Its table for user mode omits nearly all of the kernel. Only for such a guest:
    /// without PTI, the bit that this clears belongs to the table's address.
    #[must_use]
    pub fn isolated_kernel_view(self) -> Self {
        Self {
            root: Gpa(self.root.0 & !ISOLATED_USER_TABLE),
            ..self
        }
    }
}

/// Walks the page tables for one byte, by the fastest way of `memory`.
///
/// # Errors
/// If the address is not mapped for access, or a table is not in RAM.
#[inline]
pub fn translate(
    memory: &(impl PhysicalMemory + ?Sized),
    space: AddressSpace,
    gva: Gva,
) -> Result<Translation, TranslateError> {
    memory.walk(space, gva)
}

/// Walks the page tables for one byte, entry by entry.
///
/// # Errors
/// As [`translate`].
pub fn walk(
    memory: &(impl PhysicalMemory + ?Sized),
    space: AddressSpace,
    gva: Gva,
) -> Result<Translation, TranslateError> {
    let levels = space.levels;
    if !matches!(levels, 4 | 5) {
        return Err(TranslateError::BadLevels { levels });
    }
    // An address has 48 or 57 bits. The bits above repeat the topmost of them.
    let unused = 64 - (12 + 9 * u32::from(levels));
    if (gva.0.cast_signed() << unused >> unused).cast_unsigned() != gva.0 {
        return Err(TranslateError::NonCanonical { gva, levels });
    }
    let mut table = space.root.0 & ADDRESS;
    let (mut allowed, mut no_execute) = (WRITABLE | USER, 0);
    let (mut level, mut shift) = (levels, 12 + 9 * u32::from(levels));
    loop {
        shift -= 9;
        let slot = Gpa(table | (gva.0 >> shift & 0x1ff) << 3);
        let Ok(entry) = memory.read_word(slot) else {
            return Err(TranslateError::TableOutsideRam {
                gva,
                level,
                entry: slot,
            });
        };
        let last = level == 1 || (level <= 3 && entry & LARGE != 0);
        if last || entry & PRESENT == 0 {
            return end(gva, level, entry, last, allowed, no_execute);
        }
        allowed &= entry;
        no_execute |= entry;
        table = entry & ADDRESS;
        level -= 1;
    }
}

/// Ends a walk at an entry that maps a page if `last`, or is not present.
#[inline]
fn end(
    gva: Gva,
    level: u8,
    entry: u64,
    last: bool,
    allowed: u64,
    no_execute: u64,
) -> Result<Translation, TranslateError> {
    let page_size = 1u64 << (12 + 9 * (u32::from(level) - 1));
    // Bit 12 of a large page's entry is a memory type, and so not part of the address.
    let byte = |entry: u64| Gpa(entry & ADDRESS & !(page_size - 1) | gva.0 & (page_size - 1));
    if entry & PRESENT == 0 {
        if last && entry & PROT_NONE != 0 {
            // Linux stores the address of such a page inverted, against speculation past the clear
            // present bit (arch/x86/include/asm/pgtable-invert.h).
            let gpa = byte(!entry);
            return Err(TranslateError::NoAccess { gva, level, gpa });
        }
        return Err(TranslateError::NotPresent { gva, level, entry });
    }
    let allowed = allowed & entry;
    Ok(Translation {
        gpa: byte(entry),
        page_size,
        writable: allowed & WRITABLE != 0,
        user: allowed & USER != 0,
        no_execute: (no_execute | entry) & NO_EXECUTE != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_memory::{Flags, TestMemory};

    const KERNEL: u64 = 0xffff_ffff_8100_0000;
    const DIRECT: u64 = 0xffff_8880_0000_0000;

    fn space(levels: u8) -> (TestMemory, AddressSpace) {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(levels);
        (memory, space)
    }

    #[test]
    fn pages_of_every_size_are_found() {
        for levels in [4, 5] {
            let (mut memory, space) = space(levels);
            memory.map(space, KERNEL, 0x20_0000, 1 << 21, Flags::default());
            memory.map(
                space,
                DIRECT,
                0x4000_0000,
                1 << 30,
                Flags::default().writable().no_execute(),
            );
            memory.map(
                space,
                0x7fff_0000_1000,
                0x12_3000,
                1 << 12,
                Flags::default().user(),
            );
            for (gva, gpa, page_size, writable, user, no_execute) in [
                (KERNEL + 0x1f_fff8, 0x3f_fff8, 1 << 21, false, false, false),
                (
                    DIRECT + 0x3fff_ffff,
                    0x7fff_ffff,
                    1 << 30,
                    true,
                    false,
                    true,
                ),
                (0x7fff_0000_1abc, 0x12_3abc, 1 << 12, false, true, false),
            ] {
                let expected = Translation {
                    gpa: Gpa(gpa),
                    page_size,
                    writable,
                    user,
                    no_execute,
                };
                assert_eq!(
                    translate(&memory, space, Gva(gva)),
                    Ok(expected),
                    "{gva:#x}, {levels} levels"
                );
            }
        }
    }

    #[test]
    fn five_levels_reach_what_four_cannot() {
        let gva = Gva(0x0012_3456_7890_1000);
        let (mut memory, five) = space(5);
        memory.map(five, gva.0, 0x18_0000, 1 << 12, Flags::default());
        assert_eq!(
            translate(&memory, five, gva).map(|t| t.gpa),
            Ok(Gpa(0x18_0000))
        );
        let four = AddressSpace { levels: 4, ..five };
        assert_eq!(
            translate(&memory, four, gva),
            Err(TranslateError::NonCanonical { gva, levels: 4 })
        );
    }

    #[test]
    fn addresses_that_cannot_be_read_say_why() {
        let (mut memory, space) = space(4);
        memory.map(
            space,
            0x40_0000,
            0x12_3000,
            1 << 12,
            Flags::default().user(),
        );
        memory.map_entry(space, 0x40_1000, 1, !0x12_4000u64 & ADDRESS | PROT_NONE);
        memory.map_entry(space, 0x40_2000, 1, 0x6000_0000);
        memory.map_entry(space, 0x80_0000_0000, 4, 0x9999_9000 | PRESENT);
        let not_present = |gva, level, entry| {
            let gva = Gva(gva);
            (gva, TranslateError::NotPresent { gva, level, entry })
        };
        let non_canonical = |gva, levels| {
            let gva = Gva(gva);
            (gva, TranslateError::NonCanonical { gva, levels })
        };
        let (gva, gpa, level) = (Gva(0x40_1234), Gpa(0x12_4234), 1);
        let no_access = (gva, TranslateError::NoAccess { gva, level, gpa });
        let (gva, entry, level) = (Gva(0x80_0000_0000), Gpa(0x9999_9000), 3);
        let outside_ram = (gva, TranslateError::TableOutsideRam { gva, level, entry });
        for (gva, expected) in [
            not_present(0x40_3000, 1, 0),
            not_present(0x80_0000, 2, 0),
            not_present(KERNEL, 4, 0),
            not_present(0x40_2000, 1, 0x6000_0000),
            no_access,
            outside_ram,
            non_canonical(1 << 47, 4),
            non_canonical(0xffff_7fff_ffff_ffff, 4),
        ] {
            assert_eq!(translate(&memory, space, gva), Err(expected), "{gva}");
        }
        let odd = AddressSpace { levels: 3, ..space };
        assert_eq!(
            translate(&memory, odd, Gva(0)),
            Err(TranslateError::BadLevels { levels: 3 })
        );
    }

    proptest::proptest! {
        /// With tables full of noise, looped or not, a walk ends after at most as many steps as
        /// there are levels.
        #[test]
        fn noise_in_tables_never_panics(
            entries in proptest::collection::vec((0usize..512 * 4, proptest::prelude::any::<u64>()), 0..400),
            gva: u64,
            levels in 4u8..=5,
        ) {
            let mut memory = TestMemory::new(0, 4 * 4096);
            for (index, entry) in entries {
                // Half of the entries point into the tables themselves.
                let entry = if entry & 2 == 0 { entry } else { entry & 0x8000_0000_0000_3fff };
                memory.write(index as u64 * 8, &entry.to_le_bytes());
            }
            let space = AddressSpace { root: Gpa(0), levels };
            if let Ok(found) = translate(&memory, space, Gva(gva)) {
                proptest::prop_assert_eq!((found.gpa.0 ^ gva) & (found.page_size - 1), 0);
                proptest::prop_assert!(found.gpa.0 < 1 << 52);
            }
        }
    }

    #[test]
    fn upper_levels_take_rights_away() {
        let (mut memory, space) = space(4);
        memory.map(
            space,
            0x40_0000,
            0x12_3000,
            1 << 12,
            Flags::default().user().writable(),
        );
        memory.restrict(space, 0x40_0000, 2, WRITABLE, NO_EXECUTE);
        let found = translate(&memory, space, Gva(0x40_0000));
        assert_eq!(
            found.map(|t| (t.writable, t.user, t.no_execute)),
            Ok((false, true, true))
        );
    }

    #[test]
    fn the_isolated_kernel_view_is_the_table_below() {
        let user = AddressSpace {
            root: Gpa(0x1234_5000),
            levels: 4,
        };
        assert_eq!(user.isolated_kernel_view().root, Gpa(0x1234_4000));
        assert_eq!(
            user.isolated_kernel_view().isolated_kernel_view().root,
            Gpa(0x1234_4000)
        );
    }
}
