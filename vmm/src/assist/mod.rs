//! Host assists: support for guests on a KVM that interprets guest kernel mode, and nothing else.
//!
//! They are absent from the path of hardware KVM, because [`needed`] decides from the host record
//! alone. There are three. Instructions that the interpreter lacks are completed
//! (`vcpu::assisted`). SYSCALL from user mode is repaired (`syscall`). The kernel's command line
//! tells it to avoid what is slow or missing ([`command_line`]). Completing works on any KVM that
//! reports an emulation failure.

pub mod command_line;
pub(crate) mod syscall;

use crate::host::HostProfile;

/// The assists that a host needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needed {
    /// Whether SYSCALL arrives at the wrong privilege level and is repaired.
    pub syscall_repair: bool,
    /// Whether words are added to a kernel's command line.
    pub command_line: bool,
}

/// Decides from the host record.
pub fn needed(profile: &HostProfile) -> Needed {
    Needed {
        syscall_repair: !profile.user_syscall,
        command_line: profile.kernel_mode.is_interpreted(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_needs_no_assist() {
        let none = Needed {
            syscall_repair: false,
            command_line: false,
        };
        assert_eq!(needed(&HostProfile::hardware_example()), none);
        assert_eq!(needed(&HostProfile::svm_example()), none);
        let all = Needed {
            syscall_repair: true,
            command_line: true,
        };
        assert_eq!(needed(&HostProfile::interpreted_example()), all);
    }
}
