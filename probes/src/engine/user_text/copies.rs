//! Sites in pages of a program's own: private copies of a file's page that the guest makes where somebody writes to the text of one
//! program (a debugger, or the program itself).
//!
//! A copy is noted when it is made, and gets its traps when what was to be written has been written and the program cannot write to it by
//! itself. Each is known by its page of memory and belongs to the program that it was made for; when that moves it, unmaps it or
//! makes it writable the traps are taken out first. [`super::super::guest_pages`] tells of all that.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use introspect::kernel::page_cache::PageOwner;
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::{Gpa, Gva, PhysicalMemory};
use vmm::trap::{INT3, SiteId, same_instruction};

use super::{State, Traps, UserSite, UserSites, arm, disarm};
use crate::engine::return_sites::ReturnSites;

/// Copies that are noted; programs whose text is written to are few.
const MOST_COPIES: usize = 1 << 14;

/// A page of memory that one program has instead of a file's.
#[derive(Debug, Clone)]
pub(crate) struct PrivateCopy {
    /// The program's page tables, and where it has the page.
    pub(crate) space: AddressSpace,
    pub(crate) address: u64,
    /// What it is a copy of.
    pub(crate) text: PageOwner,
    /// The program can write to it.
    pub(crate) writable: bool,
}

/// A copy, and what stands in it.
pub(super) struct Copied {
    copy: PrivateCopy,
    /// Calls that write to it right now.
    writers: usize,
    /// The program has it at that address: seen when the call that made it was over.
    settled: bool,
    /// By offset in the file.
    armed: BTreeMap<u64, SiteId>,
}

impl Copied {
    fn is_in(&self, space: AddressSpace, addresses: &Range<u64>) -> bool {
        let address = self.copy.address;
        self.copy.space == space
            && address < addresses.end
            && addresses.start < address.saturating_add(PAGE)
    }

    fn may_hold_traps(&self) -> bool {
        self.settled && self.writers == 0 && !self.copy.writable
    }

    fn arm(&mut self, traps: Traps<'_>, page: u64, offset: u64, site: &UserSite) {
        if self.armed.contains_key(&offset) || !self.may_hold_traps() {
            return;
        }
        let within = offset % PAGE;
        let code = traps
            .table
            .read_code(Gva(self.copy.address + within), self.copy.space);
        // What was written may be just that, but for another's breakpoint, which stays that one's.
        let mut expected = code.clone();
        if let (Some(first), Some(&INT3)) = (expected.first_mut(), code.first()) {
            *first = site.code.first().copied().unwrap_or_default();
        }
        if !same_instruction(&site.code, &expected) {
            return;
        }
        if let Ok(armed) = arm(traps, Gpa(page + within), &code, &site.plan) {
            self.armed.insert(offset, armed);
        }
    }

    fn take_out(&mut self, traps: Traps<'_>) {
        for site in std::mem::take(&mut self.armed).into_values() {
            disarm(traps, site);
        }
    }
}

impl State {
    /// What happens at a place has changed: the same in all copies of its page.
    pub(super) fn change_copies(&mut self, traps: Traps<'_>, mapping: Gva, offset: u64) {
        let text = PageOwner {
            mapping,
            index: offset / PAGE,
        };
        let site = self
            .files
            .get(&mapping)
            .and_then(|file| file.sites.get(&offset));
        let copies = self.copies.iter_mut();
        for (page, copied) in copies.filter(|(_, copied)| copied.copy.text == text) {
            match (site, copied.armed.get(&offset)) {
                (Some(site), Some(armed)) => {
                    let plan = Arc::new(site.plan.clone());
                    traps.plans.insert(armed.0.0, plan);
                }
                (Some(site), None) => copied.arm(traps, *page, offset, site),
                (None, _) => {
                    if let Some(armed) = copied.armed.remove(&offset) {
                        disarm(traps, armed);
                    }
                }
            }
        }
    }

    /// Puts the sites of a file into those copies of its pages that may hold them.
    fn settle(&mut self, traps: Traps<'_>, pages: &[u64]) {
        for page in pages {
            let Some(copied) = self.copies.get_mut(page) else {
                continue;
            };
            let PageOwner { mapping, index } = copied.copy.text;
            let Some(file) = self.files.get(&mapping) else {
                continue;
            };
            let start = index.saturating_mul(PAGE);
            for (offset, site) in file.sites.range(start..start.saturating_add(PAGE)) {
                copied.arm(traps, *page, *offset, site);
            }
        }
    }
}

impl UserSites {
    /// Whether any copy is known: asked first, since there seldom is one.
    pub(crate) fn has_copies(&self) -> bool {
        self.copies.load(Ordering::Relaxed) > 0
    }

    /// What a copy of the page at `page` would be a copy of, if sites are kept of that: the page is `owner`'s, or itself a copy.
    pub(crate) fn text_of(&self, page: Gpa, owner: Option<PageOwner>) -> Option<PageOwner> {
        let state = self.lock();
        match owner {
            Some(owner) => state.files.contains_key(&owner.mapping).then_some(owner),
            None => state.copies.get(&page.0).map(|copied| copied.copy.text),
        }
    }

    /// A copy was made at `page`, for a program that had `before` there. The traps of one that this replaces are taken out.
    pub(crate) fn copied(
        &self,
        traps: Traps<'_>,
        returns: &ReturnSites,
        before: Gpa,
        page: Gpa,
        copy: PrivateCopy,
    ) {
        let space = copy.space;
        self.forget_copies(traps, returns, |at, known| {
            at == page.0 || at == before.0 && known.space == space
        });
        let mut state = self.lock();
        if state.copies.len() >= MOST_COPIES {
            log::warn!("too many programs have text of their own: one is not traced there");
            return;
        }
        let copied = Copied {
            copy,
            writers: 0,
            settled: false,
            armed: BTreeMap::new(),
        };
        state.copies.insert(page.0, copied);
        self.copies.store(state.copies.len(), Ordering::Relaxed);
    }

    /// A call begins that writes to a program's memory: what stands in its copies there is taken out. Gives their pages, for
    /// [`Self::written`].
    pub(crate) fn write_to_copies(
        &self,
        traps: Traps<'_>,
        returns: &ReturnSites,
        space: AddressSpace,
        addresses: &Range<u64>,
    ) -> Vec<u64> {
        let mut pages = Vec::new();
        let mut state = self.lock();
        for (page, copied) in &mut state.copies {
            if copied.is_in(space, addresses) {
                copied.writers += 1;
                copied.take_out(traps);
                pages.push(*page);
            }
        }
        drop(state);
        forget_returns(traps, returns, &pages);
        pages
    }

    /// That call is over: traps go into the copies that were written to, and into those that were made meanwhile.
    pub(crate) fn written(
        &self,
        traps: Traps<'_>,
        memory: &dyn PhysicalMemory,
        returns: &ReturnSites,
        opened: &[u64],
        (space, addresses): (AddressSpace, &Range<u64>),
    ) {
        let mut state = self.lock();
        for page in opened {
            if let Some(copied) = state.copies.get_mut(page) {
                copied.writers = copied.writers.saturating_sub(1);
            }
        }
        let pages = state.pages_in(memory, space, addresses);
        state.settle(traps, &pages);
        drop(state);
        // What could not get a trap before may have one now.
        forget_returns(traps, returns, &pages);
    }

    /// A program is about to be able to write to its text.
    pub(crate) fn make_writable(
        &self,
        traps: Traps<'_>,
        returns: &ReturnSites,
        space: AddressSpace,
        addresses: &Range<u64>,
    ) {
        let mut pages = Vec::new();
        let mut state = self.lock();
        for (page, copied) in &mut state.copies {
            if copied.is_in(space, addresses) {
                copied.copy.writable = true;
                copied.take_out(traps);
                pages.push(*page);
            }
        }
        drop(state);
        forget_returns(traps, returns, &pages);
    }

    /// A program cannot write to its text any more: traps go into what it has written.
    pub(crate) fn make_read_only(
        &self,
        traps: Traps<'_>,
        memory: &dyn PhysicalMemory,
        returns: &ReturnSites,
        (space, addresses): (AddressSpace, &Range<u64>),
    ) {
        let mut state = self.lock();
        for copied in state.copies.values_mut() {
            if copied.is_in(space, addresses) {
                copied.copy.writable = false;
            }
        }
        drop(state);
        self.written(traps, memory, returns, &[], (space, addresses));
    }

    /// Copies that `gone` tells of are no more: by their page of memory.
    pub(crate) fn forget_copies(
        &self,
        traps: Traps<'_>,
        returns: &ReturnSites,
        gone: impl Fn(u64, &PrivateCopy) -> bool,
    ) {
        let mut pages = Vec::new();
        let mut state = self.lock();
        state.copies.retain(|page, copied| {
            let gone = gone(*page, &copied.copy);
            if gone {
                copied.take_out(traps);
                pages.push(*page);
            }
            !gone
        });
        self.copies.store(state.copies.len(), Ordering::Relaxed);
        drop(state);
        forget_returns(traps, returns, &pages);
    }

    /// Arms a return address if it lies in a copy that may hold traps; `None` otherwise.
    pub(crate) fn arm_in_copy<R>(&self, place: Gpa, arm: impl FnOnce() -> R) -> Option<R> {
        if !self.has_copies() {
            return None;
        }
        let state = self.lock();
        let copied = state.copies.get(&(place.0 & !(PAGE - 1)))?;
        // Under the lock: once a copy is told to be gone no return address is armed in it.
        copied.may_hold_traps().then(arm)
    }
}

impl State {
    /// The copies that a program has at `addresses`, which are where they are said to be.
    fn pages_in(
        &mut self,
        memory: &dyn PhysicalMemory,
        space: AddressSpace,
        addresses: &Range<u64>,
    ) -> Vec<u64> {
        let mut pages = Vec::new();
        for (page, copied) in &mut self.copies {
            if copied.is_in(space, addresses) {
                let place = translate(memory, space, Gva(copied.copy.address));
                copied.settled = place.is_ok_and(|place| place.gpa.0 == *page);
                pages.push(*page);
            }
        }
        pages
    }
}

/// Return addresses are known by their pages alone. Not while the sites are locked: see [`UserSites::arm_in_copy`].
fn forget_returns(traps: Traps<'_>, returns: &ReturnSites, pages: &[u64]) {
    for page in pages {
        for site in returns.forget(*page..page.saturating_add(PAGE)) {
            traps.table.disarm(site);
        }
    }
}
