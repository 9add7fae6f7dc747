//! Runs other programs with their output in a log file, and makes errors that show its end.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// The number of the last lines that an error shows.
const TAIL_LINES: usize = 12;
/// The length at which the error, but not the log, cuts a line.
const TAIL_WIDTH: usize = 300;

/// A program failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The program could not be started, or its output could not be read.
    #[error("cannot run {what}: {source}")]
    Start {
        /// The purpose of the program.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// The log cannot be written.
    #[error("cannot write the log {}: {source}", log.display())]
    Log {
        /// The path of the log.
        log: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The program ended with an error.
    #[error("{what} failed ({status}); its output is in {}, which ends:\n{tail}", log.display())]
    Failed {
        /// The purpose of the program.
        what: String,
        /// The exit status.
        status: ExitStatus,
        /// The log with its whole output.
        log: PathBuf,
        /// The last lines of the output.
        tail: String,
    },
}

/// Runs `command` to its end, with its output and errors appended to `log`. After each line, `line`
/// gets the number of lines so far.
///
/// # Errors
/// If it cannot be started, does not end with status 0, or the log cannot be written.
pub fn run(
    what: &str,
    command: &mut Command,
    log: &Path,
    line: impl Fn(u64),
) -> Result<(), CommandError> {
    let start = |source| CommandError::Start {
        what: what.to_owned(),
        source,
    };
    let log_error = |source| CommandError::Log {
        log: log.to_owned(),
        source,
    };
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .map_err(log_error)?;
    writeln!(file, "== {what}").map_err(log_error)?;

    let (reader, writer) = io::pipe().map_err(start)?;
    let errors = writer.try_clone().map_err(start)?;
    command.stdin(Stdio::null()).stdout(writer).stderr(errors);
    let mut child = command.spawn().map_err(start)?;
    // The command holds the pipe's writing ends: without this the reader would never see the end.
    command.stdout(Stdio::null()).stderr(Stdio::null());

    let mut tail = VecDeque::new();
    let mut count = 0;
    for bytes in BufReader::new(reader).split(b'\n') {
        let bytes = bytes.map_err(start)?;
        file.write_all(&bytes)
            .and_then(|()| file.write_all(b"\n"))
            .map_err(log_error)?;
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        let text: String = String::from_utf8_lossy(&bytes)
            .chars()
            .take(TAIL_WIDTH)
            .collect();
        tail.push_back(text);
        count += 1;
        line(count);
    }
    let status = child.wait().map_err(start)?;
    if status.success() {
        return Ok(());
    }
    Err(CommandError::Failed {
        what: what.to_owned(),
        status,
        log: log.to_owned(),
        tail: Vec::from(tail).join("\n"),
    })
}

/// Runs `command` and returns its output.
///
/// # Errors
/// If it cannot be started or does not end with status 0; `log` then has its standard error.
pub fn output(what: &str, command: &mut Command, log: &Path) -> Result<String, CommandError> {
    let output = command.output().map_err(|source| CommandError::Start {
        what: what.to_owned(),
        source,
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    std::fs::write(log, &output.stderr).map_err(|source| CommandError::Log {
        log: log.to_owned(),
        source,
    })?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<_> = errors.lines().collect();
    let tail = lines.get(lines.len().saturating_sub(TAIL_LINES)..);
    Err(CommandError::Failed {
        what: what.to_owned(),
        status: output.status,
        log: log.to_owned(),
        tail: tail.unwrap_or_default().join("\n"),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::cell::Cell;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn output_and_errors_go_to_the_log_line_by_line() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let lines = Cell::new(0);
        let mut command = shell("echo one; echo two >&2; printf 'no newline'");
        run("a test", &mut command, &log, |count| lines.set(count)).unwrap();
        assert_eq!(lines.get(), 3);
        let text = std::fs::read_to_string(&log).unwrap();
        assert_eq!(text, "== a test\none\ntwo\nno newline\n");
    }

    #[test]
    fn a_failure_names_the_log_and_shows_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut command = shell("seq 100; echo no such file; exit 3");
        let error = run("make it", &mut command, &log, |_| {}).unwrap_err();
        let message = error.to_string();
        assert!(
            message.starts_with("make it failed (exit status: 3)"),
            "{message}"
        );
        assert!(message.contains(log.to_str().unwrap()), "{message}");
        assert!(message.ends_with("99\n100\nno such file"), "{message}");
        assert!(!message.contains("\n42\n"), "{message}");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("no-such-program-here");
        let error = run(
            "the thing",
            &mut command,
            &directory.path().join("log"),
            |_| {},
        );
        assert!(error.unwrap_err().to_string().contains("the thing"));
    }
}
