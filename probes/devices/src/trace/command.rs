//! The commands of `tracectl`: words, and the errors of the manual page and its code.

use crate::port::{PortError, Refusal};

/// The greatest exponent of a log's size: 2^28 entries.
const LARGEST_EXPONENT: u32 = 28;
/// The greatest length of a trace's name in bytes.
const LONGEST_NAME: usize = 63;

/// The error for a text that is no command.
const USAGE: &str = "devtrace:  usage: 'trace' [ktextaddr|name] 'on'|'off'|'mk'|'del' [name] or:  'size' buffersize (power of 2)";
const TRACE_USAGE: &str = "devtrace: usage: 'trace' [ktextaddr|name] 'on'|'off'|'mk'|'del' [name]";
const NEW_USAGE: &str = "devtrace: usage: trace <ktextstart> <ktextend> new <name>";
const WATCH_USAGE: &str = "devtrace: usage: watch [0|pid]";
const SIZE_USAGE: &str = "devtrace: usage: size <exponent>";
/// The error for a text that is no number or address.
pub(super) const BAD_ADDRESS: &str = "devtrace: bad address";

/// A command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Command {
    /// `trace START END new NAME`: the addresses as written.
    New {
        start: String,
        end: String,
        name: String,
    },
    /// `trace NAME on`.
    On(String),
    /// `trace NAME off`.
    Off(String),
    /// `trace NAME remove`.
    Remove(String),
    /// `size EXPONENT`, or `logsize ENTRIES` as the configuration has it: the number of entries.
    Size(usize),
    /// `watch PID`; 0 clears the list.
    Watch(u32),
    /// `start`.
    Start,
    /// `stop`.
    Stop,
    /// `all`.
    All,
}

fn wrong(text: impl std::fmt::Display) -> PortError {
    PortError::new(Refusal::Invalid, text)
}

impl Command {
    /// Parses a command. Returns `None` for a comment, a line that begins with `#`, as in the
    /// configuration.
    pub(super) fn parse(text: &str) -> Result<Option<Self>, PortError> {
        if text.starts_with('#') {
            return Ok(None);
        }
        let words = words(text);
        let mut parts = words.iter().map(String::as_str);
        let verb = parts.next().unwrap_or_default();
        let arguments: Vec<&str> = parts.collect();
        let alone = |command: Self| match arguments.is_empty() {
            true => Ok(command),
            false => Err(wrong(format_args!("devtrace: usage: {verb}"))),
        };
        let command = match verb {
            "trace" => trace(&arguments)?,
            "size" => Self::Size(size(&arguments)?),
            "logsize" => Self::Size(entries(&arguments)?),
            "watch" => Self::Watch(watch(&arguments)?),
            "start" => alone(Self::Start)?,
            "stop" => alone(Self::Stop)?,
            "all" => alone(Self::All)?,
            _ => return Err(wrong(USAGE)),
        };
        Ok(Some(command))
    }
}

fn trace(arguments: &[&str]) -> Result<Command, PortError> {
    if let [start, end, "new", rest @ ..] = arguments {
        let [name] = rest else {
            return Err(wrong(NEW_USAGE));
        };
        if name.len() > LONGEST_NAME || name.chars().any(|c| c.is_control() || c == '\'') {
            return Err(wrong(format_args!(
                "devtrace: bad name: at most {LONGEST_NAME} bytes, no quotes and no control characters"
            )));
        }
        return Ok(Command::New {
            start: (*start).to_owned(),
            end: (*end).to_owned(),
            name: (*name).to_owned(),
        });
    }
    let [name, verb, rest @ ..] = arguments else {
        return Err(wrong(TRACE_USAGE));
    };
    let command = match *verb {
        "on" => Command::On,
        "off" => Command::Off,
        "remove" => Command::Remove,
        _ => return Err(wrong("bad arg in system call")),
    };
    match rest {
        [] => Ok(command((*name).to_owned())),
        _ => Err(wrong(format_args!("devtrace: usage: trace <name> {verb}"))),
    }
}

fn size(arguments: &[&str]) -> Result<usize, PortError> {
    let [exponent] = arguments else {
        return Err(wrong(SIZE_USAGE));
    };
    let exponent: u32 = exponent.parse().map_err(|_| wrong(BAD_ADDRESS))?;
    match exponent {
        ..=LARGEST_EXPONENT => Ok(1 << exponent),
        _ => Err(PortError::new(Refusal::NoRoom, "kernel allocate failed")),
    }
}

fn entries(arguments: &[&str]) -> Result<usize, PortError> {
    let [entries] = arguments else {
        return Err(wrong("devtrace: usage: logsize <entries>"));
    };
    let entries: usize = entries.parse().map_err(|_| wrong(BAD_ADDRESS))?;
    match entries.is_power_of_two() && entries <= 1 << LARGEST_EXPONENT {
        true => Ok(entries),
        false => Err(PortError::new(Refusal::NoRoom, "kernel allocate failed")),
    }
}

fn watch(arguments: &[&str]) -> Result<u32, PortError> {
    let [pid] = arguments else {
        return Err(wrong(WATCH_USAGE));
    };
    match pid.parse::<i64>() {
        Ok(..0) => Err(wrong("PID must be greater than zero.")),
        Ok(pid) => u32::try_from(pid).map_err(|_| wrong(WATCH_USAGE)),
        Err(_) => Err(wrong(WATCH_USAGE)),
    }
}

/// Splits words as Plan 9's tokenize(2) does: at white space outside single quotes. Within them, a
/// doubled quote is one quote.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut characters = text.chars().peekable();
    loop {
        while characters.next_if(|c| c.is_whitespace()).is_some() {}
        if characters.peek().is_none() {
            return words;
        }
        let (mut word, mut quoted) = (String::new(), false);
        while let Some(c) = characters.next_if(|c| quoted || !c.is_whitespace()) {
            match c {
                '\'' if quoted && characters.next_if_eq(&'\'').is_some() => word.push('\''),
                '\'' => quoted = !quoted,
                c => word.push(c),
            }
        }
        words.push(word);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn commands_are_read_or_refused_with_the_texts_of_the_device() {
        let new = |start: &str, end: &str, name: &str| {
            Ok(Some(Command::New {
                start: start.into(),
                end: end.into(),
                name: name.into(),
            }))
        };
        let name = |text: &str| text.to_owned();
        let cases = [
            ("trace 16c2c6 16c306 new a", new("16c2c6", "16c306", "a")),
            (
                "  trace\tvfs_read  vfs_write new a\n",
                new("vfs_read", "vfs_write", "a"),
            ),
            (
                "trace 'vfs_read' 'vfs_''write' new 'a b'",
                new("vfs_read", "vfs_'write", "a b"),
            ),
            ("trace a on", Ok(Some(Command::On(name("a"))))),
            ("trace 'a b' off", Ok(Some(Command::Off(name("a b"))))),
            ("trace a remove", Ok(Some(Command::Remove(name("a"))))),
            ("size 0", Ok(Some(Command::Size(1)))),
            ("size 28", Ok(Some(Command::Size(1 << 28)))),
            ("logsize 8192", Ok(Some(Command::Size(8192)))),
            ("watch 0", Ok(Some(Command::Watch(0)))),
            ("watch 22", Ok(Some(Command::Watch(22)))),
            ("start", Ok(Some(Command::Start))),
            ("stop ", Ok(Some(Command::Stop))),
            ("all", Ok(Some(Command::All))),
            ("#tracehits 12, in queue 3", Ok(None)),
            ("trace 1 2 new", Err(NEW_USAGE)),
            ("trace 1 2 new a b", Err(NEW_USAGE)),
            ("trace a", Err(TRACE_USAGE)),
            ("trace", Err(TRACE_USAGE)),
            ("trace a mk", Err("bad arg in system call")),
            ("trace a on now", Err("devtrace: usage: trace <name> on")),
            ("trace a off now", Err("devtrace: usage: trace <name> off")),
            (
                "trace a remove now",
                Err("devtrace: usage: trace <name> remove"),
            ),
            ("size", Err(SIZE_USAGE)),
            ("size 1 2", Err(SIZE_USAGE)),
            ("size ten", Err(BAD_ADDRESS)),
            ("size 29", Err("kernel allocate failed")),
            ("logsize 3", Err("kernel allocate failed")),
            ("watch", Err(WATCH_USAGE)),
            ("watch 1 2", Err(WATCH_USAGE)),
            ("watch sh", Err(WATCH_USAGE)),
            ("watch 99999999999", Err(WATCH_USAGE)),
            ("watch -1", Err("PID must be greater than zero.")),
            ("start now", Err("devtrace: usage: start")),
            ("stop now", Err("devtrace: usage: stop")),
            ("all of them", Err("devtrace: usage: all")),
            ("", Err(USAGE)),
            ("query 1", Err(USAGE)),
        ];
        for (text, expected) in cases {
            let found = Command::parse(text).map_err(|error| error.text);
            assert_eq!(found, expected.map_err(str::to_owned), "{text}");
        }
        Command::parse(&format!("trace 1 2 new {}", "n".repeat(64))).unwrap_err();
    }
}
