//! Traps: places where a guest stops for the host, whatever the host's KVM reports them as.
//!
//! A [`TrapTable`] holds the int3 sites, keyed by guest-physical byte. Whatever comes out of KVM_RUN (a debug
//! exit, an emulation failure at our byte, an arrival at the guest's own int3 entry) is turned into one
//! [`Trap`] by `vcpu`, given to the machine's [`TrapSink`] on the vCPU's own thread, and the displaced
//! instruction is then executed for the guest. An int3 that is not ours goes back to the guest.

mod classify;
mod table;

use introspect::x86_64::GeneralRegisters;
use introspect::{CpuRegisters, Gpa, Gva};
use kvm_bindings::{kvm_regs, kvm_sregs};

pub(crate) use classify::{GiveBack, Int3Owner, foreign_int3};
pub use table::{ArmError, SiteId, TrapTable};
pub(crate) use table::{Displaced, Purpose, Site};

use crate::memory::GuestRam;
use crate::vcpu::{address_space, general_registers};

/// The trap instruction of x86.
pub const INT3: u8 = 0xcc;

/// What stopped a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrapKind {
    /// An int3 of ours, in guest kernel mode.
    Kernel,
    /// An int3 of ours, in guest user mode.
    User,
    /// The hardware breakpoint with this number.
    Breakpoint(u8),
}

/// One stop of one vCPU for the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trap {
    /// Index of the vCPU.
    pub vcpu: usize,
    /// Address of the instruction that it is about to execute.
    pub address: Gva,
    /// Why.
    pub kind: TrapKind,
    /// The site that was hit, for int3 traps.
    pub site: Option<SiteId>,
}

/// Takes traps, on the vCPU's own thread. Whatever it does, the guest waits for: no blocking, no allocation
/// on the usual path.
pub trait TrapSink: Send + Sync {
    /// The vCPU of `trap` stands before the trapped instruction, with its registers in `cpu`.
    fn trap(&self, trap: &Trap, cpu: &StoppedCpu<'_>);
}

/// One vCPU that stands still at a trap.
pub struct StoppedCpu<'a> {
    pub(crate) regs: &'a kvm_regs,
    pub(crate) user_mode: bool,
    pub(crate) sregs: &'a kvm_sregs,
    pub(crate) ram: &'a GuestRam,
    pub(crate) traps: &'a TrapTable,
}

impl StoppedCpu<'_> {
    /// General registers, RIP and RFLAGS at the trapped instruction.
    pub fn regs(&self) -> &kvm_regs {
        self.regs
    }

    /// The same as plain values.
    pub fn general(&self) -> GeneralRegisters {
        general_registers(self.regs)
    }

    /// Guest memory.
    pub fn ram(&self) -> &GuestRam {
        self.ram
    }

    /// The machine's sites, to arm another one (a return address) from here.
    pub fn traps(&self) -> &TrapTable {
        self.traps
    }

    /// The guest's time stamp counter now.
    pub fn tsc(&self) -> u64 {
        crate::clock::host_tsc()
    }
}

impl CpuRegisters for StoppedCpu<'_> {
    fn page_table_root(&self) -> Gpa {
        address_space(self.sregs).root
    }

    fn five_level_paging(&self) -> bool {
        address_space(self.sregs).levels == 5
    }

    fn kernel_gs_base(&self) -> Gva {
        Gva(self.sregs.gs.base)
    }

    fn instruction_pointer(&self) -> Gva {
        Gva(self.regs.rip)
    }

    fn in_user_mode(&self) -> bool {
        self.user_mode
    }
}
