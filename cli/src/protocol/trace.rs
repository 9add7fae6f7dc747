//! What is asked of a trace: probes, whose hits, and what is kept of them.

use probes::engine::{Capture, Filter, Match, StringArgument};
use probes::event::{COMM_LENGTH, EventKind, MAX_ARGUMENTS};
use probes::probe::{Probe, Target};
use serde::{Deserialize, Serialize};

/// Events that each vCPU's ring holds unless told otherwise.
pub const DEFAULT_SLOTS: usize = 1 << 14;
/// Bytes of a string argument that are shown.
const STRING: usize = 128;

/// A trace, as the command line and the control socket describe it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Patterns of probes.
    pub probes: Vec<String>,
    /// Processes; empty for all.
    pub pids: Vec<u32>,
    /// Those that they make, too.
    pub follow: bool,
    /// Threads; empty for all.
    pub tids: Vec<u32>,
    /// Names of threads; empty for all.
    pub comms: Vec<String>,
    /// Frames of the kernel stack.
    pub kernel_stack: usize,
    /// Frames of the program's stack.
    pub user_stack: usize,
    /// Record one hit in this many; 0 and 1 are all.
    pub one_in: u32,
    /// Record at most this many hits of a probe a second; 0 is no limit.
    pub per_second: u32,
    /// Events that each vCPU's ring holds.
    pub slots: usize,
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
        }
    }
}

impl Request {
    /// Of these patterns and nothing else.
    pub fn of(patterns: &[String]) -> Self {
        Self {
            probes: patterns.to_vec(),
            ..Self::default()
        }
    }

    /// Frames of both stacks.
    pub fn frames(&self) -> usize {
        self.kernel_stack + self.user_stack
    }

    /// Whose hits of a probe are wanted; `process` is the one that the probe itself is for.
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

    /// What is kept of a probe's hits. `registers` is how many argument registers the function takes, if that is known better
    /// than by its signature.
    pub fn capture(&self, probe: &Probe, registers: Option<usize>) -> Capture {
        let signature = probe.signature.as_ref();
        let known = signature.map(|signature| signature.arguments.len());
        let arguments = match &probe.target {
            Target::Timer { .. } => 0,
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
            // At a return it is the value that counts.
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

/// Whether a probe is of a return.
pub fn is_return(probe: &Probe) -> bool {
    probe.kind() == EventKind::Return
}
