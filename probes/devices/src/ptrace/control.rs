//! The commands of `ptracectl`, and Plan 9's words for errors.

use crate::port::{PortError, Refusal};

/// The greatest number of records that the log may hold.
pub(super) const MOST_RECORDS: usize = 1 << 19;
/// The word that stands for all tasks in place of a number.
const ALL: &str = "all";

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command {
    /// Sets the log's size in records.
    Size(usize),
    /// Traces tasks: on, off, or toggled.
    Trace(TraceScope, Option<bool>),
}

/// The tasks that a command concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TraceScope {
    /// All tasks.
    All,
    /// A thread; the first thread of a process means all of its threads.
    Thread(u32),
}

fn invalid(text: impl std::fmt::Display) -> PortError {
    PortError::new(Refusal::Invalid, text)
}

/// Returns the error for a thread that does not exist.
pub(super) fn process_exited() -> PortError {
    PortError::new(Refusal::NoProcess, "process exited")
}

/// Returns the error for a second reader.
pub(super) fn in_use() -> PortError {
    PortError::new(Refusal::Busy, "device or object already in use")
}

/// Returns the error for a log of size 0.
pub(super) fn no_size() -> PortError {
    invalid("must set trace size first")
}

/// Parses a command.
///
/// # Errors
/// The command is wrong; the message has Plan 9's words.
pub(super) fn parse(text: &str) -> Result<Command, PortError> {
    let text = text.trim();
    let words: Vec<&str> = text.split_whitespace().collect();
    match words.as_slice() {
        [] => Err(invalid("empty control message")),
        ["size", records] => size(records).map(Command::Size),
        ["size", ..] => Err(invalid(format_args!(
            "wrong #args in control message \"{text}\""
        ))),
        ["trace", who] => Ok(Command::Trace(whom(who)?, None)),
        ["trace", who, value] => {
            let value: i64 = value.parse().map_err(|_| bad_request())?;
            Ok(Command::Trace(whom(who)?, Some(value != 0)))
        }
        ["trace", ..] => Err(bad_request()),
        _ => Err(invalid(format_args!("unknown control message \"{text}\""))),
    }
}

fn bad_request() -> PortError {
    invalid("bad process or channel control request")
}

fn size(records: &str) -> Result<usize, PortError> {
    let number: Option<usize> = records.parse().ok();
    let number = number.filter(|number| *number == 0 || number.is_power_of_two());
    match number {
        None => Err(invalid("wrong size. use a power of two.")),
        Some(number) if number > MOST_RECORDS => {
            Err(PortError::new(Refusal::NoRoom, "size is too large"))
        }
        Some(number) => Ok(number),
    }
}

fn whom(who: &str) -> Result<TraceScope, PortError> {
    match who {
        ALL => Ok(TraceScope::All),
        number => number
            .parse()
            .map(TraceScope::Thread)
            .map_err(|_| bad_request()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_and_refused_in_the_words_of_plan_9() {
        let thread = |value| Ok(Command::Trace(TraceScope::Thread(57), value));
        let wrong_size = Err("wrong size. use a power of two.");
        let bad_request = Err("bad process or channel control request");
        for (text, expected) in [
            ("size 8192", Ok(Command::Size(8192))),
            (" size\t1 \n", Ok(Command::Size(1))),
            ("size 0", Ok(Command::Size(0))),
            ("size 524288", Ok(Command::Size(524_288))),
            ("size 1048576", Err("size is too large")),
            ("size 1000", wrong_size),
            ("size -1", wrong_size),
            ("size many", wrong_size),
            ("size", Err("wrong #args in control message \"size\"")),
            (
                "size 1 2",
                Err("wrong #args in control message \"size 1 2\""),
            ),
            ("trace 57 1", thread(Some(true))),
            ("trace 57 -1", thread(Some(true))),
            ("trace 57 0", thread(Some(false))),
            ("trace 57", thread(None)),
            (
                "trace all 1",
                Ok(Command::Trace(TraceScope::All, Some(true))),
            ),
            ("trace all", Ok(Command::Trace(TraceScope::All, None))),
            ("trace", bad_request),
            ("trace 57 1 2", bad_request),
            ("trace sh 1", bad_request),
            ("trace 57 yes", bad_request),
            ("", Err("empty control message")),
            (" \n", Err("empty control message")),
            ("stop", Err("unknown control message \"stop\"")),
            ("Size 8\n", Err("unknown control message \"Size 8\"")),
        ] {
            let found = parse(text).map_err(|error| error.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{text:?}");
        }
    }
}
