//! Tracing a running machine: from patterns to enabled probes, and from events to lines.
//!
//! A [`Tracing`] is one session of the machine's probe engine. Whoever makes it drains it; when it goes, its traps are gone.

pub mod event;
pub mod outbox;
pub mod output;
pub mod request;
pub mod stream;
mod text;

use std::collections::{HashMap, HashSet};

use introspect::Gpa;
use probes::bt::session::NotFound;
use probes::engine::{Capture, Engine, EngineStats, NewFiles, ProbeStats, RingSize, SessionStats};
use probes::event::{Event, EventKind, MAX_STATIC_ARGUMENTS};
use probes::kernel_view::KernelView;
use probes::name::ProbePattern;
use probes::probe::{Probe, Target};
use probes::provider::{self, kprobe, tracepoint, uprobe, usdt};
use serde::{Deserialize, Serialize};

use crate::vm::Vm;
use output::ClockPair;
use request::Request;

/// Most probes of one trace.
pub const MOST_PROBES: usize = 1 << 16;
/// Files that are named where a function was not found in any.
const NAMED_FILES: usize = 5;

/// Why nothing is traced, for the user.
pub type Refusal = String;

/// A probe that is traced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traced {
    /// Its four parts.
    pub name: String,
    /// Its function, system call or event.
    pub function: String,
    /// Names of its arguments, as far as they are known.
    pub arguments: Vec<String>,
    /// Which of them are shown in decimal.
    pub signed: Vec<bool>,
}

/// What a trace came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Counts {
    /// Hits of entries that were recorded or dropped.
    pub entries: u64,
    /// The same of returns.
    pub exits: u64,
    /// Of all others.
    pub others: u64,
    /// Hits that filters left out.
    pub filtered: u64,
    /// Events read.
    pub read: u64,
    /// Events lost to full rings.
    pub dropped: u64,
    /// Of all traces of the machine together: returns of code that was called by none of them.
    pub unpaired_returns: u64,
    /// Calls whose return will not be seen.
    pub lost_returns: u64,
    /// Calls whose return could not be trapped.
    pub without_return: u64,
    /// Calls that have not returned yet.
    pub waiting_returns: u64,
    /// Hits whose process could not be read.
    pub unknown_task: u64,
    /// Probes with places in programs that stand no more: see [`ProbeStats::given_up`].
    pub given_up: Vec<String>,
}

/// A session of the machine's engine.
pub struct Tracing {
    session: probes::engine::Session,
    probes: Vec<Probe>,
    traced: Vec<Traced>,
    skipped: Vec<String>,
    request: Request,
    /// Patterns of programs' text that may match a file which is not mapped yet.
    open: Vec<ProbePattern>,
    new_files: Option<NewFiles>,
    /// Counts of the engine when this began: what came before is others'.
    before: EngineStats,
    /// Both clocks before the first trap was put in.
    began: ClockPair,
}

impl Tracing {
    /// Enables what `request` asks for. `view` is of the running kernel.
    ///
    /// # Errors
    /// If a pattern matches nothing, or a probe cannot be enabled. Nothing is armed then.
    pub fn start(
        machine: &Vm,
        engine: &Engine,
        view: &KernelView,
        request: &Request,
    ) -> Result<Self, Refusal> {
        let mut found: Vec<Probe> = Vec::new();
        // Of a name alone every probe must be armed; of a pattern, those that can be.
        let mut must = HashSet::new();
        let mut known = HashSet::new();
        let mut open = Vec::new();
        for text in &request.probes {
            let pattern = ProbePattern::parse(text).map_err(|error| error.to_string())?;
            let matches = match find(machine, view, &pattern) {
                Ok(matches) => matches,
                // Of a file that no process has mapped: it may come.
                Err(_) if may_come(machine, &pattern) => {
                    open.push(pattern);
                    continue;
                }
                Err(why) => return Err(why),
            };
            for probe in matches {
                if pattern.is_one() {
                    must.insert(probe.name.clone());
                }
                if known.insert((probe.name.clone(), place(&probe))) {
                    found.push(probe);
                }
            }
        }
        if found.is_empty() && open.is_empty() {
            return Err("no probes to trace were given".into());
        }
        if found.len() > MOST_PROBES {
            return Err(format!(
                "{} probes are to be traced, at most {MOST_PROBES} at once; name fewer",
                found.len()
            ));
        }
        let captures: Vec<_> = found
            .iter()
            .map(|probe| capture(request, probe, registers(view, probe)))
            .collect();
        let words = captures
            .iter()
            .map(|capture| RingSize::for_capture(1, capture).words);
        let size = RingSize {
            slots: request.slots,
            // What comes later is as large as what a program's function gives, or its static probe.
            words: words
                .max()
                .unwrap_or_default()
                .max(RingSize::default().words + 2 + request.frames())
                .max(words_to_come(request, &open)),
        };
        let before = engine.stats();
        // A running guest meets the first traps while the last are still put in.
        let began = ClockPair::now();
        let mut session = engine.session(size).map_err(|error| error.to_string())?;
        let (mut probes, mut skipped) = (Vec::new(), Vec::new());
        for (probe, capture) in found.into_iter().zip(captures) {
            match session.enable(&probe, request.filter(process(&probe)), capture) {
                Ok(_) => probes.push(probe),
                Err(error) if must.contains(&probe.name) => return Err(error.to_string()),
                Err(error) => skipped.push(error.to_string()),
            }
        }
        if probes.is_empty() && open.is_empty() {
            return Err(skipped.swap_remove(0));
        }
        let new_files = match open.is_empty() {
            true => None,
            false => Some(engine.new_files().ok_or_else(|| {
                format!(
                    "{}: no process has it mapped, and the kernel does not tell of new ones",
                    open[0]
                )
            })?),
        };
        // A process may have come in between.
        let mut tracing = Self {
            request: request.clone(),
            open,
            new_files,
            session,
            traced: probes.iter().map(traced).collect(),
            probes,
            skipped,
            before,
            began,
        };
        tracing.look_for_open(machine);
        Ok(tracing)
    }

    /// Looks at the files that the guest has mapped since the last time, which it is held for, and enables what matches them. To be called
    /// often.
    pub fn take_up_files(&mut self, machine: &Vm) {
        while let Some(_held) = self.new_files.as_ref().and_then(NewFiles::next) {
            self.look_for_open(machine);
        }
    }

    fn look_for_open(&mut self, machine: &Vm) {
        let patterns = std::mem::take(&mut self.open);
        for pattern in patterns {
            let Ok(found) = find_user(machine, &pattern) else {
                self.open.push(pattern);
                continue;
            };
            for probe in found {
                let capture = capture(&self.request, &probe, None);
                let filter = self.request.filter(process(&probe));
                match self.session.enable(&probe, filter, capture) {
                    Ok(_) => {
                        self.traced.push(traced(&probe));
                        self.probes.push(probe);
                    }
                    Err(error) => self.skipped.push(error.to_string()),
                }
            }
        }
        if self.open.is_empty() {
            self.new_files = None;
        }
    }

    /// Patterns that wait for a file to be mapped.
    pub fn open(&self) -> impl Iterator<Item = &str> {
        self.open.iter().map(|pattern| pattern.text.as_str())
    }

    /// Returns the clocks at the begin of the trace: no event is earlier.
    pub fn began(&self) -> ClockPair {
        self.began
    }

    /// What is traced; a position here is [`Event::probe`].
    pub fn traced(&self) -> &[Traced] {
        &self.traced
    }

    /// Probes of patterns that cannot be enabled, and why.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Gives what was recorded since the last time, in time order.
    pub fn drain(&mut self, each: impl FnMut(Event)) -> usize {
        self.session.drain(each)
    }

    /// Takes all traps away, at one moment; the counts of each probe until then, in the order of [`Self::traced`]. What was recorded can
    /// still be drained.
    pub fn stop(&mut self) -> Vec<ProbeStats> {
        let machine = self.session.engine().machine().clone();
        let _paused = machine.pause();
        let numbers = 0..u32::try_from(self.probes.len()).unwrap_or(u32::MAX);
        let each = numbers
            .map(|number| self.session.probe_stats(number).unwrap_or_default())
            .collect();
        self.session.disable_all();
        each
    }

    /// The counts, given those that [`Self::stop`] gave.
    pub fn counts(&self, each: &[ProbeStats]) -> Counts {
        let SessionStats { probes, read } = self.session.stats();
        let engine = self.session.engine().stats();
        let mut counts = Counts {
            filtered: probes.filtered,
            dropped: probes.dropped,
            read,
            unpaired_returns: engine.unpaired_returns - self.before.unpaired_returns,
            lost_returns: engine.lost_returns - self.before.lost_returns,
            without_return: engine.without_return - self.before.without_return,
            waiting_returns: engine.waiting_returns,
            unknown_task: engine.unknown_task - self.before.unknown_task,
            ..Counts::default()
        };
        for (probe, stats) in self.probes.iter().zip(each) {
            if stats.given_up > 0 {
                counts.given_up.push(probe.name.to_string());
            }
            let seen = stats.recorded + stats.dropped;
            match probe.kind() {
                EventKind::Entry => counts.entries += seen,
                EventKind::Return => counts.exits += seen,
                EventKind::Point | EventKind::Tick => counts.others += seen,
            }
        }
        counts
    }
}

/// Whether a pattern is of a file that no process has mapped yet.
fn may_come(machine: &Vm, pattern: &ProbePattern) -> bool {
    if usdt::has_file(pattern) {
        let kernel = machine.kernel.as_ref();
        let looked = machine.inspector.look(&machine.machine, kernel, |look| {
            let found = usdt::find(&look, pattern, &|_, _| false);
            found.is_ok_and(|found| found.files.is_empty())
        });
        return looked.unwrap_or(false);
    }
    if !uprobe::is_meant(pattern) {
        return false;
    }
    let kernel = machine.kernel.as_ref();
    let process = uprobe::process_of(&pattern.provider);
    let looked = machine.inspector.look(&machine.machine, kernel, |look| {
        // A process that is not there never maps anything.
        let is_there = process.is_none_or(|pid| matches!(look.process(pid), Ok(Ok(Some(_)))));
        let files = uprobe::find(
            &look,
            &ProbePattern {
                function: uprobe::WHOLE_FILE.into(),
                ..pattern.clone()
            },
            &|_, _| false,
        );
        is_there && files.is_ok_and(|found| found.files.is_empty())
    });
    looked.unwrap_or(false)
}

/// What tells probes of one name from each other: where they are.
fn place(probe: &Probe) -> (u64, u64) {
    match &probe.target {
        Target::Kernel { address, .. } => (address.0, 0),
        Target::User { text, .. } => (text.file.mapping.0, text.offset),
        Target::Static(text) => text
            .sites
            .first()
            .map_or((0, 0), |site| (site.text.file.mapping.0, site.text.offset)),
        Target::Tracepoint(text) => (text.structure.0, 0),
        Target::SystemCall { number, .. } => (u64::from(*number), 0),
        Target::Timer { .. } => (0, 0),
    }
}

/// The probes that a pattern stands for.
///
/// # Errors
/// If there are none, with names like it.
pub fn find(
    machine: &Vm,
    view: &KernelView,
    pattern: &ProbePattern,
) -> Result<Vec<Probe>, Refusal> {
    find_probes(machine, view, pattern)
        .map_err(|NotFound { message, nearest }| suggest(message, &nearest))
}

/// As [`find`], with the names apart.
///
/// # Errors
/// If there are none, with names like it.
pub fn find_probes(
    machine: &Vm,
    view: &KernelView,
    pattern: &ProbePattern,
) -> Result<Vec<Probe>, NotFound> {
    if uprobe::is_meant(pattern) || usdt::is_meant(pattern) {
        return find_user(machine, pattern);
    }
    let mut matches = provider::find(view, pattern);
    if pattern.matches_provider(tracepoint::PROVIDER) && pattern.text.contains(':') {
        matches
            .probes
            .extend(find_tracepoints(machine, view, pattern).map_err(not_found)?);
    }
    if !matches.probes.is_empty() {
        return Ok(matches.probes);
    }
    // A provider that is none of the kernel's may be a program's own.
    if usdt::may_be_meant(pattern)
        && let Ok(found) = find_user(machine, pattern)
    {
        return Ok(found);
    }
    let function = &pattern.function;
    let symbols = view.symbols.all_of(function);
    let mut functions = symbols.filter(|symbol| symbol.is_text());
    if functions.any(|symbol| view.has_freed(symbol.address)) {
        return Err(not_found(format!(
            "no probe {pattern}: {function} runs at boot only, and the kernel has freed its memory since"
        )));
    }
    let what = match pattern.text.contains(':') {
        false => format!("the guest's kernel and its loaded modules have no function {function:?}"),
        true => format!("no probe {pattern}"),
    };
    Err(NotFound {
        message: what,
        nearest: matches.nearest,
    })
}

fn not_found(message: Refusal) -> NotFound {
    NotFound {
        message,
        nearest: Vec::new(),
    }
}

fn find_tracepoints(
    machine: &Vm,
    view: &KernelView,
    pattern: &ProbePattern,
) -> Result<Vec<Probe>, Refusal> {
    let handle = machine.machine.handle();
    let found = machine
        .inspector
        .look(&machine.machine, machine.kernel.as_ref(), |look| {
            tracepoint::find(&look, &handle, view, pattern)
        })?;
    // A kernel that does not tell of its tracepoints has other probes.
    match found {
        Ok(found) => {
            for sentence in &found.incomplete {
                log::warn!("not all tracepoints are known: {sentence}");
            }
            Ok(found.probes)
        }
        Err(why) if pattern.provider == tracepoint::PROVIDER => Err(why),
        Err(_) => Ok(Vec::new()),
    }
}

fn find_user(machine: &Vm, pattern: &ProbePattern) -> Result<Vec<Probe>, NotFound> {
    let traps = machine.machine.handle();
    let unpatched = |gpa: Gpa, buf: &mut [u8]| traps.traps().read_unpatched(gpa, buf).is_ok();
    let found = machine
        .inspector
        .look(
            &machine.machine,
            machine.kernel.as_ref(),
            |look| match uprobe::is_meant(pattern) {
                true => uprobe::find(&look, pattern, &unpatched),
                false => usdt::find(&look, pattern, &unpatched),
            },
        )
        .map_err(not_found)?;
    let found = found.map_err(|lost| not_found(lost.to_string()))?;
    if !found.probes.is_empty() {
        return Ok(found.probes);
    }
    let named: Vec<&str> = (found.files.iter().take(NAMED_FILES))
        .map(String::as_str)
        .collect();
    let named = named.join(", ");
    let (module, function) = (&pattern.module, &pattern.function);
    let why = match (usdt::is_meant(pattern), found.files.is_empty()) {
        (true, _) if !usdt::has_file(pattern) => {
            "no program or library that a process has mapped has such a static probe".to_owned()
        }
        (true, true) => "no process has such a program or library mapped; see maps".to_owned(),
        (true, false) => format!("no such static probe in {named}"),
        (false, true) => {
            format!("no process has a program or library {module:?} mapped; see maps")
        }
        (false, false) => format!("no function {function:?} in {named}"),
    };
    let mut why = format!("{pattern}: {why}");
    for sentence in found.incomplete.iter().take(NAMED_FILES) {
        why += &format!("; {sentence}");
    }
    Err(NotFound {
        message: why,
        nearest: found.nearest,
    })
}

fn suggest(what: String, nearest: &[String]) -> Refusal {
    match nearest.is_empty() {
        true => what,
        false => format!("{what} (did you mean {}?)", nearest.join(", ")),
    }
}

/// How many argument registers a kernel function takes.
fn registers(view: &KernelView, probe: &Probe) -> Option<usize> {
    match &probe.target {
        Target::Kernel { .. } if probe.name.provider == kprobe::PROVIDER => {
            view.argument_registers(&probe.name.function)
        }
        _ => None,
    }
}

/// What is kept of a probe's hits.
fn capture(request: &Request, probe: &Probe, registers: Option<usize>) -> Capture {
    let mut capture = request.capture(probe, registers);
    if let Target::Static(text) = &probe.target {
        let sites = text.sites.iter().map(|site| site.arguments.len());
        capture.arguments = sites.max().unwrap_or_default();
    }
    capture
}

/// Words of what files that are not mapped yet may give.
fn words_to_come(request: &Request, open: &[ProbePattern]) -> usize {
    if !open.iter().any(usdt::is_meant) {
        return 0;
    }
    let capture = Capture {
        arguments: MAX_STATIC_ARGUMENTS,
        comm: true,
        ..Capture::default()
    };
    RingSize::for_capture(1, &capture).words + request.frames()
}

/// The process that a probe is meant in.
pub fn process(probe: &Probe) -> Option<u32> {
    let process = match &probe.target {
        Target::Static(text) => text.process,
        _ => uprobe::process_of(&probe.name.provider),
    };
    process.map(i32::cast_unsigned)
}

fn traced(probe: &Probe) -> Traced {
    let arguments = probe.signature.as_ref().map_or(&[][..], |s| &s.arguments);
    Traced {
        name: probe.name.to_string(),
        function: probe.name.function.clone(),
        arguments: arguments.iter().map(|a| a.name.clone()).collect(),
        signed: arguments.iter().map(|a| is_signed(&a.type_name)).collect(),
    }
}

/// Whether values of a C type are numbers that may be negative.
fn is_signed(type_name: &str) -> bool {
    matches!(
        type_name.trim_start_matches("const "),
        "int"
            | "long"
            | "long int"
            | "short"
            | "short int"
            | "loff_t"
            | "ssize_t"
            | "pid_t"
            | "off_t"
            | "long long int"
            | "int8_t"
            | "int16_t"
            | "int32_t"
            | "int64_t"
    )
}

/// How many probes each provider has among `names`.
pub fn count_by_provider<'n>(names: impl Iterator<Item = &'n str>) -> Vec<(String, usize)> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for name in names {
        *counts
            .entry(name.split(':').next().unwrap_or_default())
            .or_default() += 1;
    }
    let mut counts: Vec<(String, usize)> =
        counts.into_iter().map(|(n, c)| (n.to_owned(), c)).collect();
    counts.sort();
    counts
}
