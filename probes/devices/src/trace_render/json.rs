//! One JSON object a line for each line.
//!
//! | Field | Value |
//! |---|---|
//! | `event` | `entry` or `return` |
//! | `pid` | the process: a Linux thread id; `null` where there is none |
//! | `pc` | address: of the function entered, or returned to |
//! | `symbol` | its name; missing if none is known |
//! | `function` | the function that is entered or returns; missing where the return's entry was not seen |
//! | `tsc` | time stamp counter, in ticks |
//! | `time`, `clock` | nanoseconds since 1970, and `realtime`; missing if ticks cannot be made times |
//! | `args` | of an entry: its four arguments, those that it has not being zero |
//! | `return` | of a return: the value |
//!
//! Addresses and values are hexadecimal text, since JSON readers round large numbers.

use std::fmt;
use std::fmt::Write as _;
use std::io::{self, Write};

use lru::LruCache;
use probes::clock::Clock;
use probes::json::string;

use super::calls::Calls;
use super::{MAX_TASKS, Symbols, named};
use crate::render::Render;
use crate::trace_line::{LineKind, NO_PROCESS, TraceLine};

/// A renderer that writes an object for each line.
pub struct Json {
    symbols: Symbols,
    clock: Option<Clock>,
    /// The functions that have not returned, by process.
    calls: LruCache<u64, Calls<u64>>,
}

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Json")
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}

impl Json {
    /// Makes a renderer. With a `clock`, lines have times as well as ticks.
    #[must_use]
    pub fn new(symbols: Symbols, clock: Option<Clock>) -> Self {
        Self {
            symbols,
            clock,
            calls: LruCache::sparse(MAX_TASKS),
        }
    }
}

impl Render<TraceLine> for Json {
    fn record(&mut self, line: &TraceLine, out: &mut dyn Write) -> io::Result<()> {
        let calls = self.calls.get_or_insert_mut(line.pid, Calls::default);
        let (event, function) = match line.kind {
            LineKind::Entry => {
                calls.enter(line.pc);
                ("entry", Some(line.pc))
            }
            LineKind::Exit => ("return", calls.leave()),
        };
        let pid = match line.pid {
            NO_PROCESS => "null".to_owned(),
            pid => pid.to_string(),
        };
        let pc = line.pc;
        let mut text = format!("{{\"event\":\"{event}\",\"pid\":{pid},\"pc\":\"{pc:#x}\"");
        // Writing to a `String` cannot fail.
        if let Some(symbol) = (self.symbols)(pc) {
            let _ = write!(text, ",\"symbol\":{}", string(symbol.as_bytes()));
        }
        if let Some(function) = function {
            let function = named(&self.symbols, function);
            let _ = write!(text, ",\"function\":{}", string(function.as_bytes()));
        }
        let _ = write!(text, ",\"tsc\":{}", line.ticks);
        if let Some(clock) = &self.clock {
            let time = clock.unix_ns(line.ticks);
            let _ = write!(text, ",\"time\":{time},\"clock\":\"realtime\"");
        }
        let [a, b, c, d] = line.arguments;
        match line.kind {
            LineKind::Entry => writeln!(
                out,
                "{text},\"args\":[\"{a:#x}\",\"{b:#x}\",\"{c:#x}\",\"{d:#x}\"]}}"
            ),
            LineKind::Exit => writeln!(out, "{text},\"return\":\"{a:#x}\"}}"),
        }
    }
}
