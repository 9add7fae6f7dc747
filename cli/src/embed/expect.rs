//! Expectations of a guest: bounds on how often probes are hit, for the program that embeds a VM.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::trace::wait_until;
use crate::expect::Expectation;
use crate::expect::counting::Armed;
use crate::expect::report::Verdict;
use crate::protocol::error::{ErrorKind, RequestError};
use crate::vm::{GuestError, Vm};

/// Expectations whose hits are counted. Their probes are disabled when it is dropped.
pub struct Expecting {
    vm: Arc<Vm>,
    armed: Armed,
}

impl fmt::Debug for Expecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Expecting")
            .field("vm", &self.vm)
            .finish_non_exhaustive()
    }
}

impl Vm {
    /// Enables the probes of expectations such as `"vfs_read>=1"` or `"syscall:unlink==0"`, in the
    /// form of `exotrace run --expect`, and counts their hits. A module or file that one names
    /// may come later; the guest is paused then until [`Expecting::verdicts`] is called.
    ///
    /// # Errors
    /// If the guest has not booted far enough, or an expectation is invalid or matches no probe.
    pub fn expect<'e>(
        self: &Arc<Self>,
        expectations: impl IntoIterator<Item = &'e str>,
    ) -> Result<Expecting, GuestError> {
        let parsed = expectations.into_iter().map(Expectation::parse);
        let parsed: Arc<[Expectation]> = parsed
            .collect::<Result<_, _>>()
            .map_err(|error| RequestError::new(ErrorKind::Invalid, error))?;
        let view = self.kernel_view()?;
        let engine = self.engine(&view);
        let armed = Armed::start(&self.traceable(&view), &engine, parsed)?;
        Ok(Expecting {
            vm: self.clone(),
            armed,
        })
    }
}

impl Expecting {
    /// Counts until all hold and no hit can change that, the guest ends, or `limit` has passed.
    /// Returns a verdict for each expectation, in their order.
    pub fn verdicts(mut self, limit: Duration) -> Vec<Verdict> {
        let deadline = Instant::now().checked_add(limit);
        let waiter = self.armed.waiter();
        while !self.armed.is_met() && !self.vm.has_ended() && wait_until(&waiter, deadline) {
            self.armed.discard_hits(&self.vm);
        }
        let _paused = self.vm.machine.pause();
        self.armed.verdicts()
    }
}
