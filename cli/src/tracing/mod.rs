//! Tracing a running machine: from patterns to enabled probes, and from events to lines.
//!
//! A [`Tracing`] is one session of the machine's probe engine. Its owner drains it. Dropping it
//! removes its traps.

mod call_values;
pub mod listing;
pub mod text;

use crate::protocol::cost::{Cost, Unwatched};
use crate::protocol::error::{ErrorKind, RequestError};
use crate::protocol::trace::{Counts, Traced, process};
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use probes::engine::{
    Capture, Engine, EngineStats, ProbeStats, RingSize, Session, SessionStats, Waiter,
};
use probes::event::{Event, EventKind, MAX_STATIC_ARGUMENTS};
use probes::file_probes::FileProbes;
use probes::kernel_view::KernelView;
use probes::module_probes::{Enable, ModuleProbes};
use probes::name::ProbePattern;
use probes::probe::{Probe, Target};
use probes::provider::{self, Traceable, kprobe, module, usdt};

use crate::protocol::event::ClockPair;
use crate::protocol::trace::Request;
use crate::vm::Vm;

/// A session of the machine's engine.
pub struct Tracing {
    session: Session,
    probes: Vec<Probe>,
    traced: Vec<Traced>,
    skipped: Vec<String>,
    request: Request,
    /// Probes of files that no process has mapped yet.
    files: Option<FileProbes>,
    /// Probes of modules that are named, whether they are loaded or not.
    modules: Option<ModuleProbes>,
    /// The engine's counts at the start, to be subtracted as other traces' counts.
    before: EngineStats,
    /// Both clocks before the first site was armed.
    began: ClockPair,
    /// The probes that a budget has stopped, as of the end.
    unwatched: Vec<Unwatched>,
    /// The calls that had not returned at the end, when this trace ceased to wait for them.
    waiting_returns: Option<u64>,
}

impl Tracing {
    /// Enables the probes of `request`. `view` is of the running kernel.
    ///
    /// # Errors
    /// If a pattern matches nothing, or a probe cannot be enabled. Nothing is armed then.
    pub fn start(
        guest: &dyn Traceable,
        engine: &Engine,
        request: &Request,
    ) -> Result<Self, RequestError> {
        let view = guest.view();
        let mut found: Vec<Probe> = Vec::new();
        // A plain name requires every probe to be armed, a pattern only those that can be.
        let mut must = HashSet::new();
        let mut known = HashSet::new();
        let (mut open, mut of_modules) = (Vec::new(), Vec::new());
        let mut to_come = None;
        for text in &request.probes {
            let pattern = ProbePattern::parse(text)?;
            if module::named(&pattern).is_some() {
                of_modules.push(pattern.clone());
            }
            let matches = match provider::find(guest, &pattern) {
                Ok(matches) => matches,
                Err(_) if module::to_come(view, &pattern).is_some() => {
                    to_come = Some(pattern);
                    continue;
                }
                // Of a file that no process has mapped: it may come.
                Err(_) if !provider::to_come(guest, &pattern).is_empty() => {
                    open.push(pattern);
                    continue;
                }
                Err(why) => return Err(why.into()),
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
        let none_to_come = open.is_empty() && to_come.is_none();
        if found.is_empty() && none_to_come {
            let why = "no probes to trace were given";
            return Err(RequestError::new(ErrorKind::Invalid, why));
        }
        RequestError::limit_probes(found.len())?;
        let captures: Vec<_> = found
            .iter()
            .map(|probe| capture(request, probe, registers(view, probe)))
            .collect();
        let words = captures
            .iter()
            .map(|capture| RingSize::for_capture(1, capture).words);
        let size = RingSize {
            slots: request.slots,
            // Records of later probes are as large as those of a program's function or static
            // probe.
            words: words
                .max()
                .unwrap_or_default()
                .max(RingSize::default().words + 2 + request.frames())
                .max(words_to_come(request, &open)),
        };
        let before = engine.stats();
        // The guest runs, and hits the first traps while the last are being armed.
        let began = ClockPair::now();
        let mut session = engine.session(size)?;
        session.set_budget(request.budget.map(|budget| budget.0));
        session.set_label(&request.probes.join(", "));
        let (mut probes, mut skipped) = (Vec::new(), Vec::new());
        for (probe, capture) in found.into_iter().zip(captures) {
            match session.enable(&probe, request.filter(process(&probe)), capture) {
                Ok(_) => probes.push(probe),
                Err(error) if must.contains(&probe.name) => return Err(error.into()),
                Err(error) => skipped.push(error.to_string()),
            }
        }
        if probes.is_empty() && none_to_come {
            return Err(RequestError::new(
                ErrorKind::NotEnabled,
                skipped.swap_remove(0),
            ));
        }
        let files = match open.first().cloned() {
            None => None,
            Some(first) => Some(FileProbes::follow(&session, open).ok_or_else(|| {
                let why = format_args!(
                    "{first}: no process has it mapped, and the kernel does not report new ones"
                );
                RequestError::new(ErrorKind::NoMatch, why)
            })?),
        };
        let modules = ModuleProbes::follow(&session, of_modules, probes.iter().zip(0..));
        if let (Some(pattern), None) = (to_come, &modules) {
            let why = format_args!(
                "{pattern}: its module is not loaded, and the kernel does not report new ones"
            );
            return Err(RequestError::new(ErrorKind::NoMatch, why));
        }
        // A process may have started, or a module come, in between.
        let mut tracing = Self {
            request: request.clone(),
            files,
            modules,
            session,
            traced: probes.iter().map(traced).collect(),
            probes,
            skipped,
            before,
            began,
            unwatched: Vec::new(),
            waiting_returns: None,
        };
        tracing.look_for_files(guest);
        tracing.look_for_modules(ModuleProbes::take_up_present);
        Ok(tracing)
    }

    /// Looks at the files that the guest has mapped and the modules that it has loaded since the
    /// last time. Enables the probes there. The guest is held until it is called.
    pub fn take_up(&mut self, vm: &Vm) {
        self.look_for_modules(ModuleProbes::take_up);
        if let Some(guest) = vm.traced() {
            self.look_for_files(&guest);
        }
    }

    fn look_for_files(&mut self, guest: &dyn Traceable) {
        let Some(mut files) = self.files.take() else {
            return;
        };
        let request = &self.request;
        files.take_up(&mut self.session, guest, &mut |session, probe, _| {
            let capture = capture(request, &probe, None);
            match session.enable(&probe, request.filter(process(&probe)), capture) {
                Ok(_) => {
                    self.traced.push(traced(&probe));
                    self.probes.push(probe);
                }
                Err(error) => self.skipped.push(error.to_string()),
            }
        });
        self.files = Some(files).filter(|files| files.waiting().next().is_some());
    }

    /// Enables the probes of modules that `look` finds.
    fn look_for_modules(
        &mut self,
        look: impl FnOnce(&mut ModuleProbes, &mut Session, &mut Enable<'_>),
    ) {
        let Some(modules) = &mut self.modules else {
            return;
        };
        let (request, engine) = (&self.request, self.session.engine().clone());
        let (all, all_traced) = (&mut self.probes, &mut self.traced);
        look(modules, &mut self.session, &mut |session, probe| {
            let capture = capture(request, &probe, registers(engine.view(), &probe));
            let number = session.enable(&probe, request.filter(process(&probe)), capture)?;
            all_traced.push(traced(&probe));
            all.push(probe);
            Ok(Some(number))
        });
    }

    /// Returns the patterns that wait for a file to be mapped, or a module to be loaded.
    pub fn open(&self) -> impl Iterator<Item = &str> {
        let modules = self.modules.iter().flat_map(ModuleProbes::waiting);
        let files = self.files.iter().flat_map(FileProbes::waiting);
        let waiting = files.chain(modules);
        waiting.map(|pattern| pattern.text.as_str())
    }

    /// Returns the clocks at the start of the trace: no event is earlier.
    pub fn began(&self) -> ClockPair {
        self.began
    }

    /// Returns the traced probes, indexed by [`Event::probe`].
    pub fn traced(&self) -> &[Traced] {
        &self.traced
    }

    /// Returns the probes of patterns that cannot be enabled, with reasons.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Returns a waiter for the events, files and ends to come.
    pub fn waiter(&self) -> Waiter {
        self.session.waiter()
    }

    /// Passes the events recorded since the last call to `each`, in time order.
    pub fn drain(&mut self, each: impl FnMut(Event)) -> usize {
        self.session.drain(each)
    }

    /// Disarms all probes at one moment and returns each one's counts, in the order of
    /// [`Self::traced`]. The recorded events can still be drained.
    pub fn stop(&mut self) -> Vec<ProbeStats> {
        let machine = self.session.engine().machine().clone();
        let _paused = machine.pause();
        let each = self.look();
        let waiting = |session: &Session| session.engine().stats().waiting_returns;
        let before = waiting(&self.session);
        self.session.disable_all();
        let waiting = before.saturating_sub(waiting(&self.session));
        // Nothing waits any more when it is stopped again.
        self.waiting_returns.get_or_insert(waiting);
        each
    }

    /// Returns each probe's counts so far, in the order of [`Self::traced`].
    pub fn look(&mut self) -> Vec<ProbeStats> {
        let each: Vec<ProbeStats> = (0..)
            .zip(&self.probes)
            .map(|(number, _)| self.session.probe_stats(number).unwrap_or_default())
            .collect();
        let hz = self.session.engine().tsc_hz();
        let probes = (0..).zip(self.probes.iter().zip(&each));
        let unwatched = probes.filter_map(|(number, (probe, stats))| {
            let unwatched = self.session.unwatched(number)?;
            Unwatched::of(&probe.name.to_string(), stats.hits, unwatched, hz)
        });
        self.unwatched = unwatched.collect();
        each
    }

    /// Returns the counts of the trace, from those that [`Self::stop`] or [`Self::look`] returned.
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
            waiting_returns: self.waiting_returns.unwrap_or(engine.waiting_returns),
            unknown_task: engine.unknown_task - self.before.unknown_task,
            cost: Cost::of(self.session.cost(), self.session.engine().tsc_hz()),
            unwatched: self.unwatched.clone(),
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

/// Returns the place of a probe, which distinguishes probes of one name.
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
        Target::Watchpoint(watchpoint) => (watchpoint.address().0, 0),
        Target::Timer { .. } => (0, 0),
    }
}

/// Returns the number of argument registers that a kernel function takes.
fn registers(view: &KernelView, probe: &Probe) -> Option<usize> {
    match &probe.target {
        Target::Kernel { .. } if probe.name.provider == kprobe::PROVIDER => {
            view.argument_registers(&probe.name.function)
        }
        _ => None,
    }
}

/// Returns the capture for a probe's hits.
fn capture(request: &Request, probe: &Probe, registers: Option<usize>) -> Capture {
    let mut capture = request.capture(probe, registers);
    if let Target::Static(text) = &probe.target {
        let sites = text.sites.iter().map(|site| site.arguments.len());
        capture.arguments = sites.max().unwrap_or_default();
    }
    capture
}

/// Returns the record size in words for files that are not mapped yet.
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

fn traced(probe: &Probe) -> Traced {
    let arguments = probe.signature.as_ref().map_or(&[][..], |s| &s.arguments);
    Traced {
        name: probe.name.to_string(),
        function: probe.name.function.clone(),
        arguments: arguments.iter().map(|a| a.name.clone()).collect(),
        signed: arguments.iter().map(|a| is_signed(&a.type_name)).collect(),
    }
}

/// Checks whether values of a C type are numbers that may be negative.
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

/// Returns the line that tells the user of a pattern without probes yet: see [`Tracing::open`].
pub fn waits(pattern: &str) -> String {
    let parsed = ProbePattern::parse(pattern);
    match parsed.as_ref().ok().and_then(module::named) {
        Some(module) => format!("{pattern} waits for the module {module}"),
        None => format!("{pattern}: no process has it mapped; waiting for one"),
    }
}

/// Returns the number of probes among `names` for each provider.
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

/// Ends a draining thread when it is dropped.
pub struct Stopper(Stop);

/// The draining thread's side of a [`Stopper`].
#[derive(Clone)]
pub struct Stop {
    waiter: Waiter,
    stopped: Arc<AtomicBool>,
}

impl Stopper {
    /// Makes both sides, for the thread that drains by `waiter`.
    pub fn new(waiter: Waiter) -> (Self, Stop) {
        let stop = Stop {
            waiter,
            stopped: Arc::default(),
        };
        (Self(stop.clone()), stop)
    }
}

impl Drop for Stopper {
    fn drop(&mut self) {
        self.0.stopped.store(true, Ordering::SeqCst);
        self.0.waiter.wake();
    }
}

impl Stop {
    /// Waits until there may be something to drain. Returns whether the thread is to end.
    pub fn wait(&self) -> bool {
        let _ = self.waiter.wait(None);
        self.stopped.load(Ordering::SeqCst)
    }
}

/// The trace's thread cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("the trace thread cannot be started: {0}")]
pub struct TraceStartError(#[from] io::Error);

/// A programming error on the trace's thread.
#[derive(Debug, thiserror::Error)]
#[error("the trace thread panicked: the trace is incomplete")]
pub struct TracePanicked;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_without_probes_yet_says_what_it_waits_for() {
        for (pattern, expected) in [
            (
                "kprobe:virtio-net:virtnet_*:",
                "kprobe:virtio-net:virtnet_*: waits for the module virtio_net",
            ),
            (
                "tracepoint:ext4:ext4:*",
                "tracepoint:ext4:ext4:* waits for the module ext4",
            ),
            (
                "uprobe:/bin/a:main",
                "uprobe:/bin/a:main: no process has it mapped; waiting for one",
            ),
        ] {
            assert_eq!(waits(pattern), expected);
        }
    }
}
