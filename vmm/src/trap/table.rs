//! The table of int3 sites, keyed by the guest-physical byte under the int3.
//!
//! Readers (the hit path) take no lock: adding or removing a site swaps its part of the table.
//! Writers take turns.
//!
//! The order of a change makes this safe. A new site is in the table before its int3 is in memory,
//! and a removed one leaves memory before it leaves the table. A vCPU that hits an int3 of ours
//! finds the site, or finds that the int3 has gone and runs on.
//!
//! `patching` handles guest writes to text with sites. `reading` reads memory as it is without
//! them.

mod patching;
mod reading;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use introspect::x86_64::paging::{self, AddressSpace};
use introspect::{Gpa, Gva, PhysicalMemory};

pub use patching::{Choice, Suspended, SuspendedUser};
use reading::overlay;

use super::arm_error::ArmError;
use super::site::{Displaced, Original, Purpose, Site, SiteCounters, SiteId};
use super::{INT3, Int3Owner};
use crate::hex::hex;
use crate::lookaside::Lookaside;
use crate::memory::PageSet;
use crate::memory::{GuestRam, PAGE_SIZE};
use crate::sharded_map::ShardedMap;
use crate::x86_64::{LONGEST_INSTRUCTION, emulate};

/// STI. The instruction after it completes before any interrupt is delivered.
const STI: u8 = 0xfb;

/// The counters and the state of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SiteStats {
    /// The site.
    pub site: SiteId,
    /// The address at which the site was armed.
    pub address: Gva,
    /// Whether the site is in a program's text.
    pub user: bool,
    /// The number of hits.
    pub hits: u64,
    /// The number of hits whose instruction was single-stepped with the other vCPUs paused. The
    /// others were emulated.
    pub stepped: u64,
    /// Whether the guest has freed the memory, or written something that no site can stand on.
    pub suspended: bool,
    /// Whether a program hit the site in a state in which this host cannot execute the displaced
    /// instruction.
    pub given_up: bool,
}

/// A byte of guest memory that an int3 may replace.
///
/// Writes are sequentially consistent, so that they are noted even if the writer is not paused when
/// [`GuestRam::watch_writes`] begins.
struct TrapByte<'r> {
    byte: &'r AtomicU8,
    ram: &'r GuestRam,
}

impl TrapByte<'_> {
    /// Replaces `old` by `new`. Returns whether the byte was `old`.
    fn replace(&self, old: u8, new: u8) -> bool {
        let (success, failure) = (Ordering::SeqCst, Ordering::SeqCst);
        let replaced = self.byte.compare_exchange(old, new, success, failure);
        if replaced.is_ok() {
            self.ram.wrote(self.byte.as_ptr(), 1);
        }
        replaced.is_ok()
    }

    fn store(&self, value: u8) {
        self.byte.store(value, Ordering::SeqCst);
        self.ram.wrote(self.byte.as_ptr(), 1);
    }
}

struct Entry {
    site: Arc<Site>,
    users: usize,
    /// The number of suspensions of the site. Its int3 is in memory only if there are none.
    suspensions: usize,
    /// Whether the guest has overwritten the instruction. No int3 is in memory until the
    /// instruction is back.
    overwritten: bool,
    /// Whether the guest has freed the site's memory. The site then only waits for being disarmed.
    gone: bool,
    /// Whether the instruction could not be executed at a hit. Arming the site again reinstates it.
    given_up: bool,
    /// Whether the guest, during a suspension, has written from before the site to behind its first
    /// byte.
    written_inside: bool,
}

impl Entry {
    /// Checks whether the int3 is in memory.
    fn is_in(&self) -> bool {
        self.suspensions == 0 && !self.overwritten && !self.gone && !self.given_up
    }
}

/// All sites, for those who change them.
#[derive(Default)]
struct Entries {
    by_id: BTreeMap<SiteId, Entry>,
    /// The sites in kernel text by address.
    kernel: BTreeMap<u64, SiteId>,
    /// The removed user sites that a program on its way to the guest's #BP entry may have hit
    /// before.
    gone: BTreeSet<SiteId>,
    windows: patching::Windows,
}

/// The sites of one kind that a reader has found, and the addresses at which it has found none.
pub(crate) type SeenSites = Lookaside<Option<Arc<Site>>>;

/// All sites of a machine.
pub struct TrapTable {
    ram: GuestRam,
    /// The kernel sites by virtual address. Kernel text is mapped alike in every address space.
    kernel: ShardedMap<Site>,
    /// The user sites by GPA.
    user: ShardedMap<Site>,
    /// The entries with their reference counts. Every change of the table holds this lock.
    entries: Mutex<Entries>,
    step_kernel: bool,
    step_user: bool,
}

impl fmt::Debug for TrapTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrapTable")
            .field("kernel", &self.kernel)
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

impl TrapTable {
    pub(crate) fn new(ram: GuestRam, step_kernel: bool, step_user: bool) -> Self {
        Self {
            ram,
            kernel: ShardedMap::default(),
            user: ShardedMap::default(),
            entries: Mutex::default(),
            step_kernel,
            step_user,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arms a site in guest kernel text.
    ///
    /// Several users share one site. Each must [`Self::disarm`] it once. A foreign int3 at the
    /// address is reinjected after each hit.
    ///
    /// `space` need map the address only now: a hit uses the vCPU's own page tables.
    ///
    /// # Errors
    /// If the address is not mapped in `space`, holds no instruction, or holds one that this host
    /// cannot get past.
    pub fn arm_kernel(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        self.arm(address, space, Purpose::Probe { user: false }, None)
    }

    /// Arms a site in guest kernel text, as [`Self::arm_kernel`] does, if page tables of the
    /// kernel's own are known.
    ///
    /// `tables` must map the kernel, its stacks included, for as long as the site exists. Hits are
    /// cheaper then. Tables of a process will not do: the guest may free them and reuse their
    /// memory.
    ///
    /// # Errors
    /// As [`Self::arm_kernel`].
    pub fn arm_kernel_by(&self, address: Gva, tables: AddressSpace) -> Result<SiteId, ArmError> {
        let purpose = Purpose::Probe { user: false };
        self.arm(address, tables, purpose, Some(tables))
    }

    /// Arms a site in a user program's text, mapped at `address` in `space`. Every process that
    /// maps the same page hits it.
    ///
    /// # Errors
    /// As [`Self::arm_kernel`].
    pub fn arm_user(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        self.arm(address, space, Purpose::Probe { user: true }, None)
    }

    pub(crate) fn arm(
        &self,
        address: Gva,
        space: AddressSpace,
        purpose: Purpose,
        tables: Option<AddressSpace>,
    ) -> Result<SiteId, ArmError> {
        let place = paging::translate(&self.ram, space, address)
            .map_err(|source| ArmError::NotMapped { address, source })?;
        // An int3 in data is never hit, and corrupts the data.
        if place.no_execute {
            return Err(ArmError::NotExecutable { address });
        }
        let code = |entries: &Entries| self.original_code(entries, address, space);
        self.arm_at(place.gpa, address, purpose, tables, code)
    }

    /// Arms a site in a user program's text at a guest-physical byte, which need not be mapped yet.
    ///
    /// `code` is the code there without any site. It must hold at least one whole instruction,
    /// whose rest may lie in another page. If the host does not report user int3s, the machine must
    /// [hold user traps](crate::machine::Handle::hold_user_traps) meanwhile.
    ///
    /// # Errors
    /// If `code` is no instruction, or one that this host cannot get past.
    pub fn arm_user_at(&self, physical: Gpa, code: &[u8]) -> Result<SiteId, ArmError> {
        let code = code.iter().copied().take(LONGEST_INSTRUCTION).collect();
        // The virtual address is not known. Relative operands are decoded anew at each hit.
        let address = Gva(physical.0);
        self.arm_at(
            physical,
            address,
            Purpose::Probe { user: true },
            None,
            |_| code,
        )
    }

    fn arm_at(
        &self,
        physical: Gpa,
        address: Gva,
        purpose: Purpose,
        tables: Option<AddressSpace>,
        code: impl FnOnce(&Entries) -> Vec<u8>,
    ) -> Result<SiteId, ArmError> {
        let id = SiteId(physical);
        let mut entries = self.lock();
        // Users who armed a site here before the guest freed the memory still disarm it.
        let mut users = 1;
        if let Some(entry) = entries.by_id.get_mut(&id) {
            if entry.gone {
                users += entry.users;
            } else if entry.site.purpose != purpose {
                return Err(ArmError::Reserved { address });
            } else {
                entry.users += 1;
                self.reinsert(entry);
                return Ok(id);
            }
        }
        let byte = self
            .byte(physical)
            .ok_or(ArmError::NotRam { address, physical })?;
        let code = code(&entries);
        let original = self.original(&entries, id, code, address, purpose)?;
        let site = Arc::new(Site::new(
            id,
            address,
            purpose,
            tables,
            original,
            Arc::new(SiteCounters::default()),
        ));
        self.map(purpose).insert(site.key(), site.clone());
        let mut suspensions = 0;
        if !purpose.is_user() {
            entries.kernel.insert(address.0, id);
            suspensions = entries.windows.enter(&site);
        }
        let entry = Entry {
            site,
            users,
            suspensions,
            overwritten: false,
            gone: false,
            given_up: false,
            written_inside: false,
        };
        if entry.is_in() {
            byte.store(INT3);
        }
        entries.by_id.insert(id, entry);
        Ok(id)
    }

    /// Returns the original instruction of a site, decoded from its bytes.
    fn original(
        &self,
        entries: &Entries,
        id: SiteId,
        code: Vec<u8>,
        address: Gva,
        purpose: Purpose,
    ) -> Result<Original, ArmError> {
        let instruction =
            emulate::decode(&code, address.0).map_err(|_| ArmError::NoInstruction {
                address,
                bytes: hex(&code),
            })?;
        let step = if purpose.is_user() {
            self.step_user
        } else {
            self.step_kernel
        };
        let displaced = if code.first() == Some(&INT3) {
            Displaced::Breakpoint
        } else if emulate::is_supported(&instruction) {
            Displaced::Emulate
        } else if step {
            Displaced::Step
        } else {
            return Err(ArmError::CannotPass {
                address,
                instruction: instruction.to_string(),
            });
        };
        Ok(Original {
            instruction,
            code,
            displaced,
            behind_sti: !purpose.is_user() && self.may_be_behind_sti(entries, id),
        })
    }

    /// Checks whether the byte before a site is STI, or the last byte of another instruction that
    /// looks like it.
    ///
    /// Returns true if that byte lies in another page, because that page is not known here.
    fn may_be_behind_sti(&self, entries: &Entries, site: SiteId) -> bool {
        if site.0.0.is_multiple_of(PAGE_SIZE) {
            return true;
        }
        let before = Gpa(site.0.0 - 1);
        let mut byte = [STI];
        // A site is in RAM, and so is the rest of its page.
        let _ = self.ram.read_physical(before, &mut byte);
        overlay(entries, before, &mut byte);
        byte == [STI]
    }

    /// Drops one use of a site. The last one restores the original byte. Returns `false` if there
    /// is no such site.
    pub fn disarm(&self, id: SiteId) -> bool {
        let mut entries = self.lock();
        let Some(entry) = entries.by_id.get_mut(&id) else {
            return false;
        };
        entry.users -= 1;
        if entry.users > 0 {
            return true;
        }
        let (site, is_in, gone) = (entry.site.clone(), entry.is_in(), entry.gone);
        if is_in && let Some(byte) = self.byte(id.0) {
            // A byte that the guest has overwritten meanwhile is left as it is.
            let _ = byte.replace(INT3, site.original);
        }
        entries.by_id.remove(&id);
        if site.is_user() {
            entries.gone.insert(id);
        }
        // A site that is gone has left the maps already, and another site may be at its address.
        if !gone {
            self.forget(&mut entries, &site);
        }
        true
    }

    /// Gives up a user site whose instruction this host cannot execute in the program's state.
    ///
    /// Its users still disarm it. Returns whether it was armed until now.
    pub(crate) fn give_up(&self, id: SiteId) -> bool {
        let mut entries = self.lock();
        let Some(entry) = entries.by_id.get_mut(&id).filter(|entry| !entry.given_up) else {
            return false;
        };
        self.take_out(entry);
        entry.suspensions -= 1;
        entry.given_up = true;
        self.map(entry.site.purpose).remove(entry.site.key());
        true
    }

    /// Reinstates a site that was given up: a new user may trace another program with it.
    pub fn reinstate(&self, id: SiteId) {
        if let Some(entry) = self.lock().by_id.get_mut(&id) {
            self.reinsert(entry);
        }
    }

    fn reinsert(&self, entry: &mut Entry) {
        if !std::mem::take(&mut entry.given_up) {
            return;
        }
        let site = &entry.site;
        self.map(site.purpose).insert(site.key(), site.clone());
        if entry.is_in()
            && let Some(byte) = self.byte(site.id.0)
        {
            let _ = byte.replace(site.original, INT3);
        }
    }

    /// Returns (site, hits, hits whose instruction was stepped) of every site that a probe uses.
    pub fn hits(&self) -> Vec<(SiteId, u64, u64)> {
        let stats = self.stats().into_iter();
        stats.map(|s| (s.site, s.hits, s.stepped)).collect()
    }

    /// Returns the counters of every site that a probe uses.
    pub fn stats(&self) -> Vec<SiteStats> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let entries = self.lock();
        let probes = entries.by_id.values().filter(|e| e.site.is_probe());
        probes
            .map(|entry| SiteStats {
                site: entry.site.id,
                address: entry.site.address,
                user: entry.site.is_user(),
                hits: load(&entry.site.counters.hits),
                stepped: load(&entry.site.counters.stepped),
                suspended: entry.overwritten || entry.gone,
                given_up: entry.given_up,
            })
            .collect()
    }

    /// Calls `work` while guest memory holds the original bytes of all sites. `work` gets the pages
    /// of the sites.
    ///
    /// The machine must be paused. No site is added or removed meanwhile.
    pub(crate) fn with_bytes_restored<R>(&self, work: impl FnOnce(&PageSet) -> R) -> R {
        let entries = self.lock();
        let mut pages = PageSet::empty(&self.ram);
        for id in entries.by_id.keys() {
            pages.add(id.0.0);
        }
        let mut put_back = Vec::new();
        for entry in entries.by_id.values().filter(|entry| entry.is_in()) {
            if let Some(byte) = self.byte(entry.site.id.0)
                && byte.replace(INT3, entry.site.original)
            {
                put_back.push(byte);
            }
        }
        let result = work(&pages);
        for byte in put_back {
            byte.store(INT3);
        }
        result
    }

    /// Returns the kernel site whose int3 is at `address`.
    pub(crate) fn kernel_site(&self, address: u64) -> Option<Arc<Site>> {
        self.kernel.get(address)
    }

    /// Returns the kernel site at `address`, for a reader that caches the sites it has `seen`.
    #[inline]
    pub(crate) fn kernel_site_seen<'s>(
        &self,
        seen: &'s mut SeenSites,
        address: u64,
    ) -> Option<&'s Arc<Site>> {
        seen.get(&self.kernel, address)
    }

    /// Returns the user site at a guest-physical byte, for a reader that caches the sites it has
    /// `seen`.
    #[inline]
    pub(crate) fn user_site_seen<'s>(
        &self,
        seen: &'s mut SeenSites,
        physical: Gpa,
    ) -> Option<&'s Arc<Site>> {
        seen.get(&self.user, physical.0)
    }

    /// Returns the user site at a guest-physical byte.
    pub(crate) fn user_site(&self, physical: Gpa) -> Option<Arc<Site>> {
        self.user.get(physical.0)
    }

    /// Returns the owner of an int3 for which [`Self::kernel_site`] or [`Self::user_site`] found no
    /// site.
    ///
    /// The result is exact: it takes the lock, so no site is added or removed meanwhile.
    pub(crate) fn owner_of(&self, physical: Gpa) -> Int3Owner {
        let entries = self.lock();
        match entries.by_id.get(&SiteId(physical)) {
            Some(entry) if !entry.overwritten && !entry.gone && !entry.given_up => {
                Int3Owner::Ours(entry.site.clone())
            }
            _ if self.ram.read_byte(physical).is_ok_and(|byte| byte != INT3) => {
                Int3Owner::JustRemoved
            }
            _ => Int3Owner::Guest,
        }
    }

    /// Removes the int3 of `site` for a step. Returns whether it was in memory.
    pub(crate) fn suspend_for_step(&self, site: &Site) -> bool {
        let _entries = self.lock();
        let byte = self.byte(site.id.0);
        byte.is_some_and(|byte| byte.replace(INT3, site.original))
    }

    /// Restores the int3 that [`Self::suspend_for_step`] removed, unless the site was removed
    /// meanwhile.
    pub(crate) fn put_back(&self, site: &Arc<Site>) {
        let entries = self.lock();
        let stands = entries
            .by_id
            .get(&site.id)
            .is_some_and(|entry| entry.is_in() && Arc::ptr_eq(&entry.site, site));
        if stands && let Some(byte) = self.byte(site.id.0) {
            // A byte that the guest has written meanwhile stays.
            let _ = byte.replace(site.original, INT3);
        }
    }

    /// Checks whether any site is in a program's text.
    pub(crate) fn has_user_sites(&self) -> bool {
        !self.user.is_empty()
    }

    /// Returns the user sites that were removed since [`Self::forget_gone_user_sites`].
    pub(crate) fn gone_user_sites(&self) -> BTreeSet<SiteId> {
        self.lock().gone.clone()
    }

    /// Forgets the removed user sites. The caller knows that no program is on its way from any of
    /// [`Self::gone_user_sites`].
    pub(crate) fn forget_gone_user_sites(&self) {
        self.lock().gone.clear();
    }

    /// Returns the site on the guest's own #BP entry and its address, if there is one.
    pub(crate) fn breakpoint_entry(&self) -> Option<(SiteId, Gva)> {
        let entries = self.lock();
        let mut sites = entries
            .kernel
            .values()
            .filter_map(|id| entries.by_id.get(id));
        let entry = sites.find(|e| e.site.purpose == Purpose::BreakpointEntry)?;
        Some((entry.site.id, entry.site.address))
    }

    /// Returns the byte in guest memory under a site.
    fn byte(&self, physical: Gpa) -> Option<TrapByte<'_>> {
        let pointer = self.ram.host_address(physical, 1)?;
        // SAFETY: the pointer is into guest RAM, mapped as long as `self.ram` lives, which the
        // returned borrow cannot outlive. A byte is always aligned, and all host access to it here
        // is atomic. The guest may change it at any time, which atomics allow.
        let byte = unsafe { AtomicU8::from_ptr(pointer) };
        Some(TrapByte {
            byte,
            ram: &self.ram,
        })
    }

    /// Removes a site from the maps, so that neither hits nor guest writes find it.
    fn forget(&self, entries: &mut Entries, site: &Site) {
        if entries.kernel.get(&site.address.0) == Some(&site.id) {
            entries.kernel.remove(&site.address.0);
        }
        entries.windows.leave(site.id);
        self.map(site.purpose).remove(site.key());
    }

    fn map(&self, purpose: Purpose) -> &ShardedMap<Site> {
        if purpose.is_user() {
            &self.user
        } else {
            &self.kernel
        }
    }
}
