//! One vCPU and its thread.
//!
//! The thread owns the [`Vcpu`], and it alone uses its KVM descriptor. Others reach the vCPU
//! through [`crate::machine::control::Control`], which parks it and hands it jobs.
//!
//! `run` is the loop around KVM_RUN. `quick` handles the usual hit. `hit` turns other exits into
//! traps and gets past the displaced instruction, which `step` does where it cannot be emulated.
//! `watching` reports watchpoints. `assisted` holds the code that only interpreting hosts need.
//! `state` saves and restores.
//!
//! Below them, `exit` and `system` read the data that KVM left in the shared page. `environment` is
//! the emulator's view of the vCPU. `debug` requests breakpoints and steps. `kick` makes the thread
//! leave KVM_RUN.

mod assisted;
#[cfg(feature = "test-utils")]
mod bare;
mod debug;
mod environment;
mod hit;
pub(crate) mod kick;
pub(crate) mod quick;
#[cfg(test)]
pub(crate) mod recorded;
mod run;
pub(crate) mod state;
mod step;
mod stopped;
pub(crate) mod system;
mod watching;

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use arc_swap::cache::Cache;
use introspect::Gva;
use introspect::x86_64::paging::{self, AddressSpace};
use introspect::x86_64::{CpuState, GeneralRegisters};
use kvm_bindings::{
    KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED, kvm_regs,
    kvm_sregs,
};
use kvm_ioctls::VcpuFd;
use std::mem::offset_of;

pub(crate) use environment::{address_space, in_user_mode};
pub use stopped::{StoppedVcpu, TrapSink};

use crate::assist::syscall::SyscallMsrs;
use crate::machine::MachineError;
use crate::machine::shared::Shared;
use crate::memory::PhysicalWriteError;
use crate::trap::{Site, SiteId};
use crate::vm::{KvmError, NameCall};
use crate::x86_64::{msr, rflags};
use debug::GuestDebug;
use quick::Caches;
use system::Registers;

/// One vCPU.
pub(crate) struct Vcpu {
    index: usize,
    fd: VcpuFd,
    registers: Registers,
    debug: GuestDebug,
    /// The guest's SYSCALL MSRs, once it has written LSTAR. Only kept if SYSCALL is repaired.
    syscall: SyscallMsrs,
    /// Whether the guest has written LSTAR but has no page-fault entry to watch yet.
    syscalls_unwatched: bool,
    /// A site whose hit was reported but whose instruction is not done, and the registers with
    /// which the guest returns to it.
    ///
    /// The instruction is a string instruction in part, or has raised an exception, or the sink has
    /// held the vCPU before it.
    again: Option<(Arc<Site>, kvm_regs)>,
    /// The address of a hardware breakpoint before which the sink has held the vCPU.
    breakpoint_held: Option<u64>,
    /// The mask of the watchpoints that the last instruction has met. They are reported before the
    /// next entry.
    watched: u8,
    /// The number of changes of the machine's watchpoints that this vCPU has applied.
    watchpoint_changes: u64,
    /// The host's time stamp counter when KVM_RUN last returned for a trap or a sample.
    exited: u64,
    /// The machine's sink, cached. One load checks whether it is still the same.
    sink: SinkCache,
    caches: Caches,
    machine: Arc<Shared>,
}

/// A cache of the last sink, valid until another one is set.
pub(crate) type SinkCache =
    Cache<Arc<ArcSwapOption<Box<dyn TrapSink>>>, Option<Arc<Box<dyn TrapSink>>>>;

impl Vcpu {
    /// Wraps a new vCPU.
    pub(crate) fn new(
        index: usize,
        mut fd: VcpuFd,
        machine: Arc<Shared>,
    ) -> Result<Self, KvmError> {
        let registers = {
            // On an interpreting host an ioctl costs as much as half an exit, and the registers of
            // an exit next to nothing.
            let always = machine.profile.kernel_mode.is_interpreted();
            Registers::new(&mut fd, machine.profile.sync_regs, always)
        };
        let mut debug = GuestDebug::new(&machine.profile);
        debug.apply(&fd)?;
        Ok(Self {
            index,
            fd,
            registers,
            debug,
            syscall: SyscallMsrs::default(),
            syscalls_unwatched: false,
            again: None,
            breakpoint_held: None,
            watched: 0,
            watchpoint_changes: 0,
            exited: 0,
            sink: Cache::new(machine.sink.clone()),
            caches: Caches::default(),
            machine,
        })
    }

    /// Returns the position among the machine's vCPUs, which is also the APIC id.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Clears a kick whose reason has gone.
    pub(crate) fn clear_kick(&mut self) {
        kick::set_immediate_exit(&mut self.fd, false);
    }

    /// Sets the registers of a vCPU that has not run. `prepare` computes them from the initial
    /// ones.
    pub(crate) fn set_entry(
        &self,
        prepare: impl FnOnce(kvm_sregs) -> Result<(kvm_regs, kvm_sregs), PhysicalWriteError>,
    ) -> Result<(), MachineError> {
        let (regs, sregs) = prepare(self.fd.get_sregs().call("KVM_GET_SREGS")?)?;
        self.fd.set_sregs(&sregs).call("KVM_SET_SREGS")?;
        self.fd.set_regs(&regs).call("KVM_SET_REGS")?;
        Ok(())
    }

    /// Sets or removes a hardware breakpoint.
    pub(crate) fn set_breakpoint(
        &mut self,
        number: usize,
        address: Option<u64>,
    ) -> Result<(), KvmError> {
        self.debug.set_breakpoint(&self.fd, number, address)
    }

    /// Returns the value of an MSR, if KVM knows it.
    pub(crate) fn read_msr(&self, index: u32) -> Option<u64> {
        let mut list = msr::list([(index, 0)]).ok()?;
        (self.fd.get_msrs(&mut list).ok()? == 1).then(|| list.as_slice().first().map(|e| e.data))?
    }

    /// Returns the rate of the guest's time stamp counter in kHz, if KVM reports it.
    pub(crate) fn tsc_khz(&self) -> Option<u32> {
        self.fd.get_tsc_khz().ok().filter(|khz| *khz > 0)
    }

    /// Returns the handler address of a gate in the vCPU's interrupt descriptor table.
    pub(crate) fn interrupt_handler(&self, vector: u8) -> Option<u64> {
        self.gate(&self.fd.get_sregs().ok()?, vector)
    }

    /// Checks whether a #BP may be on its way into the guest's handler at `entry`, or has just
    /// arrived there.
    ///
    /// KVM does not report a queued #BP (KVM_GET_VCPU_EVENTS leaves software exceptions out). A
    /// program at one of the `removed` sites, or a byte behind it, therefore counts as having hit
    /// it.
    pub(crate) fn has_breakpoint_under_way(&self, entry: u64, removed: &BTreeSet<SiteId>) -> bool {
        let (Ok(regs), Ok(sregs)) = (self.fd.get_regs(), self.fd.get_sregs()) else {
            return true;
        };
        let at_site = |address| {
            let found = paging::translate(&self.machine.ram, address_space(&sregs), Gva(address));
            found.is_ok_and(|t| removed.contains(&SiteId(t.gpa)))
        };
        regs.rip == entry || at_site(regs.rip) || at_site(regs.rip.wrapping_sub(1))
    }

    /// Checks whether this vCPU waits for something that cannot come by itself: it is halted with
    /// interrupts off, or was never started.
    pub(crate) fn is_off(&self) -> bool {
        let (Ok(state), Ok(regs)) = (self.fd.get_mp_state(), self.fd.get_regs()) else {
            return false;
        };
        match state.mp_state {
            KVM_MP_STATE_HALTED => regs.rflags & rflags::IF == 0,
            KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED => true,
            _ => false,
        }
    }

    /// Returns the general and system registers of this vCPU, which is parked or at an exit.
    pub(crate) fn snapshot_registers(&self) -> Result<VcpuRegisters, KvmError> {
        Ok(VcpuRegisters {
            regs: self.fd.get_regs().call("KVM_GET_REGS")?,
            sregs: self.fd.get_sregs().call("KVM_GET_SREGS")?,
        })
    }
}

/// The general and system registers of one vCPU.
#[derive(Debug, Clone, Copy)]
pub struct VcpuRegisters {
    /// The general registers, RIP and RFLAGS.
    pub regs: kvm_regs,
    /// The segments, control registers and descriptor tables.
    pub sregs: kvm_sregs,
}

impl VcpuRegisters {
    /// Returns the page tables in use.
    pub fn address_space(&self) -> AddressSpace {
        address_space(&self.sregs)
    }

    /// Checks whether the vCPU is in user mode.
    pub fn in_user_mode(&self) -> bool {
        in_user_mode(&self.sregs)
    }

    /// Returns the registers as plain values. `swapped_gs_base` is IA32_KERNEL_GS_BASE, which is
    /// not among them.
    pub fn cpu_state(&self, swapped_gs_base: u64) -> CpuState {
        let s = &self.sregs;
        CpuState {
            general: *general_registers(&self.regs),
            cs: s.cs.selector,
            gs_base: s.gs.base,
            swapped_gs_base,
            fs_base: s.fs.base,
            idt_base: s.idt.base,
            cr3: s.cr3,
            cr4: s.cr4,
        }
    }
}

/// Returns KVM's general registers as plain values.
pub(crate) fn general_registers(regs: &kvm_regs) -> &GeneralRegisters {
    // A change of one structure without the other does not build.
    macro_rules! alike {
        ($($name:ident),*) => {
            $(const { assert!(offset_of!(kvm_regs, $name) == offset_of!(GeneralRegisters, $name)) };)*
        };
    }
    alike!(
        rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags
    );
    const { assert!(size_of::<kvm_regs>() == size_of::<GeneralRegisters>()) };
    let registers: *const kvm_regs = regs;
    // SAFETY: both are `repr(C)` and made of the same `u64`s at the same offsets, which the
    // assertions above ensure. The result borrows `regs`.
    unsafe { &*registers.cast() }
}

impl std::fmt::Display for VcpuRegisters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let r = &self.regs;
        let s = &self.sregs;
        writeln!(
            f,
            "rip {:016x} rflags {:08x} cs {:04x} ss {:04x}",
            r.rip, r.rflags, s.cs.selector, s.ss.selector
        )?;
        writeln!(
            f,
            "rax {:016x} rbx {:016x} rcx {:016x} rdx {:016x}",
            r.rax, r.rbx, r.rcx, r.rdx
        )?;
        writeln!(
            f,
            "rsi {:016x} rdi {:016x} rbp {:016x} rsp {:016x}",
            r.rsi, r.rdi, r.rbp, r.rsp
        )?;
        writeln!(
            f,
            "r8  {:016x} r9  {:016x} r10 {:016x} r11 {:016x}",
            r.r8, r.r9, r.r10, r.r11
        )?;
        writeln!(
            f,
            "r12 {:016x} r13 {:016x} r14 {:016x} r15 {:016x}",
            r.r12, r.r13, r.r14, r.r15
        )?;
        write!(
            f,
            "cr0 {:08x} cr2 {:016x} cr3 {:012x} cr4 {:06x} efer {:04x} gs {:016x}",
            s.cr0, s.cr2, s.cr3, s.cr4, s.efer, s.gs.base
        )
    }
}
