//! The usual hit: of a probe's site whose displaced instruction is prepared, taken on the general registers of the exit.
//!
//! What is not usual is left to `hit`, from where the usual way has come to ([`Quick`]). No system call where nobody needs
//! the system registers, and no reference counted. It needs no KVM: registers, guest memory and the table of sites are
//! all there is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::Gva;
use introspect::x86_64::paging::{Translation, translate};
use kvm_bindings::kvm_regs;

use super::environment::{address_space, allowed};
use super::system::System;
use crate::machine::control::Control;
use crate::machine::shared::Shared;
use crate::memory::GuestRam;
use crate::trap::{Site, StoppedCpu, Trap, TrapKind, TrapSink, TrapTable};

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
}

impl<'m> Surroundings<'m> {
    #[inline]
    pub(crate) fn of(shared: &'m Shared, sink: Option<&'m dyn TrapSink>) -> Self {
        Self {
            ram: &shared.ram,
            traps: &shared.traps,
            control: &shared.control,
            sink,
            delivered: &shared.counters.traps,
        }
    }

    /// Takes the int3 of a site in kernel text that vCPU `vcpu` has met at its RIP. The registers are those of the exit;
    /// they are changed where the guest is past the instruction.
    #[inline]
    pub(crate) fn kernel_hit(self, vcpu: usize, regs: &mut kvm_regs, system: &System<'_>) -> Quick {
        let (pc, table) = (regs.rip, self.traps);
        let taken = table.with_kernel_site(pc, |site| self.take(vcpu, site, false, regs, system));
        taken.unwrap_or(Quick::Left)
    }

    /// The same of a program's text.
    pub(crate) fn user_hit(self, vcpu: usize, regs: &mut kvm_regs, system: &System<'_>) -> Quick {
        let pc = Gva(regs.rip);
        let Ok(place) = translate(self.ram, address_space(system.get()), pc) else {
            return Quick::Left;
        };
        let table = self.traps;
        let taken =
            table.with_user_site(place.gpa, |site| self.take(vcpu, site, true, regs, system));
        taken.unwrap_or(Quick::Left)
    }

    fn take(
        self,
        vcpu: usize,
        site: &Arc<Site>,
        user: bool,
        regs: &mut kvm_regs,
        system: &System<'_>,
    ) -> Quick {
        let (true, Some(prepared)) = (site.is_probe(), &site.prepared) else {
            return Quick::Left;
        };
        let kind = match user {
            true => TrapKind::User,
            false => TrapKind::Kernel,
        };
        let trap = site.met(vcpu, kind, regs.rip);
        self.deliver(&trap, regs, system, user);
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
    ) -> StoppedCpu<'a>
    where
        'm: 'a,
    {
        StoppedCpu {
            regs,
            user_mode,
            system,
            ram: self.ram,
            traps: self.traps,
            control: self.control,
        }
    }

    /// Stores a word for the guest, at an address that is a multiple of 8; `false` where it may not, or it is not in RAM.
    fn store(self, site: &Site, system: &System<'_>, address: u64, value: u64) -> bool {
        let put = |space, may: &dyn Fn(&Translation) -> bool| {
            let found = translate(self.ram, space, Gva(address));
            found.is_ok_and(|place| may(&place) && self.ram.store_word(place.gpa, value))
        };
        match site.tables {
            // The kernel's stacks are mapped as its text is: the vCPU need not be asked for its page tables.
            Some(space) if address >> 63 == site.address.0 >> 63 => {
                put(space, &|place| place.writable && !place.user)
            }
            _ => {
                let (user, sregs) = (site.is_user(), system.get());
                put(address_space(sregs), &|place| {
                    allowed(place, sregs, user, true)
                })
            }
        }
    }
}
