//! A cache of page walks for one vCPU's hits, checked against the page tables at each use.
//!
//! A walk's result follows from the entries that it has read. Each walk is kept with those, and is valid while they are all
//! as they were: a guest may change its page tables at any time, and tells nobody. (introspect's `TranslationCache` does not
//! look, and is valid only while the guest is paused.)

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::x86_64::paging::{
    AddressSpace, PAGE, TranslateError, Translation, translate, walk,
};
use introspect::{Gpa, Gva, PhysicalMemory, PhysicalReadError};

use crate::memory::GuestRam;

/// Walks that are kept, each in the only place that it may have; a power of two.
const PLACES: usize = 64;
/// Most levels of page tables.
const LEVELS: usize = 5;

/// An entry as a walk has read it.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    /// Address in this process of a word of RAM.
    place: usize,
    entry: u64,
}

impl Step {
    /// Returns whether the entry is what it was.
    ///
    /// # Safety
    /// The RAM that the entry was read from, or a clone, must be alive.
    #[inline]
    unsafe fn is_unchanged(self) -> bool {
        let pointer = std::ptr::with_exposed_provenance_mut(self.place);
        // SAFETY: the pointer is to an aligned word of RAM that is mapped, as the caller sees to. All access is atomic.
        let word = unsafe { AtomicU64::from_ptr(pointer) };
        u64::from_le(word.load(Ordering::Relaxed)) == self.entry
    }
}

/// One walk, of the 4 KiB around an address.
#[derive(Debug, Clone, Copy)]
struct Walk {
    /// Number of the RAM.
    ram: u64,
    space: AddressSpace,
    page: u64,
    /// Of the first of these bytes.
    found: Translation,
    steps: [Step; LEVELS],
    count: usize,
}

/// The walks of one vCPU.
#[derive(Debug)]
pub(crate) struct Walks {
    places: Box<[Option<Walk>; PLACES]>,
}

impl Default for Walks {
    fn default() -> Self {
        Self {
            places: Box::new([None; PLACES]),
        }
    }
}

impl Walks {
    #[inline]
    fn kept(&self, ram: &GuestRam, space: AddressSpace, gva: Gva) -> Option<Translation> {
        let (page, offset) = (gva.0 & !(PAGE - 1), gva.0 & (PAGE - 1));
        let kept = self.places.get(place_of(page))?.as_ref()?;
        if kept.page != page || kept.space != space || kept.ram != ram.number() {
            return None;
        }
        for step in kept.steps.iter().take(kept.count) {
            // SAFETY: the steps were made of `ram` or a clone, since the number is the same.
            if !unsafe { step.is_unchanged() } {
                return None;
            }
        }
        Some(Translation {
            gpa: Gpa(kept.found.gpa.0 | offset),
            ..kept.found
        })
    }

    #[cold]
    #[inline(never)]
    fn walk(
        &mut self,
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
        let first = Translation {
            gpa: Gpa(found.gpa.0 & !(PAGE - 1)),
            ..found
        };
        if let Some(place) = self.places.get_mut(place_of(page)) {
            *place = Some(Walk {
                ram: ram.number(),
                space,
                page,
                found: first,
                steps: noted.steps.get(),
                count: noted.count.get(),
            });
        }
        Ok(found)
    }
}

fn place_of(page: u64) -> usize {
    (page >> 12 ^ page >> 18) as usize % PLACES
}

/// Memory that notes each entry which a walk reads.
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
        // Entries are words at multiples of 8, in RAM as was just seen.
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
    walks: &'m RefCell<Walks>,
}

impl<'m> HitMemory<'m> {
    pub(crate) fn new(ram: &'m GuestRam, walks: &'m RefCell<Walks>) -> Self {
        Self { ram, walks }
    }

    /// Returns the memory itself.
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

    fn page_words(&self, address: Gpa) -> Option<&[AtomicU64]> {
        self.ram.page_words(address)
    }

    fn walk(&self, space: AddressSpace, gva: Gva) -> Result<Translation, TranslateError> {
        let Ok(mut walks) = self.walks.try_borrow_mut() else {
            return translate(self.ram, space, gva);
        };
        match walks.kept(self.ram, space, gva) {
            Some(found) => Ok(found),
            None => walks.walk(self.ram, space, gva),
        }
    }

    fn ram(&self) -> Vec<Range<u64>> {
        self.ram.ram()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const RAM: u64 = 4 << 20;
    const ROOT: u64 = 0x1000;
    /// Tables of levels 3, 2 and 1, one after the other.
    const TABLES: [u64; 3] = [0x2000, 0x3000, 0x4000];
    const ADDRESS: u64 = 0xffff_c900_0000_1000;
    const PRESENT_WRITABLE: u64 = 3;

    /// Where the entry of a level, counted from the top, stands.
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
        let walks = RefCell::default();
        let memory = HitMemory::new(&ram, &walks);
        let same = |offset: u64| {
            let gva = Gva(ADDRESS + offset);
            for _ in 0..2 {
                assert_eq!(memory.walk(space, gva), translate(&ram, space, gva));
            }
            memory.walk(space, gva)
        };
        assert_eq!(same(0x123).unwrap().gpa, Gpa(0x10_0123));
        for level in 0..4 {
            let at = Gpa(entry(level));
            let before = ram.read_word(at).unwrap();
            // Gone; read-only; another table, which maps nothing, or another page.
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
        let walks = RefCell::default();
        let memory = HitMemory::new(&ram, &walks);
        assert!(memory.walk(space, Gva(ADDRESS)).is_ok());
        let other = AddressSpace {
            root: Gpa(0x5000),
            ..space
        };
        assert!(memory.walk(other, Gva(ADDRESS)).is_err());
    }
}
