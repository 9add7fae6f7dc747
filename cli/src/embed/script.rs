//! Scripts in the bt language over a VM, for the program that embeds it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::trace::wait_until;
use crate::protocol::script::{Counts, MapLine, ScriptRequest};
use crate::scripting::{Job, Rendered};
use crate::vm::{GuestError, Vm};

/// Name of a script's text in messages.
const NAME: &str = "script";

/// A script whose probes are enabled. They are disabled when it is dropped.
pub struct Script {
    vm: Arc<Vm>,
    job: Job,
    begun: Rendered,
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Script")
            .field("vm", &self.vm)
            .finish_non_exhaustive()
    }
}

impl Vm {
    /// Compiles a script and enables its probes. `request` is its text, or a [`ScriptRequest`] with
    /// arguments and a filter of hits.
    ///
    /// # Errors
    /// If the guest has not booted far enough; or with the script's errors and their places, as
    /// `exotrace trace -e` shows them. No probe is enabled then.
    pub fn script(
        self: &Arc<Self>,
        request: impl Into<ScriptRequest>,
    ) -> Result<Script, GuestError> {
        let view = self.kernel_view()?;
        let engine = self.engine(&view);
        let (job, begun) = Job::start(self, &engine, &view, &request.into())?;
        Ok(Script {
            vm: self.clone(),
            job,
            begun,
        })
    }
}

impl From<&str> for ScriptRequest {
    fn from(text: &str) -> Self {
        Self::of(text.to_owned(), NAME)
    }
}

impl Script {
    /// Returns the names of the enabled probes.
    pub fn probes(&self) -> Vec<String> {
        self.job.probes()
    }

    /// Returns the probes of patterns that cannot be enabled, with the reasons.
    pub fn skipped(&self) -> &[String] {
        self.job.skipped()
    }

    /// Returns the patterns that wait for a file to be mapped, or a module to be loaded.
    pub fn waiting(&self) -> Vec<String> {
        self.job.waiting().map(str::to_owned).collect()
    }

    /// Returns the contents of all maps that have numbers.
    pub fn maps(&mut self) -> Vec<MapLine> {
        self.job.maps()
    }

    /// Returns whether the script has called `exit()`.
    pub fn has_exited(&self) -> bool {
        self.job.has_exited()
    }

    /// Returns the output since the last call, that of `BEGIN` included.
    ///
    /// Probes of files and modules that came meanwhile are enabled here. The guest is paused for
    /// that from their arrival on.
    pub fn output(&mut self) -> Rendered {
        let mut output = std::mem::take(&mut self.begun);
        self.job.take_up();
        output.append(self.job.step());
        output
    }

    /// Waits for output, `exit()`, the guest's end, or a file or module that a probe waits for, but
    /// for at most `timeout`. It may return before any of these has come: the caller looks again.
    pub fn wait(&self, timeout: Duration) {
        let _ = self.job.waiter().wait_at_most(timeout, None);
    }

    /// Lets the script run until it exits, the guest ends, or `limit` has passed. Returns all
    /// output, that of `END` and the maps included, and the script's counts.
    pub fn run(mut self, limit: Duration) -> (Rendered, Counts) {
        let deadline = Instant::now().checked_add(limit);
        let mut output = self.output();
        let waiter = self.job.waiter();
        while !self.has_exited() && !self.vm.has_ended() && wait_until(&waiter, deadline) {
            self.job.take_up();
            output.append(self.job.step());
        }
        let (last, counts) = self.finish();
        output.append(last);
        (output, counts)
    }

    /// Disables the probes. Returns the output since the last call, that of `END` and the maps
    /// included, and the script's counts.
    pub fn finish(self) -> (Rendered, Counts) {
        let Self {
            job,
            begun: mut output,
            ..
        } = self;
        let (last, counts) = job.finish();
        output.append(last);
        (output, counts)
    }
}

impl Rendered {
    /// Adds later output.
    pub fn append(&mut self, mut other: Self) {
        self.out.append(&mut other.out);
        self.err.append(&mut other.err);
    }

    /// Returns standard output as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }
}
