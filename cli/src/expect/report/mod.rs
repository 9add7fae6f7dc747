//! The report on a run with expectations: its content, and the files it is written to.

mod json;
mod junit;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

#[cfg(test)]
pub use json::render as json;
#[cfg(test)]
pub use junit::render as junit;
use serde::Serialize;

use super::Expectation;
use super::crash::Crash;
use super::events::Hit;
use crate::output_file::OutputFile;
use crate::report::{Failure, printable, say};

/// The content of a report.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The machine's name.
    pub machine: String,
    /// Set if all expectations hold, the run was not cut short and the guest did not crash.
    pub passed: bool,
    /// The start of counting, in nanoseconds since 1970; without counting, the end of the run.
    pub began_unix_ns: u64,
    /// The duration of counting, in seconds.
    pub seconds: f64,
    /// The requested duration in seconds, if any.
    pub asked_seconds: Option<f64>,
    /// The end of the run.
    pub end: End,
    /// The verdicts in the order of the command line.
    pub expectations: Vec<Verdict>,
    /// The crash, if the guest had one.
    pub crash: Option<Crash>,
    /// The console's last lines.
    pub console: Vec<String>,
    /// The last lines of the run's trace, as written.
    pub trace: Vec<String>,
    /// The last hits that were counted, oldest first.
    pub events: Vec<Hit>,
    /// The hits that may belong among them and were dropped because they were not drained in time.
    /// They were counted.
    pub events_lost: u64,
}

/// The end of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct End {
    /// The kind.
    pub kind: EndKind,
    /// The description, a sentence.
    pub text: String,
}

/// The ways in which runs end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndKind {
    /// The time was up.
    TimeUp,
    /// All expectations held, with `--until-met`.
    Met,
    /// The guest reset, powered off or halted.
    Guest,
    /// The script of the run has exited.
    Script,
    /// A signal, or another command, ended it early.
    CutShort,
    /// The guest's kernel panicked.
    Panic,
    /// The guest, or the host, failed in another way.
    Crash,
    /// Nothing was counted: the probes could not be enabled.
    NotCounted,
}

impl EndKind {
    /// Checks whether the counts are those of a whole run.
    pub fn is_whole(self) -> bool {
        matches!(self, Self::TimeUp | Self::Met | Self::Guest | Self::Script)
    }
}

/// An expectation and its verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The expectation.
    #[serde(flatten)]
    pub expected: Expectation,
    /// The counted hits; `None` if nothing was counted.
    pub seen: Option<u64>,
    /// Set if it holds.
    pub holds: bool,
}

impl Verdict {
    /// Returns the verdict for this number of hits.
    pub fn new(expected: &Expectation, seen: Option<u64>) -> Self {
        Self {
            expected: expected.clone(),
            seen,
            holds: seen.is_some_and(|seen| expected.holds(seen)),
        }
    }

    /// Returns `ok` or `FAILED`.
    pub fn word(&self) -> &'static str {
        if self.holds { "ok" } else { "FAILED" }
    }
}

impl Report {
    /// Returns the message of the run's failure; `None` if it passed.
    pub fn failure(&self) -> Option<String> {
        let broken = self.expectations.iter().filter(|judged| !judged.holds);
        let (broken, all) = (broken.count(), self.expectations.len());
        match self.end.kind {
            _ if self.passed => None,
            kind if kind.is_whole() => Some(format!("{broken} of {all} expectations do not hold")),
            _ => Some(format!("the run was not whole: {}", self.end.text)),
        }
    }

    /// Returns a line for each of the last events; the first line names what is missing.
    pub fn event_lines(&self) -> Vec<String> {
        let lost = (self.events_lost > 0).then(|| {
            format!(
                "({} events that may belong here were not kept in time; they were counted)",
                self.events_lost
            )
        });
        let events = self.events.iter().map(|hit| {
            let ns = hit.unix_ns.saturating_sub(self.began_unix_ns);
            let number = |id: Option<u32>| id.map_or("-".to_owned(), |id| id.to_string());
            let comm = hit.comm.as_deref().unwrap_or("-");
            let line = format!(
                "{:12.6} {:>3} {:>7} {:<15} {}",
                ns as f64 / 1e9,
                hit.cpu,
                number(hit.tid),
                comm,
                hit.probe
            );
            printable(&line)
        });
        lost.into_iter().chain(events).collect()
    }
}

impl Crash {
    /// Returns the lines of the stack; the last line has the reason if it is incomplete.
    pub fn stack_lines(&self) -> Vec<String> {
        let ends = self
            .stack_ends
            .iter()
            .map(|why| format!("ends here: {why}"));
        self.kernel_stack.iter().cloned().chain(ends).collect()
    }
}

/// The forms of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// JUnit's XML.
    JUnit,
    /// One JSON document.
    Json,
}

/// The destination of a report, and its form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    path: PathBuf,
    form: Form,
}

/// The file name does not imply the form of a report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid report name: expected one that ends in .xml (JUnit XML) or .json (JSON)")]
pub struct UnknownForm;

impl FromStr for Destination {
    type Err = UnknownForm;

    fn from_str(path: &str) -> Result<Self, UnknownForm> {
        let path = PathBuf::from(path);
        let form = match path.extension().and_then(|ending| ending.to_str()) {
            Some("xml") => Form::JUnit,
            Some("json") => Form::Json,
            _ => return Err(UnknownForm),
        };
        Ok(Self { path, form })
    }
}

/// The files that a report is written to, once.
#[derive(Debug)]
pub struct Files(Vec<(OutputFile, PathBuf, Form)>);

impl Files {
    /// Opens the files without emptying them.
    ///
    /// # Errors
    /// If one cannot be written.
    pub fn open(destinations: &[Destination]) -> Result<Self, Failure> {
        let mut files = Vec::new();
        for Destination { path, form } in destinations {
            files.push((OutputFile::open(path)?, path.clone(), *form));
        }
        Ok(Self(files))
    }

    /// Writes the report to all files.
    ///
    /// # Errors
    /// If it cannot be written to one; the others have it then.
    pub fn write(self, report: &Report) -> Result<(), Failure> {
        let mut failed = None;
        for (file, path, form) in self.0 {
            if let Err(error) = write(file, &path, form, report)
                && let Some(Failure::Failed(before)) = failed.replace(error)
            {
                say(before);
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

fn write(mut file: OutputFile, path: &Path, form: Form, report: &Report) -> Result<(), Failure> {
    let text = match form {
        Form::JUnit => junit::render(report)?,
        Form::Json => json::render(report)?,
    };
    let failed = |error| {
        let path = path.display();
        Failure::new(format_args!(
            "the report cannot be written to {path}: {error}"
        ))
    };
    file.keep()?;
    let mut writer = file.writer()?;
    writer.write_all(text.as_bytes()).map_err(failed)?;
    writer.flush().map_err(failed)
}
