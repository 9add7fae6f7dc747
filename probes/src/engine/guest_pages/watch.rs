//! The watches on the functions by which the guest's kernel uses pages of programs' text.
#![allow(
    clippy::single_range_in_vec_init,
    reason = "lists of ranges, often of one"
)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use introspect::kernel::page_cache::PageOwner;
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::{Gpa, Gva, PausedMemory};
use vmm::StoppedVcpu;
use vmm::trap::TrapTable;

use super::GuestPages;
use super::iter::nth;
use super::originals::{Original, put_right, relative};
use crate::engine::calls::Calls;
use crate::engine::hit::{Hit, HitPath};
use crate::engine::returns::Returning;
use crate::engine::semaphores::PageCache;
use crate::engine::user_text::{PrivateCopy, Traps};
use crate::engine::watch::Watch;

/// The number of pages in a file's largest folio.
const LARGEST_FOLIO: u64 = 1 << 9;
/// The length of the longest instruction in bytes.
const LONGEST_INSTRUCTION: u64 = 15;
/// `FOLL_WRITE` (include/linux/mm_types.h).
const FOLL_WRITE: u64 = 1;

/// The event that a function is watched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A page leaves the page cache. Positions of the file and the page among the arguments.
    Leaves { mapping: usize, folio: usize },
    /// The same, since it moves. It stays where it is if the function returns an error.
    Moves { mapping: usize, folio: usize },
    /// A file's inode is freed.
    FileGoes,
    /// Pages of a file are about to be mapped.
    Maps,
    /// Bytes of a page are copied to a reader.
    Read,
    /// A file's pages are passed on without a copy.
    Splice,
    /// One program's memory is copied by another. The position of its `mm_struct`; address, buffer,
    /// length and flags follow.
    Peek { mm: usize },
    /// A program gets a private page, or may get one. `page_is_known`: the fault already says
    /// which.
    OwnCopy { page_is_known: bool },
    /// A page is written to. Positions of the first byte and the length among the arguments, behind
    /// the page.
    Write { offset: usize, length: usize },
    /// Pages are written to a disk. The position of the first among the arguments.
    WriteBack { folio: usize },
    /// The pages are on the disk.
    WrittenBack,
    /// A page has moved: the second argument's to the first's.
    Moved,
}

/// The work that is left for a watched call's return.
pub(super) enum Pending {
    /// Bytes to restore in copies: for each its position among the copied bytes, and its value.
    Bytes {
        parts: Vec<Range<u64>>,
        space: AddressSpace,
        originals: Vec<Original>,
    },
    /// The same, in the page that replaces the one at `before` in a program.
    Page {
        before: Gpa,
        space: AddressSpace,
        address: u64,
        originals: Vec<Original>,
        /// The new page, if sites are kept for it.
        copy: Option<PrivateCopy>,
    },
    /// A program's memory was written to, private pages among it.
    Written {
        space: AddressSpace,
        addresses: Range<u64>,
        opened: Vec<u64>,
    },
    /// A file whose traps were suspended.
    File(Gva),
    /// A file with waiting traps.
    Waiting(Gva),
    /// A file with a page that may have moved.
    Moving(Gva),
}

pub(super) struct PageWatch {
    pub(super) pages: Arc<GuestPages>,
    event: Event,
    calls: Calls<Pending>,
}

impl PageWatch {
    pub(super) fn new(pages: Arc<GuestPages>, event: Event) -> Self {
        Self {
            pages,
            event,
            calls: Calls::default(),
        }
    }
}

impl Watch for PageWatch {
    fn on_entry(&self, path: &HitPath, hit: &Hit<'_>) -> bool {
        let Some(cpu) = hit.cpu else { return false };
        let traps = path.traps(cpu);
        let [first, second, third, fourth, ..] = hit.arguments();
        let (pages, memory) = (&self.pages, hit.memory);
        let paused = PausedMemory::new(memory);
        let view = paused.view(pages.space);
        let layout = &pages.layout;
        let cache = PageCache {
            ram: cpu.ram(),
            layout,
            view,
        };
        let pending = match self.event {
            Event::Leaves { mapping, folio } => {
                self.leaves(path, hit, traps, (mapping, folio));
                None
            }
            Event::Moves { mapping, folio } => self
                .leaves(path, hit, traps, (mapping, folio))
                .map(Pending::Moving),
            Event::FileGoes => {
                path.user_sites.file_goes(traps, Gva(first));
                path.semaphores.file_goes(Gva(first));
                None
            }
            Event::Maps => {
                self.own_copy_at_first(path, hit, cpu, first);
                if let Some(mapping) = pages.fault_mapping(memory, first) {
                    if path.user_sites.waits(mapping) {
                        self.arrive(path, cpu, mapping);
                    }
                    path.semaphores.pages_arrive(cache, mapping);
                }
                None
            }
            Event::Moved => {
                let (to, from) = (
                    pages.memory_of(memory, first),
                    pages.memory_of(memory, second),
                );
                let places = to.zip(from);
                let file = places.and_then(|places| self.moved(path, hit, cpu, places));
                file.map(Pending::Waiting)
            }
            // Only if the page itself names its owner.
            Event::WrittenBack => pages.memory_of(memory, first).and_then(|page| {
                let owner = layout.owner(view, page).ok()??;
                let waits = path.user_sites.waits(owner.mapping);
                waits.then_some(Pending::Waiting(owner.mapping))
            }),
            Event::Read => pages.memory_of(memory, first).and_then(|page| {
                let start = page.0.saturating_add(second);
                let range = start..start.saturating_add(third.min(LARGEST_FOLIO * PAGE));
                self.copied(path, hit, traps, cache, range, fourth)
            }),
            Event::Splice => {
                let mapping = pages.word(memory, first, pages.file_mapping).map(Gva);
                mapping.map(|mapping| hand_on(path, traps, cache, mapping))
            }
            Event::Peek { mm } => match hit.arguments().get(mm..) {
                Some(&[mm, address, _, length, flags, ..]) if flags & FOLL_WRITE != 0 => {
                    self.poke(path, hit, traps, mm, address, length)
                }
                Some(&[mm, address, buffer, length, ..]) => {
                    self.peek(hit, traps, mm, address, buffer, length)
                }
                _ => None,
            },
            Event::OwnCopy { page_is_known } => {
                self.own_copy(path, hit, traps, (first, page_is_known))
            }
            Event::Write { offset, length } => {
                let argument = |number: usize| hit.arguments().get(number).copied();
                if let (Some(page), Some(offset), Some(length)) = (
                    pages.memory_of(memory, first),
                    argument(offset),
                    argument(length),
                ) {
                    let start = page.0.saturating_add(offset);
                    let end = start.saturating_add(length);
                    self.written(path, hit, traps, start..end);
                }
                None
            }
            Event::WriteBack { folio } => {
                let folio = hit.arguments().get(folio).copied();
                if let Some(page) = folio.and_then(|folio| pages.memory_of(memory, folio)) {
                    self.write_back(path, hit, traps, cache, page);
                }
                None
            }
        };
        let Some(pending) = pending else { return false };
        let entered = self.calls.enter(hit, pending);
        for pending in entered.unreturned {
            if let Pending::File(mapping) = pending {
                self.handed_on(path, cpu, mapping);
            }
        }
        if !entered.is_kept {
            log::warn!("a read of a program's text cannot be followed: it may show traps");
        }
        entered.is_kept
    }

    fn on_return(&self, path: &HitPath, hit: &Hit<'_>, _: &Returning, from_stack: Gva) {
        let Some(cpu) = hit.cpu else { return };
        let Some(pending) = self.calls.leave(hit, from_stack) else {
            return;
        };
        let hidden = match pending {
            Pending::Bytes {
                parts,
                space,
                originals,
            } => {
                // Bytes that were not copied are left alone.
                let copied = hit.registers.rax;
                let originals = originals.into_iter().filter(|byte| byte.at < copied);
                let places = originals.filter_map(|byte| Some((nth(&parts, byte.at)?, byte)));
                put_right(cpu.ram(), space, places)
            }
            Pending::Page {
                before,
                space,
                address,
                originals,
                copy,
            } => {
                let places = originals.into_iter();
                let places = places.map(|byte| (address + byte.at, byte));
                // The old page is still mapped if the fault failed. It stays as it is.
                match translate(cpu.ram(), space, Gva(address)) {
                    Ok(found) if found.gpa != before && !cpu.traps().is_patched(found.gpa) => {
                        let hidden = put_right(cpu.ram(), space, places);
                        if let Some(copy) = copy {
                            let returns = &path.user_returns;
                            path.user_sites.copied(
                                path.traps(cpu),
                                returns,
                                before,
                                found.gpa,
                                copy,
                            );
                        }
                        hidden
                    }
                    _ => 0,
                }
            }
            Pending::Written {
                space,
                addresses,
                opened,
            } => {
                path.user_sites.written(
                    path.traps(cpu),
                    cpu.ram(),
                    &path.user_returns,
                    &opened,
                    (space, &addresses),
                );
                0
            }
            Pending::File(mapping) => {
                self.handed_on(path, cpu, mapping);
                0
            }
            Pending::Waiting(mapping) => {
                self.arrive(path, cpu, mapping);
                0
            }
            // If it has moved, its bytes are not there yet.
            Pending::Moving(mapping) => {
                if hit.registers.rax & 0xffff_ffff != 0 {
                    self.arrive(path, cpu, mapping);
                }
                0
            }
        };
        path.counters.hidden.fetch_add(hidden, Ordering::Relaxed);
    }

    fn on_unwatch(&self, _: &TrapTable) {
        drop(self.calls.close());
    }
}

impl PageWatch {
    /// Resumes a file's waiting traps in the pages that are in memory.
    fn arrive(&self, path: &HitPath, cpu: &StoppedVcpu<'_>, mapping: Gva) {
        let paused = PausedMemory::new(cpu.ram());
        let view = paused.view(self.pages.space);
        path.user_sites
            .pages_arrive(path.traps(cpu), mapping, &self.pages.layout, view);
    }

    /// Prepares a copy of the bytes in `range` of memory, within one folio, to the `struct
    /// iov_iter` at `destination`.
    fn copied(
        &self,
        path: &HitPath,
        hit: &Hit<'_>,
        traps: Traps<'_>,
        cache: PageCache<'_>,
        range: Range<u64>,
        destination: u64,
    ) -> Option<Pending> {
        let start = range.start;
        let mut originals = relative(&traps.table.user_originals(range.clone()), start);
        let owner_of = |page| cache.layout.owner(cache.view, page).ok().flatten();
        let raised = path.semaphores.raised(cache.ram, &range, owner_of);
        originals.extend(raised.into_iter().map(|byte| Original {
            at: byte.place.0 - start,
            ours: byte.ours,
            original: byte.original,
        }));
        if originals.is_empty() {
            return None;
        }
        let (pages, length) = (&self.pages, range.end - start);
        let parts = pages
            .copy
            .destination(hit.memory, pages.space, destination, length);
        let space = hit.space();
        (!parts.is_empty()).then_some(Pending::Bytes {
            parts,
            space,
            originals,
        })
    }

    /// Prepares the folio that begins at `first` for being written to a disk.
    fn write_back(
        &self,
        path: &HitPath,
        hit: &Hit<'_>,
        traps: Traps<'_>,
        cache: PageCache<'_>,
        first: Gpa,
    ) {
        for page in self.patched_pages(hit, traps, first, None) {
            suspend(path, traps, page..page.saturating_add(PAGE));
        }
        if path.semaphores.are_some()
            && let Ok(Some(owner)) = cache.layout.owner(cache.view, first)
        {
            let folio = first.0..first.0.saturating_add(LARGEST_FOLIO * PAGE);
            path.semaphores.take_out(cache, owner.mapping, &folio);
        }
    }

    /// Resumes a file's traps after its pages were passed on.
    fn handed_on(&self, path: &HitPath, cpu: &StoppedVcpu<'_>, mapping: Gva) {
        path.user_sites.splices.end(cpu.traps(), mapping);
        let paused = PausedMemory::new(cpu.ram());
        let cache = PageCache {
            ram: cpu.ram(),
            layout: &self.pages.layout,
            view: paused.view(self.pages.space),
        };
        path.semaphores.show(cache, mapping);
    }

    /// Suspends the traps in bytes of a page that are about to be written. This includes an
    /// instruction that reaches into them from the file's previous page, which can be anywhere in
    /// memory.
    fn written(&self, path: &HitPath, hit: &Hit<'_>, traps: Traps<'_>, bytes: Range<u64>) {
        let end = bytes.end.checked_next_multiple_of(PAGE);
        suspend(
            path,
            traps,
            bytes.start & !(PAGE - 1)..end.unwrap_or(u64::MAX),
        );
        if bytes.start % PAGE >= LONGEST_INSTRUCTION - 1 {
            return;
        }
        let paused = PausedMemory::new(hit.memory);
        let view = paused.view(self.pages.space);
        if let Ok(Some(before)) = self.pages.layout.page_before(view, Gpa(bytes.start)) {
            let end = before.0.saturating_add(PAGE);
            suspend(path, traps, end - (LONGEST_INSTRUCTION - 1)..end);
        }
    }

    /// Returns the pages with sites of the folio that begins at `first`. `owner` is the owner of
    /// its first page, if the page must not be asked any more.
    pub(super) fn patched_pages(
        &self,
        hit: &Hit<'_>,
        traps: Traps<'_>,
        first: Gpa,
        owner: Option<PageOwner>,
    ) -> Vec<u64> {
        let paused = PausedMemory::new(hit.memory);
        let view = paused.view(self.pages.space);
        let layout = &self.pages.layout;
        let folio = first.0..first.0.saturating_add(LARGEST_FOLIO * PAGE);
        let sites = traps.table.user_originals(folio);
        let mut pages: Vec<u64> = sites.iter().map(|(site, _)| site.0 & !(PAGE - 1)).collect();
        pages.dedup();
        if pages.is_empty() {
            return pages;
        }
        let owner = owner.or_else(|| layout.owner(view, first).ok()?);
        pages.retain(|page| {
            let expected = owner.map(|owner| PageOwner {
                index: owner.index.saturating_add((page - first.0) / PAGE),
                ..owner
            });
            *page == first.0 || expected.is_some() && layout.owner(view, Gpa(*page)) == Ok(expected)
        });
        pages
    }
}

/// Suspends a file's traps while its pages are passed on.
fn hand_on(path: &HitPath, traps: Traps<'_>, cache: PageCache<'_>, mapping: Gva) -> Pending {
    let is_of_file = |page| {
        let owner = cache.layout.owner(cache.view, page);
        matches!(owner, Ok(Some(owner)) if owner.mapping == mapping)
    };
    let splices = &path.user_sites.splices;
    let out = splices.begin(traps.table, mapping, is_of_file);
    path.count_suspended_in_programs(out);
    path.semaphores.hide(cache, mapping);
    Pending::File(mapping)
}

/// Suspends the sites in memory that is about to be written, or written to a disk. They wait until
/// it is mapped again.
pub(super) fn suspend(path: &HitPath, traps: Traps<'_>, range: Range<u64>) {
    let out = path.user_sites.take_out(traps, &range);
    path.count_suspended_in_programs(out);
    for site in path.user_returns.forget(range) {
        traps.table.disarm(site);
    }
}
