//! The counting of expectations at the hits. The last hits are kept, on a thread of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use bt::session::{ScriptSession, ScriptStats};
use probes::clock::unix_ns_now;
use probes::engine::{Engine, Waiter};
use probes::provider::Traceable;

use super::Expectation;
use super::events::{LastHits, statement};
use super::report::Verdict;
use crate::protocol::error::RequestError;
use crate::protocol::script::ScriptRequest;
use crate::scripting::{attach, prepare};
use crate::tracing::{Stop, Stopper, TracePanicked, TraceStartError};
use crate::vm::Vm;

/// The name of a faulty expectation's source in messages.
const NAME: &str = "--expect";

/// The start of counting.
#[derive(Debug, Clone, Copy)]
pub struct Began {
    /// The time of the start, for durations.
    pub at: Instant,
    /// The time of the start, in nanoseconds since 1970.
    pub unix_ns: u64,
}

impl Began {
    fn now() -> Self {
        Self {
            at: Instant::now(),
            unix_ns: unix_ns_now(),
        }
    }
}

/// Expectations whose probes are enabled.
pub struct Armed {
    script: ScriptSession,
    expectations: Arc<[Expectation]>,
    /// The time at which they were enabled.
    pub began: Began,
}

impl Armed {
    /// Enables the probes.
    ///
    /// # Errors
    /// If a probe is missing or cannot be enabled, or a predicate has errors.
    pub fn start(
        guest: &dyn Traceable,
        engine: &Engine,
        expectations: Arc<[Expectation]>,
    ) -> Result<Self, RequestError> {
        // Each alone first, so that faults are shown in the user's own text and nothing else.
        for expectation in &*expectations {
            let text = format!("{}\n{{ }}", expectation.rule());
            prepare(guest, engine.tsc_hz(), &ScriptRequest::of(text, NAME))?;
        }
        let text = script(&expectations);
        let (script, _) = attach(guest, engine, &ScriptRequest::of(text, NAME), true)?;
        Ok(Self {
            script,
            expectations,
            began: Began::now(),
        })
    }

    /// Returns the probes of patterns that cannot be enabled, with reasons.
    pub fn skipped(&self) -> &[String] {
        self.script.skipped()
    }

    /// Returns the patterns that wait for a file to be mapped, or a module to be loaded.
    pub fn waiting(&self) -> impl Iterator<Item = &str> {
        self.script.waiting()
    }

    fn seen(&self) -> Vec<u64> {
        let numbers = (0..self.expectations.len()).map(|at| self.script.number(&variable(at)));
        numbers
            .map(|number| u64::try_from(number).unwrap_or_default())
            .collect()
    }

    /// Returns a waiter for the hits and ends to come.
    pub fn waiter(&self) -> Waiter {
        self.script.waiter()
    }

    /// Takes the hits that were recorded and forgets them: they are counted already. Takes up the
    /// modules that the guest has loaded and the files that it has mapped.
    pub fn discard_hits(&mut self, vm: &Vm) {
        self.take_up(vm);
        self.script.drain(&mut |_| {});
    }

    fn take_up(&mut self, vm: &Vm) {
        if let Some(guest) = vm.traced() {
            self.script.take_up(&guest);
        }
    }

    /// Returns a verdict for each expectation by its hits until now. Of a paused machine they are
    /// all of one moment.
    pub fn verdicts(&self) -> Vec<Verdict> {
        let each = self.expectations.iter().zip(self.seen());
        each.map(|(expected, seen)| Verdict::new(expected, Some(seen)))
            .collect()
    }

    /// Whether all hold, and no hit can change that.
    pub fn is_met(&self) -> bool {
        let each = self.expectations.iter().zip(self.seen());
        each.into_iter()
            .all(|(expected, seen)| expected.holds(seen) && !expected.has_upper_bound())
    }
}

/// Returns the variable that counts for the expectation at index `at`.
fn variable(at: usize) -> String {
    format!("expected{at}")
}

/// Returns the script with a rule for each.
fn script(expectations: &[Expectation]) -> String {
    let rules = expectations.iter().enumerate().map(|(at, expectation)| {
        let (rule, variable) = (expectation.rule(), variable(at));
        // The count comes first, so that it is made whether there is room for the event or not.
        format!("{rule}\n{{ @{variable} = count(); {} }}\n", statement(at))
    });
    rules.collect()
}

/// The results of counting.
#[derive(Debug, Clone)]
pub struct Counted {
    /// The hits of each expectation, in their order, all of one moment.
    pub seen: Vec<u64>,
    /// The last hits.
    pub last: LastHits,
    /// The hits whose predicate took too long to decide.
    pub undecided: u64,
    /// The start of counting.
    pub began: Began,
    /// The duration of counting, in seconds.
    pub seconds: f64,
}

/// Expectations that are being counted.
pub struct Counting {
    stopper: Stopper,
    thread: JoinHandle<Counted>,
    met: Arc<AtomicBool>,
}

impl Counting {
    /// Starts to collect the records of `armed`. With `until_met` the machine is stopped once all
    /// hold and no hit can change that.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn start(vm: Arc<Vm>, armed: Armed, until_met: bool) -> Result<Self, TraceStartError> {
        let (stopper, stop) = Stopper::new(armed.waiter());
        let met = Arc::new(AtomicBool::new(false));
        let told = met.clone();
        let thread = std::thread::Builder::new()
            .name("expect".into())
            .spawn(move || count(&vm, armed, until_met.then_some(&*told), &stop))?;
        Ok(Self {
            stopper,
            thread,
            met,
        })
    }

    /// Checks whether the machine was stopped because all hold.
    pub fn is_met(&self) -> bool {
        self.met.load(Ordering::SeqCst)
    }

    /// Removes the probes and returns the counts.
    ///
    /// # Errors
    /// If the thread panicked.
    pub fn finish(self) -> Result<Counted, TracePanicked> {
        drop(self.stopper);
        self.thread.join().map_err(|_| TracePanicked)
    }
}

fn count(vm: &Vm, mut armed: Armed, met: Option<&AtomicBool>, stop: &Stop) -> Counted {
    let mut last = LastHits::default();
    while !stop.wait() {
        armed.take_up(vm);
        armed.script.drain(&mut |output| last.push(output));
        if let Some(met) = met
            && !met.load(Ordering::SeqCst)
            && armed.is_met()
        {
            // Before the end that it explains.
            met.store(true, Ordering::SeqCst);
            vm.machine.stop();
        }
    }
    let seconds = armed.began.at.elapsed().as_secs_f64();
    // The counts are of one moment, even if the guest goes on.
    let paused = vm.machine.pause();
    let seen = armed.seen();
    let Armed { script, began, .. } = armed;
    let ScriptStats {
        lost_output,
        endless,
        ..
    } = script.finish(&mut |output| last.push(output), &mut drop);
    drop(paused);
    last.lost = lost_output;
    Counted {
        seen,
        last,
        undecided: endless,
        began,
        seconds,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_rule_counts_before_it_tells() {
        let texts = ["vfs_read", "syscall:openat/comm == \"sh\"/==0"];
        let expectations: Vec<_> = texts.iter().flat_map(|t| Expectation::parse(t)).collect();
        let expected = "\
kprobe:vfs_read:entry
{ @expected0 = count(); printf(\"%d %s %s %d %d %d %lu\\n\", 0, probe, comm, pid, tid, cpu, nsecs); }
syscall:openat:entry /comm == \"sh\"/
{ @expected1 = count(); printf(\"%d %s %s %d %d %d %lu\\n\", 1, probe, comm, pid, tid, cpu, nsecs); }
";
        assert_eq!(script(&expectations), expected);
        ScriptRequest::of(expected.to_owned(), NAME)
            .parse()
            .unwrap();
    }
}
