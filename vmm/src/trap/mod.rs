//! Traps: places where a guest stops for the host, whatever the host's KVM reports them as.
//!
//! A [`TrapTable`] holds the int3 sites, keyed by guest-physical byte. Whatever comes out of KVM_RUN (a debug
//! exit, an emulation failure at our byte, an arrival at the guest's own int3 entry) is turned into one
//! [`Trap`] by `vcpu`, given to the machine's [`TrapSink`](crate::TrapSink) on the vCPU's own thread, and the displaced
//! instruction is then executed for the guest. An int3 that is not ours goes back to the guest.

mod arm_error;
mod classify;
mod return_target;
mod site;
mod table;

use introspect::Gva;

pub use arm_error::ArmError;
pub(crate) use classify::{Int3Owner, Reinjection, foreign_int3};
pub(crate) use site::{Displaced, Purpose, Site};
pub use site::{SiteId, same_instruction};
pub(crate) use table::SeenSites;
pub use table::{Choice, SiteStats, Suspended, SuspendedUser, TrapTable};

pub use crate::x86_64::INT3;

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
