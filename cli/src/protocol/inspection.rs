//! The control socket's answers about the guest: processes, mappings, symbols, stacks.
//!
//! Addresses and sizes are in bytes. Everything is read while the guest is paused, for
//! `standstill_us`. `incomplete` has a line for each reason why something could not be read.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A user's name for a process: digits are a pid, anything else is a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProcessName {
    /// The pid.
    Pid(i32),
    /// The kernel's name of the process (comm), or the long name of a kernel thread that `ps`
    /// shows.
    Comm(String),
}

impl FromStr for ProcessName {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let number = text
            .parse()
            .ok()
            .filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
        Ok(number.map_or_else(|| Self::Comm(text.to_owned()), Self::Pid))
    }
}

impl fmt::Display for ProcessName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pid(pid) => write!(f, "{pid}"),
            Self::Comm(name) => write!(f, "{name:?}"),
        }
    }
}

/// The circumstances of a reading.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// The length of the guest's pause, in microseconds.
    pub standstill_us: u64,
    /// Descriptions of what is missing, for the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub incomplete: Vec<String>,
}

/// A process or thread, as `ps` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// The pid, or the tid where threads are listed.
    pub pid: i32,
    /// The pid of the process.
    pub tgid: i32,
    /// The pid of the parent.
    pub ppid: i32,
    /// The state letter of proc(5).
    pub state: char,
    /// The kernel's name of the thread.
    pub comm: String,
    /// Set for a thread of the kernel's own.
    pub kernel_thread: bool,
    /// The number of threads in the process.
    pub threads: u32,
    /// The start time, in nanoseconds since the guest's boot.
    pub start_ns: u64,
    /// The vCPU that it runs on or ran on last.
    pub cpu: u32,
    /// The arguments; empty for a kernel thread.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<String>,
    /// The path of the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// The pid, or the tid where threads are listed, in the innermost pid namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ns_pid: Option<i32>,
    /// The path in the unified hierarchy of control groups, as the first process sees it. Kernels
    /// without control groups have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The container's short name, for a process in a pid namespace other than the initial one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

/// The guest's processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processes {
    /// The processes in the order of their creation.
    pub processes: Vec<Process>,
    /// The circumstances of the reading.
    #[serde(flatten)]
    pub reading: Reading,
}

/// The mappings of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maps {
    /// The pid.
    pub pid: i32,
    /// The kernel's name of the process.
    pub comm: String,
    /// The mappings, ascending by address.
    pub mappings: Vec<Mapping>,
    /// The circumstances of the reading.
    #[serde(flatten)]
    pub reading: Reading,
}

/// A mapping (VMA).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// The first address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// The permissions: `r`, `w`, `x` or `-` each, then `p` (private) or `s` (shared).
    pub permissions: String,
    /// The offset in the file.
    pub offset: u64,
    /// The major and minor number of the file's device.
    pub device: (u32, u32),
    /// The file's inode; 0 without a file.
    pub inode: u64,
    /// A path, a name in brackets, or empty.
    pub name: String,
}

/// The result of a symbol query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Symbols {
    /// The symbols that were found.
    pub symbols: Vec<Symbol>,
    /// A sentence for each symbol that was not found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<String>,
    /// The circumstances of the reading.
    #[serde(flatten)]
    pub reading: Reading,
}

/// A symbol, or a place at an offset from one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Symbol {
    /// The address.
    pub address: u64,
    /// The name of the symbol that the address belongs to.
    pub name: String,
    /// The offset from the symbol, in bytes.
    pub offset: u64,
    /// The type letter of nm(1).
    pub kind: char,
    /// The module or file; none for the kernel itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
}

/// The stacks of a process's threads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stacks {
    /// The pid.
    pub pid: i32,
    /// The kernel's name of the process.
    pub comm: String,
    /// The threads.
    pub threads: Vec<ThreadStack>,
    /// The circumstances of the reading.
    #[serde(flatten)]
    pub reading: Reading,
}

/// A thread's stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadStack {
    /// The tid.
    pub tid: i32,
    /// The kernel's name of the thread.
    pub comm: String,
    /// The state letter of proc(5).
    pub state: char,
    /// The frames in the kernel, innermost first; empty if the thread runs in user mode.
    pub kernel: Vec<Frame>,
    /// The reason why the kernel's part ends early, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_end: Option<String>,
    /// The frames of the program.
    pub user: Vec<Frame>,
    /// The reason why the program's part ends early, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_end: Option<String>,
}

/// A frame of a stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// The address of the instruction, or the return address.
    pub address: u64,
    /// The demangled name of the function, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The offset from the function's start, in bytes. Without a name: the address in the file, as
    /// in the program headers.
    pub offset: u64,
    /// The module or file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// The reason to doubt this frame, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doubt: Option<String>,
}
