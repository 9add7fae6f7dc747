//! The end of a run and its reason.

use super::PanicReport;
use crate::vcpu::VcpuRegisters;

/// The reason for the end of a run.
#[derive(Debug, Clone)]
pub enum RunEnd {
    /// The guest reset the machine. A reboot does so, and so does the end of a machine without
    /// ACPI.
    Reset {
        /// The device that reset it, if known.
        cause: Option<String>,
    },
    /// The guest asked to be powered off.
    PoweredOff,
    /// Every vCPU is halted with interrupts off: `halt`, or a power-off without ACPI.
    Halted,
    /// The run was ended from outside.
    Stopped,
    /// The guest kernel panicked.
    Panic(PanicReport),
    /// A vCPU took an exception it could not deliver.
    TripleFault {
        /// The index of the vCPU.
        vcpu: usize,
        /// The registers of the vCPU. `None` if the host resets them before it reports the fault.
        registers: Option<Box<VcpuRegisters>>,
    },
    /// The host's KVM failed.
    Host {
        /// The failure.
        message: String,
    },
}

impl RunEnd {
    /// Checks whether the guest ended by its own request or ours.
    pub fn is_orderly(&self) -> bool {
        matches!(
            self,
            Self::Reset { .. } | Self::PoweredOff | Self::Halted | Self::Stopped
        )
    }
}

impl std::fmt::Display for RunEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Reset { cause: Some(cause) } => write!(f, "guest reset by {cause}"),
            Self::Reset { cause: None } => write!(f, "guest reset"),
            Self::PoweredOff => write!(f, "guest powered off"),
            Self::Halted => write!(f, "guest halted: every vCPU waits with interrupts off"),
            Self::Stopped => write!(f, "stopped"),
            Self::Panic(PanicReport { vcpu: None, .. }) => write!(f, "guest kernel panic"),
            Self::Panic(PanicReport {
                vcpu: Some(vcpu), ..
            }) => write!(f, "guest kernel panic on vCPU {vcpu}"),
            Self::TripleFault { vcpu, registers } => {
                write!(f, "triple fault on vCPU {vcpu}")?;
                match registers {
                    Some(_) => Ok(()),
                    None => write!(
                        f,
                        "; its place is not known, since this host's KVM resets the vCPU first"
                    ),
                }
            }
            Self::Host { message } => write!(f, "{message}"),
        }
    }
}
