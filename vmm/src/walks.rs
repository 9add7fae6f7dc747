//! A cache of page walks for one vCPU's hits, checked against the page tables at each use.
//!
//! A walk's result follows from the entries that it has read. Each walk is kept with those, and is
//! valid while they all are unchanged. A guest may change its page tables at any time, without
//! notice. (introspect's `TranslationCache` does not check, and is valid only while the guest is
//! paused.)

use std::cell::Cell;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::x86_64::paging::{AddressSpace, PAGE, TranslateError, Translation, walk};
use introspect::{Gpa, Gva, PAGE_WORDS, PhysicalMemory, PhysicalReadError};

use crate::memory::GuestRam;

/// The number of cached walks, a power of two. Each has only one possible place.
const PLACES: usize = 64;
/// The maximum number of levels of page tables.
const LEVELS: usize = 5;

/// An entry as a walk has read it.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    /// The address in this process of a word of RAM.
    place: usize,
    entry: u64,
}

impl Step {
    /// Checks whether the entry is unchanged.
    ///
    /// # Safety
    /// The RAM that the entry was read from, or a clone, must be alive.
    #[inline]
    unsafe fn is_unchanged(self) -> bool {
        let pointer = std::ptr::with_exposed_provenance_mut(self.place);
        // SAFETY: the pointer is to an aligned word of RAM that is mapped, which the caller
        // ensures. All access is atomic.
        let word = unsafe { AtomicU64::from_ptr(pointer) };
        u64::from_le(word.load(Ordering::Relaxed)) == self.entry
    }
}

/// One walk, of the 4 KiB around an address.
#[derive(Debug)]
struct CachedWalk {
    /// The number of the RAM.
    ram: Cell<u64>,
    space: Cell<AddressSpace>,
    /// The page, or [`NO_PAGE`] if there is no walk.
    page: Cell<u64>,
    /// The translation of the page's first byte.
    found: Cell<Translation>,
    /// The address of the page in this process. 0 if it is not RAM.
    host: Cell<usize>,
    /// The entries of the walk. With fewer levels, the last one is repeated.
    steps: [Cell<Step>; LEVELS],
}

/// An address at which no page begins.
const NO_PAGE: u64 = 1;

impl Default for CachedWalk {
    fn default() -> Self {
        Self {
            ram: Cell::default(),
            space: Cell::new(AddressSpace {
                root: Gpa(0),
                levels: 0,
            }),
            page: Cell::new(NO_PAGE),
            found: Cell::new(Translation {
                gpa: Gpa(0),
                page_size: PAGE,
                writable: false,
                user: false,
                no_execute: false,
            }),
            host: Cell::default(),
            steps: Default::default(),
        }
    }
}

/// The walks of one vCPU.
#[derive(Debug)]
pub(crate) struct Walks {
    places: Box<[CachedWalk; PLACES]>,
}

impl Default for Walks {
    fn default() -> Self {
        Self {
            places: Box::new(std::array::from_fn(|_| CachedWalk::default())),
        }
    }
}

impl Walks {
    /// Returns the walk to an address if it was made before, in `ram` or a clone, and would be the
    /// same now.
    // Inlined, because most of its cost is the call and the return.
    #[inline(always)]
    fn kept(&self, ram: &GuestRam, space: AddressSpace, gva: Gva) -> Option<&CachedWalk> {
        let page = gva.0 & !(PAGE - 1);
        let kept = self.places.get(place_of(page))?;
        if kept.page.get() != page || kept.space.get() != space || kept.ram.get() != ram.number() {
            return None;
        }
        for step in &kept.steps {
            // SAFETY: a walk with a page has all steps. They were made of `ram` or a clone, because
            // the number is the same.
            if !unsafe { step.get().is_unchanged() } {
                return None;
            }
        }
        Some(kept)
    }

    #[cold]
    #[inline(never)]
    fn walk(
        &self,
        ram: &GuestRam,
        space: AddressSpace,
        gva: Gva,
    ) -> Result<Translation, TranslateError> {
        let page = gva.0 & !(PAGE - 1);
        let noted = Noted {
            ram,
            steps: Cell::default(),
            count: Cell::default(),
        };
        let found = walk(&noted, space, gva)?;
        let first = Gpa(found.gpa.0 & !(PAGE - 1));
        let (steps, count) = (noted.steps.get(), noted.count.get());
        if let Some(place) = self.places.get(place_of(page))
            && let Some(last) = count.checked_sub(1).and_then(|n| steps.get(n))
        {
            place.ram.set(ram.number());
            place.space.set(space);
            place.page.set(page);
            place.found.set(Translation {
                gpa: first,
                ..found
            });
            let host = ram
                .word(first)
                .map(|word| word.as_ptr().expose_provenance());
            place.host.set(host.unwrap_or_default());
            let all = steps.iter().take(count).chain(std::iter::repeat(last));
            for (step, noted) in place.steps.iter().zip(all) {
                step.set(*noted);
            }
        }
        Ok(found)
    }
}

fn place_of(page: u64) -> usize {
    (page >> 12 ^ page >> 18) as usize % PLACES
}

/// Memory that notes each entry that a walk reads.
struct Noted<'m> {
    ram: &'m GuestRam,
    steps: Cell<[Step; LEVELS]>,
    count: Cell<usize>,
}

impl PhysicalMemory for Noted<'_> {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        self.ram.read_physical(address, buf)
    }

    fn read_word(&self, address: Gpa) -> Result<u64, PhysicalReadError> {
        let entry = self.ram.read_word(address)?;
        let (mut steps, count) = (self.steps.get(), self.count.get());
        // Entries are words at multiples of 8, in RAM as the read above shows.
        if let Some(step) = steps.get_mut(count)
            && let Some(word) = self.ram.word(address)
        {
            let place = word.as_ptr().expose_provenance();
            *step = Step { place, entry };
            self.steps.set(steps);
            self.count.set(count + 1);
        }
        Ok(entry)
    }

    fn ram(&self) -> Vec<Range<u64>> {
        self.ram.ram()
    }
}

/// Guest memory as a hit on one vCPU reads it.
#[derive(Clone, Copy)]
pub struct HitMemory<'m> {
    ram: &'m GuestRam,
    walks: &'m Walks,
}

impl fmt::Debug for HitMemory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HitMemory").finish_non_exhaustive()
    }
}

/// A word of guest memory, and the access that its mapping allows.
pub(crate) struct Word<'m> {
    pub(crate) word: &'m AtomicU64,
    pub(crate) writable: bool,
    pub(crate) user: bool,
}

impl<'m> HitMemory<'m> {
    pub(crate) fn new(ram: &'m GuestRam, walks: &'m Walks) -> Self {
        Self { ram, walks }
    }

    /// Walks the page tables for one byte, as [`translate`](introspect::x86_64::paging::translate)
    /// does.
    #[inline(always)]
    pub(crate) fn find(
        &self,
        space: AddressSpace,
        gva: Gva,
    ) -> Result<Translation, TranslateError> {
        match self.walks.kept(self.ram, space, gva) {
            Some(kept) => {
                let first = kept.found.get();
                let gpa = Gpa(first.gpa.0 | gva.0 & (PAGE - 1));
                Ok(Translation { gpa, ..first })
            }
            None => self.walks.walk(self.ram, space, gva),
        }
    }

    /// Returns the word at an address, if that is a multiple of 8 and mapped to RAM.
    #[inline(always)]
    pub(crate) fn word(&self, space: AddressSpace, gva: Gva) -> Option<Word<'m>> {
        if !gva.0.is_multiple_of(8) {
            return None;
        }
        let Some(kept) = self.walks.kept(self.ram, space, gva) else {
            return self.word_anew(space, gva);
        };
        let host = kept.host.get();
        if host == 0 {
            return None;
        }
        let place = host.wrapping_add((gva.0 & (PAGE - 1)) as usize);
        let pointer = std::ptr::with_exposed_provenance_mut(place);
        // SAFETY: the page was found in `ram` or a clone, because the number is the same. It is
        // mapped as long as one of them lives, and the result borrows `ram`. Pages are aligned, and
        // so is the word in it. All access is atomic.
        let word = unsafe { AtomicU64::from_ptr(pointer) };
        let found = kept.found.get();
        Some(Word {
            word,
            writable: found.writable,
            user: found.user,
        })
    }

    #[cold]
    #[inline(never)]
    fn word_anew(&self, space: AddressSpace, gva: Gva) -> Option<Word<'m>> {
        let found = self.walks.walk(self.ram, space, gva).ok()?;
        Some(Word {
            word: self.ram.word(found.gpa)?,
            writable: found.writable,
            user: found.user,
        })
    }

    #[cold]
    #[inline(never)]
    fn page_anew(&self, space: AddressSpace, gva: Gva) -> Option<&'m [AtomicU64; PAGE_WORDS]> {
        let found = self.walks.walk(self.ram, space, gva).ok()?;
        self.ram.page_words(found.gpa)
    }

    /// Returns the memory without the cache.
    #[must_use]
    pub fn guest_ram(&self) -> &'m GuestRam {
        self.ram
    }
}

impl PhysicalMemory for HitMemory<'_> {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        self.ram.read_physical(address, buf)
    }

    #[inline]
    fn read_word(&self, address: Gpa) -> Result<u64, PhysicalReadError> {
        self.ram.read_word(address)
    }

    fn page_words(&self, address: Gpa) -> Option<&[AtomicU64; PAGE_WORDS]> {
        self.ram.page_words(address)
    }

    fn walk(&self, space: AddressSpace, gva: Gva) -> Result<Translation, TranslateError> {
        self.find(space, gva)
    }

    fn word_at(&self, space: AddressSpace, gva: Gva) -> Option<u64> {
        let found = self.word(space, gva)?;
        Some(u64::from_le(found.word.load(Ordering::Relaxed)))
    }

    fn page_at(&self, space: AddressSpace, gva: Gva) -> Option<&[AtomicU64; PAGE_WORDS]> {
        let Some(kept) = self.walks.kept(self.ram, space, gva) else {
            return self.page_anew(space, gva);
        };
        let page: *const [AtomicU64; PAGE_WORDS] =
            std::ptr::with_exposed_provenance(kept.host.get());
        // SAFETY: the pointer is null, or to a page of `ram` or a clone, because the number is the
        // same. That is mapped as long as one of them lives, and the result borrows `ram`. RAM is
        // made of whole pages, which are aligned. All access is atomic.
        unsafe { page.as_ref() }
    }

    fn ram(&self) -> Vec<Range<u64>> {
        self.ram.ram()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::x86_64::paging::translate;

    use super::*;

    const RAM: u64 = 4 << 20;
    const ROOT: u64 = 0x1000;
    /// The tables of levels 3, 2 and 1, in this order.
    const TABLES: [u64; 3] = [0x2000, 0x3000, 0x4000];
    const ADDRESS: u64 = 0xffff_c900_0000_1000;
    const PRESENT_WRITABLE: u64 = 3;

    /// Returns the address of the entry of a level, counted from the top.
    fn entry(level: usize) -> u64 {
        let table = [&[ROOT][..], &TABLES].concat()[level];
        table + (ADDRESS >> (39 - 9 * level) & 0x1ff) * 8
    }

    fn guest() -> (GuestRam, AddressSpace) {
        let ram = GuestRam::new(RAM).unwrap();
        let page = 0x10_0000;
        for (level, next) in TABLES.into_iter().chain([page]).enumerate() {
            let word = (next | PRESENT_WRITABLE).to_le_bytes();
            ram.write_physical(Gpa(entry(level)), &word).unwrap();
        }
        let space = AddressSpace {
            root: Gpa(ROOT),
            levels: 4,
        };
        (ram, space)
    }

    #[test]
    fn walks_are_those_of_the_tables_whatever_entry_the_guest_changes() {
        let (ram, space) = guest();
        let walks = Walks::default();
        let memory = HitMemory::new(&ram, &walks);
        let same = |offset: u64| {
            let gva = Gva(ADDRESS + offset);
            for _ in 0..2 {
                assert_eq!(memory.walk(space, gva), translate(&ram, space, gva));
                assert_eq!(memory.word_at(space, gva), ram.word_at(space, gva));
                let place = |page: &[AtomicU64; PAGE_WORDS]| page.as_ptr();
                let expected = ram.page_at(space, gva).map(place);
                assert_eq!(memory.page_at(space, gva).map(place), expected);
            }
            memory.walk(space, gva)
        };
        assert_eq!(same(0x123).unwrap().gpa, Gpa(0x10_0123));
        for level in 0..4 {
            let at = Gpa(entry(level));
            let before = ram.read_word(at).unwrap();
            // Removed, read-only, another table (which maps nothing) or another page, and the
            // original.
            for changed in [0, before & !2, 0x20_0000 | PRESENT_WRITABLE, before] {
                ram.write_physical(at, &changed.to_le_bytes()).unwrap();
                let _ = same(0x123);
                let _ = same(0xff8);
            }
        }
        assert_eq!(same(0).unwrap().gpa, Gpa(0x10_0000));
    }

    #[test]
    fn spaces_are_told_apart() {
        let (ram, space) = guest();
        let walks = Walks::default();
        let memory = HitMemory::new(&ram, &walks);
        memory.walk(space, Gva(ADDRESS)).unwrap();
        let other = AddressSpace {
            root: Gpa(0x5000),
            ..space
        };
        memory.walk(other, Gva(ADDRESS)).unwrap_err();
    }
}
