//! Scripts in the bt language over a machine, for `trace -e`, `trace FILE` and `run -e`.
//!
//! A [`Job`] belongs to one thread of the machine's process, which calls [`Job::step`] often and
//! [`Job::finish`] once. Its output is already rendered: bytes for standard output and standard
//! error.

mod maps;
mod moments;
mod names;

use crate::protocol::cost::{Cost, Unwatched};
use crate::protocol::script::{Counts, MapLine};
use std::sync::Arc;

use bt::Clock;
use bt::ast::{Dialect, Iteration, Script};
use bt::compile::Guest;
use bt::diagnostic::Diagnostic;
use bt::render::{Output, collapsed, json, text};
use bt::session::{Finder, NotFound, Prepared, ScriptSession, ScriptStats};
use bt::value::Names;
use introspect::kernel::btf::Btf;
use probes::engine::{Engine, Waiter};
use probes::kernel_view::KernelView;
use probes::probe::Probe;
use probes::provider::{Inspectable, Traceable};

use crate::inspection::InspectedGuest;
use crate::protocol::error::RequestError;
use crate::protocol::script::{Form, ScriptRequest};
use crate::vm::Vm;
use moments::Moments;
use names::GuestNames;

/// The rate in Hz of the clock of a script that has no hits.
const NANOSECONDS: u64 = 1_000_000_000;

/// The number of bytes of one output behind which no file is printed: the guest may hit many probes
/// before its output is taken.
const MOST_AT_ONCE: usize = 32 << 20;

/// Rendered output.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rendered {
    /// The bytes for standard output.
    pub out: Vec<u8>,
    /// The bytes for standard error.
    pub err: Vec<u8>,
}

/// A script at work on a machine.
pub struct Job {
    script: ScriptSession,
    renderer: Renderer,
    ticks_before: u64,
    moments: Moments,
}

impl Job {
    /// Compiles the requested script and enables its probes. `view` is of the running kernel. The
    /// second value is the output of BEGIN.
    ///
    /// # Errors
    /// If the script has errors, or a probe cannot be enabled.
    pub fn start(
        machine: &Arc<Vm>,
        engine: &Engine,
        view: &Arc<KernelView>,
        request: &ScriptRequest,
    ) -> Result<(Self, Rendered), RequestError> {
        Self::start_as(machine, engine, view, request, false)
    }

    /// Does the same for a script whose probes no budget stops.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_whole(
        machine: &Arc<Vm>,
        engine: &Engine,
        view: &Arc<KernelView>,
        request: &ScriptRequest,
    ) -> Result<(Self, Rendered), RequestError> {
        Self::start_as(machine, engine, view, request, true)
    }

    fn start_as(
        machine: &Arc<Vm>,
        engine: &Engine,
        view: &Arc<KernelView>,
        request: &ScriptRequest,
        is_whole: bool,
    ) -> Result<(Self, Rendered), RequestError> {
        let ticks_before = engine.stats().joined_ticks;
        let guest = &machine.traceable(view);
        let prepared = prepare(guest, engine.tsc_hz(), request)?;
        moments::begin(machine, prepared.keeps())?;
        let (script, first) = begin(prepared, guest, engine, request, is_whole)?;
        let mut renderer = Renderer {
            machine: machine.clone(),
            names: GuestNames::new(view.clone()),
            form: request.form,
            dialect: script.dialect(),
        };
        let rendered = renderer.render(&first);
        let job = Self {
            script,
            renderer,
            ticks_before,
            moments: Moments::default(),
        };
        Ok((job, rendered))
    }

    /// Returns the enabled probes.
    pub fn probes(&self) -> Vec<String> {
        let probes = self.script.probes().iter();
        probes.map(|probe| probe.name.to_string()).collect()
    }

    /// Returns the probes that are not enabled, with reasons.
    pub fn skipped(&self) -> &[String] {
        self.script.skipped()
    }

    /// Returns the patterns that wait for a file to be mapped, or a module to be loaded.
    pub fn waiting(&self) -> impl Iterator<Item = &str> {
        self.script.waiting()
    }

    /// Enables the probes of modules that the guest has loaded and files that it has mapped, and
    /// keeps the moments that the script wants. The guest is held until then, so this is called
    /// whether there is room for output or not.
    pub fn take_up(&mut self) {
        if let Some(guest) = self.renderer.machine.traced() {
            self.script.take_up(&guest);
        }
        for moment in self.script.take_moments() {
            self.moments.keep(&self.renderer.machine, moment);
        }
    }

    /// Checks whether the script has ended itself.
    pub fn has_exited(&self) -> bool {
        self.script.has_exited()
    }

    /// Returns a waiter for the output, exit and end to come.
    pub fn waiter(&self) -> Waiter {
        self.script.waiter()
    }

    /// Returns the output since the last call.
    pub fn step(&mut self) -> Rendered {
        let mut outputs = Vec::new();
        self.script.drain(&mut |output| outputs.push(output));
        let mut rendered = self.renderer.render(&outputs);
        self.moments.tell(&mut rendered.err);
        rendered
    }

    /// Returns the contents of all maps that have numbers.
    pub fn maps(&mut self) -> Vec<MapLine> {
        let all: Vec<_> = self.script.maps().collect();
        let outputs = all.iter().map(|(_, snapshot)| Output::Map {
            snapshot: snapshot.clone(),
            top: None,
            divisor: None,
        });
        let outputs: Vec<Output> = outputs.collect();
        self.renderer
            .names
            .prepare(&self.renderer.machine.inspection(), &outputs);
        let names = &self.renderer.names;
        let lines = all.iter();
        lines
            .map(|(kind, snapshot)| maps::line(*kind, snapshot, names))
            .collect()
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        let hz = self.renderer.machine.tsc_hz();
        let each = self.script.each();
        let each: Vec<_> = each.into_iter().map(Option::unwrap_or_default).collect();
        let of_probes = || self.probes().into_iter().zip(&each);
        let given_up = of_probes().filter(|(_, stats)| stats.given_up > 0);
        let given_up = given_up.map(|(name, _)| name).collect();
        let unwatched = of_probes().zip(self.script.unwatched());
        let unwatched = unwatched.filter_map(|((name, stats), unwatched)| {
            Unwatched::of(&name, stats.hits, unwatched?, hz)
        });
        let unwatched = unwatched.collect();
        let cost = Cost::of(self.script.cost(), hz);
        let each = of_probes()
            .map(|(name, stats)| (name, stats.hits))
            .collect();
        let engine = self.renderer.machine.engine.get().map(Engine::stats);
        let joined_ticks = engine.map_or(0, |stats| stats.joined_ticks) - self.ticks_before;
        let counts = Counts {
            joined_ticks,
            each,
            given_up,
            lost_moments: self.moments.lost(),
            cost,
            unwatched,
            ..Counts::default()
        };
        with_stats(counts, &self.script.stats())
    }

    /// Removes the probes and returns the remaining output and the counts.
    pub fn finish(self) -> (Rendered, Counts) {
        // The counts are of one moment: no hit comes between them and the probes' end.
        let machine = self.renderer.machine.clone();
        let paused = machine.machine.pause();
        let counts = self.counts();
        let Self {
            script,
            mut renderer,
            mut moments,
            ..
        } = self;
        let mut outputs = Vec::new();
        let stats = script.finish(&mut |output| outputs.push(output), &mut |moment| {
            moments.keep(&machine, moment);
        });
        drop(paused);
        let counts = Counts {
            lost_moments: moments.lost(),
            ..with_stats(counts, &stats)
        };
        let mut rendered = renderer.render(&outputs);
        moments.tell(&mut rendered.err);
        (rendered, counts)
    }
}

/// Returns counts with those of the script's session.
fn with_stats(counts: Counts, stats: &ScriptStats) -> Counts {
    Counts {
        hits: stats.probes.hits,
        filtered: stats.probes.filtered,
        ran: stats.probes.recorded,
        lost_output: stats.lost_output,
        lost_values: stats.lost_values,
        divisions_by_zero: stats.divisions_by_zero,
        failed_reads: stats.failed_reads,
        failed_fields: stats.failed_fields,
        endless: stats.endless,
        exit_status: stats.exit_status,
        ..counts
    }
}

/// Resolves `request` in this guest without enabling anything.
///
/// # Errors
/// As [`Job::start`].
pub fn prepare(
    guest: &dyn Traceable,
    tsc_hz: u64,
    request: &ScriptRequest,
) -> Result<Prepared, RequestError> {
    let script = request.parse()?;
    let clock = Clock::now(tsc_hz);
    let vcpus = guest.machine().vcpus();
    let options = request.options();
    let known: &dyn Inspectable = guest;
    let prepared = Prepared::new(&script, &options, &known, &known, vcpus, clock);
    let prepared = prepared.map_err(|wrong| request.refuse(&wrong))?;
    RequestError::limit_probes(prepared.probes().len())?;
    Ok(prepared)
}

/// Compiles the requested script, enables its probes, and also returns the output of BEGIN. No
/// budget stops its probes if it `is_whole`.
///
/// # Errors
/// As [`Job::start`]. Nothing is left in the guest then.
pub fn attach(
    guest: &dyn Traceable,
    engine: &Engine,
    request: &ScriptRequest,
    is_whole: bool,
) -> Result<(ScriptSession, Vec<Output>), RequestError> {
    let prepared = prepare(guest, engine.tsc_hz(), request)?;
    begin(prepared, guest, engine, request, is_whole)
}

fn begin(
    prepared: Prepared,
    guest: &dyn Traceable,
    engine: &Engine,
    request: &ScriptRequest,
    is_whole: bool,
) -> Result<(ScriptSession, Vec<Output>), RequestError> {
    let (label, budget) = (request.file.clone(), request.whose.budget);
    let prepared = prepared.with_session(move |session| {
        session.set_label(&label);
        session.set_budget(budget.map(|budget| budget.0));
        if is_whole {
            session.watch_always();
        }
    });
    let mut first = Vec::new();
    let mut put = |output| first.push(output);
    let filter = |probe: &Probe| request.filter(probe);
    let mut script = prepared.start(engine, &filter, &mut put)?;
    script.take_up(guest);
    script.iterate(guest, &mut |output| first.push(output))?;
    Ok((script, first))
}

/// A renderer of a script's output as text.
struct Renderer {
    machine: Arc<Vm>,
    names: GuestNames,
    form: Form,
    dialect: Dialect,
}

impl Renderer {
    fn render(&mut self, outputs: &[Output]) -> Rendered {
        self.names.prepare(&self.machine.inspection(), outputs);
        rendered(outputs, self.form, self.dialect, &self.names)
    }
}

/// Runs a script that needs no guest: BEGIN and END alone.
///
/// # Errors
/// If the script has errors.
pub fn run_alone(script: &Script, request: &ScriptRequest) -> Result<(Rendered, u8), RequestError> {
    let clock = Clock::now(NANOSECONDS);
    let prepared = Prepared::new(script, &request.options(), &Nobody, &Nobody, 1, clock);
    let (outputs, status) = run_prepared(prepared, request, None)?;
    Ok((
        rendered(&outputs, request.form, request.dialect(), &names::Addresses),
        status,
    ))
}

/// Runs a script over a guest that does not run: BEGIN, iterations and END.
///
/// # Errors
/// If the script has errors or other probes, or the guest cannot be iterated over.
pub fn run_over(
    guest: &InspectedGuest<'_>,
    script: &Script,
    request: &ScriptRequest,
) -> Result<(Rendered, u8), RequestError> {
    let clock = Clock::now(NANOSECONDS);
    let known: &dyn Inspectable = guest;
    let prepared = Prepared::new(script, &request.options(), &known, &NoHits, 1, clock);
    let (outputs, status) = run_prepared(prepared, request, Some(known))?;
    let mut names = GuestNames::new(guest.shared_view().clone());
    names.prepare(&guest.inspection(), &outputs);
    Ok((
        rendered(&outputs, request.form, request.dialect(), &names),
        status,
    ))
}

/// Runs a script without probes. Returns its output and status.
fn run_prepared(
    prepared: Result<Prepared, Vec<Diagnostic>>,
    request: &ScriptRequest,
    guest: Option<&dyn Inspectable>,
) -> Result<(Vec<Output>, u8), RequestError> {
    let prepared = prepared.map_err(|wrong| request.refuse(&wrong))?;
    moments::refuse(prepared.keeps())?;
    let mut outputs = Vec::new();
    let status = prepared.run_alone(guest, &mut |output| outputs.push(output))?;
    Ok((outputs, status))
}

fn rendered(outputs: &[Output], form: Form, dialect: Dialect, names: &dyn Names) -> Rendered {
    let mut rendered = Rendered::default();
    for output in outputs {
        let Output::File { path, .. } = output else {
            render(output, form, dialect, names, &mut rendered);
            continue;
        };
        let path = path.bytes(names);
        let lost = match rendered.out.len() > MOST_AT_ONCE {
            true => Some(format!("more than {MOST_AT_ONCE} bytes of output at once")),
            false => {
                render(output, form, dialect, names, &mut rendered);
                names.file(&path).lost
            }
        };
        if let Some(reason) = lost {
            let path = String::from_utf8_lossy(&path);
            let line = format!("cat {path}: {reason}\n");
            rendered.err.extend(line.bytes());
        }
    }
    rendered
}

fn render(
    output: &Output,
    form: Form,
    dialect: Dialect,
    names: &dyn Names,
    rendered: &mut Rendered,
) {
    let part = match output.is_for_stderr() {
        true => &mut rendered.err,
        false => &mut rendered.out,
    };
    match (form, output) {
        (Form::Json, output) => part.extend(json::render(output, dialect, names).bytes()),
        (Form::Collapsed, Output::Map { snapshot, .. }) => {
            part.extend(collapsed::render(snapshot, names).bytes());
        }
        // Folded lines are for programs.
        (Form::Collapsed, Output::Ending) => {}
        (Form::Text | Form::Collapsed, output) => part.extend(text::render(output, dialect, names)),
    }
}

/// The probes of a guest that does not run: none.
struct NoHits;

impl Finder for NoHits {
    fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound> {
        let known = Iteration::ALL.map(Iteration::name).join(", ");
        Err(NotFound::from(format!(
            "{pattern}: a guest that does not run here has no hits; rules may be for BEGIN, END, {known}"
        )))
    }
}

/// No guest at all.
struct Nobody;

impl Guest for Nobody {
    fn types(&self) -> Option<&Btf> {
        None
    }

    fn symbol(&self, _: &str) -> Option<u64> {
        None
    }

    fn nearest_symbols(&self, _: &str) -> Vec<String> {
        Vec::new()
    }
}

impl Finder for Nobody {
    fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound> {
        Err(NotFound {
            message: format!("{pattern}: there is no guest"),
            nearest: Vec::new(),
        })
    }
}
