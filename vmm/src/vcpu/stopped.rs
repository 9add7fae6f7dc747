//! A vCPU that is stopped at a trap, as the machine's [`TrapSink`] sees it.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::{CpuState, GeneralRegisters};
use introspect::{CpuRegisters, Gpa, Gva};
use kvm_bindings::{kvm_regs, kvm_sregs};

use super::system::System;
use super::{VcpuRegisters, address_space, general_registers};
use crate::machine::Paused;
use crate::machine::control::Control;
use crate::memory::GuestRam;
use crate::trap::{SiteId, Trap, TrapTable};
use crate::walks::HitMemory;

/// Handles traps, on the vCPU's own thread. The guest waits for it, so it must not block, nor
/// allocate on the usual path.
pub trait TrapSink: Send + Sync {
    /// Handles a hit. The vCPU of `trap` is before the trapped instruction, with its registers in
    /// `cpu`.
    fn trap(&self, trap: &Trap, cpu: &StoppedVcpu<'_>);

    /// Checks whether a hit at this site may be [held](StoppedVcpu::hold_here). Such a hit is
    /// handled before its instruction is executed, on every host.
    fn may_hold(&self, site: SiteId) -> bool {
        let _ = site;
        false
    }

    /// Handles a site that was given up: a program hit it in a state in which this host cannot
    /// execute the displaced instruction. That hit was reported, later ones are not.
    fn given_up(&self, site: SiteId) {
        let _ = site;
    }

    /// Handles a vCPU that [`crate::machine::Handle::sample`] has made leave the guest at any
    /// instruction, or while halted.
    fn sample(&self, vcpu: usize, mask: u64, cpu: &StoppedVcpu<'_>) {
        let _ = (vcpu, mask, cpu);
    }
}

/// The sink's wish for a vCPU at a trap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Hold {
    /// It executes the trapped instruction.
    #[default]
    No,
    /// It parks before the instruction, which it executes when the machine goes on.
    Here,
    /// It stays before the instruction and runs into the trap again.
    Retry,
}

/// One vCPU that is stopped at a trap.
pub struct StoppedVcpu<'a> {
    pub(crate) regs: &'a kvm_regs,
    pub(crate) user_mode: bool,
    pub(crate) system: &'a System<'a>,
    pub(crate) memory: HitMemory<'a>,
    pub(crate) traps: &'a TrapTable,
    pub(crate) control: &'a Arc<Control>,
    /// The host's time stamp counter when the vCPU left the guest.
    pub(crate) exited: u64,
    /// The sink's wish.
    pub(crate) hold: Cell<Hold>,
}

impl fmt::Debug for StoppedVcpu<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoppedVcpu")
            .field("regs", &self.regs)
            .field("user_mode", &self.user_mode)
            .finish_non_exhaustive()
    }
}

impl StoppedVcpu<'_> {
    /// General registers, RIP and RFLAGS at the trapped instruction.
    pub fn regs(&self) -> &kvm_regs {
        self.regs
    }

    /// The same as plain values.
    pub fn general(&self) -> &GeneralRegisters {
        general_registers(self.regs)
    }

    /// Guest memory.
    pub fn ram(&self) -> &GuestRam {
        self.memory.guest_ram()
    }

    /// Guest memory, through the page walks that this vCPU's hits have kept.
    pub fn memory(&self) -> &HitMemory<'_> {
        &self.memory
    }

    /// The page tables in use.
    pub fn address_space(&self) -> AddressSpace {
        address_space(self.sregs())
    }

    /// Segments, control registers, descriptor tables: KVM is asked for them here, at the first
    /// time.
    pub(crate) fn sregs(&self) -> &kvm_sregs {
        self.system.get()
    }

    /// Base of the GS segment as it is: the program's in user mode, and in the first instructions
    /// of an entry from it.
    pub fn gs_base(&self) -> Gva {
        Gva(self.sregs().gs.base)
    }

    /// The address of the last page fault (CR2).
    pub fn fault_address(&self) -> Gva {
        Gva(self.sregs().cr2)
    }

    /// General registers, segments and control registers as introspection takes them. The GS base
    /// that is swapped out is given as the one in use, which is right in kernel mode.
    pub fn cpu_state(&self) -> CpuState {
        let registers = VcpuRegisters {
            regs: *self.regs,
            sregs: *self.sregs(),
        };
        registers.cpu_state(self.sregs().gs.base)
    }

    /// Returns the bytes at an address without any trap, as many as the longest instruction has;
    /// fewer if a page is missing.
    pub fn code(&self, address: Gva) -> Vec<u8> {
        self.traps.read_code(address, self.address_space())
    }

    /// Pauses all vCPUs after this hit, until the result is dropped. It is for work on another
    /// thread that must be done before the guest continues. That thread pauses the machine itself
    /// before it reads from it.
    pub fn hold(&self) -> Paused {
        self.control.hold_all()
    }

    /// Pauses all vCPUs until the result is dropped, this one before the trapped instruction.
    ///
    /// The instruction is executed when the machine goes on. That is no second hit, unless other
    /// programs run on this vCPU before. It has no effect on a [sample](TrapSink::sample), whose
    /// vCPU parks where it is.
    pub fn hold_here(&self) -> Paused {
        self.hold.set(Hold::Here);
        self.control.hold_all()
    }

    /// Lets the guest go on without executing the trapped instruction: it runs into the trap again,
    /// which is another hit. It takes interrupts in between, so its scheduler can run other tasks.
    /// It has no effect on a [sample](TrapSink::sample) or a hardware breakpoint.
    pub fn retry(&self) {
        self.hold.set(Hold::Retry);
    }

    /// Returns the machine's sites, to arm another one (a return address) during a hit.
    pub fn traps(&self) -> &TrapTable {
        self.traps
    }

    /// Returns the host's time stamp counter when KVM_RUN returned with this trap or for this
    /// sample. What has passed since is the time of the hit, but for the exit and the entry
    /// themselves.
    pub fn exited(&self) -> u64 {
        self.exited
    }

    /// Returns the current value of the guest's time stamp counter.
    pub fn tsc(&self) -> u64 {
        crate::clock::host_tsc()
    }
}

impl CpuRegisters for StoppedVcpu<'_> {
    fn page_table_root(&self) -> Gpa {
        address_space(self.sregs()).root
    }

    fn five_level_paging(&self) -> bool {
        address_space(self.sregs()).levels == 5
    }

    fn kernel_gs_base(&self) -> Gva {
        Gva(self.sregs().gs.base)
    }

    fn instruction_pointer(&self) -> Gva {
        Gva(self.regs.rip)
    }

    fn in_user_mode(&self) -> bool {
        self.user_mode
    }
}
