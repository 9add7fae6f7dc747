//! A script at work: its probes in the guest, its output in order, its maps at the end.
//!
//! [`Prepared::new`] compiles and resolves everything, and says what cannot work, before the guest is touched. [`Prepared::start`] runs BEGIN
//! and enables the probes. Then the caller drains until it has enough or the script says so ([`ScriptSession::has_exited`]), and ends it
//! with [`ScriptSession::finish`]: the probes go, what was recorded is given, END runs, the maps are printed.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::ast::{Dialect, PlaceKind, ProbeKind, Rule, Script, StatementKind};
use super::compile::{Compiler, Guest, Options, ProbeKindInfo};
use super::context::{AtHit, Clock, Context};
use super::diagnostic::Diagnostic;
use super::maps::Maps;
use super::program::{Code, Emission};
use super::record;
use super::registers::Register;
use super::render::Output;
use super::run::{Ended, Faults, ProbeTexts, Shared, run};
use super::snapshots::Snapshots;
use super::value::Value;
use crate::engine::{
    EnableError, Engine, Filter, ProbeHit, ProbeStats, Program, Ran, RingSize, Session,
};
use crate::event::COMM_LENGTH;
use crate::name::{ProbeName, ProbePattern};
use crate::probe::{Probe, Target};
use crate::ring::RingSizeError;

/// Memory of a ring, in bytes: what a script puts out while nobody reads.
const RING_BYTES: usize = 16 << 20;
/// Fewest and most records of a ring.
const SLOTS: std::ops::RangeInclusive<usize> = 1 << 10..=1 << 16;

/// Who knows which probes there are.
pub trait Finder {
    /// The probes that a pattern stands for: one at least.
    ///
    /// # Errors
    /// If there are none, with names like it.
    fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound>;
}

/// A pattern stands for nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotFound {
    /// What was asked for, and what was found.
    pub message: String,
    /// Names that look like it.
    pub nearest: Vec<String>,
}

/// A script that can be started.
pub struct Prepared {
    dialect: Dialect,
    shared: Shared,
    words: usize,
    begin: Vec<Code>,
    end: Vec<Code>,
    probes: Vec<Wanted>,
    /// Maps that are printed at the end, in order.
    printed: Vec<usize>,
    clock: Clock,
}

/// A probe, and what runs at it.
struct Wanted {
    probe: Probe,
    codes: Vec<Arc<Code>>,
    /// Whether a pattern means this one and not whatever matches: that it cannot be enabled is an error then.
    must: bool,
}

/// A script that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The rings.
    #[error(transparent)]
    Rings(#[from] RingSizeError),
    /// A probe.
    #[error(transparent)]
    Enable(#[from] EnableError),
}

impl Prepared {
    /// Compiles a script for a guest with so many vCPUs. `clock` tells the time of its hits.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn new(
        script: &Script,
        options: &Options,
        guest: &dyn Guest,
        finder: &dyn Finder,
        vcpus: usize,
        clock: Clock,
    ) -> Result<Self, Vec<Diagnostic>> {
        let dialect = options.dialect;
        let mut resolved: HashMap<&str, Vec<Probe>> = HashMap::new();
        let mut wrong = Vec::new();
        for spec in script.rules.iter().flat_map(|rule| &rule.probes) {
            let ProbeKind::Pattern(pattern) = &spec.kind else {
                continue;
            };
            if resolved.contains_key(pattern.as_str()) {
                continue;
            }
            match finder.find(pattern) {
                Ok(found) => {
                    resolved.insert(pattern, found);
                }
                Err(none) => wrong.push(Diagnostic {
                    dialect,
                    suggestions: none.nearest,
                    ..Diagnostic::new(spec.span, none.message)
                }),
            }
        }
        if !wrong.is_empty() {
            return Err(wrong);
        }
        let mut compiler = Compiler::new(script, options, guest);
        for probe in resolved.values().flatten() {
            compiler.may_put_out(probe.name.to_string().len());
        }
        for rule in &script.rules {
            for kind in kinds_of(rule, &resolved) {
                compiler.learn(rule, &kind);
            }
        }
        let (mut begin, mut end) = (Vec::new(), Vec::new());
        let mut probes: Vec<Wanted> = Vec::new();
        let mut known: HashMap<ProbeName, Vec<usize>> = HashMap::new();
        for rule in &script.rules {
            let mut compiled: HashMap<ProbeKindInfo, Arc<Code>> = HashMap::new();
            for spec in &rule.probes {
                let pattern = match &spec.kind {
                    ProbeKind::Begin => {
                        begin.push(compiler.rule(rule, &ProbeKindInfo::default()));
                        continue;
                    }
                    ProbeKind::End => {
                        end.push(compiler.rule(rule, &ProbeKindInfo::default()));
                        continue;
                    }
                    ProbeKind::Pattern(pattern) => pattern,
                };
                let must = ProbePattern::parse(pattern).is_ok_and(|pattern| pattern.is_one());
                for probe in resolved.get(pattern.as_str()).into_iter().flatten() {
                    let code = compiled
                        .entry(ProbeKindInfo::of(probe))
                        .or_insert_with_key(|kind| Arc::new(compiler.rule(rule, kind)));
                    let same = known.entry(probe.name.clone()).or_default();
                    let at = same.iter().copied().find(|at| {
                        let known = probes.get(*at);
                        known.is_some_and(|known| known.probe.target == probe.target)
                    });
                    let at = at.unwrap_or_else(|| {
                        same.push(probes.len());
                        probes.push(Wanted {
                            probe: probe.clone(),
                            codes: Vec::new(),
                            must,
                        });
                        probes.len() - 1
                    });
                    if let Some(wanted) = probes.get_mut(at) {
                        wanted.must |= must;
                        if !wanted.codes.iter().any(|known| Arc::ptr_eq(known, code)) {
                            wanted.codes.push(code.clone());
                        }
                    }
                }
            }
        }
        let printed = compiler.printed_at_end(&assigned(script));
        let compiled = compiler.finish()?;
        Ok(Self {
            dialect,
            words: compiled.words,
            shared: Shared {
                dialect,
                maps: Maps::new(compiled.maps, vcpus, dialect, options.most_entries),
                emissions: compiled.emissions,
                snapshots: Snapshots::default(),
                began: clock.unix_ns(vmm::host_tsc()),
                exited: AtomicBool::new(false),
                faults: Faults::default(),
                random: AtomicU64::new(clock.unix_ns),
            },
            begin,
            end,
            probes,
            printed,
            clock,
        })
    }

    /// The probes that will be enabled.
    pub fn probes(&self) -> impl ExactSizeIterator<Item = &Probe> {
        self.probes.iter().map(|wanted| &wanted.probe)
    }

    /// Runs BEGIN and END and gives what they put out, and the maps: all that a script without probes does.
    pub fn run_alone(self, each: &mut dyn FnMut(Output)) {
        let shared = self.shared;
        run_here(&self.begin, "BEGIN", &shared, &self.clock, each);
        finish_here(&self.end, &self.printed, &shared, &self.clock, each);
    }

    /// Runs BEGIN, then enables the probes, unless BEGIN has ended the script. `filter` tells whose hits of a probe are wanted. `each` gets
    /// what BEGIN has put out.
    ///
    /// # Errors
    /// If a probe that is named and not just matched cannot be enabled. Nothing is left in the guest then.
    pub fn start(
        self,
        engine: &Engine,
        filter: &dyn Fn(&Probe) -> Filter,
        each: &mut dyn FnMut(Output),
    ) -> Result<ScriptSession, StartError> {
        let words = self.words;
        let bytes = 8 * (words + crate::ring::SLOT_OVERHEAD_WORDS);
        let slots = (RING_BYTES / bytes).clamp(*SLOTS.start(), *SLOTS.end());
        let slots = 1 << slots.ilog2();
        let session = engine.session(RingSize { slots, words })?;
        let shared = Arc::new(self.shared);
        let mut running = ScriptSession {
            dialect: self.dialect,
            session,
            shared,
            end: self.end,
            printed: self.printed,
            clock: self.clock,
            probes: Vec::new(),
            skipped: Vec::new(),
        };
        run_here(&self.begin, "BEGIN", &running.shared, &self.clock, each);
        if running.has_exited() {
            return Ok(running);
        }
        for Wanted { probe, codes, must } in self.probes {
            let program = ScriptProgram {
                shared: running.shared.clone(),
                codes,
                texts: texts(&probe.name, self.dialect),
                clock: self.clock,
            };
            let filter = match &probe.target {
                // It is nobody's.
                Target::Timer {
                    every_vcpu: false, ..
                } => Filter::default(),
                _ => filter(&probe),
            };
            match running
                .session
                .enable_program(&probe, filter, Arc::new(program))
            {
                Ok(_) => running.probes.push(probe),
                Err(error) if must => return Err(error.into()),
                Err(error) => running.skipped.push(error.to_string()),
            }
        }
        Ok(running)
    }
}

/// The kinds of probe that a rule is compiled for.
fn kinds_of(rule: &Rule, resolved: &HashMap<&str, Vec<Probe>>) -> Vec<ProbeKindInfo> {
    let mut kinds = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for spec in &rule.probes {
        let found = match &spec.kind {
            ProbeKind::Begin | ProbeKind::End => vec![ProbeKindInfo::default()],
            ProbeKind::Pattern(pattern) => {
                let probes = resolved.get(pattern.as_str()).into_iter().flatten();
                probes.map(ProbeKindInfo::of).collect()
            }
        };
        for kind in found {
            if seen.insert(kind.clone()) {
                kinds.push(kind);
            }
        }
    }
    kinds
}

/// Names of the maps that rules assign to in their outermost statements: what bt(5) prints at the end.
fn assigned(script: &Script) -> Vec<&str> {
    let statements = script.rules.iter().flat_map(|rule| &rule.body.statements);
    let places = statements.filter_map(|statement| match &statement.kind {
        StatementKind::Assign { place, .. } | StatementKind::Aggregate { place, .. } => Some(place),
        _ => None,
    });
    let names = places.filter_map(|place| match &place.kind {
        PlaceKind::Global { name, .. } => Some(name.as_str()),
        PlaceKind::Local(_) => None,
    });
    names.collect()
}

/// What `probe` and `func` are at a probe.
fn texts(name: &ProbeName, dialect: Dialect) -> ProbeTexts {
    let ProbeName {
        provider,
        function,
        name: last,
        ..
    } = name;
    let whole = match dialect {
        Dialect::Normal => name.to_string(),
        Dialect::Strict => format!("{provider}:{function}:{last}"),
    };
    ProbeTexts {
        name: whole.as_bytes().into(),
        function: function.as_bytes().into(),
    }
}

/// What runs at a probe's hits: the rules that stand there, in the script's order.
struct ScriptProgram {
    shared: Arc<Shared>,
    codes: Vec<Arc<Code>>,
    texts: ProbeTexts,
    clock: Clock,
}

impl Program for ScriptProgram {
    fn run(&self, hit: &ProbeHit<'_>) -> Ran {
        let context = AtHit {
            hit,
            clock: &self.clock,
        };
        let mut ran = Ran::Filtered;
        for code in &self.codes {
            // After exit() nothing runs any more, on no vCPU.
            if self.shared.exited.load(Ordering::Relaxed) {
                break;
            }
            if run(code, &self.shared, &context, &self.texts) == Ended::Ran {
                ran = Ran::Taken;
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
    dialect: Dialect,
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
        self.dialect
    }

    /// Gives what was put out since the last time, in order. Never waits.
    pub fn drain(&mut self, each: &mut dyn FnMut(Output)) -> usize {
        let (shared, clock) = (&self.shared, &self.clock);
        self.session.drain_records(|_, tsc, words| {
            if let Some((emission, values)) = record::read(words)
                && let Some(output) = output(shared, emission, values, clock.unix_ns(tsc))
            {
                each(output);
            }
        })
    }

    /// Takes the probes away, gives what is left to be put out, runs END and prints the maps.
    pub fn finish(mut self, each: &mut dyn FnMut(Output)) -> ScriptStats {
        self.session.disable_all();
        self.drain(each);
        finish_here(&self.end, &self.printed, &self.shared, &self.clock, each);
        self.stats()
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

/// Runs BEGIN or END, on this thread.
fn run_here(
    codes: &[Code],
    name: &str,
    shared: &Shared,
    clock: &Clock,
    each: &mut dyn FnMut(Output),
) {
    let context = Here {
        unix_ns: clock.unix_ns(vmm::host_tsc()),
        put: RefCell::default(),
    };
    let texts = ProbeTexts {
        name: name.as_bytes().into(),
        function: [].into(),
    };
    for code in codes {
        if shared.exited.load(Ordering::Relaxed) {
            break;
        }
        run(code, shared, &context, &texts);
    }
    for (emission, values) in context.put.into_inner() {
        if let Some(output) = output(shared, emission, values, context.unix_ns) {
            each(output);
        }
    }
}

/// Runs END and prints the maps.
fn finish_here(
    end: &[Code],
    printed: &[usize],
    shared: &Shared,
    clock: &Clock,
    each: &mut dyn FnMut(Output),
) {
    // exit() of a rule ends the rules, not END.
    shared.exited.store(false, Ordering::Relaxed);
    run_here(end, "END", shared, clock, each);
    for map in printed {
        let snapshot = shared.maps.snapshot(*map);
        if !snapshot.entries.is_empty() {
            each(Output::Map {
                snapshot,
                top: None,
                divisor: None,
            });
        }
    }
}

/// What an emission and its values come to.
fn output(shared: &Shared, emission: usize, values: Vec<Value>, unix_ns: u64) -> Option<Output> {
    let mut values = values;
    Some(match shared.emissions.get(emission)? {
        Emission::Printf { format, to_stderr } => Output::Printf {
            format: format.clone(),
            arguments: values,
            to_stderr: *to_stderr,
        },
        Emission::Print => Output::Print(values.pop()?),
        Emission::Join { separator } => Output::Join {
            parts: values
                .into_iter()
                .filter_map(|value| match value {
                    Value::Text(text) => Some(text),
                    _ => None,
                })
                .collect(),
            separator: separator.clone(),
        },
        Emission::Time { format } => Output::Time {
            format: format.clone(),
            unix_ns: i64::try_from(unix_ns).unwrap_or(i64::MAX),
        },
        Emission::Map { top, divisor } => match values.pop()? {
            Value::Int(ticket) => Output::Map {
                snapshot: shared.snapshots.take(ticket)?,
                top: *top,
                divisor: *divisor,
            },
            _ => return None,
        },
        Emission::Fail { message } => Output::Fail {
            message: message.clone(),
        },
    })
}

/// Where BEGIN and END run: on the host, as the tracer's own process.
struct Here {
    unix_ns: u64,
    put: RefCell<Vec<(usize, Vec<Value>)>>,
}

impl Context for Here {
    fn cpu(&self) -> usize {
        0
    }

    fn process(&self) -> u32 {
        std::process::id()
    }

    fn thread(&self) -> u32 {
        std::process::id()
    }

    fn comm(&self) -> [u8; COMM_LENGTH] {
        *b"exotrace\0\0\0\0\0\0\0\0"
    }

    fn unix_ns(&self) -> u64 {
        self.unix_ns
    }

    fn task(&self) -> u64 {
        0
    }

    fn pc(&self) -> u64 {
        0
    }

    fn argument(&self, _: usize) -> u64 {
        0
    }

    fn returned(&self) -> Option<u64> {
        None
    }

    fn register(&self, _: &Register) -> u64 {
        0
    }

    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn read_string(&self, _: u64, _: &mut [u8]) -> (usize, bool) {
        (0, false)
    }

    fn kernel_stack(&self, _: &mut [u64]) -> usize {
        0
    }

    fn user_stack(&self, _: &mut [u64]) -> usize {
        0
    }

    fn emit(&self, emission: usize, values: &[Value]) -> bool {
        self.put.borrow_mut().push((emission, values.to_vec()));
        true
    }
}
