//! The control socket: one JSON line asks, one JSON line answers, then the connection ends.
//!
//! `{"version":2,"command":"snapshot"}` is answered by `{"version":2,"answer":"saved","bytes":134217728,"paused_us":900}` or
//! `{"version":2,"answer":"error","message":"..."}`, after lines that say how far it is (`saving`). Both sides refuse another version by name. The folder that
//! the socket stands in keeps other users out, and the server looks at who they are besides.
//!
//! With `snapshot` come the descriptors of the two files that it is to be written to (SCM_RIGHTS): the machine's process may
//! be confined to a folder of its own, the client is not.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmm::machine::VirtioStats;
use vmm::snapshot::CheckStats;

use crate::protocol::inspection::ProcessName;
use crate::protocol::script::ScriptRequest;
use crate::protocol::trace::Request;

/// Raised when a message changes its meaning.
pub const VERSION: u32 = 2;
/// Longest question the server takes, in bytes: a script and its library.
pub const LONGEST_QUESTION: u64 = 4 << 20;
/// Longest answer a client takes: stacks of thousands of threads.
pub const LONGEST_ANSWER: u64 = 256 << 20;

/// Descriptors that come with a question at most; further ones are closed.
pub const MOST_DESCRIPTORS: usize = 2;

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// Who is there?
    Info,
    /// Save the machine to the files whose descriptors come along: `state`, then `memory`.
    Snapshot,
    /// The counts so far.
    Stat {
        /// And a hash of the kernel's text in memory.
        #[serde(default)]
        hash: bool,
    },
    /// The processes, or all threads.
    Ps {
        /// Threads, too.
        threads: bool,
    },
    /// The mappings of a process.
    Maps {
        /// Which.
        process: ProcessName,
    },
    /// Symbols by address or name.
    Sym {
        /// Hexadecimal addresses and names.
        what: Vec<String>,
        /// In this process's files instead of the kernel.
        process: Option<ProcessName>,
        /// A folder with copies of the guest's files, an absolute path.
        symfs: Option<PathBuf>,
    },
    /// The stacks of a process's threads.
    Stack {
        /// Which.
        process: ProcessName,
        /// As above.
        symfs: Option<PathBuf>,
    },
    /// The probes that match a pattern; all but those of programs if it is empty.
    List {
        /// The pattern.
        pattern: String,
    },
    /// Trace until the client closes its side. Answered as a [stream](crate::server::trace).
    Trace(Request),
    /// Run a script until the client closes its side. Answered as a [stream](crate::server::script).
    Script(ScriptRequest),
    /// End the run.
    Stop,
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// To [`Command::Info`].
    Info(Info),
    /// To [`Command::Stat`].
    Stat(Box<Stat>),
    /// To [`Command::Ps`].
    Ps(crate::protocol::inspection::Processes),
    /// To [`Command::Maps`].
    Maps(crate::protocol::inspection::Maps),
    /// To [`Command::Sym`].
    Sym(crate::protocol::inspection::Symbols),
    /// To [`Command::Stack`].
    Stack(crate::protocol::inspection::Stacks),
    /// To [`Command::Snapshot`], any number of times before the answer: how far it is.
    Saving {
        /// Everything is written and the guest runs: it is hashed.
        hashing: bool,
        /// Bytes done.
        done: u64,
        /// All bytes, as far as is known.
        total: u64,
    },
    /// To [`Command::Snapshot`].
    Saved {
        /// The machine's memory in bytes.
        bytes: u64,
        /// How long the guest was paused, in microseconds.
        paused_us: u64,
    },
    /// To [`Command::List`].
    Probes {
        /// Them.
        probes: Vec<ListedProbe>,
    },
    /// To [`Command::Stop`]: the run is about to end.
    Stopping,
    /// It could not be done.
    Error {
        /// Why, for the user.
        message: String,
    },
}

/// A probe as `list` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedProbe {
    /// Its four parts.
    pub name: String,
    /// Its arguments as C declares them, if they are known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub arguments: Option<Vec<String>>,
    /// The type of what it returns.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub returns: Option<String>,
}

/// What a machine says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// RAM in bytes.
    pub memory: u64,
    /// Number of vCPUs.
    pub cpus: usize,
    /// Where its kernel came from.
    pub kernel: String,
    /// Seconds since it was started or restored.
    pub running_s: u64,
}

/// What a machine has counted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// Its name.
    pub name: String,
    /// Port accesses that left the guest.
    pub port_exits: u64,
    /// Memory accesses to devices or to nothing.
    pub mmio_exits: u64,
    /// Traps of probes.
    pub traps: u64,
    /// The guest's own int3s, given back to it.
    pub guest_int3: u64,
    /// System calls repaired on hosts that break them.
    pub syscalls_repaired: u64,
    /// (instruction, times) completed for the guest.
    pub completed: Vec<(String, u64)>,
    /// (instruction, times) that could not be completed; the guest got #UD.
    pub refused: Vec<(String, u64)>,
    /// SHA-256 of the kernel's text in memory, or why there is none, if asked for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub text: Option<String>,
    /// Of a restored machine, what checks of its snapshot's memory have found.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub restored_memory: Option<RestoredMemory>,
    /// Places where traps stand.
    pub sites: Vec<SiteCount>,
    /// What the probe engine has counted, all traces together; by name.
    pub engine: Vec<(String, u64)>,
    /// Its virtio devices.
    #[serde(default)]
    pub virtio: Vec<VirtioCount>,
    /// Memory of its process.
    #[serde(default)]
    pub memory: MemoryCount,
    /// Ports that no device answers.
    pub unknown_ports: Vec<Unknown>,
    /// Memory that no device answers.
    pub unknown_memory: Vec<Unknown>,
}

/// The memory of the snapshot that a machine was restored from, in pieces that are checked as they come into use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredMemory {
    /// Pieces.
    pub pieces: usize,
    /// Those that were checked.
    pub checked: usize,
    /// Those of them that are not what was written, by their bytes in the file.
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

/// Memory of a machine's process, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryCount {
    /// RAM of the guest, of which only what it has used takes memory of the host.
    pub guest: u64,
    /// Held for guests and clients, by purpose.
    pub held: Vec<(String, u64)>,
    /// Most that is held for all purposes together.
    pub most: u64,
}

/// What a virtio device has counted, its queues together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtioCount {
    /// The kind of device.
    pub device: String,
    /// Where its registers are, guest-physical.
    pub address: u64,
    /// Requests and buffers given back to the guest.
    pub used: u64,
    /// Those of them that were malformed.
    pub rejected: u64,
    /// How often a queue broke.
    pub broken: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Interrupts that the host refused.
    pub lost_interrupts: u64,
    /// What was wrong with a queue or one of its buffers, the last time.
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

/// A place where a trap stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteCount {
    /// Its address; in a program's text the physical one.
    pub address: u64,
    /// Symbol there, in the kernel.
    pub symbol: String,
    /// Times it was hit.
    pub hits: u64,
    /// Hits whose instruction was single-stepped with the other vCPUs standing still; that of the others was emulated.
    pub stepped: u64,
    /// The guest has something else there now.
    pub suspended: bool,
    /// This host cannot execute its instruction in the state that a program was in: it stands no more.
    pub given_up: bool,
}

/// Accesses to an address that no device answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unknown {
    /// Port or guest-physical address.
    pub address: u64,
    /// Reads, answered with ones.
    pub reads: u64,
    /// Writes, ignored.
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

/// A line that is not a message.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// Another program's, or cut short.
    #[error("not a message of the control protocol ({source}): {line:?}")]
    Malformed {
        /// What was received, shortened.
        line: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// Of another exotrace.
    #[error(
        "control protocol version {found}, this exotrace speaks {VERSION}; use the same exotrace on both sides"
    )]
    Version {
        /// What the other side speaks.
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

    #[test]
    fn every_message_survives_its_line() {
        let maps = Command::Maps {
            process: "a b".parse().unwrap(),
        };
        for command in [
            Command::Info,
            maps,
            Command::Snapshot,
            Command::Stat { hash: true },
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
            virtio: Vec::new(),
            memory: MemoryCount::default(),
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
            },
            Answer::Stopping,
            Answer::Error {
                message: "a\nb".into(),
            },
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
