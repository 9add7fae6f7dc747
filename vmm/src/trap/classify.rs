//! The owner of an int3, and the way a foreign int3 is reinjected.
//!
//! The host record alone decides how it is reinjected.

use std::sync::Arc;

use super::Site;
use crate::host::{HostProfile, Int3};

/// The owner of the int3 that a vCPU has hit.
#[derive(Debug)]
pub(crate) enum Int3Owner {
    /// This site.
    Ours(Arc<Site>),
    /// The site was removed after the CPU had fetched it. The vCPU runs on.
    JustRemoved,
    /// The guest.
    Guest,
}

/// The way to reinject a foreign #BP that the host has intercepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reinjection {
    /// KVM_SET_GUEST_DEBUG with KVM_GUESTDBG_INJECT_BP, RIP at the int3.
    InjectBreakpoint,
    /// RIP moves past the int3, and KVM_SET_VCPU_EVENTS queues exception 3.
    QueueException,
}

/// Returns the way that works on this host for an int3 in kernel mode.
pub(crate) fn foreign_int3(profile: &HostProfile) -> Reinjection {
    match profile.int3_kernel {
        Int3::DebugExit => Reinjection::InjectBreakpoint,
        Int3::EmulationFailure | Int3::GuestHandler => Reinjection::QueueException,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_gives_an_int3_back_its_way() {
        for hardware in [HostProfile::hardware_example(), HostProfile::svm_example()] {
            assert_eq!(foreign_int3(&hardware), Reinjection::InjectBreakpoint);
        }
        assert_eq!(
            foreign_int3(&HostProfile::interpreted_example()),
            Reinjection::QueueException
        );
    }
}
