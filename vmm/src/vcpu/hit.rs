//! From an exit to a trap, and past the displaced instruction.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use introspect::x86_64::paging;
use introspect::{Gpa, Gva};
use kvm_bindings::{kvm_debug_exit_arch, kvm_regs, kvm_sregs};

use super::environment::{VcpuEnvironment, address_space};
use super::run::Flow;
use super::{Vcpu, debug};
use crate::machine::control::AfterPark;
use crate::machine::{PanicReport, RunEnd};
use crate::trap::{
    Displaced, GiveBack, INT3, Int3Owner, Purpose, Site, StoppedCpu, Trap, TrapKind, foreign_int3,
};
use crate::vm::NameCall;
use crate::x86_64::emulate::{self, EmulateError};

const VECTOR_DB: u32 = 1;
const VECTOR_BP: u32 = 3;
/// DR6.BS: a single step.
const DR6_STEP: u64 = 1 << 14;
/// Exits that one stepped instruction may take (a string instruction's port accesses) before it is given up.
const STEP_EXITS: usize = 10_000;

impl Vcpu {
    /// KVM_EXIT_DEBUG: an int3 where the host reports them so, a hardware breakpoint, or a step.
    pub(super) fn on_debug(&mut self, arch: &kvm_debug_exit_arch) -> Result<Flow, RunEnd> {
        if arch.exception == VECTOR_BP {
            return self.on_reported_int3(arch.pc);
        }
        if arch.exception == VECTOR_DB && arch.dr6 & DR6_STEP != 0 {
            return Ok(Flow::Stepped);
        }
        if self.debug.breakpoint(debug::PAGE_FAULT_ENTRY) == Some(arch.pc) {
            return self.on_page_fault_entry();
        }
        for number in 0..debug::BREAKPOINTS {
            if self.debug.breakpoint(number) == Some(arch.pc) {
                return self.on_breakpoint(number, arch.pc);
            }
        }
        // A stale breakpoint that was just taken away: run on.
        Ok(Flow::Run)
    }

    /// An int3 at `pc`, in either mode, reported by a debug exit.
    fn on_reported_int3(&mut self, pc: u64) -> Result<Flow, RunEnd> {
        let regs = self.registers.general(&self.fd)?;
        if let Some(site) = self.machine.traps.kernel_site(pc) {
            return self.kernel_hit(&site, regs);
        }
        let sregs = self.registers.system(&self.fd)?;
        let physical = self.physical(&sregs, pc);
        if let Some(site) = physical.and_then(|gpa| self.machine.traps.user_site(gpa)) {
            let trap = self.trap(&site, TrapKind::User, pc);
            self.deliver(&trap, &regs, &sregs, true);
            return self.pass(&site, regs, Some(sregs), 3);
        }
        self.not_ours(physical, regs)
    }

    /// An int3 in kernel mode, reported as an emulation failure.
    pub(super) fn on_failed_int3(&mut self, regs: kvm_regs) -> Result<Flow, RunEnd> {
        if let Some(site) = self.machine.traps.kernel_site(regs.rip) {
            return self.kernel_hit(&site, regs);
        }
        let sregs = self.registers.system(&self.fd)?;
        let physical = self.physical(&sregs, regs.rip);
        self.not_ours(physical, regs)
    }

    fn physical(&self, sregs: &kvm_sregs, address: u64) -> Option<Gpa> {
        let space = address_space(sregs);
        paging::translate(&self.machine.ram, space, Gva(address)).ok().map(|t| t.gpa)
    }

    fn kernel_hit(&mut self, site: &Arc<Site>, regs: kvm_regs) -> Result<Flow, RunEnd> {
        match site.purpose {
            Purpose::Probe { .. } => {
                let sregs = self.registers.recent_system(&self.fd)?;
                let trap = self.trap(site, TrapKind::Kernel, regs.rip);
                self.deliver(&trap, &regs, &sregs, false);
            }
            Purpose::BreakpointEntry => return self.on_breakpoint_entry(site, regs),
            Purpose::Panic => {
                let registers = self.snapshot_registers()?;
                self.machine.note_panic(PanicReport { vcpu: self.index, registers: Box::new(registers) });
            }
        }
        self.pass(site, regs, None, 0)
    }

    fn trap(&self, site: &Site, kind: TrapKind, address: u64) -> Trap {
        site.hits.fetch_add(1, Ordering::Relaxed);
        Trap { vcpu: self.index, address: Gva(address), kind, site: Some(site.id) }
    }

    /// Gives a trap to whoever listens.
    pub(super) fn deliver(&self, trap: &Trap, regs: &kvm_regs, sregs: &kvm_sregs, user_mode: bool) {
        self.machine.counters.traps.fetch_add(1, Ordering::Relaxed);
        if let Some(sink) = self.machine.sink.load().as_deref() {
            let cpu = StoppedCpu {
                regs,
                user_mode,
                sregs,
                ram: &self.machine.ram,
                traps: &self.machine.traps,
            };
            sink.trap(trap, &cpu);
        }
    }

    /// Executes the displaced instruction of `site` on `regs` and lets the vCPU go on after it.
    pub(super) fn pass(
        &mut self,
        site: &Arc<Site>,
        mut regs: kvm_regs,
        sregs: Option<kvm_sregs>,
        privilege: u8,
    ) -> Result<Flow, RunEnd> {
        if site.displaced == Displaced::Emulate {
            match self.emulate(&site.instruction, &mut regs, sregs, Some(privilege)) {
                Ok(()) => {
                    self.registers.set_general(&mut self.fd, &regs)?;
                    return Ok(Flow::Run);
                }
                // A fault, or a state the emulator leaves alone: the guest's own CPU does it.
                Err(error) => log::debug!("displaced instruction stepped: {error}"),
            }
        }
        self.step_over(site)
    }

    /// Runs one instruction through the emulator.
    pub(super) fn emulate(
        &mut self,
        instruction: &iced_x86::Instruction,
        regs: &mut kvm_regs,
        sregs: Option<kvm_sregs>,
        privilege: Option<u8>,
    ) -> Result<(), EmulateError> {
        let machine = self.machine.clone();
        let mut environment = VcpuEnvironment {
            fd: &mut self.fd,
            registers: &mut self.registers,
            ram: &machine.ram,
            privilege,
            sregs,
        };
        emulate::execute(instruction, regs, &mut environment)
    }

    /// Puts the original byte back, steps the vCPU over it with the others standing still, and arms again.
    fn step_over(&mut self, site: &Arc<Site>) -> Result<Flow, RunEnd> {
        let machine = self.machine.clone();
        if machine.control.stop_others(self) == AfterPark::Leave {
            return Ok(Flow::Interrupted);
        }
        site.stepped.fetch_add(1, Ordering::Relaxed);
        let byte = machine.traps.byte(site.id.0);
        let was_armed = byte.is_some_and(|b| {
            b.compare_exchange(INT3, site.original, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        });
        let result = self.step();
        if let Some(byte) = byte
            && was_armed
            && machine.traps.still_armed(site.id)
        {
            // What the guest wrote over the byte meanwhile stays.
            let _ = byte.compare_exchange(site.original, INT3, Ordering::SeqCst, Ordering::SeqCst);
        }
        machine.control.resume_others();
        result
    }

    /// One instruction of the guest by KVM's single-step.
    pub(super) fn step(&mut self) -> Result<Flow, RunEnd> {
        self.debug.set_step(&self.fd, true)?;
        let mut kicked = false;
        let mut outcome = Err(RunEnd::Host {
            message: format!("an instruction did not end within {STEP_EXITS} exits while single-stepped"),
        });
        for _ in 0..STEP_EXITS {
            match self.enter() {
                Ok(Flow::Stepped) => {
                    outcome = Ok(Flow::Run);
                    break;
                }
                Ok(Flow::Run) => {}
                Ok(Flow::Interrupted) => {
                    // Whoever kicked waits until the step is done.
                    kicked = true;
                    self.clear_kick();
                }
                Err(end) => {
                    outcome = Err(end);
                    break;
                }
            }
        }
        self.debug.set_step(&self.fd, false)?;
        if kicked {
            self.fd.set_kvm_immediate_exit(1);
        }
        outcome
    }

    /// An int3 that no site of ours stands for.
    fn not_ours(&mut self, physical: Option<Gpa>, mut regs: kvm_regs) -> Result<Flow, RunEnd> {
        let now = physical.and_then(|gpa| self.machine.ram.read_byte(gpa).ok());
        if Int3Owner::of(false, now) == Int3Owner::JustRemoved {
            return Ok(Flow::Run);
        }
        self.machine.counters.guest_int3.fetch_add(1, Ordering::Relaxed);
        match foreign_int3(&self.machine.profile) {
            GiveBack::InjectBreakpoint => self.debug.inject_breakpoint(&self.fd)?,
            GiveBack::QueueException => {
                regs.rip = regs.rip.wrapping_add(1);
                self.registers.set_general(&mut self.fd, &regs)?;
                self.queue_exception(VECTOR_BP as u8, None)?;
            }
        }
        Ok(Flow::Run)
    }

    /// Makes the guest take an exception before its next instruction.
    pub(super) fn queue_exception(&mut self, vector: u8, error: Option<u32>) -> Result<(), RunEnd> {
        let mut events = self.fd.get_vcpu_events().call("KVM_GET_VCPU_EVENTS")?;
        events.exception.injected = 1;
        events.exception.nr = vector;
        events.exception.has_error_code = u8::from(error.is_some());
        events.exception.error_code = error.unwrap_or(0);
        self.fd.set_vcpu_events(&events).call("KVM_SET_VCPU_EVENTS")?;
        Ok(())
    }

    /// One of the caller's hardware breakpoints.
    fn on_breakpoint(&mut self, number: usize, pc: u64) -> Result<Flow, RunEnd> {
        let regs = self.registers.general(&self.fd)?;
        let sregs = self.registers.system(&self.fd)?;
        let user_mode = sregs.cs.selector & 3 == 3;
        let kind = TrapKind::Breakpoint(number as u8);
        let trap = Trap { vcpu: self.index, address: Gva(pc), kind, site: None };
        self.deliver(&trap, &regs, &sregs, user_mode);
        self.past_breakpoint(number, regs, &sregs)
    }

    /// Gets past an instruction under a hardware breakpoint: emulated if it can be, else stepped with the
    /// breakpoint off.
    pub(super) fn past_breakpoint(
        &mut self,
        number: usize,
        mut regs: kvm_regs,
        sregs: &kvm_sregs,
    ) -> Result<Flow, RunEnd> {
        if let Some(instruction) = self.instruction_at(sregs, regs.rip)
            && self.emulate(&instruction, &mut regs, Some(*sregs), None).is_ok()
        {
            self.registers.set_general(&mut self.fd, &regs)?;
            return Ok(Flow::Run);
        }
        let address = self.debug.breakpoint(number);
        self.debug.set_breakpoint(&self.fd, number, None)?;
        let result = self.step();
        self.debug.set_breakpoint(&self.fd, number, address)?;
        result
    }

    /// Decodes the instruction at a linear address as the guest has it.
    pub(super) fn instruction_at(&self, sregs: &kvm_sregs, rip: u64) -> Option<iced_x86::Instruction> {
        let mut code = [0; 15];
        let length = self.machine.read_code(address_space(sregs), Gva(rip), &mut code);
        emulate::decode(code.get(..length)?, rip).ok()
    }
}
