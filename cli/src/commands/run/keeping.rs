//! The moments of a run that are kept as snapshots: those of `--snapshot-at`, and the one before
//! the end of a run that fails. And the recording of a restored machine, which is played.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use bt::moments;
use probes::kernel_view::KernelView;
use vmm::RunEnd;

use super::Watched;
use crate::args;
use crate::expect::Point;
use crate::history::BEFORE_END;
use crate::protocol::script::ScriptRequest;
use crate::report::{Failure, say, show};
use crate::scripting::{Job, prepare};
use crate::tracing::{Stop, Stopper, TracePanicked, TraceStartError, waits};
use crate::vm::Vm;

/// The name of a faulty point's source in messages.
const NAME: &str = "--snapshot-at";

/// Returns the folder for the run's snapshots, if it may make any. It is made if need be.
///
/// # Errors
/// If it cannot be made.
pub fn folder(
    args: &args::Run,
    script: Option<&ScriptRequest>,
) -> Result<Option<PathBuf>, Failure> {
    let script = script.map(ScriptRequest::parse).transpose();
    let script = script.map_err(Failure::refused)?;
    let is_needed = args.history.is_some()
        || !args.snapshot_at.is_empty()
        || script.is_some_and(|script| moments::are_kept_by(&script));
    let folder = match (&args.snapshots, is_needed) {
        (Some(folder), _) => folder.clone(),
        (None, true) => PathBuf::from("."),
        (None, false) => return Ok(None),
    };
    let made = std::fs::create_dir_all(&folder).and_then(|()| folder.canonicalize());
    let made = made.map_err(|error| {
        let folder = folder.display();
        Failure::new(format_args!("the folder for snapshots {folder}: {error}"))
    });
    made.map(Some)
}

/// The points of `--snapshot-at`, whose probes are enabled.
pub struct Keeping {
    stopper: Stopper,
    thread: JoinHandle<()>,
}

impl Keeping {
    /// Enables the probes of `points`. Returns `None` if there are none.
    ///
    /// # Errors
    /// If a probe is missing or cannot be enabled, or a predicate has errors.
    pub fn start(
        vm: &Arc<Vm>,
        view: &Arc<KernelView>,
        points: &[Point],
    ) -> Result<Option<Self>, Failure> {
        if points.is_empty() {
            return Ok(None);
        }
        let engine = vm.engine(view);
        // Each alone first, so that faults are shown in the user's own text and nothing else.
        for point in points {
            let alone = ScriptRequest::of(format!("{}\n{{ }}", point.rule()), NAME);
            prepare(&vm.traceable(view), engine.tsc_hz(), &alone).map_err(Failure::refused)?;
        }
        let started = Job::start_whole(vm, &engine, view, &ScriptRequest::of(script(points), NAME));
        let (job, _) = started.map_err(Failure::refused)?;
        super::super::trace::tell_skipped(job.skipped());
        job.waiting().for_each(|pattern| say(waits(pattern)));
        let (stopper, stop) = Stopper::new(job.waiter());
        let thread = std::thread::Builder::new().name("snapshot-at".into());
        let thread = thread.spawn(move || keep(job, &stop));
        let thread = thread.map_err(TraceStartError::from)?;
        Ok(Some(Self { stopper, thread }))
    }

    /// Removes the probes.
    ///
    /// # Errors
    /// If the thread panicked.
    pub fn finish(self) -> Result<(), TracePanicked> {
        drop(self.stopper);
        self.thread.join().map_err(|_| TracePanicked)
    }
}

fn keep(mut job: Job, stop: &Stop) {
    while !stop.wait() {
        job.take_up();
        show(&job.step().err);
    }
    show(&job.finish().0.err);
}

/// Returns the script with a rule for each point, which keeps its first hit.
fn script(points: &[Point]) -> String {
    let rules = points.iter().enumerate().map(|(at, point)| {
        let (rule, name) = (point.rule(), name_of(point));
        format!("{rule}\n{{ if (@kept{at} == 0) {{ @kept{at} = 1; snapshot(\"{name}\") }} }}\n")
    });
    let config = "config = { print_maps_on_exit = 0 }\n".to_owned();
    std::iter::once(config).chain(rules).collect()
}

/// Returns the name for the snapshot of a point: its probe, without the marks that files do not
/// have.
fn name_of(point: &Point) -> String {
    const LONGEST: usize = 100;
    let parts = point
        .probe
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let parts = parts.filter(|part| !part.is_empty()).collect::<Vec<_>>();
    let name = parts.join("-");
    name.chars().take(LONGEST).collect()
}

/// Starts to give the machine the input of its recording, and to tell how that ends. Returns `None`
/// if it was given none.
///
/// # Errors
/// If the thread cannot be made.
pub fn play(vm: &Vm) -> Result<Option<JoinHandle<()>>, TraceStartError> {
    let Some(replayer) = vm.machine.replayer() else {
        return Ok(None);
    };
    let thread = std::thread::Builder::new().name("replay".into());
    let thread = thread.spawn(move || {
        if let Some(replay) = replayer.play() {
            say(replay);
        }
    });
    Ok(Some(thread?))
}

/// Keeps the machine of some time before its end, if it has a history and the run has failed.
pub fn keep_the_past(vm: &Vm, watched: &Watched, has_failed: bool) {
    if vm.keeper.ring().is_none() {
        return;
    }
    let (name, from) = match &watched.end {
        RunEnd::Panic(report) => ("before-panic", report.at.unwrap_or(watched.at)),
        end if !end.is_orderly() => ("before-crash", watched.at),
        _ if has_failed => ("before-failure", watched.at),
        _ => return,
    };
    match vm.keep_before(name, from, BEFORE_END) {
        Ok(moment) => say(moment),
        Err(error) => say(format_args!("{name}: not kept: {error}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use bt::ast::Dialect;
    use bt::parse::parse;

    use super::*;

    #[test]
    fn a_point_becomes_a_rule_and_the_name_of_a_snapshot() {
        let points = [
            ("do_exit", "do_exit-entry"),
            ("kprobe:vfs_*:return/retval < 0/", "kprobe-vfs_-return"),
            (
                "tracepoint:sched:sched_switch",
                "tracepoint-sched-sched_switch",
            ),
            ("uprobe:/bin/busybox:main", "uprobe-bin-busybox-main"),
        ];
        let of = |text: &str| Point::parse(text).unwrap();
        for (text, name) in points {
            let found = name_of(&of(text));
            assert!(found.ends_with(name), "{text}: {found}");
        }
        let text = script(&points.map(|(text, _)| of(text)));
        let script = parse(text.as_bytes(), Dialect::Normal).unwrap();
        assert_eq!(script.rules.len(), points.len());
        assert!(moments::are_kept_by(&script));
    }
}
