//! The usual hit: of a probe's site whose displaced instruction is prepared, taken on the general registers of the exit.
//!
//! What is not usual is left to `hit`, from where the usual way has come to ([`Quick`]). No system call where nobody needs
//! the system registers, and no lock. It needs no KVM: registers, guest memory, the table of sites and what the vCPU has
//! kept of earlier hits ([`Caches`]) are all there is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::Gva;
use kvm_bindings::kvm_regs;

use super::environment::{address_space, allowed};
use super::system::System;
use crate::machine::control::Control;
use crate::machine::shared::Shared;
use crate::memory::GuestRam;
use crate::trap::{SeenSites, Site, Trap, TrapKind, TrapTable};
use crate::vcpu::{StoppedVcpu, TrapSink};
use crate::walks::{HitMemory, Walks};

/// How far the usual way went.
pub(crate) enum Quick {
    /// The trap was delivered, and the guest is past the displaced instruction: enter it again.
    Passed,
    /// The trap was delivered. The displaced instruction is still to be executed.
    Delivered(Arc<Site>),
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
    /// Traps delivered.
    pub(crate) delivered: &'m AtomicU64,
    /// The vCPU's.
    pub(crate) walks: &'m Walks,
}

/// Lookups and page walks of one vCPU's hits, kept for its next hits.
#[derive(Default)]
pub(crate) struct Caches {
    pub(crate) kernel_sites: SeenSites,
    pub(crate) user_sites: SeenSites,
    pub(crate) walks: Walks,
}

impl<'m> Surroundings<'m> {
    #[inline]
    pub(crate) fn of(shared: &'m Shared, sink: Option<&'m dyn TrapSink>, walks: &'m Walks) -> Self {
        Self {
            ram: &shared.ram,
            traps: &shared.traps,
            control: &shared.control,
            sink,
            delivered: &shared.counters.traps,
            walks,
        }
    }

    /// Takes the int3 of a site in kernel text that vCPU `vcpu` has met at its RIP. The registers are those of the exit;
    /// they are changed where the guest is past the instruction.
    // In place, with the next: four calls with their saved registers are a tenth of a hit.
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

    /// The same of a program's text.
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

    /// Guest memory, with the vCPU's page walks.
    #[inline]
    fn memory(self) -> HitMemory<'m> {
        HitMemory::new(self.ram, self.walks)
    }

    /// Delivers the trap at `site`, if one was found, and executes the displaced instruction where it is prepared.
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
        self.deliver(&trap, regs, system, USER);
        let store = |address: u64, value: u64| self.store(site, system, address, value);
        match prepared.execute(regs, store) {
            true => Quick::Passed,
            false => Quick::Delivered(site.clone()),
        }
    }

    /// Delivers a trap to the sink, if there is one.
    #[inline]
    pub(super) fn deliver(
        self,
        trap: &Trap,
        regs: &kvm_regs,
        system: &System<'_>,
        user_mode: bool,
    ) {
        self.delivered.fetch_add(1, Ordering::Relaxed);
        if let Some(sink) = self.sink {
            sink.trap(trap, &self.stopped(regs, system, user_mode));
        }
    }

    /// A vCPU as a sink sees it.
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
        }
    }

    /// Stores a word for the guest, at an address that is a multiple of 8; `false` where it may not, or it is not in RAM.
    #[inline(always)]
    fn store(self, site: &Site, system: &System<'_>, address: u64, value: u64) -> bool {
        match site.tables {
            // The kernel's stacks are mapped as its text is: the vCPU need not be asked for its page tables.
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

    /// The same, through the page tables in use.
    #[inline(never)]
    fn store_by_system(self, site: &Site, system: &System<'_>, address: u64, value: u64) -> bool {
        let (user, sregs) = (site.is_user(), system.get());
        let found = self.memory().find(address_space(sregs), Gva(address));
        found.is_ok_and(|place| {
            allowed(&place, sregs, user, true) && self.ram.store_word(place.gpa, value)
        })
    }
}
