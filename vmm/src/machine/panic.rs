//! Detection and reporting of a panic of the guest's kernel.
//!
//! A trap at the kernel's `panic` ([`Machine::watch_panic`]) keeps the registers, once the kernel
//! has been located. A [`PanicWitness`] reads guest memory instead: about once a second while the
//! guest runs, and when the run has ended. A guest that panics before any trap is armed, and then
//! resets, halts, faults or hangs, thus ends as [`RunEnd::Panic`] too.

use std::time::{Duration, Instant};

use super::watch::AFTER_PANIC;
use super::{Handle, Machine, RunEnd};
use crate::vcpu::VcpuRegisters;

/// A panic of the guest kernel. The witness, the trap or both have seen it.
#[derive(Debug, Clone, Default)]
pub struct PanicReport {
    /// The vCPU that panicked, if known.
    pub vcpu: Option<usize>,
    /// The vCPU's registers at the entry of `panic`, if that was trapped. RDI is the format string.
    pub registers: Option<Box<VcpuRegisters>>,
    /// The kernel's message, formatted, if guest memory has it.
    pub text: Option<String>,
    /// The time of the panic, if it was trapped.
    pub at: Option<Instant>,
}

/// A detector of panics in guest memory.
pub trait PanicWitness: Send + Sync {
    /// Returns the panic that the guest's memory shows, without registers.
    ///
    /// It is called on the watch thread while vCPUs run, when it must cost little. It is called
    /// once at the end of the run (`ended`), on the thread that first asks for the end.
    fn look(&self, machine: &Handle, ended: bool) -> Option<PanicReport>;

    /// Returns the time that a panicked kernel may go on printing before the run is ended.
    fn patience(&self) -> Duration {
        AFTER_PANIC
    }
}

impl Machine {
    /// Sets the witness of the guest's panics, before [`Machine::start`]. Only the first counts.
    pub fn set_panic_witness(&self, witness: Box<dyn PanicWitness>) {
        if self.shared.witness.set(witness).is_err() {
            log::debug!("the machine has a witness of panics already");
        }
    }
}

impl Handle {
    /// Returns the combined report of a panic from trap and witness.
    pub(super) fn panic(&self, ended: bool) -> Option<PanicReport> {
        let trapped = self.shared.panic();
        let witness = self.shared.witness.get();
        let seen = witness.and_then(|witness| witness.look(self, ended));
        match (trapped, seen) {
            (Some(trapped), Some(seen)) => Some(PanicReport {
                text: seen.text,
                ..trapped
            }),
            (trapped, seen) => trapped.or(seen),
        }
    }

    /// Returns the reported reason of a run that ended by `end`: a panic, if the guest panicked
    /// before.
    pub(super) fn told(&self, end: RunEnd) -> RunEnd {
        let told = self.shared.told.get_or_init(|| match end {
            // A failure of the host says nothing about the guest.
            RunEnd::Host { .. } => end,
            RunEnd::Reset { .. }
            | RunEnd::PoweredOff
            | RunEnd::Halted
            | RunEnd::Stopped
            | RunEnd::Panic(_)
            | RunEnd::TripleFault { .. } => match self.panic(true) {
                Some(report) => RunEnd::Panic(report),
                None => end,
            },
        });
        told.clone()
    }
}
