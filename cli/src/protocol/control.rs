//! The control socket: a client sends one JSON line, gets one JSON line, and the connection ends.
//!
//! `{"version":2,"command":"snapshot"}` is answered by
//! `{"version":2,"answer":"saved","bytes":134217728,"paused_us":900}` or
//! `{"version":2,"answer":"error","kind":"no-match","message":"..."}`, after lines of progress
//! (`saving`). Both sides
//! refuse another version by name. The socket's folder keeps other users out, and the server also
//! checks the client's user.
//!
//! With `snapshot` come the descriptors of the files to write (SCM_RIGHTS): the machine's
//! process may be confined to a folder of its own, the client is not.

use std::path::PathBuf;
use std::sync::Arc;

use probes::name::ProbeName;
use probes::probe::{Argument, Signature};
use serde::{Deserialize, Serialize};
use vmm::machine::{MAX_DEVICES, VirtioStats};
use vmm::snapshot::CheckStats;

use crate::protocol::cost::{Budget, Cost};
use crate::protocol::error::RequestError;
use crate::protocol::inspection::ProcessName;
use crate::protocol::script::ScriptRequest;
use crate::protocol::trace::Request;

/// The protocol version. It is raised when a message changes its meaning.
pub const VERSION: u32 = 2;
/// Longest question the server takes, in bytes: a script and its library.
pub const LONGEST_QUESTION: u64 = 4 << 20;
/// Longest answer a client takes: stacks of thousands of threads.
pub const LONGEST_ANSWER: u64 = 256 << 20;

/// The largest number of descriptors with a request; further ones are closed. A snapshot has two,
/// and one for each disk with an overlay.
pub const MOST_DESCRIPTORS: usize = 2 + MAX_DEVICES;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// Describe the machine.
    Info,
    /// Save the machine to the files with the descriptors sent along: `state`, `memory`, then the
    /// [overlays](Info::overlays) in the order of the disks.
    Snapshot,
    /// Save the machine as it was before to files in the same way, from its history.
    Rewind {
        /// How long before, in milliseconds.
        ago_ms: u64,
    },
    /// Return the counts so far.
    Stat {
        /// Add a hash of the kernel's text in memory.
        #[serde(default)]
        hash: bool,
    },
    /// Return the processes, or all threads.
    Ps {
        /// Include threads.
        threads: bool,
    },
    /// Return the pid of a process.
    Pid {
        /// The process.
        process: ProcessName,
    },
    /// Return the mappings of a process.
    Maps {
        /// The process.
        process: ProcessName,
    },
    /// Return symbols by address or name.
    Sym {
        /// Hexadecimal addresses and names.
        what: Vec<String>,
        /// The process whose files are searched, instead of the kernel.
        process: Option<ProcessName>,
        /// A folder with copies of the guest's files, as an absolute path.
        symfs: Option<PathBuf>,
    },
    /// Return the stacks of a process's threads.
    Stack {
        /// The process.
        process: ProcessName,
        /// A folder with copies of the guest's files, as an absolute path.
        symfs: Option<PathBuf>,
    },
    /// Return the probes that match a pattern; if it is empty, all but those of programs.
    List {
        /// The pattern.
        pattern: String,
    },
    /// Trace until the client closes its side. Answered as a [stream](crate::server::trace).
    Trace(Request),
    /// Run a script until the client closes its side. Answered as a
    /// [stream](crate::server::script).
    Script(ScriptRequest),
    /// Attach a debugger to a process, or to the kernel. The connection speaks the GDB remote
    /// protocol behind the [answer](Answer::Debugging).
    Gdb {
        /// The process; the kernel without one.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        process: Option<ProcessName>,
        /// Whether the debugger may change registers and memory.
        #[serde(default)]
        write: bool,
    },
    /// Press the guest's power button.
    PowerButton,
    /// End the run.
    Stop,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// The answer to [`Command::Info`].
    Info(Info),
    /// The answer to [`Command::Stat`].
    Stat(Box<Stat>),
    /// To [`Command::Ps`].
    Ps(crate::protocol::inspection::Processes),
    /// To [`Command::Pid`].
    Pid {
        /// The pid.
        pid: i32,
    },
    /// To [`Command::Maps`].
    Maps(crate::protocol::inspection::Maps),
    /// To [`Command::Sym`].
    Sym(crate::protocol::inspection::Symbols),
    /// To [`Command::Stack`].
    Stack(crate::protocol::inspection::Stacks),
    /// To [`Command::Snapshot`] and [`Command::Rewind`], any number of times before the answer: how
    /// far it is.
    Saving {
        /// Set once everything is written and the guest runs, while the files are hashed.
        hashing: bool,
        /// The bytes done.
        done: u64,
        /// The total in bytes, as far as it is known.
        total: u64,
    },
    /// The answer to [`Command::Snapshot`] and [`Command::Rewind`].
    Saved {
        /// The size of the machine's memory in bytes.
        bytes: u64,
        /// The length of the guest's pause, in microseconds.
        paused_us: u64,
        /// The age of the moment at the request, in milliseconds.
        #[serde(default)]
        ago_ms: u64,
    },
    /// The answer to [`Command::List`].
    Probes {
        /// The matching probes.
        probes: Vec<ListedProbe>,
    },
    /// The answer to [`Command::Gdb`]: the machine is paused.
    Debugging {
        /// The number of the process; none for the kernel.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        pid: Option<i32>,
        /// The number of bytes that the kernel runs above the addresses in its file.
        #[serde(default)]
        slide: u64,
        /// A sentence for each event of the process that cannot be seen.
        #[serde(skip_serializing_if = "Vec::is_empty", default)]
        unseen: Vec<String>,
    },
    /// The answer to [`Command::PowerButton`]: the guest has been asked to shut down.
    Pressed,
    /// The answer to [`Command::Stop`]: the run is about to end.
    Stopping,
    /// The request failed.
    Error(RequestError),
}

/// A probe as `list` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedProbe {
    /// The probe's four parts.
    pub name: String,
    /// The arguments as C declares them, if they are known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub arguments: Option<Arc<[String]>>,
    /// The formatted fields of a tracepoint's event as C declares them, if it has any.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub fields: Vec<String>,
    /// The return type.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub returns: Option<String>,
}

impl ListedProbe {
    /// Describes a probe of this name.
    #[must_use]
    pub fn new(name: &ProbeName, signature: Option<Signature>) -> Self {
        let arguments = signature.as_ref().map(|of| declared(&of.arguments));
        Self {
            fields: Vec::new(),
            name: name.text(),
            arguments,
            returns: signature.and_then(|of| of.returns),
        }
    }
}

/// Returns arguments as C declares them.
#[must_use]
pub fn declared(arguments: &[Argument]) -> Arc<[String]> {
    let argument = |a: &Argument| {
        let space = match a.name.is_empty() || a.type_name.ends_with('*') {
            true => "",
            false => " ",
        };
        [&*a.type_name, space, &*a.name].concat()
    };
    arguments.iter().map(argument).collect()
}

/// A machine's description of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// The machine's name.
    pub name: String,
    /// The pid of its process.
    pub pid: u32,
    /// The size of its RAM in bytes.
    pub memory: u64,
    /// The number of vCPUs.
    pub cpus: usize,
    /// The origin of its kernel.
    pub kernel: String,
    /// The seconds since it was started or restored.
    pub running_s: u64,
    /// The number of its disks with an overlay, each of which a snapshot holds.
    #[serde(default)]
    pub overlays: usize,
}

/// A machine's counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// The machine's name.
    pub name: String,
    /// The port accesses that caused exits.
    pub port_exits: u64,
    /// The memory accesses to devices or to unused addresses.
    pub mmio_exits: u64,
    /// The probe traps hit.
    pub traps: u64,
    /// The foreign int3s, reinjected into the guest.
    pub guest_int3: u64,
    /// The system calls repaired on hosts that break them.
    pub syscalls_repaired: u64,
    /// The changes of registers and memory by debuggers.
    #[serde(default)]
    pub changes: u64,
    /// The instructions completed for the guest, with counts.
    pub completed: Vec<(String, u64)>,
    /// The instructions that could not be completed, with counts; the guest got #UD.
    pub refused: Vec<(String, u64)>,
    /// The SHA-256 of the kernel's text in memory, or the reason for its absence; only on request.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub text: Option<String>,
    /// The results of the checks of a restored machine's snapshot memory.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub restored_memory: Option<RestoredMemory>,
    /// The sites with traps.
    pub sites: Vec<SiteCount>,
    /// The probe engine's counts by name, all traces together.
    pub engine: Vec<(String, u64)>,
    /// The cost of all traces together since the first one began; `None` before.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cost: Option<Cost>,
    /// The budget of all traces together.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub budget: Option<Budget>,
    /// The traces, scripts and debuggers with probes in the guest.
    #[serde(default)]
    pub sessions: Vec<SessionCount>,
    /// The virtio devices.
    #[serde(default)]
    pub virtio: Vec<VirtioCount>,
    /// The memory of the machine's process.
    #[serde(default)]
    pub memory: MemoryCount,
    /// The history of checkpoints, if there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub history: Option<HistoryCount>,
    /// The ports that no device answers.
    pub unknown_ports: Vec<Unknown>,
    /// The memory addresses that no device answers.
    pub unknown_memory: Vec<Unknown>,
}

/// The memory of a restored machine's snapshot. Its pieces are checked as they come into use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredMemory {
    /// The number of pieces.
    pub pieces: usize,
    /// The number of checked pieces.
    pub checked: usize,
    /// The byte ranges, in the file, of checked pieces that differ from what was written.
    pub damaged: Vec<String>,
}

impl From<&CheckStats> for RestoredMemory {
    fn from(stats: &CheckStats) -> Self {
        Self {
            pieces: stats.pieces,
            checked: stats.checked,
            damaged: stats.damaged.iter().map(ToString::to_string).collect(),
        }
    }
}

/// The history of a machine's checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryCount {
    /// The number of checkpoints.
    pub checkpoints: u64,
    /// The age of the oldest one, in milliseconds.
    pub reaches_back_ms: u64,
    /// The memory that they take, in bytes.
    pub bytes: u64,
    /// The longest pause of the guest for one, in microseconds.
    pub longest_pause_us: u64,
    /// The checkpoints that were left out, since another one was being written.
    pub left_out: u64,
}

/// The memory of a machine's process, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryCount {
    /// The guest's RAM. Only the part that the guest has used occupies host memory.
    pub guest: u64,
    /// The memory held for guests and clients, by purpose.
    pub held: Vec<(String, u64)>,
    /// The limit for all purposes together.
    pub most: u64,
}

/// The counts of a virtio device, its queues together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtioCount {
    /// The kind of device.
    pub device: String,
    /// The guest-physical address of its registers.
    pub address: u64,
    /// The requests and buffers returned to the guest.
    pub used: u64,
    /// The malformed ones among them.
    pub rejected: u64,
    /// The number of times that a queue broke.
    pub broken: u64,
    /// The interrupts raised.
    pub interrupts: u64,
    /// The interrupts that the host refused.
    pub lost_interrupts: u64,
    /// The last fault in a queue or one of its buffers.
    pub problem: Option<String>,
}

impl From<&VirtioStats> for VirtioCount {
    fn from(stats: &VirtioStats) -> Self {
        let queues = || stats.queues.iter();
        let broken = queues().rev().find_map(|queue| queue.last_break.as_ref());
        let rejected = queues()
            .rev()
            .find_map(|queue| queue.last_rejection.as_ref());
        Self {
            device: stats.name.to_owned(),
            address: stats.address,
            used: queues().map(|queue| queue.used).sum(),
            rejected: queues().map(|queue| queue.rejected).sum(),
            broken: queues().map(|queue| queue.broken).sum(),
            interrupts: stats.interrupts,
            lost_interrupts: stats.lost_interrupts,
            problem: broken
                .map(ToString::to_string)
                .or(rejected.map(ToString::to_string)),
        }
    }
}

/// A trace, a script or a debugger, and its cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionCount {
    /// Its number, from 1: the order in which they came.
    pub number: u64,
    /// The probes or the script that it was asked for, or the device that it serves.
    pub label: String,
    /// Its cost for the guest.
    pub cost: Cost,
    /// Its own budget.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub budget: Option<Budget>,
    /// The number of its probes.
    pub probes: usize,
    /// The number of those that a budget has stopped for now.
    pub resting: usize,
}

/// A site with a trap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteCount {
    /// The address: physical in a program's text, virtual in the kernel's.
    pub address: u64,
    /// The symbol at the site, in the kernel.
    pub symbol: String,
    /// The number of hits.
    pub hits: u64,
    /// The hits whose instruction was single-stepped with the other vCPUs paused. In the other hits
    /// it was emulated.
    pub stepped: u64,
    /// Set while the site is suspended: the guest has other text there.
    pub suspended: bool,
    /// Set if the site was removed: this host cannot execute its instruction in a state that a
    /// program was in.
    pub given_up: bool,
}

/// Accesses to an address that no device answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unknown {
    /// The port or guest-physical address.
    pub address: u64,
    /// The reads, answered with ones.
    pub reads: u64,
    /// The writes, ignored.
    pub writes: u64,
}

/// A message with its version.
#[derive(Debug, Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    #[serde(flatten)]
    message: T,
}

/// The version alone, which every version can read.
#[derive(Debug, Deserialize)]
struct VersionOnly {
    version: u32,
}

/// An error in a line that should be a message.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// A line of another program, or one cut short.
    #[error("not a message of the control protocol ({source}): {line:?}")]
    Malformed {
        /// The received line, shortened.
        line: String,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// A message of another exotrace version.
    #[error(
        "control protocol version {found}, this exotrace speaks {VERSION}; use the same exotrace on both sides"
    )]
    Version {
        /// The other side's version.
        found: u32,
    },
}

pub(crate) fn encode<T: Serialize>(message: T) -> Result<String, serde_json::Error> {
    let mut line = serde_json::to_string(&Versioned {
        version: VERSION,
        message,
    })?;
    line.push('\n');
    Ok(line)
}

pub(crate) fn decode<T: for<'a> Deserialize<'a>>(line: &str) -> Result<T, MessageError> {
    let malformed = |source| MessageError::Malformed {
        line: line.chars().take(80).collect(),
        source,
    };
    let VersionOnly { version } = serde_json::from_str(line).map_err(malformed)?;
    if version != VERSION {
        return Err(MessageError::Version { found: version });
    }
    let message: Versioned<T> = serde_json::from_str(line).map_err(malformed)?;
    Ok(message.message)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::protocol::error::ErrorKind;

    #[test]
    fn every_message_survives_its_line() {
        let maps = Command::Maps {
            process: "a b".parse().unwrap(),
        };
        for command in [
            Command::Info,
            maps,
            Command::Snapshot,
            Command::Rewind { ago_ms: 2000 },
            Command::Stat { hash: true },
            Command::PowerButton,
            Command::Stop,
        ] {
            let line = encode(&command).unwrap();
            assert_eq!(line.matches('\n').count(), 1);
            assert_eq!(decode::<Command>(&line).unwrap(), command);
        }
        let stat = Stat {
            name: "vm1".into(),
            port_exits: u64::MAX,
            mmio_exits: 1,
            traps: 2,
            guest_int3: 3,
            syscalls_repaired: 4,
            changes: 7,
            completed: vec![("popcnt".into(), 5)],
            refused: vec![("vaddps".into(), 2)],
            text: None,
            restored_memory: None,
            sites: vec![SiteCount {
                address: 7,
                symbol: "vfs_read".into(),
                hits: 6,
                stepped: 5,
                suspended: false,
                given_up: false,
            }],
            engine: vec![("lifted".into(), 4)],
            cost: Some(Cost::default()),
            budget: "5%".parse().ok(),
            sessions: Vec::new(),
            virtio: Vec::new(),
            memory: MemoryCount::default(),
            history: None,
            unknown_ports: vec![Unknown {
                address: 0x64,
                reads: 1,
                writes: 0,
            }],
            unknown_memory: vec![],
        };
        let answers = [
            Answer::Stat(Box::new(stat)),
            Answer::Saving {
                hashing: true,
                done: 1,
                total: 2,
            },
            Answer::Saved {
                bytes: 8,
                paused_us: 7,
                ago_ms: 9,
            },
            Answer::Pressed,
            Answer::Stopping,
            Answer::Error(RequestError::new(ErrorKind::NoMatch, "a\nb")),
        ];
        for answer in answers {
            assert_eq!(decode::<Answer>(&encode(&answer).unwrap()).unwrap(), answer);
        }
    }

    #[test]
    fn the_line_is_as_documented() {
        let line = encode(Command::Snapshot).unwrap();
        assert_eq!(line, "{\"version\":2,\"command\":\"snapshot\"}\n");
    }

    #[test]
    fn what_is_no_message_is_told_apart() {
        for (line, expected) in [
            ("GET / HTTP/1.1", "not a message"),
            ("", "not a message"),
            (
                "{\"version\":1,\"command\":\"brew\"}",
                "version 1, this exotrace speaks 2",
            ),
            ("{\"version\":2,\"command\":\"brew\"}", "brew"),
            ("{\"version\":2,\"command\":\"maps\"}", "process"),
        ] {
            let message = decode::<Command>(line).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
