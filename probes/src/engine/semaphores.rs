//! Counters of listeners in programs' data: a static probe that has one is passed by while it is 0.
//!
//! While such a probe is enabled its counter is one higher, in every process that maps the file: in the private pages of those that have one
//! there, and in the file's page in the page cache, from which new processes and new private pages take it. When the probe is disabled the
//! same is done backwards; a process that has got its page in between has got the count with it. All that while the guest stands still.
//!
//! The file itself keeps its bytes: what is read of it gets them, and while its page is handed on or written to a disk the count is out of
//! it. Not reached: a private page that is on a swap device while the probe is enabled; where the program looks at it, it sees no
//! listener. A page of the file that leaves the page cache takes the count with it, and gets it again when the file is next mapped; so does
//! one that was written to a disk.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use introspect::kernel::page_cache::{CachedFile, CachedPage, PageCacheLayout};
use introspect::x86_64::PAGE;
use introspect::{Gpa, Gva, MemoryView, PausedMemory, PhysicalMemory};
use vmm::memory::GuestRam;

use super::Engine;
use crate::probe::SemaphoreText;

/// Bytes of a counter.
const SIZE: u64 = 2;

struct Counter {
    file: CachedFile,
    offset: u64,
    /// Probes that are enabled and look at it.
    listeners: u16,
    /// What the file has there by itself; `None` if nobody knows, since its page was never in memory.
    original: Option<u16>,
    /// Calls under way that hand the file's pages on: the count is out of them meanwhile.
    hidden: usize,
    /// Where it stood in the page cache when last looked at.
    place: Option<Gpa>,
}

/// A byte of a counter in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RaisedByte {
    pub(crate) place: Gpa,
    /// What stands there.
    pub(crate) ours: u8,
    /// What the file has there.
    pub(crate) original: u8,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Semaphores {
    /// By file and offset.
    counters: Mutex<HashMap<(Gva, u64), Counter>>,
    /// How many there are: asked first, since there seldom is one.
    count: AtomicUsize,
}

impl Semaphores {
    fn lock(&self) -> MutexGuard<'_, HashMap<(Gva, u64), Counter>> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any is raised.
    pub(crate) fn are_some(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// A file's pages are about to be mapped: those that came new from the disk get their counts.
    pub(crate) fn pages_arrive(
        &self,
        ram: &GuestRam,
        mapping: Gva,
        layout: &PageCacheLayout,
        view: MemoryView<'_>,
    ) {
        let mut counters = self.lock();
        for counter in of_file(&mut counters, mapping) {
            counter.settle(ram, layout, view, 0);
        }
    }

    /// The bytes of counters that stand higher in `range` of memory than in their files.
    pub(crate) fn raised(
        &self,
        ram: &GuestRam,
        layout: &PageCacheLayout,
        view: MemoryView<'_>,
        range: &Range<u64>,
    ) -> Vec<RaisedByte> {
        let mut found = Vec::new();
        let mut counters = self.lock();
        for counter in in_range(&mut counters, range) {
            let (Some((place, ours)), Some(original)) =
                (counter.cached(ram, layout, view), counter.original)
            else {
                continue;
            };
            let bytes = ours.to_le_bytes().into_iter().zip(original.to_le_bytes());
            let bytes = (place.0..)
                .zip(bytes)
                .map(|(place, (ours, original))| RaisedByte {
                    place: Gpa(place),
                    ours,
                    original,
                });
            found.extend(
                bytes.filter(|byte| byte.ours != byte.original && range.contains(&byte.place.0)),
            );
        }
        found
    }

    /// A file's pages are about to be handed on as they are: the counts are out of them until [`Self::show`].
    pub(crate) fn hide(
        &self,
        ram: &GuestRam,
        mapping: Gva,
        layout: &PageCacheLayout,
        view: MemoryView<'_>,
    ) {
        let mut counters = self.lock();
        for counter in of_file(&mut counters, mapping) {
            let before = counter.raised();
            counter.hidden += 1;
            counter.settle(ram, layout, view, before);
        }
    }

    /// That is over.
    pub(crate) fn show(
        &self,
        ram: &GuestRam,
        mapping: Gva,
        layout: &PageCacheLayout,
        view: MemoryView<'_>,
    ) {
        let mut counters = self.lock();
        for counter in of_file(&mut counters, mapping) {
            counter.hidden = counter.hidden.saturating_sub(1);
            counter.settle(ram, layout, view, 0);
        }
    }

    /// Pages of a file, in `range` of memory, are about to be written to a disk: the counts are out of them until the file is mapped again.
    pub(crate) fn take_out(
        &self,
        ram: &GuestRam,
        mapping: Gva,
        layout: &PageCacheLayout,
        view: MemoryView<'_>,
        range: &Range<u64>,
    ) {
        let mut counters = self.lock();
        let near = in_range(&mut counters, range);
        for counter in near.filter(|counter| counter.file.mapping == mapping) {
            if let (Some((place, found)), Some(original)) =
                (counter.cached(ram, layout, view), counter.original)
                && found == original.saturating_add(counter.raised())
            {
                write(ram, place, original);
            }
        }
    }

    /// The file's inode goes, and its pages with it.
    pub(crate) fn file_goes(&self, inode: Gva) {
        let mut counters = self.lock();
        counters.retain(|_, counter| counter.file.inode != inode);
        self.count.store(counters.len(), Ordering::Relaxed);
    }
}

fn of_file(
    counters: &mut HashMap<(Gva, u64), Counter>,
    mapping: Gva,
) -> impl Iterator<Item = &mut Counter> {
    let counters = counters.values_mut();
    counters.filter(move |counter| counter.file.mapping == mapping)
}

/// Those that may stand in a range of memory.
fn in_range<'c>(
    counters: &'c mut HashMap<(Gva, u64), Counter>,
    range: &Range<u64>,
) -> impl Iterator<Item = &'c mut Counter> {
    let is_near = move |place: Gpa| place.0 < range.end && range.start < place.0 + SIZE;
    let counters = counters.values_mut();
    counters.filter(move |counter| counter.place.is_some_and(is_near))
}

impl Counter {
    /// How much higher it is to stand in the page cache than in the file.
    fn raised(&self) -> u16 {
        match self.hidden {
            0 => self.listeners,
            _ => 0,
        }
    }

    /// Where it stands in the page cache, and what it is there; `None` while its page is not there or on its way to a disk.
    fn cached(
        &mut self,
        ram: &GuestRam,
        layout: &PageCacheLayout,
        view: MemoryView<'_>,
    ) -> Option<(Gpa, u16)> {
        let found = match layout.page(view, &self.file, self.offset / PAGE) {
            Ok(CachedPage::Present { gpa, page })
                if layout.is_in_writeback(view, page) == Ok(false) =>
            {
                let place = Gpa(gpa.0 + self.offset % PAGE);
                read(ram, place).map(|found| (place, found))
            }
            _ => None,
        };
        self.place = found.map(|(place, _)| place);
        found
    }

    /// Puts it right in the page cache, where it stood `before` higher than in the file, or is fresh from the disk; whether its page is
    /// there. What somebody has written to the file is left alone.
    fn settle(
        &mut self,
        ram: &GuestRam,
        layout: &PageCacheLayout,
        view: MemoryView<'_>,
        before: u16,
    ) -> bool {
        let Some((place, found)) = self.cached(ram, layout, view) else {
            return false;
        };
        let original = *self.original.get_or_insert(found);
        if found == original.saturating_add(before) || found == original {
            write(ram, place, original.saturating_add(self.raised()));
        }
        true
    }
}

/// Up or down by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Up,
    Down,
}

impl Step {
    /// The count after it; where that is none, as it is.
    fn of(self, count: u16) -> u16 {
        match self {
            Self::Up => count.saturating_add(1),
            Self::Down => count.saturating_sub(1),
        }
    }
}

impl Engine {
    /// One listener more.
    pub(super) fn raise(&self, text: &SemaphoreText) {
        self.step(text, Step::Up);
    }

    /// One listener less.
    pub(super) fn lower(&self, text: &SemaphoreText) {
        self.step(text, Step::Down);
    }

    fn step(&self, text: &SemaphoreText, step: Step) {
        let Some(pages) = &self.0.pages else {
            log::warn!(
                "{}: the kernel does not tell of its page cache; programs do not see that a probe is enabled",
                text.path
            );
            return;
        };
        if text.offset % PAGE > PAGE - SIZE {
            log::warn!(
                "{}: the counter of listeners at {:#x} lies in two pages and is left alone",
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
        let view = memory.view(self.0.view.space);
        let mut counters = semaphores.lock();
        let key = (text.file.mapping, text.offset);
        if step == Step::Up {
            counters.entry(key).or_insert(Counter {
                file: text.file,
                offset: text.offset,
                listeners: 0,
                original: None,
                hidden: 0,
                place: None,
            });
        }
        // The file is gone, and whoever has mapped it with it.
        let Some(counter) = counters.get_mut(&key) else {
            return;
        };
        let before = counter.raised();
        counter.listeners = step.of(counter.listeners);
        if !counter.settle(ram, pages.layout(), view, before) && step == Step::Up {
            log::warn!(
                "{}: the page of a counter of listeners is not in memory; new processes see it when it is mapped",
                text.path
            );
        }
        for page in private_pages(pages, ram, view, counter) {
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

/// The pages that processes have in place of the one of a counter, each once: after a fork several have the same.
fn private_pages(
    pages: &super::guest_pages::GuestPages,
    memory: &dyn PhysicalMemory,
    view: MemoryView<'_>,
    counter: &Counter,
) -> BTreeSet<u64> {
    let (mapped, error) = pages.mapped(memory, counter.file.mapping, counter.offset);
    if let Some(error) = error {
        log::warn!("not all processes see that a probe is enabled: {error}");
    }
    let own = |page: &Gpa| matches!(pages.layout().owner(view, *page), Ok(None));
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
