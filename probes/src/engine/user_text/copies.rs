//! Sites in private pages. The guest makes a private copy of a file's page when a debugger, or the
//! program itself, writes to the text of one program.
//!
//! A copy is noted when it is made. It gets its traps when the write is complete and the program
//! cannot write to it. Each copy is identified by its page of memory and belongs to one program.
//! Before the program moves it, unmaps it or makes it writable, the traps are disarmed.
//! [`super::super::guest_pages`] reports all of these events.

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

/// The most copies that are noted. Few programs have their text written to.
const MOST_COPIES: usize = 1 << 14;

/// A page of memory that one program has instead of a file's.
#[derive(Debug, Clone)]
pub(crate) struct PrivateCopy {
    /// The program's page tables, and the page's address in them.
    pub(crate) space: AddressSpace,
    pub(crate) address: u64,
    /// The file's page that was copied.
    pub(crate) text: PageOwner,
    /// Whether the program can write to the page.
    pub(crate) writable: bool,
}

/// A copy with its sites.
pub(super) struct Copied {
    copy: PrivateCopy,
    /// The number of calls in progress that write to the copy.
    writers: usize,
    /// Whether the program was seen to have the page at that address, at the return of the call
    /// that made it.
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
        // The text may be unchanged except for a foreign breakpoint, which stays in place.
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
    /// Applies a changed plan of a site to all copies of its page.
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

    /// Arms the sites of a file in those copies of its pages that may hold them.
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
    /// Checks whether any copy is known. Called first, since there seldom is one.
    pub(crate) fn has_copies(&self) -> bool {
        self.copies.load(Ordering::Relaxed) > 0
    }

    /// Returns the file's page that a copy of `page` would stand for, if sites are kept for it. The
    /// page is `owner`'s, or itself a copy.
    pub(crate) fn text_of(&self, page: Gpa, owner: Option<PageOwner>) -> Option<PageOwner> {
        let state = self.lock();
        match owner {
            Some(owner) => state.files.contains_key(&owner.mapping).then_some(owner),
            None => state.copies.get(&page.0).map(|copied| copied.copy.text),
        }
    }

    /// Notes a copy made at `page`, for a program that had `before` there. If it replaces another
    /// copy, that one's traps are disarmed.
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

    /// Disarms the traps in a program's copies before a call writes to them. Returns the copies'
    /// pages, for [`Self::written`].
    pub(crate) fn write_to_copies(
        &self,
        traps: Traps<'_>,
        returns: &ReturnSites,
        space: AddressSpace,
        addresses: &Range<u64>,
    ) -> Vec<u64> {
        self.take_out_of_copies(traps, returns, (space, addresses), |copied| {
            copied.writers += 1;
        })
    }

    /// Disarms the traps in a program's copies, each after `change`. Returns the copies' pages.
    fn take_out_of_copies(
        &self,
        traps: Traps<'_>,
        returns: &ReturnSites,
        (space, addresses): (AddressSpace, &Range<u64>),
        change: impl Fn(&mut Copied),
    ) -> Vec<u64> {
        let mut pages = Vec::new();
        let mut state = self.lock();
        for (page, copied) in &mut state.copies {
            if copied.is_in(space, addresses) {
                change(copied);
                copied.take_out(traps);
                pages.push(*page);
            }
        }
        drop(state);
        forget_returns(traps, returns, &pages);
        pages
    }

    /// Arms sites after such a call, in the copies that were written to and in those made
    /// meanwhile.
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
        // An address that could not get a trap before may get one now.
        forget_returns(traps, returns, &pages);
    }

    /// Disarms the traps in text that a program will be able to write to.
    pub(crate) fn make_writable(
        &self,
        traps: Traps<'_>,
        returns: &ReturnSites,
        space: AddressSpace,
        addresses: &Range<u64>,
    ) {
        self.take_out_of_copies(traps, returns, (space, addresses), |copied| {
            copied.copy.writable = true;
        });
    }

    /// Arms sites in text that a program cannot write to any more.
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

    /// Forgets the copies for which `gone`, called with page and copy, is true.
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

    /// Arms a return address by `arm` if it is in a copy that may hold traps. Returns `None`
    /// otherwise.
    pub(crate) fn arm_in_copy<R>(&self, place: Gpa, arm: impl FnOnce() -> R) -> Option<R> {
        if !self.has_copies() {
            return None;
        }
        let state = self.lock();
        let copied = state.copies.get(&(place.0 & !(PAGE - 1)))?;
        // Under the lock: once a copy is reported gone, no return address is armed in it.
        copied.may_hold_traps().then(arm)
    }
}

impl State {
    /// Returns the pages of the copies that a program really has at `addresses`.
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

/// Disarms return traps in pages, since they are known by their pages alone. The sites must not be
/// locked: see [`UserSites::arm_in_copy`].
fn forget_returns(traps: Traps<'_>, returns: &ReturnSites, pages: &[u64]) {
    for page in pages {
        for site in returns.forget(*page..page.saturating_add(PAGE)) {
            traps.table.disarm(site);
        }
    }
}
