//! The one place where errors become text and an exit status.
//!
//! Every failure is one line, `exotrace: ...`, on standard error. Libraries own the wording; this
//! module only adds the name and removes line breaks. A line that the guest has begun on the same
//! screen is ended first.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use parking_lot::{Mutex, MutexGuard};

use crate::messages::{Messages, PATIENCE};
use crate::protocol::error::RequestError;

/// The exit status of a failed command.
const FAILED: u8 = 1;
/// The exit status of an invalid command line.
const USAGE: u8 = 2;

/// The reason why a command ends without having done its work.
#[derive(Debug)]
pub enum Failure {
    /// A failure reported as one line; exit status 1.
    Failed(String),
    /// The faults of a script, in lines of their own that show the place. A single line is reported
    /// as any failure.
    Shown(String),
    /// The same, in a text on which no guest has an influence. Only a terminal is spared its
    /// control characters.
    Own(String),
    /// A command line that parses but makes no sense; exit status 2.
    Usage(String),
    /// A script ended with this status: `exit(3)`. No report.
    Status(u8),
    /// The reader of the output has gone (`| head`): no report, exit status 0.
    OutputClosed,
}

impl Failure {
    /// Returns a failure with this message.
    pub fn new(message: impl fmt::Display) -> Self {
        Self::Failed(message.to_string())
    }

    /// Returns the message; empty if there is nothing to report.
    pub fn message(&self) -> &str {
        match self {
            Self::Failed(message)
            | Self::Shown(message)
            | Self::Own(message)
            | Self::Usage(message) => message,
            Self::Status(_) | Self::OutputClosed => "",
        }
    }

    /// Returns the failure of a refused request. A script's errors keep their lines.
    pub fn refused(error: RequestError) -> Self {
        Self::Shown(error.message)
    }

    /// Returns the failure of writing the output `what`. A closed pipe is not reported.
    pub fn of_output(what: &str, error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            // The error names the file.
            _ if is_of_file(error) => Self::new(error),
            _ => Self::new(format_args!("{what}: {error}")),
        }
    }
}

fn is_of_file(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|inner| inner.is::<OutputFileError>())
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Conversion of results of writing to standard output.
pub trait ToOutput<T> {
    /// Treats a closed pipe as no failure; anything else is one.
    ///
    /// # Errors
    /// As in [`Failure`].
    fn to_output(self) -> Result<T, Failure>;
}

impl<T> ToOutput<T> for io::Result<T> {
    fn to_output(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::of_output("standard output", &error))
    }
}

/// Set while the guest has begun a line on the screen that shows messages. Held while either
/// writes.
static GUEST_LINE_OPEN: Mutex<bool> = Mutex::new(false);

/// Returns the end for a line that the guest has begun, if any, and keeps it from beginning
/// another. The guest's writer may hold the screen for as long as that accepts nothing: then a
/// message does not wait for it.
fn end_guest_line() -> (&'static str, Option<MutexGuard<'static, bool>>) {
    let mut open = GUEST_LINE_OPEN.try_lock_for(PATIENCE);
    let was_open = open.as_deref_mut().is_some_and(std::mem::take);
    (if was_open { "\n" } else { "" }, open)
}

/// The guest's output on a stream that also shows messages.
pub struct BesideMessages<W>(pub W);

impl<W: Write> Write for BesideMessages<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut open = GUEST_LINE_OPEN.lock();
        let written = self.0.write(bytes)?;
        if let Some(last) = bytes.get(..written).and_then(<[u8]>::last) {
            *open = *last != b'\n';
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Prints a message to the user on standard error. A closed standard error is no reason to stop.
/// Messages quote the guest, whose names must not move the cursor.
pub fn say(message: impl fmt::Display) {
    let message = printable(&message.to_string());
    let (start, _open) = end_guest_line();
    let _ = Messages.write_all(format!("{start}exotrace: {message}\n").as_bytes());
}

/// Returns a guest's text without characters that move a terminal's cursor or reverse the order of
/// text.
pub fn printable(text: &str) -> String {
    as_printable(text).into_owned()
}

/// Returns [`printable`] text, which nearly all text is as it stands.
pub fn as_printable(text: &str) -> Cow<'_, str> {
    // A loop without an early exit takes many bytes at a time.
    let is_plain = |plain, byte| plain & matches!(byte, b' '..=b'~');
    if text.bytes().fold(true, is_plain) {
        return Cow::Borrowed(text);
    }
    let shown = |c| if is_obeyed(c) { '?' } else { c };
    text.chars().map(shown).collect()
}

/// Returns lines influenced by a guest or its machine's process as [`printable`] does, but keeps
/// newlines and tabs.
pub fn printable_lines(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\t' => c,
            c if is_obeyed(c) => '?',
            c => c,
        })
        .collect()
}

/// Checks whether a terminal acts on a character instead of showing it: controls, and those that
/// change the direction of the text after them (Unicode's Bidi_Control).
fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns bytes influenced by a guest without those that a terminal acts on; newlines and tabs
/// stay.
fn harmless(bytes: &[u8]) -> Vec<u8> {
    let mut shown = Vec::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        shown.extend(printable_lines(chunk.valid()).bytes());
        // A terminal without UTF-8 acts on some of them.
        let invalid = chunk.invalid().iter();
        shown.extend(invalid.map(|byte| match byte {
            0x80..=0x9f => b'?',
            byte => *byte,
        }));
    }
    shown
}

/// A writer of text influenced by a guest to a terminal. A character must be written whole.
pub struct Harmless<W>(pub W);

impl<W: Write> Write for Harmless<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_all(&harmless(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Shows text in lines of its own on standard error: a script's output there, or its faults. As for
/// [`say`], a closed standard error is no reason to stop. The guest has no influence on it.
pub fn show(text: &[u8]) {
    if text.is_empty() {
        return;
    }
    let (start, _open) = end_guest_line();
    let _ = Messages.write_all(&[start.as_bytes(), &harmless(text)].concat());
}

/// Reports the end of a command.
pub fn finish(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) | Err(Failure::OutputClosed) => ExitCode::SUCCESS,
        Err(Failure::Status(status)) => ExitCode::from(status),
        Err(Failure::Failed(message)) => {
            say(one_line(&message));
            ExitCode::from(FAILED)
        }
        Err(Failure::Shown(message)) => {
            match message.ends_with('\n') {
                true => show(message.as_bytes()),
                false => say(one_line(&message)),
            }
            ExitCode::from(FAILED)
        }
        Err(Failure::Own(text)) => {
            match io::stderr().is_terminal() {
                true => show(text.as_bytes()),
                // As for `show`, a closed standard error is no reason to stop.
                false => drop(Messages.write_all(text.as_bytes())),
            }
            ExitCode::from(FAILED)
        }
        Err(Failure::Usage(message)) => {
            say(one_line(&message));
            ExitCode::from(USAGE)
        }
    }
}

/// Reports the parser's message about the command line, with advice if there is any. Help and
/// version go to standard output and are no failure.
pub fn finish_parse(error: &clap::Error, advice: Option<&str>) -> ExitCode {
    if !error.use_stderr() {
        // Fails only without a reader.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let message = text.split("\n\n").next().unwrap_or_default();
    let message = one_line(message.strip_prefix("error: ").unwrap_or(message));
    match error.kind() {
        clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // An empty command line gets the whole help.
            let _ = write!(io::stderr(), "{text}");
        }
        _ => match advice {
            Some(advice) => say(format_args!("{message}: {advice} (see --help)")),
            None => say(format_args!("{message} (see --help)")),
        },
    }
    ExitCode::from(USAGE)
}

/// Replaces line breaks and indentation by single spaces.
fn one_line(text: &str) -> String {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// A file cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("output {path}: {source}", path = path.display())]
pub struct OutputFileError {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub source: io::Error,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line() {
        assert_eq!(one_line("a\n   b\n\n c"), "a b c");
    }

    #[test]
    fn what_moves_the_cursor_is_not_printed() {
        assert_eq!(printable("a\u{1b}[2J\n\u{9b}\u{7f}é"), "a?[2J???é");
        assert_eq!(printable("a\u{202e}b\u{2067}c\u{200f}d"), "a?b?c?d");
    }

    #[test]
    fn a_guest_does_not_move_the_cursor_of_a_terminal() {
        let mut screen = Harmless(Vec::new());
        screen
            .write_all(b"a\x1b[2J\tb\r\n\xc2\x9b\xc3\xa9\xff\x9b\n")
            .expect("memory takes it");
        assert_eq!(screen.0, b"a?[2J\tb?\n?\xc3\xa9\xff?\n");
    }

    #[test]
    fn a_message_knows_of_the_line_that_the_guest_has_begun() {
        let mut screen = BesideMessages(Vec::new());
        for (text, begun) in [
            ("micro: c", true),
            ("ount 50\nmicro", true),
            (": done\n", false),
        ] {
            screen.write_all(text.as_bytes()).expect("memory takes it");
            assert_eq!(*GUEST_LINE_OPEN.lock(), begun, "{text:?}");
        }
        assert_eq!(screen.0, b"micro: count 50\nmicro: done\n");
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
