//! Expectations at work: counted at the hits, the last of which are kept, on a thread of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use probes::bt::session::{ScriptSession, ScriptStats};
use probes::clock::unix_ns_now;
use probes::engine::Engine;
use probes::provider::Traceable;

use super::Expectation;
use super::events::{LastHits, statement};
use super::report::Verdict;
use crate::protocol::script::ScriptRequest;
use crate::protocol::trace::Refusal;
use crate::scripting::{attach, prepare};
use crate::tracing::{DRAIN_INTERVAL, TracePanicked, TraceStartError};
use crate::vm::Vm;

/// What expectations are called where something is wrong with one.
const NAME: &str = "--expect";

/// When counting began.
#[derive(Debug, Clone, Copy)]
pub struct Began {
    /// For how long it has gone on.
    pub at: Instant,
    /// In nanoseconds since 1970.
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
    /// When they were.
    pub began: Began,
}

impl Armed {
    /// Enables the probes.
    ///
    /// # Errors
    /// The text to show: which probe there is not, or what is wrong with a predicate.
    pub fn start(
        guest: &dyn Traceable,
        engine: &Engine,
        expectations: Arc<[Expectation]>,
    ) -> Result<Self, Refusal> {
        // Each alone first: what is wrong is shown in the text that was given, and nothing else.
        for expectation in &*expectations {
            let text = format!("{}\n{{ }}", expectation.rule());
            prepare(guest, engine.tsc_hz(), &request(text))?;
        }
        let text = script(&expectations);
        let (script, _) = attach(guest, engine, &request(text))?;
        Ok(Self {
            script,
            expectations,
            began: Began::now(),
        })
    }

    /// Probes of patterns that cannot be enabled, and why.
    pub fn skipped(&self) -> &[String] {
        self.script.skipped()
    }

    fn seen(&self) -> Vec<u64> {
        let numbers = (0..self.expectations.len()).map(|at| self.script.number(&variable(at)));
        numbers
            .map(|number| u64::try_from(number).unwrap_or_default())
            .collect()
    }

    /// Takes the hits that were recorded and forgets them: they are counted already.
    pub fn discard_hits(&mut self) {
        self.script.drain(&mut |_| {});
    }

    /// Returns a verdict for each expectation by its hits until now. Of a paused machine they are all
    /// of one moment.
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

/// The variable that counts for the expectation at place `at`.
fn variable(at: usize) -> String {
    format!("expected{at}")
}

/// A rule for each.
fn script(expectations: &[Expectation]) -> String {
    let rules = expectations.iter().enumerate().map(|(at, expectation)| {
        let (rule, variable) = (expectation.rule(), variable(at));
        // The count comes first: it is made whether there is room for the event or not.
        format!("{rule}\n{{ @{variable} = count(); {} }}\n", statement(at))
    });
    rules.collect()
}

fn request(text: String) -> ScriptRequest {
    ScriptRequest {
        text,
        file: NAME.to_owned(),
        ..ScriptRequest::default()
    }
}

/// What was counted.
#[derive(Debug, Clone)]
pub struct Counted {
    /// Hits of each expectation, in their order, all of one moment.
    pub seen: Vec<u64>,
    /// The last of them.
    pub last: LastHits,
    /// Hits whose predicate took too long to say whether they count.
    pub undecided: u64,
    /// When that began.
    pub began: Began,
    /// How long it went on, in seconds.
    pub seconds: f64,
}

/// Expectations that are being counted.
pub struct Counting {
    stop: Sender<()>,
    thread: JoinHandle<Counted>,
    met: Arc<AtomicBool>,
}

impl Counting {
    /// Begins to take in what `armed` records. If it is `until_met`, the machine is stopped once all hold and nothing can change that.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn start(vm: Arc<Vm>, armed: Armed, until_met: bool) -> Result<Self, TraceStartError> {
        let (stop, stopped) = channel();
        let met = Arc::new(AtomicBool::new(false));
        let told = met.clone();
        let thread = std::thread::Builder::new()
            .name("expect".into())
            .spawn(move || count(&vm, armed, until_met.then_some(&*told), &stopped))?;
        Ok(Self { stop, thread, met })
    }

    /// Whether the machine was stopped because all hold.
    pub fn is_met(&self) -> bool {
        self.met.load(Ordering::SeqCst)
    }

    /// Takes the probes away.
    ///
    /// # Errors
    /// If the thread panicked.
    pub fn finish(self) -> Result<Counted, TracePanicked> {
        drop(self.stop);
        self.thread.join().map_err(|_| TracePanicked)
    }
}

fn count(vm: &Vm, mut armed: Armed, met: Option<&AtomicBool>, stopped: &Receiver<()>) -> Counted {
    let mut last = LastHits::default();
    while stopped.recv_timeout(DRAIN_INTERVAL) == Err(RecvTimeoutError::Timeout) {
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
    // The counts are those of one moment, also of a guest that goes on.
    let paused = vm.machine.pause();
    let seen = armed.seen();
    let Armed { script, began, .. } = armed;
    let ScriptStats {
        lost_output,
        endless,
        ..
    } = script.finish(&mut |output| last.push(output));
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
        assert!(request(expected.to_owned()).parse().is_ok());
    }
}
