//! Connects the [hit path](super::hit) to the machine: it makes hits of a stopped vCPU's traps, and
//! arms sites on its thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use introspect::x86_64::paging::{self, AddressSpace};
use introspect::{CpuRegisters, Gva};
use vmm::trap::{ArmError, SiteId, Trap, TrapKind};
use vmm::{StoppedVcpu, TrapSink};

use super::budget::meter::Payers;
use super::current::{Base, Current};
use super::hit::{Arm, Hit, HitPath};
use super::seen::{At, HitPlan, Lists};

/// The machine's trap sink.
pub(crate) struct Sink(pub(crate) Arc<HitPath>);

struct ArmBy<'c> {
    cpu: &'c StoppedVcpu<'c>,
    path: &'c HitPath,
}

impl Arm for ArmBy<'_> {
    fn kernel(&self, address: Gva) -> Result<SiteId, ArmError> {
        let traps = self.cpu.traps();
        self.path.return_targets.check(traps, address)?;
        self.path.arm_kernel(traps, address)
    }

    /// Arms only in pages of files and their private copies, whose lifetime is watched.
    fn user(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        if !self.cpu.traps().is_returned_to(address, space) {
            return Err(ArmError::NoReturnAddress { address });
        }
        let Some(pages) = &self.path.pages else {
            return self.cpu.traps().arm_user(address, space);
        };
        let place = paging::translate(self.cpu.memory(), space, address)
            .map_err(|source| ArmError::NotMapped { address, source })?;
        let traps = self.cpu.traps();
        let in_copy = || traps.arm_user(address, space);
        if let Some(armed) = self.path.user_sites.arm_in_copy(place.gpa, in_copy) {
            return armed;
        }
        let kernel = self.path.space;
        let file = pages.file_of(self.cpu.ram(), kernel, space, address);
        let mapping = file.ok_or(ArmError::NotOfFile { address })?;
        let site = self.cpu.traps().arm_user(address, space)?;
        let splices = &self.path.user_sites.splices;
        splices.take_out(self.cpu.traps(), mapping, Some(site));
        Ok(site)
    }
}

impl Sink {
    #[inline(always)]
    fn hit<'a>(
        &'a self,
        vcpu: usize,
        at: At,
        cpu: &'a StoppedVcpu<'a>,
        seen: Option<&'a Lists>,
    ) -> Hit<'a> {
        // In user mode the base is the program's own.
        let base = match at.user {
            true => Base::Known(None),
            false => Base::Of(cpu),
        };
        Hit {
            vcpu,
            site: at.site,
            address: Gva(at.address),
            user: at.user,
            registers: cpu.general(),
            known_space: None,
            memory: cpu.memory(),
            current: Current::new(&self.0.tasks, cpu.memory(), vcpu, base),
            seen,
            #[cfg(test)]
            clock: None,
            cpu: Some(cpu),
        }
    }

    #[inline(always)]
    fn dispatch(
        &self,
        vcpu: usize,
        at: At,
        cpu: &StoppedVcpu<'_>,
        spot: &HitPlan,
        seen: Option<&Lists>,
    ) {
        let hit = self.hit(vcpu, at, cpu, seen);
        let arm = ArmBy { cpu, path: &self.0 };
        self.0.dispatch(&hit, spot, &arm);
    }

    #[inline(always)]
    fn meet<const USER: bool>(&self, trap: &Trap, cpu: &StoppedVcpu<'_>) {
        if !self.0.active.load(Ordering::Relaxed) {
            return;
        }
        let at = At {
            site: trap.site.map_or(0, |site| site.0.0),
            address: cpu.general().rip,
            user: USER,
        };
        // The lock is held by this vCPU's own thread, or for a moment by a thread that clears the
        // lists.
        match self.0.seen.get(trap.vcpu).and_then(|seen| seen.try_lock()) {
            Some(mut seen) => {
                let (spot, lists) = seen.spot(&self.0, trap.vcpu, at);
                self.dispatch(trap.vcpu, at, cpu, spot, Some(lists));
                self.0.charge(&spot.payers, cpu.exited(), USER);
            }
            None => self.dispatch_unseen::<USER>(trap.vcpu, at.site, cpu),
        }
    }

    // A function of its own, so that the mode is a constant in each.
    #[inline(never)]
    fn meet_user(&self, trap: &Trap, cpu: &StoppedVcpu<'_>) {
        self.meet::<true>(trap, cpu);
    }

    /// Handles a hit that belongs to no site.
    fn meet_nowhere(
        &self,
        vcpu: usize,
        cpu: &StoppedVcpu<'_>,
        fire: impl FnOnce(&Hit<'_>) -> Payers,
    ) {
        if self.0.active.load(Ordering::Relaxed) {
            let at = At {
                site: 0,
                address: cpu.general().rip,
                user: cpu.in_user_mode(),
            };
            let payers = fire(&self.hit(vcpu, at, cpu, None));
            self.0.charge(&payers, cpu.exited(), at.user);
        }
    }

    /// Handles a hit without the vCPU's lists, while another thread clears them.
    #[cold]
    #[inline(never)]
    fn dispatch_unseen<const USER: bool>(&self, vcpu: usize, site: u64, cpu: &StoppedVcpu<'_>) {
        let at = At {
            site,
            address: cpu.general().rip,
            user: USER,
        };
        let spot = self.0.spot(vcpu, at);
        self.dispatch(vcpu, at, cpu, &spot, None);
        self.0.charge(&spot.payers, cpu.exited(), USER);
    }
}

impl TrapSink for Sink {
    fn trap(&self, trap: &Trap, cpu: &StoppedVcpu<'_>) {
        match trap.kind {
            TrapKind::Kernel => self.meet::<false>(trap, cpu),
            TrapKind::User => self.meet_user(trap, cpu),
            TrapKind::Watchpoint(number) => {
                self.meet_nowhere(trap.vcpu, cpu, |hit| self.0.watched(number, hit));
            }
            TrapKind::Breakpoint(_) => {}
        }
    }

    fn may_hold(&self, site: SiteId) -> bool {
        let plan = self.0.plans.get(site.0.0);
        plan.is_some_and(|plan| plan.probes.iter().any(|probe| probe.may_hold()))
    }

    fn given_up(&self, site: SiteId) {
        self.0.give_up(site);
    }

    fn sample(&self, vcpu: usize, mask: u64, cpu: &StoppedVcpu<'_>) {
        self.meet_nowhere(vcpu, cpu, |hit| self.0.sample(mask, hit));
    }
}
