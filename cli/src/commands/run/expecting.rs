//! The expectations of a run, from the command line to the verdicts.

use std::sync::Arc;

use probes::clock::unix_ns_now;
use vmm::RunEnd;

use super::Watched;
use crate::args;
use crate::expect::Expectation;
use crate::expect::counting::Counted;
use crate::expect::crash::Crash;
use crate::expect::events::LastHits;
use crate::expect::report::{End, EndKind, Files, Report, Verdict};
use crate::expect::tell;
use crate::report::{Failure, say};
use crate::tail::Tail;
use crate::vm::Vm;

/// The number of trace lines in a report.
const TRACE_LINES: usize = 50;

/// The expectations of a run.
pub struct Expecting {
    /// The expectations, at least one.
    pub expectations: Arc<[Expectation]>,
    /// The end of the guest's console.
    pub console: Tail,
    /// The end of the run's trace, as written.
    pub trace: Tail,
    asked_seconds: Option<f64>,
    /// The report's files, until it is written.
    files: Option<Files>,
}

impl Expecting {
    /// Returns the expectations in `args`, if any, and opens the report's files. `console` is kept
    /// for the report.
    ///
    /// # Errors
    /// If one cannot be written.
    pub fn of(args: &args::Run, console: &Tail) -> Result<Option<Self>, Failure> {
        if args.expect.is_empty() {
            return Ok(None);
        }
        let bounded = args.expect.iter().find(|e| e.has_upper_bound());
        if let (true, Some(bounded)) = (args.until_met, bounded) {
            say(format_args!(
                "--until-met: {:?} can be broken until the end, so the run takes its whole time",
                bounded.text
            ));
        }
        Ok(Some(Self {
            expectations: args.expect.as_slice().into(),
            console: console.clone(),
            trace: Tail::new(TRACE_LINES),
            asked_seconds: args.duration.map(|duration| duration.as_secs_f64()),
            files: Some(Files::open(&args.report)?),
        }))
    }

    /// Reports the verdicts and writes the report. `interrupted` means that a signal has arrived.
    ///
    /// # Errors
    /// If an expectation does not hold, the run was not whole, or the report cannot be written. The
    /// caller reports a crash.
    pub fn judge(&mut self, vm: &Vm, watched: &Watched, interrupted: bool) -> Result<(), Failure> {
        let crash = Crash::of(&watched.end, vm);
        let end = end_of(watched, interrupted);
        let report = self.report(vm.name.to_string(), end, watched.counted.as_ref(), crash);
        tell(&report);
        if let Some(counted) = &watched.counted
            && counted.undecided > 0
        {
            say(format_args!(
                "{} hits were not counted: their predicates took too long and were ended",
                counted.undecided
            ));
        }
        let written = self.write(&report);
        match (report.failure(), written) {
            (None, written) => written,
            (Some(failure), Ok(())) => Err(Failure::new(failure)),
            (Some(failure), Err(error)) => {
                say(error.message());
                Err(Failure::new(failure))
            }
        }
    }

    /// Writes a report with the reason why nothing was counted, unless there is a report already.
    pub fn write_refusal(&mut self, machine: String, failure: &Failure) {
        if self.files.is_none() {
            return;
        }
        let why = failure.message();
        let end = End {
            kind: EndKind::NotCounted,
            text: why
                .lines()
                .next()
                .unwrap_or_default()
                .trim_end_matches(':')
                .to_owned(),
        };
        let report = self.report(machine, end, None, None);
        if let Err(error) = self.write(&report) {
            say(error.message());
        }
    }

    fn write(&mut self, report: &Report) -> Result<(), Failure> {
        self.files
            .take()
            .map_or(Ok(()), |files| files.write(report))
    }

    fn report(
        &self,
        machine: String,
        end: End,
        counted: Option<&Counted>,
        crash: Option<Crash>,
    ) -> Report {
        let each = self.expectations.iter().enumerate();
        let judged: Vec<Verdict> = each
            .map(|(at, expected)| {
                let seen = counted.and_then(|counted| counted.seen.get(at).copied());
                Verdict::new(expected, seen)
            })
            .collect();
        let last = counted.map_or_else(LastHits::default, |counted| counted.last.clone());
        Report {
            machine,
            passed: end.kind.is_whole() && judged.iter().all(|judged| judged.holds),
            began_unix_ns: counted.map_or_else(unix_ns_now, |counted| counted.began.unix_ns),
            seconds: counted.map_or(0.0, |counted| counted.seconds),
            asked_seconds: self.asked_seconds,
            end,
            expectations: judged,
            crash,
            console: self.console.lines(),
            trace: self.trace.lines(),
            events_lost: last.lost,
            events: last.into_hits(),
        }
    }
}

/// Returns the run's end as it concerns its expectations.
fn end_of(watched: &Watched, interrupted: bool) -> End {
    let seconds = watched.counted.as_ref().map_or(0.0, |c| c.seconds);
    let (kind, text) = match &watched.end {
        RunEnd::Panic(_) => (EndKind::Panic, watched.end.to_string()),
        end if !end.is_orderly() => (EndKind::Crash, end.to_string()),
        end if watched.counted.is_none() => {
            let text = format!("{end} before the guest's kernel could be traced");
            (EndKind::NotCounted, text)
        }
        RunEnd::Stopped => match (watched.time_up, watched.met, watched.script_exited) {
            (true, ..) => (EndKind::TimeUp, "the time was up".to_owned()),
            (_, true, _) => (EndKind::Met, "all expectations held".to_owned()),
            (.., true) => (EndKind::Script, "the script has exited".to_owned()),
            _ => {
                let how = if interrupted {
                    "ended by a signal"
                } else {
                    "stopped"
                };
                let text = format!("{how} before its time, after {seconds:.1} s");
                (EndKind::CutShort, text)
            }
        },
        end => (EndKind::Guest, end.to_string()),
    };
    End { kind, text }
}
