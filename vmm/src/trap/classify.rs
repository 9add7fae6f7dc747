//! Decisions about an int3, taken from the host's record alone: whose it is, and how to give it back.

use crate::host::{HostProfile, Int3};
use super::INT3;

/// Whose int3 a vCPU has met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Int3Owner {
    /// A site of ours stands there.
    Ours,
    /// The site was removed after the CPU had fetched it: run on.
    JustRemoved,
    /// The guest's own.
    Guest,
}

impl Int3Owner {
    /// From whether the table knows the address and what stands in memory now.
    pub(crate) fn of(known: bool, byte_now: Option<u8>) -> Self {
        match (known, byte_now) {
            (true, _) => Self::Ours,
            (false, Some(INT3) | None) => Self::Guest,
            (false, Some(_)) => Self::JustRemoved,
        }
    }
}

/// How the guest gets a #BP of its own that the host has intercepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GiveBack {
    /// KVM_SET_GUEST_DEBUG with KVM_GUESTDBG_INJECT_BP, RIP at the int3.
    InjectBreakpoint,
    /// Move RIP past the int3 and queue exception 3 by KVM_SET_VCPU_EVENTS.
    QueueException,
}

/// The way that works on this host for int3 in kernel mode.
pub(crate) fn foreign_int3(profile: &HostProfile) -> GiveBack {
    match profile.int3_kernel {
        Int3::DebugExit => GiveBack::InjectBreakpoint,
        Int3::EmulationFailure | Int3::GuestHandler => GiveBack::QueueException,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_gives_an_int3_back_its_way() {
        assert_eq!(foreign_int3(&HostProfile::hardware_example()), GiveBack::InjectBreakpoint);
        assert_eq!(foreign_int3(&HostProfile::interpreted_example()), GiveBack::QueueException);
    }

    #[test]
    fn an_int3_is_ours_only_while_the_table_says_so() {
        assert_eq!(Int3Owner::of(true, Some(INT3)), Int3Owner::Ours);
        assert_eq!(Int3Owner::of(false, Some(INT3)), Int3Owner::Guest);
        assert_eq!(Int3Owner::of(false, Some(0x55)), Int3Owner::JustRemoved);
        assert_eq!(Int3Owner::of(false, None), Int3Owner::Guest);
    }
}
