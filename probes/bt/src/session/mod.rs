//! A running script: its probes in the guest, its output in order, its maps at the end.
//!
//! [`Prepared::new`] compiles and resolves everything, and reports errors before the guest is
//! touched. [`Prepared::start`] runs BEGIN and enables the probes, and
//! [`ScriptSession::iterate`] the rules of iterations. Then the caller drains until it
//! has enough or the script exits ([`ScriptSession::has_exited`]), and ends it with
//! [`ScriptSession::finish`]. That disables the probes, drains the rest, runs END and prints the
//! maps.

mod arguments;
mod iterations;
mod limits;
mod output;
mod prepared;
mod resolved;
mod start_error;
mod to_come;
mod traceable;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use probes::engine::{Cost, HitOutcome, ProbeHit, ProbeStats, Program, Session, Unwatched, Waiter};
use probes::file_probes::FileProbes;
use probes::module_probes::{self, ModuleProbes};
use probes::probe::Probe;
use probes::provider::Inspectable;

use crate::ast::Dialect;
use crate::context::{AtHit, Clock};
use crate::maps::{MapKind, MapSnapshot};
use crate::moments::Moment;
use crate::program::Code;
use crate::record;
use crate::render::Output;
use crate::run::{ProbeTexts, RuleOutcome, Shared, run};
use crate::value::Value;
use iterations::Iterated;
use prepared::texts;
pub use prepared::{Finder, NotFound, Prepared};
pub use start_error::StartError;
use to_come::{Rules, ToCome};

/// The program at a probe's hits: the rules of that probe, in the script's order.
struct ScriptProgram {
    shared: Arc<Shared>,
    codes: Vec<Arc<Code>>,
    texts: ProbeTexts,
    clock: Clock,
}

impl Program for ScriptProgram {
    // A value may be kept at one probe and used at another.
    fn shares(&self) -> Option<u64> {
        Some(0)
    }

    fn run(&self, hit: &ProbeHit<'_>) -> HitOutcome {
        let context = AtHit {
            hit,
            clock: &self.clock,
        };
        let mut ran = HitOutcome::Filtered;
        for code in &self.codes {
            // After exit() nothing runs any more, on any vCPU.
            if self.shared.exited.load(Ordering::Relaxed) {
                return ran;
            }
            if run(code, &self.shared, &context, &self.texts) == RuleOutcome::Executed {
                ran = HitOutcome::Accepted;
            }
            // Only the hits that were running at exit() come here: later ones wake nobody.
            if self.shared.exited.load(Ordering::Relaxed) {
                hit.wake();
            }
        }
        ran
    }

    fn may_hold(&self) -> bool {
        self.codes.iter().any(|code| code.keeps_hits())
    }
}

fn program(
    shared: &Arc<Shared>,
    clock: Clock,
    probe: &Probe,
    codes: Vec<Arc<Code>>,
    is_foreign: bool,
) -> Arc<dyn Program> {
    Arc::new(ScriptProgram {
        shared: shared.clone(),
        codes,
        texts: texts(&probe.name, shared.dialect, is_foreign),
        clock,
    })
}

/// The counters of a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScriptStats {
    /// Hits of all its probes: those filtered out by predicates and processes, and those that ran.
    pub probes: ProbeStats,
    /// The status that the script gave to `exit()`, 0 to 255.
    pub exit_status: u8,
    /// The number of outputs dropped for want of room: records, snapshots of maps.
    pub lost_output: u64,
    /// The number of values for which a map had no room.
    pub lost_values: u64,
    /// The number of divisions by zero, which yielded 1, or 0 in the strict dialect.
    pub divisions_by_zero: u64,
    /// The number of reads of memory that was not there, which yielded 0.
    pub failed_reads: u64,
    /// The number of reads of formatted fields whose record could not be made, which yielded 0.
    pub failed_fields: u64,
    /// The number of runs of a rule ended because they took too many steps, or made an endless
    /// tuple.
    pub endless: u64,
}

/// A running script.
pub struct ScriptSession {
    session: Session,
    shared: Arc<Shared>,
    end: Vec<Code>,
    iterations: Vec<Iterated>,
    printed: Vec<usize>,
    clock: Clock,
    probes: Vec<Probe>,
    skipped: Vec<String>,
    /// Probes of modules that are named, whether they are loaded or not.
    modules: Option<ModuleProbes>,
    /// Probes of files that no process has mapped yet.
    files: Option<FileProbes>,
    /// The code for those that may come.
    to_come: Vec<ToCome>,
}

impl fmt::Debug for ScriptSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptSession")
            .field("session", &self.session)
            .field("skipped", &self.skipped)
            .finish_non_exhaustive()
    }
}

impl ScriptSession {
    /// Returns the enabled probes.
    #[must_use]
    pub fn probes(&self) -> &[Probe] {
        &self.probes
    }

    /// Returns the probes that could not be enabled, and the reasons.
    #[must_use]
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Returns the patterns that wait for a file to be mapped, or a module to be loaded.
    pub fn waiting(&self) -> impl Iterator<Item = &str> {
        let modules = self.modules.iter().flat_map(ModuleProbes::waiting);
        let files = self.files.iter().flat_map(FileProbes::waiting);
        files.chain(modules).map(|pattern| pattern.text.as_str())
    }

    /// Enables the probes of modules that `guest` has loaded, and files that it has mapped, since
    /// the last call. The guest is held until it is called.
    pub fn take_up(&mut self, guest: &dyn Inspectable) {
        self.look_for_modules(ModuleProbes::take_up);
        let Some(mut files) = self.files.take() else {
            return;
        };
        let (shared, clock, to_come) = (&self.shared, self.clock, &self.to_come);
        let (probes, skipped) = (&mut self.probes, &mut self.skipped);
        files.take_up(&mut self.session, guest, &mut |session, probe, of| {
            let Rules {
                codes,
                is_foreign,
                filter,
            } = to_come::of_file(to_come, of, &probe);
            if codes.is_empty() {
                return;
            }
            let program = program(shared, clock, &probe, codes, is_foreign);
            match session.enable_program(&probe, filter, program) {
                Ok(_) => probes.push(probe),
                Err(error) => skipped.push(error.to_string()),
            }
        });
        self.files = Some(files).filter(|files| files.waiting().next().is_some());
    }

    /// Enables the probes of modules that `look` finds.
    fn look_for_modules(
        &mut self,
        look: impl FnOnce(&mut ModuleProbes, &mut Session, &mut module_probes::Enable<'_>),
    ) {
        let Some(mut modules) = self.modules.take() else {
            return;
        };
        let (shared, clock, to_come) = (&self.shared, self.clock, &self.to_come);
        let probes = &mut self.probes;
        look(&mut modules, &mut self.session, &mut |session, probe| {
            let Rules {
                codes,
                is_foreign,
                filter,
            } = to_come::of_module(to_come, &probe);
            if codes.is_empty() {
                return Ok(None);
            }
            let program = program(shared, clock, &probe, codes, is_foreign);
            let number = session.enable_program(&probe, filter, program)?;
            probes.push(probe);
            Ok(Some(number))
        });
        self.modules = Some(modules);
    }

    /// Makes the program of a probe, which may be named as bpftrace does.
    fn program(&self, probe: &Probe, codes: Vec<Arc<Code>>, is_foreign: bool) -> Arc<dyn Program> {
        program(&self.shared, self.clock, probe, codes, is_foreign)
    }

    /// Checks whether the script has ended itself.
    #[must_use]
    pub fn has_exited(&self) -> bool {
        self.shared.exited.load(Ordering::Relaxed)
    }

    /// Takes the moments that the script wants to have kept. The guest is paused at a hit until its
    /// moment is dropped.
    #[must_use]
    pub fn take_moments(&self) -> Vec<Moment> {
        self.shared.moments.take()
    }

    /// Returns the script's dialect, in which its output is rendered.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.shared.dialect
    }

    /// Returns a waiter for the output to come.
    #[must_use]
    pub fn waiter(&self) -> Waiter {
        self.session.waiter()
    }

    /// Passes on the output since the last call, in order. It never waits.
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

    /// Disables the probes, passes on the remaining output, runs END and prints the maps.
    /// `keep` receives the moments that were not taken yet, and those of END.
    pub fn finish(
        mut self,
        each: &mut dyn FnMut(Output),
        keep: &mut dyn FnMut(Moment),
    ) -> ScriptStats {
        self.session.disable_all();
        self.take_moments().into_iter().for_each(&mut *keep);
        self.drain(each);
        output::finish(&self.end, &self.printed, &self.shared, &self.clock, each);
        self.take_moments().into_iter().for_each(keep);
        self.stats()
    }

    /// Returns the current number in a variable without keys, or the number that its aggregation
    /// amounts to. It is 0 if nothing was counted yet, and exact while the machine is paused.
    #[must_use]
    pub fn number(&self, variable: &str) -> i64 {
        let maps = &self.shared.maps;
        match maps.named(variable).and_then(|map| maps.get(map, &[])) {
            Some(Value::Int(number)) => number,
            Some(Value::Unsigned(number)) => number.cast_signed(),
            _ => 0,
        }
    }

    /// Returns all maps as they are now, with the kinds of their contents. Entries of one vCPU are
    /// of one moment.
    pub fn maps(&self) -> impl Iterator<Item = (MapKind, MapSnapshot)> {
        let maps = &self.shared.maps;
        (0..maps.count()).filter_map(|map| {
            let snapshot = maps.dress(map, maps.snapshot(map));
            Some((maps.kind(map)?, snapshot))
        })
    }

    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> ScriptStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let faults = &self.shared.faults;
        ScriptStats {
            probes: self.session.stats().probes,
            exit_status: self.shared.exit_status(),
            lost_output: load(&faults.lost),
            lost_values: self.shared.maps.lost(),
            divisions_by_zero: load(&faults.divisions),
            failed_reads: load(&faults.reads),
            failed_fields: load(&faults.records),
            endless: load(&faults.endless),
        }
    }

    /// Returns what the script costs the guest.
    #[must_use]
    pub fn cost(&self) -> Cost {
        self.session.cost()
    }

    /// Returns how long each probe has not watched because of a budget, in the order of
    /// [`Self::probes`]; `None` for one that is no longer enabled.
    #[must_use]
    pub fn unwatched(&self) -> Vec<Option<Unwatched>> {
        let numbers = (0..).zip(&self.probes);
        numbers
            .map(|(number, _)| self.session.unwatched(number))
            .collect()
    }

    /// Returns the counters of each probe, in the order of [`Self::probes`]; `None` for one that is
    /// no longer enabled.
    #[must_use]
    pub fn each(&self) -> Vec<Option<ProbeStats>> {
        let numbers = 0..u32::try_from(self.probes.len()).unwrap_or(u32::MAX);
        numbers
            .map(|number| self.session.probe_stats(number))
            .collect()
    }
}
