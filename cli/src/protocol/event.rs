//! An event as one JSON object: a line of `--format json`, and of a stream over the control socket.
//!
//! Addresses and values are hexadecimal text, since JSON readers round large numbers.

use probes::clock::Clock;
use std::collections::BTreeMap;

use probes::event::{ArgumentText, Event, EventKind, StringState};
use serde::{Deserialize, Serialize};
use trace_devices::trace_line::{LineKind, NO_PROCESS, TraceLine};

use crate::protocol::trace::Traced;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventLine {
    /// The kind: `entry`, `return`, `point` or `tick`.
    pub event: String,
    /// The probe's four parts.
    pub probe: String,
    /// The function, system call or event.
    pub function: String,
    /// The program counter.
    pub pc: String,
    /// The time stamp counter, in ticks.
    pub tsc: u64,
    /// The index of the vCPU.
    pub cpu: u16,
    /// The process; `null` if there is none.
    pub pid: Option<u32>,
    /// The thread.
    pub tid: Option<u32>,
    /// The thread's name.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub comm: Option<String>,
    /// The arguments.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub args: Option<Vec<String>>,
    /// The returned value.
    #[serde(rename = "return", skip_serializing_if = "Option::is_none", default)]
    pub returned: Option<String>,
    /// The text that arguments point to, by the argument's number; `null` if it was not in memory.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub strings: BTreeMap<String, Option<String>>,
    /// The return addresses in the kernel, innermost first, with their symbols.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub kstack: Vec<String>,
    /// The return addresses in the program, innermost first, without symbols.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub ustack: Vec<String>,
}

impl EventLine {
    /// Returns the line of an event of `probe`. `symbol` names a kernel address.
    pub fn new(event: &Event, probe: Option<&Traced>, symbol: &dyn Fn(u64) -> String) -> Self {
        let hex = |value: &u64| format!("{value:#x}");
        let (kind, args, returned) = match event.kind {
            EventKind::Entry => ("entry", Some(&event.arguments), None),
            EventKind::Return => ("return", None, event.arguments.first()),
            EventKind::Point => ("point", Some(&event.arguments), None),
            EventKind::Tick => ("tick", None, None),
        };
        let comm = String::from_utf8_lossy(event.comm()).into_owned();
        Self {
            event: kind.to_owned(),
            probe: probe.map_or_else(String::new, |p| p.name.clone()),
            function: probe.map_or_else(String::new, |p| p.function.clone()),
            pc: hex(&event.pc),
            tsc: event.tsc,
            cpu: event.vcpu,
            pid: event.pid,
            tid: event.tid,
            comm: event.comm.map(|_| comm),
            args: args.map(|args| args.iter().map(hex).collect()),
            returned: returned.map(hex),
            strings: event.strings.iter().map(string).collect(),
            kstack: event.kernel_stack.iter().map(|pc| symbol(*pc)).collect(),
            ustack: event.user_stack.iter().map(hex).collect(),
        }
    }
}

impl EventLine {
    /// Returns the event as trace(3) prints it; only entries and returns have such a line.
    pub fn trace_line(&self) -> Option<TraceLine> {
        let (kind, values) = match self.event.as_str() {
            "entry" => (LineKind::Entry, self.args.clone().unwrap_or_default()),
            "return" => (LineKind::Exit, self.returned.iter().cloned().collect()),
            _ => return None,
        };
        let mut arguments = [0; 4];
        for (place, value) in arguments.iter_mut().zip(&values) {
            *place = number(value)?;
        }
        Some(TraceLine {
            kind,
            pc: number(&self.pc)?,
            ticks: self.tsc,
            pid: self.tid.map_or(NO_PROCESS, u64::from),
            arguments,
        })
    }
}

/// Parses an address or a value of an event.
pub fn number(hex: &str) -> Option<u64> {
    u64::from_str_radix(hex.strip_prefix("0x")?, 16).ok()
}

fn string(text: &ArgumentText) -> (String, Option<String>) {
    let mut shown = String::from_utf8_lossy(&text.bytes).into_owned();
    let shown = match text.state {
        StringState::Absent if text.bytes.is_empty() => None,
        StringState::Whole => Some(shown),
        StringState::Cut | StringState::Absent => {
            shown.push_str("...");
            Some(shown)
        }
    };
    (text.argument.to_string(), shown)
}

/// One reading of the time stamp counter and the wall clock together: converts the events' times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockPair {
    /// Time stamp counter, in ticks.
    pub tsc: u64,
    /// Nanoseconds since 1970, UTC.
    pub unix_ns: u64,
}

impl ClockPair {
    /// Reads both clocks.
    pub fn now() -> Self {
        // The ticks per second are sent beside it.
        let Clock { tsc, unix_ns, .. } = Clock::now(1);
        Self { tsc, unix_ns }
    }
}
