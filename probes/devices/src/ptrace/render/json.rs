//! One JSON object a line for each record, in the order in which they were read.
//!
//! | Field | Value |
//! |---|---|
//! | `event` | `admit`, `release`, `edf`, `run`, `ready`, `sleep`, `yield`, `slice`, `deadline`, `expel`, `dead`, `ints`, `inte`, `trap`, `user`, `name`; `unknown` for a type that is none of these |
//! | `pid` | the process: a Linux thread id |
//! | `comm` | its name, at most eight characters; missing before it is known |
//! | `cpu` | the CPU on which it was recorded |
//! | `time` | nanoseconds since 1970 |
//! | `clock` | the clock of `time`, in each line since files rotate: `realtime` |
//! | `type`, `arg` | type and argument as in the record |
//!
//! and, by the event,
//!
//! | Event | Field | Value |
//! |---|---|---|
//! | `sleep` | `state` | Plan 9's name of the state, or `null` |
//! | | `pc` | address in the kernel that waits |
//! | `trap` | `trap` | `fault`, `syscall` or `exception` |
//! | | `address`, `write` | of a fault: address without its upper four bits, whether it was a write |
//! | | `syscall`, `number` | of a system call: its name, or `null`, and its number |
//! | | `vector` | of an exception: its number |
//! | `ints`, `inte` | `vector` | the interrupt's |
//! | `name` | `name` | the new name |
//!
//! Addresses and `arg` are hexadecimal text, since JSON readers round large numbers. `time` is a
//! number: one that keeps it in a float is off by less than 200 ns.

use std::fmt::Write as _;
use std::io::{self, Write};

use probes::json::string;
use probes::syscall_table;

use super::tasks::{Tasks, name};
use super::trap::Trap;
use crate::ptrace::record::{EventType, Record, STATE_NAMES, sleep_parts};
use crate::render::Render;

/// A renderer that writes a line for each record.
#[derive(Debug, Default)]
pub struct Json {
    tasks: Tasks,
}

impl Render<Record> for Json {
    fn record(&mut self, record: &Record, out: &mut dyn Write) -> io::Result<()> {
        let event = EventType::of(record.event);
        let event = event.map_or_else(|| "unknown".to_owned(), |e| e.name().to_lowercase());
        let mut line = format!("{{\"event\":\"{event}\",\"pid\":{}", record.pid);
        // Writing to a `String` cannot fail.
        if let Some(comm) = self.tasks.record(record).name() {
            let _ = write!(line, ",\"comm\":{}", string(comm.as_bytes()));
        }
        let (cpu, time, number) = (record.machine, record.time, record.event);
        let _ = write!(
            line,
            ",\"cpu\":{cpu},\"time\":{time},\"clock\":\"realtime\",\"type\":{number},\"arg\":\"{:#x}\"{}}}",
            record.argument,
            decoded(record)
        );
        writeln!(out, "{line}")
    }
}

/// Returns the fields of the argument, each after a comma.
fn decoded(record: &Record) -> String {
    let text_or_null =
        |text: Option<&str>| text.map_or_else(|| "null".to_owned(), |t| string(t.as_bytes()));
    match EventType::of(record.event) {
        Some(EventType::Sleep) => {
            let (state, pc) = sleep_parts(record.argument);
            let state = text_or_null(STATE_NAMES.get(usize::from(state)).copied());
            format!(",\"state\":{state},\"pc\":\"{pc:#x}\"")
        }
        Some(EventType::Trap) => match Trap::of(record.argument) {
            Trap::Fault { address, write } => {
                format!(",\"trap\":\"fault\",\"address\":\"{address:#x}\",\"write\":{write}")
            }
            Trap::SystemCall { number } => {
                let name = text_or_null(syscall_table::by_number(number).map(|call| call.name));
                format!(",\"trap\":\"syscall\",\"syscall\":{name},\"number\":{number}")
            }
            Trap::Other { vector } => format!(",\"trap\":\"exception\",\"vector\":{vector}"),
        },
        Some(EventType::Ints | EventType::Inte) => format!(",\"vector\":{}", record.argument),
        Some(EventType::Name) => {
            let name = string(name(record).unwrap_or_default().as_bytes());
            format!(",\"name\":{name}")
        }
        _ => String::new(),
    }
}
