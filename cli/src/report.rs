//! The one place where errors become text and an exit status.
//!
//! Every failure is one line, `exotrace: ...`, on standard error. Libraries own the wording; this only adds
//! the name and cuts line breaks.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;

/// Exit status of a command that could not do what it was asked.
const FAILED: u8 = 1;
/// Exit status of a command line that was not understood.
const USAGE: u8 = 2;

/// Why a command ends without having done its work.
#[derive(Debug)]
pub enum Failure {
    /// To be told as one line; exit status 1.
    Failed(String),
    /// A command line that parses and makes no sense; exit status 2.
    Usage(String),
    /// The reader of our output has gone (`| head`): nothing to tell, exit status 0.
    OutputClosed,
}

impl Failure {
    /// A failure in own words.
    pub fn new(message: impl fmt::Display) -> Self {
        Self::Failed(message.to_string())
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Result of writing to standard output.
pub trait ToOutput<T> {
    /// A closed pipe is no failure; anything else is one.
    ///
    /// # Errors
    /// As [`Failure`] says.
    fn to_output(self) -> Result<T, Failure>;
}

impl<T> ToOutput<T> for std::io::Result<T> {
    fn to_output(self) -> Result<T, Failure> {
        self.map_err(|error| match error.kind() {
            std::io::ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::new(format_args!("standard output: {error}")),
        })
    }
}

/// Tells the user, on standard error. A closed standard error is no reason to stop.
pub fn say(message: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "exotrace: {message}");
}

/// Reports the end of a command.
pub fn finish(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) | Err(Failure::OutputClosed) => ExitCode::SUCCESS,
        Err(Failure::Failed(message)) => {
            say(one_line(&message));
            ExitCode::from(FAILED)
        }
        Err(Failure::Usage(message)) => {
            say(one_line(&message));
            ExitCode::from(USAGE)
        }
    }
}

/// Reports what the command-line parser said: help and version go to standard output and are no failure.
pub fn finish_parse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // Fails only when nobody reads.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let message = text.split("\n\n").next().unwrap_or_default();
    let message = one_line(message.strip_prefix("error: ").unwrap_or(message));
    match error.kind() {
        clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // The whole help is the answer to an empty command line.
            let _ = write!(std::io::stderr(), "{text}");
        }
        _ => say(format_args!("{message} (see --help)")),
    }
    ExitCode::from(USAGE)
}

/// Line breaks and indentation become single spaces.
fn one_line(text: &str) -> String {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line() {
        assert_eq!(one_line("a\n   b\n\n c"), "a b c");
    }

    #[test]
    fn a_closed_pipe_is_no_failure() {
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert!(matches!(
            Err::<(), _>(broken).to_output(),
            Err(Failure::OutputClosed)
        ));
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        assert!(matches!(
            Err::<(), _>(full).to_output(),
            Err(Failure::Failed(_))
        ));
    }
}
