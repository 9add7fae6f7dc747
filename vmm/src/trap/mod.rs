//! Traps: places where a guest stops for the host, however the host's KVM reports them.
//!
//! A [`TrapTable`] holds the int3 sites, keyed by guest-physical byte. Whatever comes out of
//! KVM_RUN (a debug exit, an emulation failure at our byte, an arrival at the guest's own int3
//! entry) is turned into one [`Trap`] by `vcpu`, given to the machine's
//! [`TrapSink`](crate::TrapSink) on the vCPU's own thread, and the displaced instruction is then
//! executed for the guest. An int3 that is not ours goes back to the guest.

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

/// The cause of a vCPU's stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrapKind {
    /// A trap's int3 in guest kernel mode.
    Kernel,
    /// A trap's int3 in guest user mode.
    User,
    /// The hardware breakpoint with this number.
    Breakpoint(u8),
    /// The watchpoint with this number. The instruction before has made the access.
    Watchpoint(u8),
}

/// One stop of one vCPU for the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trap {
    /// The index of the vCPU.
    pub vcpu: usize,
    /// The address of the instruction that the vCPU is about to execute.
    pub address: Gva,
    /// The cause of the stop.
    pub kind: TrapKind,
    /// The site that was hit. `None` unless the cause is an int3.
    pub site: Option<SiteId>,
}
