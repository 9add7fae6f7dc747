//! The usual hit: a probe's site whose displaced instruction is prepared, handled on the general
//! registers of the exit.
//!
//! Other hits are left to `hit`, which continues from the outcome ([`Quick`]). The usual way takes
//! no lock. It makes no system call unless somebody needs the system registers.
//!
//! It needs no KVM. It uses registers, guest memory, the table of sites and the vCPU's caches of
//! earlier hits ([`Caches`]).

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::Gva;
use kvm_bindings::kvm_regs;

use super::environment::{address_space, allowed};
use super::system::System;
use crate::machine::control::Control;
use crate::machine::shared::Shared;
use crate::machine::watchpoints::Watchpoints;
use crate::memory::GuestRam;
use crate::trap::{SeenSites, Site, Trap, TrapKind, TrapTable};
use crate::vcpu::stopped::Hold;
use crate::vcpu::{StoppedVcpu, TrapSink};
use crate::walks::{HitMemory, Walks};

/// The outcome of the usual way.
pub(crate) enum Quick {
    /// The trap was delivered, and the guest is past the displaced instruction. It can be entered
    /// again.
    Passed,
    /// The trap was delivered. The displaced instruction is still to be executed.
    Delivered(Arc<Site>),
    /// The trap was delivered, and the vCPU stays before the displaced instruction.
    Held(Arc<Site>, Hold),
    /// Nothing was done.
    Left,
}

/// The parts of a machine that a hit uses.
#[derive(Clone, Copy)]
pub(crate) struct Surroundings<'m> {
    pub(crate) ram: &'m GuestRam,
    pub(crate) traps: &'m TrapTable,
    pub(crate) control: &'m Arc<Control>,
    /// The receiver of traps, if there is one.
    pub(crate) sink: Option<&'m dyn TrapSink>,
    /// The number of delivered traps.
    pub(crate) delivered: &'m AtomicU64,
    /// The vCPU's page walks.
    pub(crate) walks: &'m Walks,
    pub(crate) watchpoints: &'m Watchpoints,
    /// The host's time stamp counter when the vCPU left the guest.
    pub(crate) exited: u64,
}

/// The lookups and page walks of one vCPU's hits, cached for its next hits.
#[derive(Default)]
pub(crate) struct Caches {
    pub(crate) kernel_sites: SeenSites,
    pub(crate) user_sites: SeenSites,
    pub(crate) walks: Walks,
}

impl<'m> Surroundings<'m> {
    #[inline]
    pub(crate) fn of(
        shared: &'m Shared,
        sink: Option<&'m dyn TrapSink>,
        walks: &'m Walks,
        exited: u64,
    ) -> Self {
        Self {
            ram: &shared.ram,
            traps: &shared.traps,
            control: &shared.control,
            sink,
            delivered: &shared.counters.traps,
            walks,
            watchpoints: &shared.watchpoints,
            exited,
        }
    }

    /// Handles the int3 of a site in kernel text that vCPU `vcpu` has hit at its RIP.
    ///
    /// The registers are those of the exit. They are changed if the guest is past the instruction.
    // Inlined, as the next ones: four calls with their saved registers are a tenth of a hit.
    #[inline(always)]
    pub(crate) fn kernel_hit(
        self,
        seen: &mut SeenSites,
        vcpu: usize,
        regs: &mut kvm_regs,
        system: &System<'_>,
    ) -> Quick {
        let site = self.traps.kernel_site_seen(seen, regs.rip);
        self.take::<false>(vcpu, site, regs, system)
    }

    /// Handles the int3 of a site in a program's text. See [`Self::kernel_hit`].
    #[inline(never)]
    pub(crate) fn user_hit(
        self,
        seen: &mut SeenSites,
        vcpu: usize,
        regs: &mut kvm_regs,
        system: &System<'_>,
    ) -> Quick {
        let space = address_space(system.get());
        let Ok(place) = self.memory().find(space, Gva(regs.rip)) else {
            return Quick::Left;
        };
        let site = self.traps.user_site_seen(seen, place.gpa);
        self.take::<true>(vcpu, site, regs, system)
    }

    /// Returns guest memory with the vCPU's page walks.
    #[inline]
    fn memory(self) -> HitMemory<'m> {
        HitMemory::new(self.ram, self.walks)
    }

    /// Delivers the trap at `site`, if one was found, and executes the displaced instruction if it
    /// is prepared.
    #[inline(always)]
    fn take<const USER: bool>(
        self,
        vcpu: usize,
        site: Option<&Arc<Site>>,
        regs: &mut kvm_regs,
        system: &System<'_>,
    ) -> Quick {
        let Some(site) = site else {
            return Quick::Left;
        };
        let (true, Some(prepared)) = (site.is_probe(), &site.prepared) else {
            return Quick::Left;
        };
        if USER && site.is_rewritten(self.ram) {
            return Quick::Left;
        }
        let kind = match USER {
            true => TrapKind::User,
            false => TrapKind::Kernel,
        };
        let trap = site.met(vcpu, kind, regs.rip);
        match self.deliver(&trap, regs, system, USER) {
            Hold::No => {}
            hold => return Quick::Held(site.clone(), hold),
        }
        // A prepared instruction reads no memory. The emulator reports watched writes.
        let store = |address: u64, value: u64| {
            !self.watchpoints.any() && self.store(site, system, address, value)
        };
        match prepared.execute(regs, store) {
            true => Quick::Passed,
            false => Quick::Delivered(site.clone()),
        }
    }

    /// Delivers a trap to the sink, if there is one. Returns the sink's wish.
    #[inline]
    pub(super) fn deliver(
        self,
        trap: &Trap,
        regs: &kvm_regs,
        system: &System<'_>,
        user_mode: bool,
    ) -> Hold {
        self.delivered.fetch_add(1, Ordering::Relaxed);
        let Some(sink) = self.sink else {
            return Hold::No;
        };
        let stopped = self.stopped(regs, system, user_mode);
        sink.trap(trap, &stopped);
        stopped.hold.get()
    }

    /// Returns a vCPU as a sink sees it.
    #[inline]
    pub(super) fn stopped<'a>(
        self,
        regs: &'a kvm_regs,
        system: &'a System<'a>,
        user_mode: bool,
    ) -> StoppedVcpu<'a>
    where
        'm: 'a,
    {
        StoppedVcpu {
            regs,
            user_mode,
            system,
            memory: self.memory(),
            traps: self.traps,
            control: self.control,
            exited: self.exited,
            hold: Cell::default(),
        }
    }

    /// Stores a word for the guest at an address that is a multiple of 8.
    ///
    /// Returns `false` if the guest may not write there, or the address is not in RAM.
    #[inline(always)]
    fn store(self, site: &Site, system: &System<'_>, address: u64, value: u64) -> bool {
        match site.tables {
            // The kernel's stacks are mapped as its text is, so the vCPU's page tables are not
            // needed.
            Some(space) if address >> 63 == site.address.0 >> 63 => {
                let found = self.memory().word(space, Gva(address));
                let Some(found) = found.filter(|found| found.writable && !found.user) else {
                    return false;
                };
                found.word.store(value.to_le(), Ordering::Relaxed);
                self.ram.wrote(found.word.as_ptr().cast(), size_of::<u64>());
                true
            }
            _ => self.store_by_system(site, system, address, value),
        }
    }

    /// Stores a word as [`Self::store`] does, through the page tables in use.
    #[inline(never)]
    fn store_by_system(self, site: &Site, system: &System<'_>, address: u64, value: u64) -> bool {
        let (user, sregs) = (site.is_user(), system.get());
        let found = self.memory().find(address_space(sregs), Gva(address));
        found.is_ok_and(|place| {
            allowed(&place, sregs, user, true) && self.ram.store_word(place.gpa, value)
        })
    }
}
