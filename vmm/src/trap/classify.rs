//! Whose an int3 is, and how the guest gets its own back: the latter decided from the host's record alone.

use std::sync::Arc;

use super::Site;
use crate::host::{HostProfile, Int3};

/// Whose int3 a vCPU has met.
#[derive(Debug)]
pub(crate) enum Int3Owner {
    /// This site's.
    Ours(Arc<Site>),
    /// The site was removed after the CPU had fetched it: run on.
    JustRemoved,
    /// The guest's own.
    Guest,
}

/// How the guest gets a #BP of its own that the host has intercepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reinjection {
    /// KVM_SET_GUEST_DEBUG with KVM_GUESTDBG_INJECT_BP, RIP at the int3.
    InjectBreakpoint,
    /// Move RIP past the int3 and queue exception 3 by KVM_SET_VCPU_EVENTS.
    QueueException,
}

/// The way that works on this host for int3 in kernel mode.
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
