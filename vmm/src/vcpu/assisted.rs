//! Exits of a KVM that interprets guest kernel mode, and user traps as they arrive there.
//!
//! A hardware KVM may report an emulation failure too, and is helped in the same way.
//!
//! See [`crate::assist`] for the handling of each.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use iced_x86::Mnemonic;
use introspect::Gva;
use introspect::x86_64::{paging, read_virtual};
use kvm_bindings::{kvm_regs, kvm_sregs};

use super::environment::{address_space, in_user_mode};
use super::hit::without_resume;
use super::run::Flow;
use super::stopped::Hold;
use super::{Vcpu, debug};
use crate::assist::syscall;
use crate::exit::EmulationFailure;
use crate::machine::RunEnd;
use crate::trap::{Displaced, INT3, Int3Owner, Site, TrapKind};
use crate::vm::{KvmError, NameCall};
use crate::x86_64::emulate::{self, EmulateError, vector};
use crate::x86_64::exception_frame::ExceptionFrame;
use crate::x86_64::{msr, segments};

const VECTOR_PF: u8 = 14;
/// The error code bits of #PF.
const PF_WRITE: u32 = 1 << 1;
const PF_USER: u32 = 1 << 2;
const PF_PRESENT: u32 = 1;
/// The size in bytes of the error code that #PF pushes below its frame.
const ERROR_CODE: u64 = 8;
const IDT_GATE: u64 = 16;

impl Vcpu {
    /// Handles an instruction that KVM could not emulate: an int3, ours or foreign, or one to
    /// complete.
    pub(super) fn on_emulation_failure(
        &mut self,
        failure: &EmulationFailure,
    ) -> Result<Flow, RunEnd> {
        if failure.bytes().first() == Some(&INT3) {
            return self.on_int3_not_emulated();
        }
        let regs = self.registers.general(&self.fd)?;
        let sregs = self.registers.system(&self.fd)?;
        let read;
        let code = match failure.bytes() {
            [] => {
                let traps = &self.machine.traps;
                read = traps.read_code(Gva(regs.rip), address_space(&sregs));
                &*read
            }
            bytes => bytes,
        };
        if code.first() == Some(&INT3) {
            return self.on_int3_not_emulated();
        }
        self.complete(code, regs, &sregs)
    }

    /// Handles an int3 that KVM tried to emulate.
    ///
    /// An interpreting KVM reports every int3 so. A KVM that reports int3s by debug exits does so
    /// only if the guest's own #BP cannot be delivered. Its descriptor table lies in no memory: a
    /// CPU would shut down, and KVM on AMD retries without end.
    fn on_int3_not_emulated(&mut self) -> Result<Flow, RunEnd> {
        if !self.debug.reports_int3() {
            return self.on_failed_int3();
        }
        Err(RunEnd::TripleFault {
            vcpu: self.index,
            registers: Some(Box::new(self.snapshot_registers()?)),
        })
    }

    /// Executes the instruction in `code` for the guest.
    fn complete(
        &mut self,
        code: &[u8],
        mut regs: kvm_regs,
        sregs: &kvm_sregs,
    ) -> Result<Flow, RunEnd> {
        let instruction = match emulate::decode(code, regs.rip) {
            Ok(instruction) => instruction,
            Err(error) => return self.refuse(Mnemonic::INVALID, &error),
        };
        match self.emulate(&instruction, &mut regs, Some(sregs), None, false) {
            Ok(()) => {
                self.machine.completed.count(instruction.mnemonic());
                self.registers.set_general(&mut self.fd, &regs)?;
            }
            Err(EmulateError::Fault(fault)) => {
                self.page_fault(fault.address, fault.write, in_user_mode(sregs), *sregs)?;
            }
            Err(EmulateError::Exception { vector, .. }) => self.raise(vector)?,
            Err(EmulateError::Contended { .. }) => {}
            Err(EmulateError::State(error)) => return Err(error.into()),
            Err(error) => return self.refuse(instruction.mnemonic(), &error),
        }
        Ok(Flow::Run)
    }

    /// Makes the guest take #UD, as on a CPU that does not know the instruction. Neither KVM nor
    /// the emulator executes it.
    fn refuse(&mut self, mnemonic: Mnemonic, why: &dyn Error) -> Result<Flow, RunEnd> {
        if self.machine.refused.count(mnemonic) == 1 {
            log::warn!(
                "vCPU {}: the guest gets #UD for an instruction that neither this host's KVM nor exotrace executes: {why}",
                self.index
            );
        }
        self.raise(vector::INVALID_OPCODE)?;
        Ok(Flow::Run)
    }

    /// Makes the guest take the exception that an emulated instruction raises.
    fn raise(&mut self, vector: u8) -> Result<(), RunEnd> {
        let has_error_code = matches!(vector, vector::STACK_FAULT | vector::GENERAL_PROTECTION);
        self.queue_exception(vector, has_error_code.then_some(0))
    }

    /// Makes the guest take the #PF that the completed instruction would have raised.
    fn page_fault(
        &mut self,
        address: u64,
        write: bool,
        user: bool,
        mut sregs: kvm_sregs,
    ) -> Result<(), RunEnd> {
        let present =
            paging::translate(&self.machine.ram, address_space(&sregs), Gva(address)).is_ok();
        let bit = |on: bool, bit: u32| if on { bit } else { 0 };
        sregs.cr2 = address;
        self.registers.set_system(&mut self.fd, &sregs)?;
        self.queue_exception(
            VECTOR_PF,
            Some(bit(write, PF_WRITE) | bit(user, PF_USER) | bit(present, PF_PRESENT)),
        )
    }

    /// Handles a filtered WRMSR. Writes to the SYSCALL MSRs are watched.
    pub(super) fn on_write_msr(&mut self, index: u32, value: u64) -> Result<Flow, RunEnd> {
        let msrs = msr::list([(index, value)])?;
        if self.fd.set_msrs(&msrs).call("KVM_SET_MSRS")? == 0 {
            // The register does not accept the value. The guest takes the #GP that its WRMSR would
            // have raised.
            self.fd.get_kvm_run().__bindgen_anon_1.msr.error = 1;
            return Ok(Flow::Run);
        }
        if index == msr::LSTAR && value != 0 {
            self.watch_syscalls()?;
        } else {
            // Kernels write STAR and the mask in any order around LSTAR.
            self.syscall = self.syscall_msrs()?;
        }
        Ok(Flow::Run)
    }

    /// Reads the SYSCALL MSRs and sets the watch on the guest's page-fault entry.
    ///
    /// If the guest has no such entry yet, its next exits try again. Until then this host cannot
    /// repair its system calls.
    pub(crate) fn watch_syscalls(&mut self) -> Result<(), RunEnd> {
        // Uses the ioctl: a vCPU that was just loaded has had no exit yet.
        let sregs = self.fd.get_sregs().call("KVM_GET_SREGS")?;
        self.syscall = self.syscall_msrs()?;
        let entry = self.gate(&sregs, VECTOR_PF);
        if let Some(entry) = entry {
            self.debug
                .set_breakpoint(&self.fd, debug::PAGE_FAULT_ENTRY, Some(entry))?;
        }
        self.syscalls_unwatched = entry.is_none();
        Ok(())
    }

    fn syscall_msrs(&self) -> Result<syscall::SyscallMsrs, KvmError> {
        let wanted = [msr::STAR, msr::LSTAR, msr::SYSCALL_MASK];
        let mut list = msr::list(wanted.map(|index| (index, 0)))?;
        self.fd.get_msrs(&mut list).call("KVM_GET_MSRS")?;
        let value = |i: usize| list.as_slice().get(i).map_or(0, |e| e.data);
        Ok(syscall::SyscallMsrs {
            star: value(0),
            lstar: value(1),
            mask: value(2),
        })
    }

    /// Returns the handler address of an interrupt gate.
    pub(crate) fn gate(&self, sregs: &kvm_sregs, vector: u8) -> Option<u64> {
        let mut gate = [0; IDT_GATE as usize];
        // The guest chooses the table. One that wraps around is none.
        let at = Gva(sregs.idt.base.checked_add(u64::from(vector) * IDT_GATE)?);
        read_virtual(&self.machine.ram, address_space(sregs), at, &mut gate).ok()?;
        let low = u16::from_le_bytes([gate[0], gate[1]]);
        let middle = u16::from_le_bytes([gate[6], gate[7]]);
        let high = u32::from_le_bytes([gate[8], gate[9], gate[10], gate[11]]);
        let present = gate[5] & 0x80 != 0;
        present.then_some(u64::from(low) | u64::from(middle) << 16 | u64::from(high) << 32)
    }

    /// Handles the guest's arrival at its page-fault entry: a SYSCALL to repair, or a fault of its
    /// own.
    pub(super) fn on_page_fault_entry(&mut self) -> Result<Flow, RunEnd> {
        let mut regs = self.registers.general(&self.fd)?;
        let mut sregs = self.registers.system(&self.fd)?;
        let space = address_space(&sregs);
        if let Some(frame) = self.exception_frame(space, regs.rsp.wrapping_add(ERROR_CODE))
            && syscall::is_syscall(&frame, &self.syscall, &regs)
            && self.is_after_syscall(space, regs.rcx)
        {
            syscall::repair(&frame, &self.syscall, &mut regs, &mut sregs);
            self.return_to(&regs, &sregs)?;
            self.machine
                .counters
                .syscalls_repaired
                .fetch_add(1, Ordering::Relaxed);
            return Ok(Flow::Run);
        }
        self.past_breakpoint(regs, &sregs)
    }

    /// Reads the frame that an exception has pushed at `address` of the guest's stack.
    fn exception_frame(&self, space: paging::AddressSpace, address: u64) -> Option<ExceptionFrame> {
        let mut bytes = [0; ExceptionFrame::SIZE];
        read_virtual(&self.machine.ram, space, Gva(address), &mut bytes).ok()?;
        Some(ExceptionFrame::from_bytes(&bytes))
    }

    /// Checks whether a SYSCALL instruction ends at `next`.
    fn is_after_syscall(&self, space: paging::AddressSpace, next: u64) -> bool {
        const SYSCALL: [u8; 2] = [0x0f, 0x05];
        let mut code = [0; 2];
        let read = read_virtual(
            &self.machine.ram,
            space,
            Gva(next.wrapping_sub(2)),
            &mut code,
        );
        read.is_ok() && code == SYSCALL
    }

    /// Handles the guest's arrival at its own #BP entry: one of our user traps, or a foreign int3.
    pub(super) fn on_breakpoint_entry(
        &mut self,
        entry: &Arc<Site>,
        regs: kvm_regs,
    ) -> Result<Flow, RunEnd> {
        let sregs = self.registers.system(&self.fd)?;
        let space = address_space(&sregs);
        let frame = self
            .exception_frame(space, regs.rsp)
            .filter(|frame| frame.cs & segments::RPL_MASK == 3);
        let Some(frame) = frame else {
            return self.pass(entry, regs, Some(&sregs), 0);
        };
        let rip = frame.rip.wrapping_sub(1);
        let Some(at) = self.physical(&sregs, rip) else {
            return self.pass(entry, regs, Some(&sregs), 0);
        };
        // The user's state at the int3.
        let mut user = kvm_regs {
            rip,
            rflags: frame.rflags,
            rsp: frame.rsp,
            ..regs
        };
        let mut user_sregs = sregs;
        user_sregs.cs = segments::code64(frame.cs as u16);
        user_sregs.ss = segments::data(frame.ss as u16);
        let Some(site) = self.machine.traps.user_site(at) else {
            return match self.machine.traps.owner_of(at) {
                Int3Owner::Guest => self.pass(entry, regs, Some(&sregs), 0),
                Int3Owner::Ours(site) if !site.is_user() => self.pass(entry, regs, Some(&sregs), 0),
                // The site was removed, or armed, after the program reached the byte. It executes
                // what is there now.
                Int3Owner::JustRemoved | Int3Owner::Ours(_) => {
                    self.return_to(&user, &user_sregs)?;
                    Ok(Flow::Run)
                }
            };
        };
        let before = user;
        let mut again = self.is_met_again(&site, &before);
        if site.displaced == Displaced::Breakpoint {
            // The guest has its own int3 there and has entered its handler already.
            let trap = self.trap(&site, TrapKind::User, rip);
            self.deliver(&trap, &before, &user_sregs, true);
            return self.pass(entry, regs, Some(&sregs), 0);
        }
        if !again && self.may_hold(&site) {
            let trap = self.trap(&site, TrapKind::User, rip);
            match self.deliver(&trap, &before, &user_sregs, true) {
                Hold::No => again = true,
                hold => {
                    self.return_to(&before, &user_sregs)?;
                    return Ok(self.hold_at(site, before, hold));
                }
            }
        }
        let Some(now) = self.as_it_stands(&site) else {
            self.deliver_once(&site, &before, &user_sregs, again);
            self.return_to(&before, &user_sregs)?;
            return Ok(Flow::Run);
        };
        let site = now;
        match self.emulate(
            &site.instruction_at(rip),
            &mut user,
            Some(&user_sregs),
            Some(3),
            site.behind_sti,
        ) {
            Ok(()) => {
                self.deliver_once(&site, &before, &user_sregs, again);
                self.return_to(&user, &user_sregs)?;
            }
            Err(EmulateError::Fault(fault)) => {
                // The guest maps the page and returns to the int3. This is no hit yet.
                self.again = again.then(|| (site, without_resume(before)));
                self.return_to(&before, &user_sregs)?;
                self.page_fault(fault.address, fault.write, true, user_sregs)?;
            }
            Err(EmulateError::Exception { vector, .. }) => {
                // Few programs return from it.
                self.deliver_once(&site, &before, &user_sregs, again);
                self.again = Some((site, without_resume(before)));
                self.return_to(&before, &user_sregs)?;
                self.raise(vector)?;
            }
            Err(EmulateError::Contended { .. }) => {
                self.again = again.then(|| (site, without_resume(before)));
                self.return_to(&before, &user_sregs)?;
            }
            Err(EmulateError::State(error)) => return Err(error.into()),
            Err(error) => {
                self.deliver_once(&site, &before, &user_sregs, again);
                self.give_up(&site, &error);
                self.return_to(&before, &user_sregs)?;
            }
        }
        Ok(Flow::Run)
    }

    /// Delivers the hit of a program's site to the sink, unless it was delivered before (`again`).
    fn deliver_once(&self, site: &Site, regs: &kvm_regs, sregs: &kvm_sregs, again: bool) {
        if !again {
            let trap = self.trap(site, TrapKind::User, regs.rip);
            self.deliver(&trap, regs, sregs, true);
        }
    }

    /// Checks whether a hit of the site may hold the vCPU before its instruction.
    fn may_hold(&self, site: &Site) -> bool {
        let sink = self.machine.sink.load();
        sink.as_deref().is_some_and(|sink| sink.may_hold(site.id))
    }

    /// Gives up a site in a program's text. The program goes on with the original instruction.
    pub(super) fn give_up(&self, site: &Site, why: &dyn Error) {
        if !self.machine.traps.give_up(site.id) {
            return;
        }
        log::debug!("the trap at {} of memory is given up: {why}", site.id.0);
        if let Some(sink) = self.machine.sink.load().as_deref() {
            sink.given_up(site.id);
        }
    }

    /// Sets the registers with which the vCPU goes on.
    fn return_to(&mut self, regs: &kvm_regs, sregs: &kvm_sregs) -> Result<(), RunEnd> {
        self.registers.set_system(&mut self.fd, sregs)?;
        self.registers.set_general(&mut self.fd, regs)?;
        Ok(())
    }
}
