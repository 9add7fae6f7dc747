//! A small cache of page walks, keyed on (page table root, virtual page).
//!
//! It is valid only while no CPU changes page tables, so the owner makes a new one for each pause.
//! Unmapped pages are not cached.

use std::cell::Cell;
use std::fmt;

use super::paging::{AddressSpace, PAGE, TranslateError, Translation, translate};
use crate::{Gpa, Gva, PhysicalMemory};

const SLOTS: usize = 1024;
/// The number of slots of a [brief](TranslationCache::brief) cache.
const BRIEF_SLOTS: usize = 32;

/// One walk. The key is the 4 KiB around the address, even if the page is larger.
#[derive(Clone, Copy)]
struct Slot {
    space: AddressSpace,
    page: u64,
    /// The translation of the first byte of these 4 KiB.
    translation: Translation,
}

/// The cache: 1024 slots (32 of a brief one). Each key has only one slot.
pub struct TranslationCache {
    slots: Box<[Cell<Option<Slot>>]>,
}

impl fmt::Debug for TranslationCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TranslationCache").finish_non_exhaustive()
    }
}

impl Default for TranslationCache {
    fn default() -> Self {
        Self::with_slots(SLOTS)
    }
}

impl TranslationCache {
    fn with_slots(slots: usize) -> Self {
        Self {
            slots: vec![Cell::new(None); slots].into_boxed_slice(),
        }
    }

    /// Makes a cache for reads of a few pages, in a fraction of the time of one of the usual size.
    #[must_use]
    pub fn brief() -> Self {
        Self::with_slots(BRIEF_SLOTS)
    }

    /// Translates as [`translate`] does, and walks only for pages that are not cached.
    ///
    /// # Errors
    /// Those of [`translate`].
    pub fn translate(
        &self,
        memory: &(impl PhysicalMemory + ?Sized),
        space: AddressSpace,
        gva: Gva,
    ) -> Result<Translation, TranslateError> {
        let (page, offset) = (gva.0 & !(PAGE - 1), gva.0 & (PAGE - 1));
        let slot = self.slots.get(slot_of(space, page, self.slots.len()));
        let kept = slot
            .and_then(Cell::get)
            .filter(|kept| kept.page == page && kept.space == space);
        let first = match kept {
            Some(kept) => kept.translation,
            None => {
                let walked = translate(memory, space, gva)?;
                let translation = Translation {
                    gpa: Gpa(walked.gpa.0 - offset),
                    ..walked
                };
                if let Some(slot) = slot {
                    slot.set(Some(Slot {
                        space,
                        page,
                        translation,
                    }));
                }
                translation
            }
        };
        Ok(Translation {
            gpa: Gpa(first.gpa.0 + offset),
            ..first
        })
    }
}

/// Fibonacci hashing: neighbouring pages, and the same page of two processes, get different slots.
fn slot_of(space: AddressSpace, page: u64, slots: usize) -> usize {
    let key = (page ^ space.root.0.rotate_left(20) ^ u64::from(space.levels)) >> 12;
    let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - slots.ilog2());
    usize::try_from(hash).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PhysicalReadError;
    use crate::test_memory::{Flags, TestMemory};
    use std::ops::Range;

    /// Counts reads.
    struct Counting(TestMemory, Cell<u32>);

    impl PhysicalMemory for Counting {
        fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
            self.1.set(self.1.get() + 1);
            self.0.read_physical(address, buf)
        }
        fn ram(&self) -> Vec<Range<u64>> {
            self.0.ram()
        }
    }

    #[test]
    fn a_page_is_walked_once_and_never_taken_for_another() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let spaces = [memory.address_space(4), memory.address_space(4)];
        let large = 0xffff_8880_0020_0000;
        for (index, space) in spaces.into_iter().enumerate() {
            let own = 0x18_0000 + 0x1000 * index as u64;
            memory.map(space, 0x40_0000, own, 4096, Flags::default());
            memory.map(space, large, 0x60_0000, 1 << 21, Flags::default());
        }
        let memory = Counting(memory, Cell::new(0));
        let cache = TranslationCache::default();
        for (index, space) in spaces.into_iter().enumerate() {
            for (gva, page) in [
                (0x40_0000, 4096),
                (large, 1 << 21),
                (large + 0x3000, 1 << 21),
            ] {
                let before = memory.1.get();
                let first = cache.translate(&memory, space, Gva(gva + 0x123)).unwrap();
                assert!(memory.1.get() > before, "space {index}, {gva:#x}: no walk");
                let walks = memory.1.get();
                for offset in [0, 0xfff] {
                    let again = cache.translate(&memory, space, Gva(gva + offset)).unwrap();
                    assert_eq!(
                        again,
                        translate(&memory.0, space, Gva(gva + offset)).unwrap()
                    );
                    assert_eq!(again.page_size, page);
                }
                assert_eq!(
                    memory.1.get(),
                    walks,
                    "space {index}, {gva:#x}: walked again"
                );
                assert_eq!(
                    first,
                    translate(&memory.0, space, Gva(gva + 0x123)).unwrap()
                );
            }
        }
    }

    #[test]
    fn what_is_not_mapped_is_asked_again() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        let cache = TranslationCache::default();
        cache.translate(&memory, space, Gva(0x40_0000)).unwrap_err();
        memory.map(space, 0x40_0000, 0x18_0000, 4096, Flags::default());
        let found = cache.translate(&memory, space, Gva(0x40_0000)).unwrap();
        assert_eq!(found.gpa, Gpa(0x18_0000));
    }
}
