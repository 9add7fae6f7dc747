//! The text of ptrace(1), which the programs that read it split into fields.
//!
//! ```text
//! # time 0 is 1790000000000000000 ns since the epoch (clock realtime)
//! 00000012000    103 01 cat  Sleep  Wakeme pc 0xffffffff81234567  5 0xffffff8123456708
//! ```
//!
//! Fields: nanoseconds since the first event, process, machine, name (`_` if none is known), state,
//! description, type and argument. Readers use the first four and the last two, so a name has no
//! white space here, and no quote.
//!
//! Unlike in ptrace(1), the address of a sleep has its top byte restored, for which records have no
//! room. A page fault says whether it was a write. Deadlines stand at their own time.

use std::io::{self, Write};

use super::order::Order;
use super::tasks::{Tasks, shown};
use super::trap::{Trap, system_call};
use crate::ptrace::record::{EventType, Record, STATE_NAMES, sleep_parts};
use crate::render::Render;

/// ptrace(1)'s name for state 11, which it uses only here.
const RENDEZVOUS: (u8, &str) = (11, "Rendez");
/// ptrace(1)'s name for states that it does not know.
const UNKNOWN: &str = "unknown";

/// A renderer that writes a line for each record. The first one is at time 0.
#[derive(Debug, Default)]
pub struct Text {
    first: Option<i64>,
    order: Order,
    tasks: Tasks,
}

impl Text {
    fn line(&mut self, record: &Record, out: &mut dyn Write) -> io::Result<()> {
        let first = self.first.unwrap_or(record.time);
        let time = i128::from(record.time) - i128::from(first);
        let seen = self.tasks.record(record);
        let name = one_field(shown(seen.name()));
        let state = seen.state().name();
        let (pid, machine, number) = (record.pid, record.machine, record.event);
        let (what, argument) = (description(record), record.argument);
        writeln!(
            out,
            "{time:011} {pid:6} {machine:02} {name:<4} {state:<6} {what} {number:2} {argument:#x}"
        )
    }
}

impl Render<Record> for Text {
    fn record(&mut self, record: &Record, out: &mut dyn Write) -> io::Result<()> {
        if self.first.is_none() {
            self.first = Some(record.time);
            let time = record.time;
            writeln!(
                out,
                "# time 0 is {time} ns since the epoch (clock realtime)"
            )?;
        }
        let ready = self.order.push(*record);
        ready.iter().try_for_each(|record| self.line(record, out))
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let rest = self.order.rest();
        rest.iter().try_for_each(|record| self.line(record, out))
    }
}

/// Returns the description of what happened.
fn description(record: &Record) -> String {
    match EventType::of(record.event) {
        Some(EventType::Sleep) => {
            let (state, pc) = sleep_parts(record.argument);
            format!("{} pc {pc:#x}", state_name(state))
        }
        Some(EventType::Trap) => match Trap::of(record.argument) {
            Trap::Fault { address, write } => {
                let access = if write { "w" } else { "r" };
                format!("{:<10} {access} {address:#x}", "pfault")
            }
            Trap::SystemCall { number } => format!("{:<10}", system_call(number)),
            Trap::Other { .. } => format!("{:<10}", EventType::Trap.name()),
        },
        Some(event) => format!("{:<10}", event.name()),
        None => format!("{UNKNOWN:<10}"),
    }
}

fn state_name(state: u8) -> &'static str {
    if state == RENDEZVOUS.0 {
        return RENDEZVOUS.1;
    }
    let name = STATE_NAMES.get(usize::from(state)).copied();
    name.unwrap_or(UNKNOWN)
}

/// Returns a name as one field. White space would split it in two, and readers would take a quote
/// for the beginning of quoted text.
fn one_field(name: &str) -> String {
    name.replace(
        |c: char| c.is_whitespace() || c.is_control() || c == '\'',
        "_",
    )
}
