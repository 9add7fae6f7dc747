//! Events of a VM's probes, for the program that embeds it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use probes::engine::Waiter;
use probes::event::Event;

use crate::protocol::trace::Request;
use crate::protocol::trace::{Counts, Traced};
use crate::tracing::Tracing;
use crate::vm::{GuestError, Vm};

/// Enabled probes, and the events that they have recorded.
///
/// The probes are disabled when it is dropped. Events that nobody takes fill the rings, and further
/// ones are dropped and counted; the guest never waits.
pub struct Trace {
    vm: Arc<Vm>,
    tracing: Tracing,
    traced: Vec<Arc<Traced>>,
    events: VecDeque<Event>,
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace")
            .field("vm", &self.vm)
            .field("traced", &self.traced)
            .finish_non_exhaustive()
    }
}

/// An event and its probe.
#[derive(Debug, Clone)]
pub struct TraceEvent {
    /// The probe.
    pub probe: Arc<Traced>,
    /// Where, when and by which task it was hit, and the values that were recorded.
    pub event: Event,
}

impl Vm {
    /// Enables the probes that `request` names, such as `"kprobe:vfs_read:entry"`, and records
    /// their hits. The module that a pattern names may be loaded later: see
    /// [`Trace::next`].
    ///
    /// # Errors
    /// If the guest has not booted far enough, a pattern matches nothing, or a probe cannot be
    /// enabled. No probe is enabled then.
    pub fn trace(self: &Arc<Self>, request: impl Into<Request>) -> Result<Trace, GuestError> {
        let view = self.kernel_view()?;
        let engine = self.engine(&view);
        let tracing = Tracing::start(&self.traceable(&view), &engine, &request.into())?;
        Ok(Trace {
            vm: self.clone(),
            tracing,
            traced: Vec::new(),
            events: VecDeque::new(),
        })
    }
}

/// Waits for something to drain, until `deadline` at most. Returns `false` if that has passed.
pub(super) fn wait_until(waiter: &Waiter, deadline: Option<Instant>) -> bool {
    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
    if left == Some(Duration::ZERO) {
        return false;
    }
    let _ = match left {
        Some(left) => waiter.wait_at_most(left, None),
        None => waiter.wait(None),
    };
    true
}

impl Trace {
    /// Returns the next event, in the order of time. Returns `None` if there is none within
    /// `timeout`, or the run has ended and all were returned.
    ///
    /// Probes of files and modules that came meanwhile are enabled here. The guest is paused for
    /// that from their arrival on.
    pub fn next(&mut self, timeout: Duration) -> Option<TraceEvent> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(event) = self.events.pop_front() {
                return self.named(event);
            }
            // Before the drain: what the guest has recorded until its end is drained after it.
            let ended = self.vm.has_ended();
            self.tracing.take_up(&self.vm);
            let events = &mut self.events;
            if self.tracing.drain(|event| events.push_back(event)) > 0 {
                continue;
            }
            if ended || !wait_until(&self.tracing.waiter(), deadline) {
                return None;
            }
        }
    }

    /// Iterates over events until none comes within `timeout`.
    pub fn events(&mut self, timeout: Duration) -> impl Iterator<Item = TraceEvent> {
        std::iter::from_fn(move || self.next(timeout))
    }

    /// Disables the probes and returns their counts. Events that were not taken are lost.
    pub fn finish(mut self) -> Counts {
        let each = self.tracing.stop();
        self.tracing.counts(&each)
    }

    fn named(&mut self, event: Event) -> Option<TraceEvent> {
        // Probes of files and modules that came meanwhile come behind the others.
        let known = self.traced.len();
        let new = self.tracing.traced().get(known..).unwrap_or_default();
        self.traced.extend(new.iter().cloned().map(Arc::new));
        let probe = self.traced.get(event.probe as usize)?.clone();
        Some(TraceEvent { probe, event })
    }
}

impl From<&str> for Request {
    fn from(pattern: &str) -> Self {
        Self::of(&[pattern.to_owned()])
    }
}

impl<const N: usize> From<[&str; N]> for Request {
    fn from(patterns: [&str; N]) -> Self {
        Self::of(&patterns.map(str::to_owned))
    }
}
