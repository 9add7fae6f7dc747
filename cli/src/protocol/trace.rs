//! The request for a trace: its probes, its filters, and the captured values.

use crate::protocol::cost::{Budget, Cost, Unwatched};
use crate::protocol::end::MachineEnd;
use crate::protocol::error::RequestError;
use crate::protocol::event::{ClockPair, EventLine};
use probes::engine::{Capture, Filter, Match, StringArgument};
use probes::event::{COMM_LENGTH, EventKind, MAX_ARGUMENTS};
use probes::probe::{Probe, Target};
use probes::provider::uprobe;
use serde::{Deserialize, Serialize};

/// The default number of events in each vCPU's ring.
pub const DEFAULT_SLOTS: usize = 1 << 14;
/// The bytes shown of a string argument.
const STRING: usize = 128;

/// A trace as the command line and the control socket describe it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The patterns of probes.
    pub probes: Vec<String>,
    /// The processes; empty for all.
    pub pids: Vec<u32>,
    /// Set to include the processes that these create.
    pub follow: bool,
    /// The threads; empty for all.
    pub tids: Vec<u32>,
    /// The names of threads; empty for all.
    pub comms: Vec<String>,
    /// The number of kernel stack frames.
    pub kernel_stack: usize,
    /// The number of program stack frames.
    pub user_stack: usize,
    /// The sampling divisor: one hit in this many is recorded; 0 and 1 record all.
    pub one_in: u32,
    /// The largest number of hits of a probe recorded per second; 0 is no limit.
    pub per_second: u32,
    /// The number of events in each vCPU's ring.
    pub slots: usize,
    /// The share of each vCPU's time that the trace may cost; all of it if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// The interval of lines with the counts so far, in milliseconds; 0 for none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub interval_ms: u32,
}

/// Checks whether a number needs no word.
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Default for Request {
    fn default() -> Self {
        Self {
            probes: Vec::new(),
            pids: Vec::new(),
            follow: false,
            tids: Vec::new(),
            comms: Vec::new(),
            kernel_stack: 0,
            user_stack: 0,
            one_in: 0,
            per_second: 0,
            slots: DEFAULT_SLOTS,
            budget: None,
            interval_ms: 0,
        }
    }
}

impl Request {
    /// Returns a request for these patterns and nothing else.
    pub fn of(patterns: &[String]) -> Self {
        Self {
            probes: patterns.to_vec(),
            ..Self::default()
        }
    }

    /// Returns the number of frames of both stacks.
    pub fn frames(&self) -> usize {
        self.kernel_stack + self.user_stack
    }

    /// Returns the filter for a probe's hits; `process` is the one that the probe itself is limited
    /// to.
    pub fn filter(&self, process: Option<u32>) -> Filter {
        fn only<T>(values: Vec<T>) -> Match<T> {
            match values.is_empty() {
                true => Match::Any,
                false => Match::In(values),
            }
        }
        // The kernel keeps no more of a name.
        let comm = |name: &String| name.bytes().take(COMM_LENGTH - 1).collect();
        let pids = process.map_or_else(|| self.pids.clone(), |pid| vec![pid]);
        Filter {
            pids: only(pids),
            follow: self.follow,
            tids: only(self.tids.clone()),
            comms: only(self.comms.iter().map(comm).collect()),
            one_in: self.one_in,
            per_second: self.per_second,
            ..Filter::default()
        }
    }

    /// Returns the capture for a probe's hits. `registers` is the number of argument registers of
    /// the function, if it is known better than from its signature.
    pub fn capture(&self, probe: &Probe, registers: Option<usize>) -> Capture {
        let signature = probe.signature.as_ref();
        let known = signature.map(|signature| signature.arguments.len());
        let arguments = match &probe.target {
            Target::Timer { .. } | Target::Watchpoint(_) => 0,
            _ => registers.or(known).unwrap_or(MAX_ARGUMENTS),
        };
        let strings = signature.map_or(&[][..], |signature| &signature.arguments);
        let strings = strings.iter().take(MAX_ARGUMENTS).enumerate();
        let strings = strings
            .filter(|(_, argument)| argument.is_string)
            .map(|(argument, _)| StringArgument {
                argument,
                length: STRING,
            });
        Capture {
            // At a return only the returned value matters.
            arguments: if is_return(probe) {
                1
            } else {
                arguments.min(MAX_ARGUMENTS)
            },
            comm: true,
            kernel_stack: self.kernel_stack,
            user_stack: self.user_stack,
            strings: strings.collect(),
        }
    }
}

/// Checks whether a probe is for a return.
pub fn is_return(probe: &Probe) -> bool {
    probe.kind() == EventKind::Return
}

/// A traced probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traced {
    /// The probe's four parts.
    pub name: String,
    /// The function, system call or event.
    pub function: String,
    /// The names of its arguments, as far as they are known.
    pub arguments: Vec<String>,
    /// Set for each argument that is shown in decimal.
    pub signed: Vec<bool>,
}

/// The counts of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Counts {
    /// The hits of entries, recorded or dropped.
    pub entries: u64,
    /// The hits of returns, recorded or dropped.
    pub exits: u64,
    /// The hits of all other probes, recorded or dropped.
    pub others: u64,
    /// The hits that filters rejected.
    pub filtered: u64,
    /// The events that were read.
    pub read: u64,
    /// The events dropped because a ring was full.
    pub dropped: u64,
    /// The returns without an entry that was seen. All traces of the machine count together.
    pub unpaired_returns: u64,
    /// The calls whose return will not be seen.
    pub lost_returns: u64,
    /// The calls whose return could not be trapped.
    pub without_return: u64,
    /// The calls that have not returned yet. At the end of a trace: those that no other trace waits
    /// for.
    pub waiting_returns: u64,
    /// The hits whose process could not be read.
    pub unknown_task: u64,
    /// The probes with sites in programs that were given up: see
    /// [`ProbeStats::given_up`](probes::engine::ProbeStats::given_up).
    pub given_up: Vec<String>,
    /// The trace's cost for the guest.
    #[serde(default)]
    pub cost: Cost,
    /// The probes that a budget has stopped for a part of the time.
    #[serde(default)]
    pub unwatched: Vec<Unwatched>,
}

/// The largest number of probes of one trace.
pub const MOST_PROBES: usize = 1 << 16;

/// Returns the process that a probe is limited to.
pub fn process(probe: &Probe) -> Option<u32> {
    let process = match &probe.target {
        Target::Static(text) => text.process,
        _ => uprobe::process_of(&probe.name.provider),
    };
    process.map(i32::cast_unsigned)
}

/// The longest line that a client accepts from a machine, in bytes.
pub const LONGEST_LINE: u64 = 64 << 20;

/// A line of the stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "kebab-case")]
pub enum Line {
    /// The first line.
    Begin {
        /// The traced probes. Events name them by position.
        probes: Vec<Traced>,
        /// The clock of the events.
        clock: ClockPair,
        /// The clock's ticks per second.
        hz: u64,
        /// The probes of patterns that cannot be traced, with the reasons.
        skipped: Vec<String>,
        /// The patterns that wait for a file to be mapped, or a module to be loaded.
        open: Vec<String>,
    },
    /// One more probe, of a file that was mapped or a module that was loaded since.
    More {
        /// The probe.
        probe: Traced,
    },
    /// One event.
    Event {
        /// The position of the probe.
        probe: usize,
        /// The event.
        event: EventLine,
    },
    /// The counts so far, at the interval of the request.
    Counts {
        /// The counts of the trace.
        counts: Counts,
        /// The hits of each probe.
        hits: Vec<u64>,
    },
    /// The last line.
    End {
        /// The counts of the trace.
        counts: Counts,
        /// The hits of each probe.
        hits: Vec<u64>,
        /// The end of the machine, if it has ended.
        machine: Option<MachineEnd>,
    },
    /// The request was refused; nothing is traced.
    Refused(RequestError),
}
