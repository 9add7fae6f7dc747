//! The table of int3 sites, keyed by the guest-physical byte that the int3 stands over.
//!
//! Readers (the hit path) take no lock: the whole table is swapped when a site comes or goes. Writers take
//! turns. The order of a change keeps the two apart: a new site is in the table before its byte is in
//! memory, and a removed one leaves memory before it leaves the table, so a vCPU that meets an int3 of ours
//! finds the site, or finds that the byte has gone and just runs on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use iced_x86::Instruction;
use introspect::x86_64::paging::{self, AddressSpace};
use introspect::{Gpa, Gva, PhysicalMemory};

use super::{INT3, Int3Owner};
use crate::hex::hex;
use crate::memory::{GuestRam, PAGE_SIZE};
use crate::x86_64::{LONGEST_INSTRUCTION, emulate};

/// A site's identity: the guest-physical byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SiteId(pub Gpa);

/// What a site is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A probe's: hits go to the sink. In user mode if `user`.
    Probe { user: bool },
    /// The guest's own #BP entry, where user traps arrive on hosts that do not report them.
    BreakpointEntry,
    /// The guest kernel's `panic`: its registers are kept.
    Panic,
}

impl Purpose {
    fn is_user(self) -> bool {
        self == Self::Probe { user: true }
    }
}

/// How the displaced instruction is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Displaced {
    /// By the emulator; the int3 stays in place.
    Emulate,
    /// Put back and single-stepped with the other vCPUs standing still.
    Step,
}

/// One site.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) id: SiteId,
    pub(crate) address: Gva,
    pub(crate) purpose: Purpose,
    pub(crate) original: u8,
    /// The instruction at [`Self::address`]; see [`Self::instruction_at`].
    instruction: Instruction,
    /// Its bytes.
    code: Vec<u8>,
    pub(crate) displaced: Displaced,
    pub(crate) hits: AtomicU64,
    pub(crate) stepped: AtomicU64,
}

/// A site cannot be armed.
#[derive(Debug, thiserror::Error)]
pub enum ArmError {
    /// The address is not mapped.
    #[error("trap at {address}: not mapped in the guest ({source})")]
    NotMapped {
        /// The address asked for.
        address: Gva,
        /// How the page walk ended.
        source: paging::TranslateError,
    },
    /// What it maps to is not RAM.
    #[error("trap at {address}: guest-physical {physical} is not RAM")]
    NotRam {
        /// The address asked for.
        address: Gva,
        /// What it maps to.
        physical: Gpa,
    },
    /// There is no instruction there.
    #[error("trap at {address}: bytes {bytes} are no instruction; give the address of one")]
    NoInstruction {
        /// The address asked for.
        address: Gva,
        /// What stands there, in hex.
        bytes: String,
    },
    /// The instruction can be neither emulated nor stepped on this host.
    #[error(
        "trap at {address}: `{instruction}` can be neither emulated nor single-stepped on this host"
    )]
    CannotPass {
        /// The address asked for.
        address: Gva,
        /// The instruction there.
        instruction: String,
    },
    /// The guest is not far enough.
    #[error(
        "trap at {address}: the guest has no breakpoint handler yet, which user traps on this host need; wait until it runs programs"
    )]
    NoBreakpointHandler {
        /// The address asked for.
        address: Gva,
    },
    /// The guest's own.
    #[error(
        "trap at {address}: the guest has an int3 of its own there; give the address of another instruction"
    )]
    GuestBreakpoint {
        /// The address asked for.
        address: Gva,
    },
    /// The byte is taken for another purpose.
    #[error(
        "trap at {address}: a trap of the machine's own stands there (the guest's breakpoint entry or its panic function)"
    )]
    Reserved {
        /// The address asked for.
        address: Gva,
    },
}

#[derive(Clone, Default)]
struct Sites {
    /// Kernel sites by virtual address: kernel text is mapped alike in every address space.
    kernel: HashMap<u64, Arc<Site>>,
    /// User sites by guest-physical address.
    user: HashMap<u64, Arc<Site>>,
}

struct Entry {
    site: Arc<Site>,
    users: usize,
}

/// All sites of a machine.
pub struct TrapTable {
    ram: GuestRam,
    sites: ArcSwap<Sites>,
    /// Who changes the table holds this; it also owns the reference counts.
    entries: Mutex<HashMap<SiteId, Entry>>,
    step_kernel: bool,
    step_user: bool,
}

impl TrapTable {
    pub(crate) fn new(ram: GuestRam, step_kernel: bool, step_user: bool) -> Self {
        Self {
            ram,
            sites: ArcSwap::default(),
            entries: Mutex::default(),
            step_kernel,
            step_user,
        }
    }

    /// Arms a site in guest kernel text. Several users share one; each [`Self::disarm`]s once.
    ///
    /// # Errors
    /// If the address is not mapped in `space`, holds no instruction, or one that this host cannot get past.
    pub fn arm_kernel(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        self.arm(address, space, Purpose::Probe { user: false })
    }

    /// Arms a site in a user program's text, mapped at `address` in `space`. It is hit by every process that
    /// maps the same page.
    ///
    /// # Errors
    /// As [`Self::arm_kernel`].
    pub fn arm_user(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        self.arm(address, space, Purpose::Probe { user: true })
    }

    pub(crate) fn arm(
        &self,
        address: Gva,
        space: AddressSpace,
        purpose: Purpose,
    ) -> Result<SiteId, ArmError> {
        let physical = paging::translate(&self.ram, space, address)
            .map_err(|source| ArmError::NotMapped { address, source })?
            .gpa;
        let id = SiteId(physical);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get_mut(&id) {
            if entry.site.purpose != purpose {
                return Err(ArmError::Reserved { address });
            }
            entry.users += 1;
            return Ok(id);
        }
        let byte = self
            .byte(physical)
            .ok_or(ArmError::NotRam { address, physical })?;
        let mut code = vec![0; LONGEST_INSTRUCTION];
        let length = self.original_code(&entries, address, space, &mut code);
        code.truncate(length);
        let instruction =
            emulate::decode(&code, address.0).map_err(|_| ArmError::NoInstruction {
                address,
                bytes: hex(&code),
            })?;
        if code.first() == Some(&INT3) {
            return Err(ArmError::GuestBreakpoint { address });
        }
        let displaced =
            self.way_past(&instruction, purpose)
                .ok_or_else(|| ArmError::CannotPass {
                    address,
                    instruction: instruction.to_string(),
                })?;
        let site = Arc::new(Site {
            id,
            address,
            purpose,
            original: code[0],
            instruction,
            code,
            displaced,
            hits: AtomicU64::new(0),
            stepped: AtomicU64::new(0),
        });
        let mut next = Sites::clone(&self.sites.load());
        next.map(purpose).insert(site.key(), site.clone());
        self.sites.store(Arc::new(next));
        entries.insert(id, Entry { site, users: 1 });
        byte.store(INT3, Ordering::SeqCst);
        Ok(id)
    }

    /// Gives up one use of a site; the last one puts the original byte back. `false` if there is no such
    /// site.
    pub fn disarm(&self, id: SiteId) -> bool {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = entries.get_mut(&id) else {
            return false;
        };
        entry.users -= 1;
        if entry.users > 0 {
            return true;
        }
        let site = entry.site.clone();
        if let Some(byte) = self.byte(id.0) {
            // A byte that the guest has overwritten meanwhile is the guest's.
            let _ = byte.compare_exchange(INT3, site.original, Ordering::SeqCst, Ordering::SeqCst);
        }
        entries.remove(&id);
        let mut next = Sites::clone(&self.sites.load());
        next.map(site.purpose).remove(&site.key());
        self.sites.store(Arc::new(next));
        true
    }

    /// Reads guest-physical memory as it would be without any site.
    ///
    /// # Errors
    /// If the range is not RAM.
    pub fn read_unpatched(
        &self,
        address: Gpa,
        buf: &mut [u8],
    ) -> Result<(), introspect::PhysicalReadError> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        self.ram.read_physical(address, buf)?;
        overlay(&entries, address, buf);
        Ok(())
    }

    /// Reads code as it would be without any site; gives how many bytes could be read, fewer where a page is missing.
    pub(crate) fn read_code(&self, address: Gva, space: AddressSpace, buf: &mut [u8]) -> usize {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        self.original_code(&entries, address, space, buf)
    }

    /// (site, hits, hits whose instruction was stepped) of every site that a probe uses.
    pub fn hits(&self) -> Vec<(SiteId, u64, u64)> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let probes = entries
            .values()
            .filter(|e| matches!(e.site.purpose, Purpose::Probe { .. }));
        probes
            .map(|e| {
                let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
                (e.site.id, load(&e.site.hits), load(&e.site.stepped))
            })
            .collect()
    }

    /// Does `work` while guest memory holds the original bytes of all sites. The machine must be paused.
    pub(crate) fn with_bytes_restored<R>(&self, work: impl FnOnce() -> R) -> R {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let mut put_back = Vec::new();
        for entry in entries.values() {
            if let Some(byte) = self.byte(entry.site.id.0)
                && byte
                    .compare_exchange(
                        INT3,
                        entry.site.original,
                        Ordering::SeqCst,
                        Ordering::SeqCst,
                    )
                    .is_ok()
            {
                put_back.push(byte);
            }
        }
        let result = work();
        for byte in put_back {
            byte.store(INT3, Ordering::SeqCst);
        }
        result
    }

    /// The kernel site whose int3 stands at `address`.
    pub(crate) fn kernel_site(&self, address: u64) -> Option<Arc<Site>> {
        self.sites.load().kernel.get(&address).cloned()
    }

    /// The user site at a guest-physical byte.
    pub(crate) fn user_site(&self, physical: Gpa) -> Option<Arc<Site>> {
        self.sites.load().user.get(&physical.0).cloned()
    }

    /// Whose the int3 is that a vCPU has met at a byte for which [`Self::kernel_site`] or [`Self::user_site`]
    /// knew nothing. Exact, since sites neither come nor go meanwhile; takes the lock.
    pub(crate) fn owner_of(&self, physical: Gpa) -> Int3Owner {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        match entries.get(&SiteId(physical)) {
            Some(entry) => Int3Owner::Ours(entry.site.clone()),
            None if self.ram.read_byte(physical).is_ok_and(|byte| byte != INT3) => {
                Int3Owner::JustRemoved
            }
            None => Int3Owner::Guest,
        }
    }

    /// Takes the int3 of `site` out for a step; whether it was in.
    pub(crate) fn lift(&self, site: &Site) -> bool {
        let _entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let lifted = |b: &AtomicU8| {
            b.compare_exchange(INT3, site.original, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
        };
        self.byte(site.id.0).is_some_and(lifted)
    }

    /// Puts back what [`Self::lift`] took, if the site was not removed meanwhile.
    pub(crate) fn put_back(&self, site: &Arc<Site>) {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let stands = entries
            .get(&site.id)
            .is_some_and(|entry| Arc::ptr_eq(&entry.site, site));
        if stands && let Some(byte) = self.byte(site.id.0) {
            // What the guest wrote over the byte meanwhile stays.
            let _ = byte.compare_exchange(site.original, INT3, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// Whether any site stands in a program's text.
    pub(crate) fn has_user_sites(&self) -> bool {
        !self.sites.load().user.is_empty()
    }

    /// The site on the guest's own #BP entry, if there is one, and its address.
    pub(crate) fn breakpoint_entry(&self) -> Option<(SiteId, Gva)> {
        let sites = self.sites.load();
        let entry = sites
            .kernel
            .values()
            .find(|s| s.purpose == Purpose::BreakpointEntry)?;
        Some((entry.id, entry.address))
    }

    /// The byte in guest memory under a site.
    fn byte(&self, physical: Gpa) -> Option<&AtomicU8> {
        let pointer = self.ram.host_address(physical, 1)?;
        // SAFETY: the pointer is into guest RAM, mapped as long as `self.ram` lives, which the returned
        // borrow cannot outlive; a byte is always aligned and all host access to it here is atomic. The
        // guest may change it at any time, which atomics allow.
        Some(unsafe { AtomicU8::from_ptr(pointer) })
    }

    fn way_past(&self, instruction: &Instruction, purpose: Purpose) -> Option<Displaced> {
        let step = if purpose.is_user() {
            self.step_user
        } else {
            self.step_kernel
        };
        if emulate::is_supported(instruction) {
            Some(Displaced::Emulate)
        } else {
            step.then_some(Displaced::Step)
        }
    }

    /// [`Self::read_code`] with the lock held.
    fn original_code(
        &self,
        entries: &HashMap<SiteId, Entry>,
        address: Gva,
        space: AddressSpace,
        buf: &mut [u8],
    ) -> usize {
        let mut done = 0;
        while done < buf.len() {
            let at = Gva(address.0.wrapping_add(done as u64));
            let Ok(translation) = paging::translate(&self.ram, space, at) else {
                break;
            };
            let in_page = (PAGE_SIZE - at.0 % PAGE_SIZE) as usize;
            let end = buf.len().min(done + in_page);
            let piece = buf.get_mut(done..end).unwrap_or_default();
            if self.ram.read_physical(translation.gpa, piece).is_err() {
                break;
            }
            overlay(entries, translation.gpa, piece);
            done = end;
        }
        done
    }
}

impl Sites {
    fn map(&mut self, purpose: Purpose) -> &mut HashMap<u64, Arc<Site>> {
        if purpose.is_user() {
            &mut self.user
        } else {
            &mut self.kernel
        }
    }
}

impl Site {
    /// Whether it stands in a program's text.
    pub(crate) fn is_user(&self) -> bool {
        self.purpose.is_user()
    }

    /// The displaced instruction as it stands at `rip`: the same page may be mapped at several addresses.
    pub(crate) fn instruction_at(&self, rip: u64) -> Instruction {
        if self.instruction.ip() == rip {
            return self.instruction;
        }
        // The same bytes decode alike wherever they stand.
        emulate::decode(&self.code, rip).unwrap_or(self.instruction)
    }

    /// What it is found by in its map of [`Sites`].
    fn key(&self) -> u64 {
        if self.is_user() {
            self.id.0.0
        } else {
            self.address.0
        }
    }
}

/// Puts the original bytes of sites into what was read from memory.
fn overlay(entries: &HashMap<SiteId, Entry>, address: Gpa, buf: &mut [u8]) {
    let put = |entry: &Entry, buf: &mut [u8]| {
        let offset = entry.site.id.0.0.checked_sub(address.0);
        if let Some(byte) = offset.and_then(|o| buf.get_mut(usize::try_from(o).ok()?))
            && *byte == INT3
        {
            *byte = entry.site.original;
        }
    };
    if buf.len() < entries.len() {
        for at in (address.0..).take(buf.len()) {
            if let Some(entry) = entries.get(&SiteId(Gpa(at))) {
                put(entry, buf);
            }
        }
    } else {
        entries.values().for_each(|entry| put(entry, buf));
    }
}
