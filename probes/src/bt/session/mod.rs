//! A script at work: its probes in the guest, its output in order, its maps at the end.
//!
//! [`Prepared::new`] compiles and resolves everything, and says what cannot work, before the guest is touched. [`Prepared::start`] runs BEGIN
//! and enables the probes. Then the caller drains until it has enough or the script says so ([`ScriptSession::has_exited`]), and ends it
//! with [`ScriptSession::finish`]: the probes go, what was recorded is given, END runs, the maps are printed.

mod output;
mod prepared;
mod traceable;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ast::Dialect;
use super::context::{AtHit, Clock};
use super::program::Code;
use super::record;
use super::render::Output;
use super::run::{Ended, ProbeTexts, Shared, run};
use super::value::Value;
use crate::engine::{HitOutcome, ProbeHit, ProbeStats, Program, Session};
use crate::probe::Probe;
pub use prepared::{Finder, NotFound, Prepared, StartError};

/// What runs at a probe's hits: the rules that stand there, in the script's order.
struct ScriptProgram {
    shared: Arc<Shared>,
    codes: Vec<Arc<Code>>,
    texts: ProbeTexts,
    clock: Clock,
}

impl Program for ScriptProgram {
    fn run(&self, hit: &ProbeHit<'_>) -> HitOutcome {
        let context = AtHit {
            hit,
            clock: &self.clock,
        };
        let mut ran = HitOutcome::Filtered;
        for code in &self.codes {
            // After exit() nothing runs any more, on no vCPU.
            if self.shared.exited.load(Ordering::Relaxed) {
                break;
            }
            if run(code, &self.shared, &context, &self.texts) == Ended::HitOutcome {
                ran = HitOutcome::Accepted;
            }
        }
        ran
    }
}

/// What a script has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScriptStats {
    /// Hits of all its probes: those filtered out by predicates and processes, and those that ran.
    pub probes: ProbeStats,
    /// What was put out and had no room: records, snapshots of maps.
    pub lost_output: u64,
    /// Values that found no room in a map.
    pub lost_values: u64,
    /// Divisions by zero, which gave 0.
    pub divisions_by_zero: u64,
    /// Memory that was not there, read as 0.
    pub failed_reads: u64,
    /// Runs of a rule that took too many steps, or made a tuple without end, and were ended.
    pub endless: u64,
}

/// A script that runs.
pub struct ScriptSession {
    session: Session,
    shared: Arc<Shared>,
    end: Vec<Code>,
    printed: Vec<usize>,
    clock: Clock,
    probes: Vec<Probe>,
    skipped: Vec<String>,
}

impl ScriptSession {
    /// The probes that are enabled.
    #[must_use]
    pub fn probes(&self) -> &[Probe] {
        &self.probes
    }

    /// Those that could not be, and why.
    #[must_use]
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Whether the script has ended itself.
    #[must_use]
    pub fn has_exited(&self) -> bool {
        self.shared.exited.load(Ordering::Relaxed)
    }

    /// The dialect it is in, which its output is rendered in.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.shared.dialect
    }

    /// Gives what was put out since the last time, in order. Never waits.
    pub fn drain(&mut self, each: &mut dyn FnMut(Output)) -> usize {
        let (shared, clock) = (&self.shared, &self.clock);
        self.session.drain_records(|_, tsc, words| {
            if let Some((emission, values)) = record::read(words)
                && let Some(output) = output::of(shared, emission, values, clock.unix_ns(tsc))
            {
                each(output);
            }
        })
    }

    /// Takes the probes away, gives what is left to be put out, runs END and prints the maps.
    pub fn finish(mut self, each: &mut dyn FnMut(Output)) -> ScriptStats {
        self.session.disable_all();
        self.drain(each);
        output::finish(&self.end, &self.printed, &self.shared, &self.clock, each);
        self.stats()
    }

    /// The number that a variable without keys holds now, or that its values amount to: what a script counts, while it runs. 0 where nothing
    /// was counted yet. Exact while the machine is paused.
    #[must_use]
    pub fn number(&self, variable: &str) -> i64 {
        let maps = &self.shared.maps;
        match maps.named(variable).and_then(|map| maps.get(map, &[])) {
            Some(Value::Int(number)) => number,
            Some(Value::Unsigned(number)) => number.cast_signed(),
            _ => 0,
        }
    }

    /// What was counted so far.
    #[must_use]
    pub fn stats(&self) -> ScriptStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let faults = &self.shared.faults;
        ScriptStats {
            probes: self.session.stats().probes,
            lost_output: load(&faults.lost),
            lost_values: self.shared.maps.lost(),
            divisions_by_zero: load(&faults.divisions),
            failed_reads: load(&faults.reads),
            endless: load(&faults.endless),
        }
    }

    /// Counts of each probe, in the order of [`Self::probes`]; none of one that is not enabled any more.
    #[must_use]
    pub fn each(&self) -> Vec<Option<ProbeStats>> {
        let numbers = 0..u32::try_from(self.probes.len()).unwrap_or(u32::MAX);
        numbers
            .map(|number| self.session.probe_stats(number))
            .collect()
    }
}
