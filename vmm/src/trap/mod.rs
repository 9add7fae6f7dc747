//! Traps: places where a guest stops for the host, whatever the host's KVM reports them as.
//!
//! A [`TrapTable`] holds the int3 sites, keyed by guest-physical byte. Whatever comes out of KVM_RUN (a debug
//! exit, an emulation failure at our byte, an arrival at the guest's own int3 entry) is turned into one
//! [`Trap`] by `vcpu`, given to the machine's [`TrapSink`] on the vCPU's own thread, and the displaced
//! instruction is then executed for the guest. An int3 that is not ours goes back to the guest.

mod arm_error;
mod classify;
mod return_target;
mod site;
mod table;

use std::sync::Arc;

use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::{CpuState, GeneralRegisters};
use introspect::{CpuRegisters, Gpa, Gva};
use kvm_bindings::{kvm_regs, kvm_sregs};

pub use arm_error::ArmError;
pub(crate) use classify::{Int3Owner, Reinjection, foreign_int3};
pub(crate) use site::{Displaced, Purpose, Site};
pub use site::{SiteId, same_instruction};
pub(crate) use table::SeenSites;
pub use table::{Choice, SiteStats, Suspended, SuspendedUser, TrapTable};

use crate::machine::Paused;
use crate::machine::control::Control;
use crate::memory::GuestRam;
use crate::vcpu::system::System;
use crate::vcpu::{VcpuRegisters, address_space, general_registers};
use crate::walks::HitMemory;

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
    fn trap(&self, trap: &Trap, cpu: &StoppedVcpu<'_>);

    /// A site stands no more: a program came there in a state in which this host cannot execute the displaced
    /// instruction. That hit was reported, later ones will not be.
    fn given_up(&self, site: SiteId) {
        let _ = site;
    }

    /// The vCPU was made to come out of the guest, wherever it was, by [`crate::machine::Handle::sample`]; a halted one too.
    fn sample(&self, vcpu: usize, mask: u64, cpu: &StoppedVcpu<'_>) {
        let _ = (vcpu, mask, cpu);
    }
}

/// One vCPU that stands still at a trap.
pub struct StoppedVcpu<'a> {
    pub(crate) regs: &'a kvm_regs,
    pub(crate) user_mode: bool,
    pub(crate) system: &'a System<'a>,
    pub(crate) memory: HitMemory<'a>,
    pub(crate) traps: &'a TrapTable,
    pub(crate) control: &'a Arc<Control>,
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

    /// Segments, control registers, descriptor tables: KVM is asked for them here, at the first time.
    pub(crate) fn sregs(&self) -> &kvm_sregs {
        self.system.get()
    }

    /// Base of the GS segment as it is: the program's in user mode, and in the first instructions of an entry from it.
    pub fn gs_base(&self) -> Gva {
        Gva(self.sregs().gs.base)
    }

    /// The address of the last page fault (CR2).
    pub fn fault_address(&self) -> Gva {
        Gva(self.sregs().cr2)
    }

    /// General registers, segments and control registers as introspection takes them. The GS base that is swapped out is given as
    /// the one in use, which is right in kernel mode.
    pub fn cpu_state(&self) -> CpuState {
        let registers = VcpuRegisters {
            regs: *self.regs,
            sregs: *self.sregs(),
        };
        registers.cpu_state(self.sregs().gs.base)
    }

    /// What stands at an address without any site, as many bytes as the longest instruction has; fewer where a page is missing.
    pub fn code(&self, address: Gva) -> Vec<u8> {
        self.traps.read_code(address, self.address_space())
    }

    /// Makes all vCPUs stand still after this, until the result is dropped: for somebody on another thread who has to do what
    /// must be done before the guest goes on. That one pauses the machine itself before looking at it.
    pub fn hold(&self) -> Paused {
        self.control.hold_all()
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
