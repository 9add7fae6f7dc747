//! The way from an exit to a trap, and past the displaced instruction.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use introspect::x86_64::paging;
use introspect::{Gpa, Gva};
use kvm_bindings::{kvm_debug_exit_arch, kvm_regs, kvm_sregs};

use super::environment::{VcpuEnvironment, address_space, in_user_mode};
use super::quick::{Quick, Surroundings};
use super::run::Flow;
use super::step::is_step;
use super::stopped::Hold;
use super::system::System;
use super::{Vcpu, debug};
use crate::machine::{PanicReport, RunEnd};
use crate::trap::{Displaced, Int3Owner, Purpose, Reinjection, Site, Trap, TrapKind, foreign_int3};
use crate::vcpu::StoppedVcpu;
use crate::x86_64::debug_exception::VECTOR_BP;
use crate::x86_64::emulate::{self, EmulateError, StateError};
use crate::x86_64::rflags;
use crate::x86_64::watchpoint::NUMBER;

/// Returns the registers without RFLAGS.RF, which a CPU sets when it returns to an instruction that
/// has faulted.
pub(super) fn without_resume(regs: kvm_regs) -> kvm_regs {
    kvm_regs {
        rflags: regs.rflags & !rflags::RF,
        ..regs
    }
}

/// The outcome of handling an int3 as a usual one.
#[expect(clippy::large_enum_variant, reason = "it does not stay")]
pub(super) enum Usual {
    /// The guest is past the int3.
    Passed,
    /// The hit was delivered. The displaced instruction is still to be executed.
    Delivered {
        site: Arc<Site>,
        privilege: u8,
        sregs: Option<kvm_sregs>,
    },
    /// The hit was delivered. The vCPU stays before the displaced instruction.
    Held(Arc<Site>, Hold),
    /// The int3 is not a usual one. Nothing was done.
    Left,
}

impl Vcpu {
    /// Handles KVM_EXIT_DEBUG: an int3 if the host reports them so, a hardware breakpoint, or a
    /// step.
    pub(super) fn on_debug(&mut self, arch: &kvm_debug_exit_arch) -> Result<Flow, RunEnd> {
        if arch.exception == VECTOR_BP {
            let usual = self.usual_int3(true);
            return self.on_reported_int3(usual, arch.pc);
        }
        self.watched |= self.debug.watchpoints_met(arch.dr6);
        if is_step(arch) {
            if self.debug.stepping().is_none() {
                // The guest's own step, which KVM hands over while a debug register is in use.
                debug::raise_step(&self.fd)?;
            }
            return Ok(Flow::Stepped);
        }
        if self.debug.breakpoint(debug::PAGE_FAULT_ENTRY) == Some(arch.pc) {
            return self.on_page_fault_entry();
        }
        for number in 0..NUMBER {
            if self.debug.breakpoint(number) == Some(arch.pc) {
                return self.on_breakpoint(number, arch.pc);
            }
        }
        // A watchpoint, or one or a breakpoint that was just removed.
        Ok(Flow::Run)
    }

    /// Handles an int3 at `pc`, in either mode, that a debug exit reported and
    /// [`usual_int3`](Self::usual_int3) has seen.
    #[cold]
    pub(super) fn on_reported_int3(&mut self, usual: Usual, pc: u64) -> Result<Flow, RunEnd> {
        if let Some(flow) = self.end_usual_int3(usual)? {
            return Ok(flow);
        }
        let regs = self.registers.general(&self.fd)?;
        if let Some(site) = self.machine.traps.kernel_site(pc) {
            return self.kernel_hit(&site, regs);
        }
        let sregs = self.registers.system(&self.fd)?;
        let physical = self.physical(&sregs, pc);
        if let Some(site) = physical.and_then(|gpa| self.machine.traps.user_site(gpa)) {
            if !self.is_met_again(&site, &regs) {
                let trap = self.trap(&site, TrapKind::User, pc);
                match self.deliver(&trap, &regs, &sregs, true) {
                    Hold::No => {}
                    hold => return Ok(self.hold_at(site, regs, hold)),
                }
            }
            let Some(site) = self.as_it_stands(&site) else {
                return Ok(Flow::Run);
            };
            return self.pass(&site, regs, Some(&sregs), 3);
        }
        self.unknown_int3(physical, regs, &sregs)
    }

    /// Handles an int3 in kernel mode that was reported as an emulation failure.
    pub(super) fn on_failed_int3(&mut self) -> Result<Flow, RunEnd> {
        let usual = self.usual_int3(false);
        if let Some(flow) = self.end_usual_int3(usual)? {
            return Ok(flow);
        }
        let regs = self.registers.general(&self.fd)?;
        if let Some(site) = self.machine.traps.kernel_site(regs.rip) {
            return self.kernel_hit(&site, regs);
        }
        let sregs = self.registers.system(&self.fd)?;
        let physical = self.physical(&sregs, regs.rip);
        self.unknown_int3(physical, regs, &sregs)
    }

    /// Returns a user site with the instruction that is there now.
    ///
    /// Returns `None` if this host cannot execute that under a trap. The site is then given up.
    pub(super) fn as_it_stands(&self, site: &Arc<Site>) -> Option<Arc<Site>> {
        if !site.is_rewritten(&self.machine.ram) {
            return Some(site.clone());
        }
        let renewed = self.machine.traps.read_anew(site);
        renewed.map_err(|error| self.give_up(site, &error)).ok()
    }

    /// Returns the GPA of `address`.
    pub(super) fn physical(&self, sregs: &kvm_sregs, address: u64) -> Option<Gpa> {
        let space = address_space(sregs);
        paging::translate(&self.machine.ram, space, Gva(address))
            .ok()
            .map(|t| t.gpa)
    }

    /// Checks whether this hit continues one that was reported: one execution is one hit.
    ///
    /// It may be the rest of a string instruction whose first rounds were stepped, or the guest's
    /// second try after a fault.
    pub(super) fn is_met_again(&mut self, site: &Arc<Site>, regs: &kvm_regs) -> bool {
        let again = self.again.as_ref();
        let is_again = again.is_some_and(|(stepped, at)| {
            Arc::ptr_eq(stepped, site) && *at == without_resume(*regs)
        });
        if is_again {
            self.again = None;
        }
        is_again
    }

    fn kernel_hit(&mut self, site: &Arc<Site>, regs: kvm_regs) -> Result<Flow, RunEnd> {
        if self.is_met_again(site, &regs) {
            return self.pass(site, regs, None, 0);
        }
        match site.purpose {
            Purpose::Probe { .. } => {
                let sregs = self.registers.system(&self.fd)?;
                let trap = self.trap(site, TrapKind::Kernel, regs.rip);
                match self.deliver(&trap, &regs, &sregs, false) {
                    Hold::No => {}
                    hold => return Ok(self.hold_at(site.clone(), regs, hold)),
                }
                self.pass(site, regs, Some(&sregs), 0)
            }
            Purpose::BreakpointEntry => self.on_breakpoint_entry(site, regs),
            Purpose::Panic => {
                let registers = self.snapshot_registers()?;
                self.machine.note_panic(PanicReport {
                    vcpu: Some(self.index),
                    registers: Some(Box::new(registers)),
                    text: None,
                    at: Some(Instant::now()),
                });
                self.pass(site, regs, None, 0)
            }
        }
    }

    /// Counts a hit at `site` and returns the trap.
    pub(super) fn trap(&self, site: &Site, kind: TrapKind, address: u64) -> Trap {
        site.met(self.index, kind, address)
    }

    /// Keeps the vCPU before the displaced instruction of `site`.
    ///
    /// It runs into the int3 again when it goes on. If the sink has paused it, that is no new hit.
    pub(super) fn hold_at(&mut self, site: Arc<Site>, regs: kvm_regs, hold: Hold) -> Flow {
        if hold == Hold::Here {
            self.again = Some((site, without_resume(regs)));
        }
        Flow::Run
    }

    /// Delivers a trap to the sink. Returns the sink's wish.
    pub(super) fn deliver(
        &self,
        trap: &Trap,
        regs: &kvm_regs,
        sregs: &kvm_sregs,
        user_mode: bool,
    ) -> Hold {
        let system = System::known_as(sregs);
        let sink = self.machine.sink.load();
        let sink = sink.as_deref().map(|sink| &**sink);
        Surroundings::of(&self.machine, sink, &self.caches.walks, self.exited)
            .deliver(trap, regs, &system, user_mode)
    }

    /// Returns this vCPU as a sink sees it.
    pub(super) fn stopped<'a>(
        &'a self,
        regs: &'a kvm_regs,
        system: &'a System<'a>,
        user_mode: bool,
    ) -> StoppedVcpu<'a> {
        Surroundings::of(&self.machine, None, &self.caches.walks, self.exited)
            .stopped(regs, system, user_mode)
    }

    /// Handles a usual int3 on the registers in the shared page. User sites are included if `user`.
    #[inline(never)]
    pub(super) fn usual_int3(&mut self, user: bool) -> Usual {
        let Some((regs, system)) = self.registers.shared(&mut self.fd) else {
            return Usual::Left;
        };
        // An unfinished step may continue here.
        if let Some((_, at)) = &self.again
            && at.rip == regs.rip
        {
            return Usual::Left;
        }
        let sink = self.sink.load().as_deref().map(|sink| &**sink);
        let surroundings = Surroundings::of(&self.machine, sink, &self.caches.walks, self.exited);
        let seen = &mut self.caches.kernel_sites;
        let mut quick = surroundings.kernel_hit(seen, self.index, regs, &system);
        let mut privilege = 0;
        if user && matches!(quick, Quick::Left) {
            let seen = &mut self.caches.user_sites;
            quick = surroundings.user_hit(seen, self.index, regs, &system);
            privilege = 3;
        }
        match quick {
            Quick::Left => Usual::Left,
            Quick::Passed => {
                self.registers.changed(&mut self.fd);
                Usual::Passed
            }
            Quick::Held(site, hold) => Usual::Held(site, hold),
            Quick::Delivered(site) => Usual::Delivered {
                site,
                privilege,
                sregs: system.known(),
            },
        }
    }

    /// Does the rest of [`usual_int3`](Self::usual_int3). Returns `None` if that has done nothing.
    fn end_usual_int3(&mut self, usual: Usual) -> Result<Option<Flow>, RunEnd> {
        match usual {
            Usual::Left => Ok(None),
            Usual::Passed => Ok(Some(Flow::Run)),
            Usual::Held(site, hold) => {
                let regs = self.registers.general(&self.fd)?;
                Ok(Some(self.hold_at(site, regs, hold)))
            }
            Usual::Delivered {
                site,
                privilege,
                sregs,
            } => {
                let regs = self.registers.general(&self.fd)?;
                self.pass(&site, regs, sregs.as_ref(), privilege).map(Some)
            }
        }
    }

    /// Executes the displaced instruction of `site` on `regs` and lets the vCPU go on after it.
    ///
    /// The system registers are read only if the instruction needs them and `sregs` is `None`.
    pub(super) fn pass(
        &mut self,
        site: &Arc<Site>,
        mut regs: kvm_regs,
        sregs: Option<&kvm_sregs>,
        privilege: u8,
    ) -> Result<Flow, RunEnd> {
        if site.displaced == Displaced::Breakpoint {
            return self.reinject(regs);
        }
        if site.displaced == Displaced::Emulate {
            match self.emulate(
                &site.instruction_at(regs.rip),
                &mut regs,
                sregs,
                Some(privilege),
                site.behind_sti,
            ) {
                Ok(()) => {
                    self.registers.set_general(&mut self.fd, &regs)?;
                    return Ok(Flow::Run);
                }
                // A fault, or a state that the emulator does not handle. The guest's own CPU does
                // it.
                Err(error) => log::debug!("displaced instruction stepped: {error}"),
            }
        }
        self.step_over(site)
    }

    /// Runs one instruction through the emulator, with the #DB that the guest expects after it if
    /// RFLAGS.TF is set.
    ///
    /// A completed instruction ends the interrupt shadow of an STI before it (`behind_sti`). If it
    /// masks interrupts, it always ends the shadow, because a CPU refuses to be entered with both.
    pub(super) fn emulate(
        &mut self,
        instruction: &iced_x86::Instruction,
        regs: &mut kvm_regs,
        sregs: Option<&kvm_sregs>,
        privilege: Option<u8>,
        behind_sti: bool,
    ) -> Result<(), EmulateError> {
        let mut environment = VcpuEnvironment {
            fd: &mut self.fd,
            registers: &self.registers,
            ram: &self.machine.ram,
            privilege,
            sregs: sregs.copied(),
            watchpoints: &self.machine.watchpoints,
            watched: 0,
        };
        let was_open = regs.rflags & rflags::IF != 0;
        let is_stepped = regs.rflags & rflags::TF != 0;
        emulate::execute(instruction, regs, &mut environment)?;
        self.watched |= environment.watched;
        if was_open && (behind_sti || regs.rflags & rflags::IF == 0) {
            environment.end_interrupt_shadow()?;
        }
        if is_stepped {
            debug::raise_step(&self.fd).map_err(|error| StateError {
                action: "raise a debug exception",
                source: error.source.into(),
            })?;
        }
        Ok(())
    }

    /// Handles an int3 at an address that the table does not know.
    fn unknown_int3(
        &mut self,
        physical: Option<Gpa>,
        regs: kvm_regs,
        sregs: &kvm_sregs,
    ) -> Result<Flow, RunEnd> {
        match physical.map(|gpa| self.machine.traps.owner_of(gpa)) {
            Some(Int3Owner::JustRemoved) => return Ok(Flow::Run),
            Some(Int3Owner::Ours(site)) => match (site.is_user(), in_user_mode(sregs)) {
                // Armed a moment ago. The next hit finds it.
                (true, true) => return Ok(Flow::Run),
                (false, false) if site.address.0 == regs.rip => return Ok(Flow::Run),
                // Text that is mapped at a second address, or a kernel that runs a program's page.
                (_, false) => return self.kernel_hit(&site, regs),
                // A program that runs the kernel's text gets its own #BP, as it would without the
                // trap.
                (false, true) => {}
            },
            Some(Int3Owner::Guest) | None => {}
        }
        self.reinject(regs)
    }

    /// Reinjects the foreign int3 that the guest has hit with these registers.
    fn reinject(&mut self, mut regs: kvm_regs) -> Result<Flow, RunEnd> {
        self.machine
            .counters
            .guest_int3
            .fetch_add(1, Ordering::Relaxed);
        match foreign_int3(&self.machine.profile) {
            Reinjection::InjectBreakpoint => self.debug.inject_breakpoint(&self.fd)?,
            Reinjection::QueueException => {
                regs.rip = regs.rip.wrapping_add(1);
                self.registers.set_general(&mut self.fd, &regs)?;
                self.queue_exception(VECTOR_BP as u8, None)?;
            }
        }
        Ok(Flow::Run)
    }

    /// Makes the guest take an exception before its next instruction.
    pub(super) fn queue_exception(&self, vector: u8, error: Option<u32>) -> Result<(), RunEnd> {
        Ok(debug::queue_exception(&self.fd, vector, error)?)
    }

    /// Handles one of the caller's hardware breakpoints.
    fn on_breakpoint(&mut self, number: usize, pc: u64) -> Result<Flow, RunEnd> {
        let regs = self.registers.general(&self.fd)?;
        let sregs = self.registers.system(&self.fd)?;
        let kind = TrapKind::Breakpoint(number as u8);
        let trap = Trap {
            vcpu: self.index,
            address: Gva(pc),
            kind,
            site: None,
        };
        if self.breakpoint_held.take() != Some(pc)
            && self.deliver(&trap, &regs, &sregs, in_user_mode(&sregs)) == Hold::Here
        {
            self.breakpoint_held = Some(pc);
            return Ok(Flow::Run);
        }
        self.past_breakpoint(regs, &sregs)
    }

    /// Gets past an instruction under a hardware breakpoint.
    ///
    /// An int3 of ours there is handled as a hit. Otherwise the instruction is emulated, or else
    /// stepped.
    pub(super) fn past_breakpoint(
        &mut self,
        mut regs: kvm_regs,
        sregs: &kvm_sregs,
    ) -> Result<Flow, RunEnd> {
        if sregs.cs.selector & 3 == 0 {
            if let Some(site) = self.machine.traps.kernel_site(regs.rip) {
                return self.kernel_hit(&site, regs);
            }
        } else if let Some(gpa) = self.physical(sregs, regs.rip)
            && self.machine.traps.user_site(gpa).is_some()
        {
            let usual = self.usual_int3(true);
            return self.on_reported_int3(usual, regs.rip);
        }
        let instruction = self.instruction_at(sregs, regs.rip);
        if let Some(instruction) = &instruction
            && self
                .emulate(instruction, &mut regs, Some(sregs), None, false)
                .is_ok()
        {
            self.registers.set_general(&mut self.fd, &regs)?;
            return Ok(Flow::Run);
        }
        self.step(instruction.unwrap_or_default())
    }

    /// Decodes the guest's instruction at a linear address.
    pub(super) fn instruction_at(
        &self,
        sregs: &kvm_sregs,
        rip: u64,
    ) -> Option<iced_x86::Instruction> {
        let code = self.machine.traps.read_code(Gva(rip), address_space(sregs));
        emulate::decode(&code, rip).ok()
    }
}
