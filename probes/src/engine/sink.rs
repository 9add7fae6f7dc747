//! The [hit path](super::hit) as the machine calls it: hits made of a vCPU that stands still, and traps put in on its thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use introspect::x86_64::paging::{self, AddressSpace};
use introspect::{CpuRegisters, Gva};
use vmm::trap::{ArmError, SiteId, StoppedCpu, Trap, TrapKind, TrapSink};

use super::current::{Base, Current};
use super::hit::{Arm, Hit, HitPath};
use super::seen::Seen;

/// The hit path as the machine calls it.
pub(crate) struct Sink(pub(crate) Arc<HitPath>);

struct ArmBy<'c> {
    cpu: &'c StoppedCpu<'c>,
    path: &'c HitPath,
}

impl Arm for ArmBy<'_> {
    fn kernel(&self, address: Gva) -> Result<SiteId, ArmError> {
        self.path.arm_kernel(self.cpu.traps(), address)
    }

    /// Only in pages of files, and private copies of such, whose coming and going is seen.
    fn user(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
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
    fn hit<'a>(
        &'a self,
        vcpu: usize,
        site: Option<SiteId>,
        user: bool,
        cpu: &'a StoppedCpu<'a>,
        seen: Option<&'a Seen>,
    ) -> Hit<'a> {
        let registers = cpu.general();
        // In user mode it is the program's own.
        let base = match user {
            true => Base::Known(None),
            false => Base::Of(cpu),
        };
        Hit {
            vcpu,
            site: site.map_or(0, |site| site.0.0),
            address: Gva(registers.rip),
            user,
            registers,
            known_space: None,
            memory: cpu.memory(),
            current: Current::new(&self.0.tasks, cpu.memory(), vcpu, base),
            seen,
            cpu: Some(cpu),
        }
    }
}

impl TrapSink for Sink {
    fn trap(&self, trap: &Trap, cpu: &StoppedCpu<'_>) {
        let user = match trap.kind {
            TrapKind::Kernel => false,
            TrapKind::User => true,
            TrapKind::Breakpoint(_) => return,
        };
        if !self.0.active.load(Ordering::Relaxed) {
            return;
        }
        // Held by this vCPU's own thread alone.
        let seen = self.0.seen.get(trap.vcpu);
        let seen = seen.and_then(|seen| seen.try_lock().ok());
        let hit = self.hit(trap.vcpu, trap.site, user, cpu, seen.as_deref());
        let arm = ArmBy { cpu, path: &self.0 };
        self.0.take(&hit, &|| cpu.tsc(), &arm);
    }

    fn sample(&self, vcpu: usize, mask: u64, cpu: &StoppedCpu<'_>) {
        if self.0.active.load(Ordering::Relaxed) {
            let hit = self.hit(vcpu, None, cpu.in_user_mode(), cpu, None);
            self.0.sample(mask, &hit, &|| cpu.tsc());
        }
    }
}
