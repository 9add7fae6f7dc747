//! A panic of the guest's kernel: how it is noticed, and how the end of a run tells of it.
//!
//! A trap at the kernel's `panic` ([`Machine::watch_panic`]) keeps the registers, once the kernel has
//! been located. A [`PanicWitness`] reads guest memory instead: about once a second while the guest runs,
//! and when the run has ended. So a guest that panics before anything stood in it, and then resets,
//! halts, faults or hangs, ends as [`RunEnd::Panic`] all the same.

use super::{Handle, Machine, RunEnd};
use crate::vcpu::VcpuRegisters;

/// The guest kernel panicked. At least one of the witness and the trap has seen it.
#[derive(Debug, Clone, Default)]
pub struct PanicReport {
    /// The vCPU that did, if known.
    pub vcpu: Option<usize>,
    /// Its registers at the entry of `panic`, if that was trapped: RDI is the format string.
    pub registers: Option<Box<VcpuRegisters>>,
    /// The kernel's message, formatted, if guest memory has it.
    pub text: Option<String>,
}

/// Looks for a panic in guest memory.
pub trait PanicWitness: Send + Sync {
    /// Returns the panic that the guest's memory shows, without registers. Called on the watch thread
    /// while vCPUs run, when it must cost little, and once at the end of the run (`ended`) on the thread
    /// that first asks for it.
    fn look(&self, machine: &Handle, ended: bool) -> Option<PanicReport>;
}

impl Machine {
    /// Takes the witness of the guest's panics, before [`Machine::start`]; only the first counts.
    pub fn set_panic_witness(&self, witness: Box<dyn PanicWitness>) {
        if self.shared.witness.set(witness).is_err() {
            log::debug!("the machine has a witness of panics already");
        }
    }
}

impl Handle {
    /// Returns what trap and witness know of a panic.
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

    /// Returns how a run that ended by `end` is told of: as a panic, if the guest panicked before.
    pub(super) fn told(&self, end: RunEnd) -> RunEnd {
        let told = self.shared.told.get_or_init(|| match end {
            // It says nothing of the guest.
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
