//! Semaphores of static probes: counters of listeners in programs' data. A program skips a static
//! probe while its semaphore is 0.
//!
//! While such a probe is enabled, its counter is raised by one in every process that maps the file.
//! Processes with a private page get it there. The others, and new processes and private pages,
//! take it from the file's page in the page cache. Disabling the probe lowers the counters again. A
//! process that got its private page in between has copied the raised counter. The guest is paused
//! for each of these changes.
//!
//! The file itself keeps its bytes. A read of the file returns the original bytes. While its page
//! is passed on or written to a disk, the counter is lowered. A page that leaves the page cache
//! loses the count, and so does one that was written to a disk. Both get it again when the file is
//! next mapped.
//!
//! When the probe is enabled or disabled, a private page on a swap device, or one being made or
//! moved, is not reached. It keeps its counter, so its program sees no listener, or one that is
//! gone.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use introspect::kernel::page_cache::{CachedFile, CachedPage, PageCacheLayout, PageOwner};
use introspect::x86_64::PAGE;
use introspect::{Gpa, Gva, MemoryView, PausedMemory, PhysicalMemory};
use vmm::memory::GuestRam;

use super::Engine;
use super::guest_pages::GuestPages;
use crate::probe::SemaphoreText;

/// The size of a counter in bytes.
const SIZE: u64 = 2;

/// The guest's page cache. A counter's page in it must not change meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct PageCache<'m> {
    pub(crate) ram: &'m GuestRam,
    pub(crate) layout: &'m PageCacheLayout,
    pub(crate) view: MemoryView<'m>,
}

struct Counter {
    file: CachedFile,
    offset: u64,
    /// The number of enabled probes that use the counter.
    listeners: u16,
    /// The counter's value in the file; `None` if not known because its page was never in memory.
    original: Option<u16>,
    /// The number of calls in progress that pass the file's pages on. The counter is lowered
    /// meanwhile.
    hidden: usize,
}

/// A byte of a raised counter in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RaisedByte {
    pub(crate) place: Gpa,
    /// The byte in memory.
    pub(crate) ours: u8,
    /// The byte in the file.
    pub(crate) original: u8,
}

type Counters = HashMap<(Gva, u64), Counter>;

/// All counters.
#[derive(Default)]
pub(crate) struct Semaphores {
    /// By file and offset.
    counters: Mutex<Counters>,
    /// The number of counters. Checked first, since it is seldom above 0.
    count: AtomicUsize,
}

impl Semaphores {
    fn lock(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether any counter is raised.
    pub(crate) fn are_some(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Raises the counters in a file's pages that are about to be mapped, if they came new from the
    /// disk.
    pub(crate) fn pages_arrive(&self, cache: PageCache<'_>, mapping: Gva) {
        self.of_file(mapping, |counter| {
            counter.settle(cache, 0);
        });
    }

    /// Returns the bytes of raised counters in `range` of memory, a few pages. `owner_of` returns
    /// the owner of a page. It is called for each match, because the page may have moved since it
    /// was raised.
    pub(crate) fn raised(
        &self,
        ram: &GuestRam,
        range: &Range<u64>,
        owner_of: impl Fn(Gpa) -> Option<PageOwner>,
    ) -> Vec<RaisedByte> {
        let mut found = Vec::new();
        if !self.are_some() {
            return found;
        }
        let counters = self.lock();
        for number in range.start / PAGE..range.end.div_ceil(PAGE) {
            let page = number * PAGE;
            for counter in counters.values() {
                let place = Gpa(page + counter.offset % PAGE);
                let near = place.0 < range.end && range.start < place.0.saturating_add(SIZE);
                let Some(original) = counter.original.filter(|_| near) else {
                    continue;
                };
                // Any other value was written by the guest.
                let ours = original.saturating_add(counter.raised());
                let owner = PageOwner {
                    mapping: counter.file.mapping,
                    index: counter.offset / PAGE,
                };
                if ours == original
                    || read(ram, place) != Some(ours)
                    || owner_of(Gpa(page)) != Some(owner)
                {
                    continue;
                }
                let bytes = ours.to_le_bytes().into_iter().zip(original.to_le_bytes());
                let bytes = (place.0..)
                    .zip(bytes)
                    .map(|(place, (ours, original))| RaisedByte {
                        place: Gpa(place),
                        ours,
                        original,
                    });
                found
                    .extend(bytes.filter(|byte| {
                        byte.ours != byte.original && range.contains(&byte.place.0)
                    }));
            }
        }
        found
    }

    /// Lowers a file's counters while its pages are passed on, until [`Self::show`].
    pub(crate) fn hide(&self, cache: PageCache<'_>, mapping: Gva) {
        self.of_file(mapping, |counter| {
            let before = counter.raised();
            counter.hidden += 1;
            counter.settle(cache, before);
        });
    }

    /// Ends a [`Self::hide`].
    pub(crate) fn show(&self, cache: PageCache<'_>, mapping: Gva) {
        self.of_file(mapping, |counter| {
            counter.hidden = counter.hidden.saturating_sub(1);
            counter.settle(cache, 0);
        });
    }

    /// Lowers a file's counters in `range` of memory, which is about to be written to a disk, until
    /// the file is mapped again.
    pub(crate) fn take_out(&self, cache: PageCache<'_>, mapping: Gva, range: &Range<u64>) {
        self.of_file(mapping, |counter| {
            if let (Some((place, found)), Some(original)) =
                (counter.cached(cache), counter.original)
                && range.contains(&place.0)
                && found == original.saturating_add(counter.raised())
            {
                write(cache.ram, place, original);
            }
        });
    }

    /// Forgets the counters of a file whose inode is freed, and its pages with it.
    pub(crate) fn file_goes(&self, inode: Gva) {
        let mut counters = self.lock();
        counters.retain(|_, counter| counter.file.inode != inode);
        self.count.store(counters.len(), Ordering::Relaxed);
    }

    fn of_file(&self, mapping: Gva, each: impl FnMut(&mut Counter)) {
        if self.are_some() {
            let mut counters = self.lock();
            let of_file = |counter: &&mut Counter| counter.file.mapping == mapping;
            counters.values_mut().filter(of_file).for_each(each);
        }
    }
}

impl Counter {
    /// Returns the difference between the counter in the page cache and in the file.
    fn raised(&self) -> u16 {
        match self.hidden {
            0 => self.listeners,
            _ => 0,
        }
    }

    /// Returns the counter's place and value in the page cache; `None` while its page is missing or
    /// being written to a disk.
    fn cached(&self, cache: PageCache<'_>) -> Option<(Gpa, u16)> {
        let PageCache { ram, layout, view } = cache;
        match layout.page(view, &self.file, self.offset / PAGE) {
            Ok(CachedPage::Present { gpa, page })
                if layout.is_in_writeback(view, page) == Ok(false) =>
            {
                let place = Gpa(gpa.0 + self.offset % PAGE);
                read(ram, place).map(|found| (place, found))
            }
            _ => None,
        }
    }

    /// Sets the counter in the page cache, where it was raised by `before` or is fresh from the
    /// disk. A value that the guest has written to the file is left alone. Returns whether the page
    /// is present.
    fn settle(&mut self, cache: PageCache<'_>, before: u16) -> bool {
        let Some((place, found)) = self.cached(cache) else {
            return false;
        };
        let original = *self.original.get_or_insert(found);
        if found == original.saturating_add(before) || found == original {
            write(cache.ram, place, original.saturating_add(self.raised()));
        }
        true
    }
}

/// A change of a counter by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Up,
    Down,
}

impl Step {
    /// Returns the count after the step, saturated.
    fn of(self, count: u16) -> u16 {
        match self {
            Self::Up => count.saturating_add(1),
            Self::Down => count.saturating_sub(1),
        }
    }
}

impl Engine {
    /// Adds a listener.
    pub(super) fn raise(&self, text: &SemaphoreText) {
        self.step(text, Step::Up);
    }

    /// Removes a listener.
    pub(super) fn lower(&self, text: &SemaphoreText) {
        self.step(text, Step::Down);
    }

    fn step(&self, text: &SemaphoreText, step: Step) {
        let Some(pages) = &self.0.pages else {
            log::warn!(
                "{}: the kernel's page cache is not known; programs do not see that a probe is enabled",
                text.path
            );
            return;
        };
        if text.offset % PAGE > PAGE - SIZE {
            log::warn!(
                "{}: the counter of listeners at {:#x} spans two pages and is not changed",
                text.path,
                text.offset
            );
            return;
        }
        let machine = &self.0.machine;
        let semaphores = &self.0.path.semaphores;
        let _paused = machine.pause();
        let ram = machine.ram();
        let memory = PausedMemory::new(ram);
        let cache = PageCache {
            ram,
            layout: pages.layout(),
            view: memory.view(self.0.view.kernel.space),
        };
        let mut counters = semaphores.lock();
        let key = (text.file.mapping, text.offset);
        if step == Step::Up {
            counters.entry(key).or_insert(Counter {
                file: text.file,
                offset: text.offset,
                listeners: 0,
                original: None,
                hidden: 0,
            });
        }
        // The file is gone, and its mappings with it.
        let Some(counter) = counters.get_mut(&key) else {
            return;
        };
        let before = counter.raised();
        counter.listeners = step.of(counter.listeners);
        if !counter.settle(cache, before) && step == Step::Up {
            log::warn!(
                "{}: the page of a counter of listeners is not in memory; new processes see it when it is mapped",
                text.path
            );
        }
        for page in private_pages(pages, cache, counter) {
            let place = Gpa(page + counter.offset % PAGE);
            if let Some(found) = read(ram, place) {
                write(ram, place, step.of(found));
            }
        }
        if counter.listeners == 0 {
            counters.remove(&key);
        }
        semaphores.count.store(counters.len(), Ordering::Relaxed);
    }
}

/// Returns the private pages that processes have instead of a counter's page, each once: after a
/// fork several share one.
fn private_pages(pages: &GuestPages, cache: PageCache<'_>, counter: &Counter) -> BTreeSet<u64> {
    let (mapped, error) = pages.mapped(cache.ram, counter.file.mapping, counter.offset);
    if let Some(error) = error {
        log::warn!("not all processes see whether a probe is enabled: {error}");
    }
    let own = |page: &Gpa| matches!(cache.layout.owner(cache.view, *page), Ok(None));
    let own = mapped.into_iter().filter(own);
    own.map(|page| page.0).collect()
}

fn read(ram: &GuestRam, place: Gpa) -> Option<u16> {
    let mut bytes = [0; SIZE as usize];
    ram.read_physical(place, &mut bytes).ok()?;
    Some(u16::from_le_bytes(bytes))
}

fn write(ram: &GuestRam, place: Gpa, count: u16) {
    if let Err(error) = ram.write_physical(place, &count.to_le_bytes()) {
        log::warn!("a counter of listeners cannot be written: {error}");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MAPPING: Gva = Gva(0xffff_8880_0100_0000);
    /// Pages of memory. The first is the file's third page.
    const PAGES: [u64; 3] = [0x20_0000, 0x20_1000, 0x30_0000];
    /// The counter's offset in the file, and in its page.
    const OFFSET: u64 = 2 * PAGE + IN_PAGE;
    const IN_PAGE: u64 = 0x123;

    fn owner(mapping: Gva, index: u64) -> PageOwner {
        PageOwner { mapping, index }
    }

    /// Returns a counter of two listeners whose value in the file is `original`.
    fn semaphores(original: u16) -> Semaphores {
        let file = CachedFile {
            mapping: MAPPING,
            inode: Gva(MAPPING.0 - 0x100),
            size: 3 * PAGE,
        };
        let counter = Counter {
            file,
            offset: OFFSET,
            listeners: 2,
            original: Some(original),
            hidden: 0,
        };
        Semaphores {
            counters: HashMap::from([((MAPPING, OFFSET), counter)]).into(),
            count: AtomicUsize::new(1),
        }
    }

    /// Returns the bytes of `range` that belong to a counter, with their originals, if the file's
    /// third page is `page`.
    fn raised(
        semaphores: &Semaphores,
        ram: &GuestRam,
        page: u64,
        range: Range<u64>,
    ) -> Vec<(u64, u8, u8)> {
        let owner_of = |asked: Gpa| match asked.0 == page {
            true => Some(owner(MAPPING, 2)),
            false => Some(owner(Gva(MAPPING.0 + 0x1000), 2)),
        };
        let found = semaphores.raised(ram, &range, owner_of);
        let found = found.into_iter();
        found
            .map(|byte| (byte.place.0, byte.ours, byte.original))
            .collect()
    }

    #[test]
    fn counts_are_found_wherever_their_page_is() {
        let ram = GuestRam::new(16 << 20).unwrap();
        let semaphores = semaphores(0);
        let whole = |page: u64| page..page + PAGE;
        for page in PAGES {
            write(&ram, Gpa(page + IN_PAGE), 2);
        }
        for page in PAGES {
            let place = page + IN_PAGE;
            let expected = [(place, 2, 0)];
            assert_eq!(raised(&semaphores, &ram, page, whole(page)), expected);
            assert_eq!(raised(&semaphores, &ram, page, place..place + 1), expected);
            // Several pages at once, the first of them another file's.
            let wide = page - PAGE..page + PAGE;
            assert_eq!(raised(&semaphores, &ram, page, wide), expected);
            for beside in [page..place, place + 1..page + PAGE, place..place] {
                assert_eq!(raised(&semaphores, &ram, page, beside), []);
            }
        }
        // Another file's page, and a range past all memory.
        assert_eq!(raised(&semaphores, &ram, PAGES[0], whole(PAGES[1])), []);
        let end = u64::MAX - PAGE..u64::MAX;
        assert_eq!(raised(&semaphores, &ram, PAGES[0], end), []);
    }

    #[test]
    fn what_the_guest_has_written_over_a_count_is_its_own() {
        let ram = GuestRam::new(16 << 20).unwrap();
        let semaphores = semaphores(0xff);
        let [page, ..] = PAGES;
        let place = page + IN_PAGE;
        let look = || raised(&semaphores, &ram, page, page..page + PAGE);
        write(&ram, Gpa(place), 0x101);
        assert_eq!(look(), [(place, 1, 0xff), (place + 1, 1, 0)]);
        for written in [0, 0xff, 0x100, 0x1234] {
            write(&ram, Gpa(place), written);
            assert_eq!(look(), [], "{written:#x}");
        }
    }

    #[test]
    fn counts_are_gone_with_their_file() {
        let semaphores = semaphores(0);
        semaphores.file_goes(MAPPING);
        assert!(semaphores.are_some(), "the inode counts");
        semaphores.file_goes(Gva(MAPPING.0 - 0x100));
        assert!(!semaphores.are_some());
    }
}
