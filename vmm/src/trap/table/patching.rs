//! Sites in text that the guest itself reads as data or writes: suspended before, resumed after.
//!
//! A kernel that changes its own text first checks the old bytes, and afterwards checks the new
//! ones. The caller watches the functions that do so. It [`TrapTable::suspend`]s the sites in their
//! way and passes them to [`TrapTable::resume_sites`] when they are done.
//!
//! There every site reads its bytes anew. It may find another instruction, or a foreign int3, which
//! is reinjected after each hit. On anything else no site can stand, so it waits until the
//! instruction is back.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use introspect::x86_64::paging::{self, AddressSpace};
use introspect::{Gpa, Gva, PhysicalMemory};

use super::super::arm_error::ArmError;
use super::{Entries, Entry, INT3, Site, SiteId, TrapTable};
use crate::memory::PAGE_SIZE;
use crate::x86_64::LONGEST_INSTRUCTION;

/// A part of the kernel's text whose sites are suspended. Must be passed to
/// [`TrapTable::resume_sites`].
#[derive(Debug, Default)]
#[must_use = "the sites stay suspended until they are resumed"]
pub struct Suspended {
    windows: Vec<u64>,
    sites: usize,
}

impl Suspended {
    /// Checks whether no site was suspended.
    pub fn is_empty(&self) -> bool {
        self.sites == 0
    }

    /// Checks whether no part of the text is kept free, so that there is nothing to resume.
    pub fn is_nothing(&self) -> bool {
        self.windows.is_empty()
    }

    /// Returns the number of suspended sites.
    pub fn len(&self) -> usize {
        self.sites
    }

    /// Adds another part of the text.
    pub fn append(&mut self, mut other: Self) {
        self.windows.append(&mut other.windows);
        self.sites += other.sites;
    }
}

/// Suspended user sites. Must be passed to [`TrapTable::resume_user`].
#[derive(Debug, Default)]
#[must_use = "the sites stay suspended until they are resumed"]
pub struct SuspendedUser {
    sites: Vec<SiteId>,
}

impl SuspendedUser {
    /// Checks whether no site was suspended.
    pub fn is_empty(&self) -> bool {
        self.sites.is_empty()
    }

    /// Returns the number of suspended sites.
    pub fn len(&self) -> usize {
        self.sites.len()
    }

    /// Adds other suspended sites.
    pub fn append(&mut self, mut other: Self) {
        self.sites.append(&mut other.sites);
    }
}

/// The parts of the kernel's text whose sites are suspended. A site that is armed there meanwhile
/// is resumed with the others.
#[derive(Default)]
pub(super) struct Windows {
    next: u64,
    open: BTreeMap<u64, Window>,
}

/// A predicate of kernel sites: the address and the bytes of the instruction.
pub type Choice = Box<dyn Fn(Gva, &[u8]) -> bool + Send + Sync>;

/// The kernel sites that are kept out of memory.
enum Kept {
    /// The sites whose instruction has a byte in this range.
    Addresses(Range<u64>),
    /// The sites that have chosen instructions, at any address.
    Chosen(Choice),
}

impl Kept {
    fn holds(&self, site: &Site) -> bool {
        match self {
            Self::Addresses(addresses) => stands_in(site, addresses),
            Self::Chosen(is_chosen) => is_chosen(site.address, site.instruction_bytes()),
        }
    }
}

struct Window {
    kept: Kept,
    sites: Vec<SiteId>,
}

impl Windows {
    fn open(&mut self, kept: Kept, sites: Vec<SiteId>) -> Suspended {
        let (number, count) = (self.next, sites.len());
        self.next = self.next.wrapping_add(1);
        self.open.insert(number, Window { kept, sites });
        Suspended {
            windows: vec![number],
            sites: count,
        }
    }

    /// Adds a new site to the windows that contain it. Returns their number.
    pub(super) fn enter(&mut self, site: &Site) -> usize {
        let windows = self.open.values_mut();
        let around = windows.filter(|window| window.kept.holds(site));
        around.map(|window| window.sites.push(site.id)).count()
    }

    /// Removes a site that no longer exists.
    pub(super) fn leave(&mut self, id: SiteId) {
        for window in self.open.values_mut() {
            window.sites.retain(|site| *site != id);
        }
    }
}

/// Checks whether the instruction of `site` has a byte in `addresses`.
fn stands_in(site: &Site, addresses: &Range<u64>) -> bool {
    let start = site.address.0;
    start < addresses.end && start.saturating_add(site.length()) > addresses.start
}

impl TrapTable {
    /// Suspends the kernel sites whose instruction has a byte in `addresses`, and keeps new ones
    /// out of memory.
    ///
    /// A vCPU that has already hit one still finds the site. Later executions are not seen.
    pub fn suspend(&self, addresses: Range<u64>) -> Suspended {
        let first = addresses
            .start
            .saturating_sub(LONGEST_INSTRUCTION as u64 - 1);
        let near = first..addresses.end.max(first);
        self.suspend_kept(near, Kept::Addresses(addresses))
    }

    /// Suspends the kernel sites that `is_chosen` accepts by address and instruction, wherever they
    /// are.
    pub fn suspend_chosen(&self, is_chosen: Choice) -> Suspended {
        self.suspend_kept(0..u64::MAX, Kept::Chosen(is_chosen))
    }

    /// Suspends the sites in the range `near` that the window keeps out, and opens the window.
    fn suspend_kept(&self, near: Range<u64>, kept: Kept) -> Suspended {
        let mut entries = self.lock();
        let entries = &mut *entries;
        let mut taken = Vec::new();
        for (_, id) in entries.kernel.range(near) {
            if let Some(entry) = entries.by_id.get_mut(id)
                && kept.holds(&entry.site)
            {
                self.take_out(entry);
                taken.push(*id);
            }
        }
        entries.windows.open(kept, taken)
    }

    /// Resumes the sites that [`Self::suspend`] has suspended, and those that were armed there
    /// since.
    ///
    /// `written` is the range that the guest has written meanwhile, as far as known. A site inside
    /// it but not at the start of an instruction waits until its own instruction is back.
    pub fn resume_sites(
        &self,
        suspended: Suspended,
        written: Option<Range<u64>>,
        space: AddressSpace,
    ) {
        let mut entries = self.lock();
        let tail = written
            .as_ref()
            .is_some_and(|written| self.is_tail(&entries, written, space));
        for number in suspended.windows {
            let window = entries.windows.open.remove(&number);
            for id in window.into_iter().flat_map(|window| window.sites) {
                self.resume_one(&mut entries, id, written.as_ref(), tail, space);
            }
        }
    }

    /// Checks whether `written` continues an instruction whose first byte is an int3 for now.
    ///
    /// Linux writes longer instructions in this way while other CPUs run them
    /// (`text_poke_bp_batch`, arch/x86/kernel/alternative.c).
    fn is_tail(&self, entries: &Entries, written: &Range<u64>, space: AddressSpace) -> bool {
        let before = Gva(written.start.wrapping_sub(1));
        written.end.saturating_sub(written.start) > 1
            && self.original_code(entries, before, space).first() == Some(&INT3)
    }

    fn resume_one(
        &self,
        entries: &mut Entries,
        id: SiteId,
        written: Option<&Range<u64>>,
        tail: bool,
        space: AddressSpace,
    ) {
        let Some(entry) = entries.by_id.get_mut(&id) else {
            return;
        };
        let at = entry.site.address.0;
        // Kept until the last suspension of the site ends.
        entry.written_inside |= written.is_some_and(|w| w.contains(&at) && (tail || w.start != at));
        if entry.suspensions > 1 {
            entry.suspensions -= 1;
            return;
        }
        let inside = std::mem::take(&mut entry.written_inside);
        let (site, overwritten) = (entry.site.clone(), entry.overwritten);
        // Reads the code while the site still counts as suspended: all bytes are the guest's, also
        // an int3.
        let code = self.original_code(entries, site.address, space);
        let stays = paging::translate(&self.ram, space, site.address).is_ok_and(|t| t.gpa == id.0);
        let unchanged = code.starts_with(site.instruction_bytes());
        let original = match unchanged {
            // The address now maps to another page, whose byte is not the instruction's.
            _ if !stays => None,
            // The original instruction is back, whatever was there in between.
            true => Some(None),
            false if inside || overwritten => None,
            false => self
                .original(entries, id, code, site.address, site.purpose)
                .ok()
                .map(Some),
        };
        let Some(entry) = entries.by_id.get_mut(&id) else {
            return;
        };
        entry.suspensions = 0;
        entry.overwritten = original.is_none();
        let map = self.map(site.purpose);
        match original {
            // An int3 that is there now is foreign.
            None => {
                map.remove(site.key());
            }
            Some(None) if overwritten => {
                map.insert(site.key(), site);
            }
            Some(None) => {}
            Some(Some(original)) => {
                entry.site = Arc::new(site.renewed(original));
                map.insert(site.key(), entry.site.clone());
            }
        }
        if entry.is_in()
            && let Some(byte) = self.byte(id.0)
        {
            byte.store(INT3);
        }
    }

    /// Evicts the kernel sites in `addresses`, because their memory is about to be reused.
    ///
    /// Their users still disarm them. A site that is armed there from now on is another one.
    /// Returns the number of evicted sites.
    pub fn evict(&self, addresses: Range<u64>) -> usize {
        let mut entries = self.lock();
        let entries = &mut *entries;
        let sites = entries.kernel.range(addresses).map(|(_, id)| *id);
        let sites: Vec<SiteId> = sites.collect();
        for id in &sites {
            if let Some(entry) = entries.by_id.get_mut(id) {
                self.take_out(entry);
                entry.suspensions = 0;
                entry.gone = true;
                let site = entry.site.clone();
                self.forget(entries, &site);
            }
        }
        sites.len()
    }

    /// Replaces a user site whose instruction a program has rewritten ([`Site::is_rewritten`]) by
    /// one for the current bytes.
    ///
    /// # Errors
    /// If the bytes are no instruction, or one that this host cannot get past.
    pub(crate) fn read_anew(&self, site: &Arc<Site>) -> Result<Arc<Site>, ArmError> {
        let mut entries = self.lock();
        let stands = |entry: &Entry| Arc::ptr_eq(&entry.site, site);
        if !entries.by_id.get(&site.id).is_some_and(stands) {
            // Another vCPU has replaced the site already.
            return Ok(self.user_site(site.id.0).unwrap_or_else(|| site.clone()));
        }
        let mut code = site.code().to_vec();
        let in_page = site.bytes_in_page().min(code.len());
        if let Some(rest) = code.get_mut(1..in_page) {
            let _ = self.ram.read_physical(Gpa(site.id.0.0 + 1), rest);
        }
        let original = self.original(&entries, site.id, code, site.address, site.purpose)?;
        let next = Arc::new(site.renewed(original));
        if let Some(entry) = entries.by_id.get_mut(&site.id) {
            entry.site = next.clone();
        }
        self.map(next.purpose).insert(next.key(), next.clone());
        Ok(next)
    }

    /// Checks whether the guest has freed a site's memory. The code there now is not what the site
    /// was armed for.
    pub fn is_gone(&self, id: SiteId) -> bool {
        self.lock().by_id.get(&id).is_some_and(|entry| entry.gone)
    }

    /// Suspends the user sites in the pages that `is_wanted` accepts, until [`Self::resume_user`].
    /// Hits are missed meanwhile.
    pub fn suspend_user(&self, mut is_wanted: impl FnMut(Gpa) -> bool) -> SuspendedUser {
        let mut entries = self.lock();
        let mut suspended = SuspendedUser::default();
        let mut last = None;
        for (id, entry) in &mut entries.by_id {
            if !entry.site.is_user() {
                continue;
            }
            let page = Gpa(id.0.0 / PAGE_SIZE * PAGE_SIZE);
            let (_, wanted) = *last.insert(match last {
                Some((known, wanted)) if known == page => (page, wanted),
                _ => (page, is_wanted(page)),
            });
            if wanted {
                self.take_out(entry);
                suspended.sites.push(*id);
            }
        }
        suspended
    }

    /// Suspends one user site, until [`Self::resume_user`].
    pub fn suspend_user_site(&self, site: SiteId) -> SuspendedUser {
        let mut entries = self.lock();
        let mut suspended = SuspendedUser::default();
        if let Some(entry) = entries.by_id.get_mut(&site)
            && entry.site.is_user()
        {
            self.take_out(entry);
            suspended.sites.push(site);
        }
        suspended
    }

    /// Resumes user sites. If the guest has overwritten a site's byte meanwhile, that byte stays.
    pub fn resume_user(&self, suspended: SuspendedUser) {
        let mut entries = self.lock();
        for id in suspended.sites {
            // The site was disarmed meanwhile, and perhaps armed again.
            let Some(entry) = entries
                .by_id
                .get_mut(&id)
                .filter(|entry| entry.suspensions > 0)
            else {
                continue;
            };
            entry.suspensions -= 1;
            if entry.is_in()
                && let Some(byte) = self.byte(id.0)
            {
                let original = entry.site.original;
                let _ = byte.replace(original, INT3);
            }
        }
    }

    /// Returns the number of user sites that are suspended.
    pub fn suspended_user(&self) -> usize {
        let entries = self.lock();
        let is_out = |entry: &&Entry| entry.site.is_user() && entry.suspensions > 0;
        entries.by_id.values().filter(is_out).count()
    }

    /// Returns the original byte at a user site, whether its int3 is in memory or not; `None` if
    /// there is no site.
    pub fn user_original(&self, at: Gpa) -> Option<u8> {
        let entries = self.lock();
        let entry = entries.by_id.get(&SiteId(at))?;
        entry.site.is_user().then_some(entry.site.original)
    }

    /// Returns the user sites within a guest-physical `range`, with the original bytes there.
    pub fn user_originals(&self, range: Range<u64>) -> Vec<(Gpa, u8)> {
        let entries = self.lock();
        entries
            .by_id
            .range(SiteId(Gpa(range.start))..SiteId(Gpa(range.end.max(range.start))))
            .filter(|(_, entry)| entry.site.is_user() && entry.is_in())
            .map(|(id, entry)| (id.0, entry.site.original))
            .collect()
    }

    /// Checks whether a user site is in the page of `gpa`.
    pub fn is_patched(&self, gpa: Gpa) -> bool {
        let page = gpa.0 / PAGE_SIZE * PAGE_SIZE;
        !self
            .user_originals(page..page.saturating_add(PAGE_SIZE))
            .is_empty()
    }

    pub(super) fn take_out(&self, entry: &mut Entry) {
        if entry.is_in()
            && let Some(byte) = self.byte(entry.site.id.0)
        {
            let original = entry.site.original;
            let _ = byte.replace(INT3, original);
        }
        entry.suspensions += 1;
    }
}
