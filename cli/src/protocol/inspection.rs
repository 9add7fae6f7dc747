//! What the control socket answers about the guest: processes, mappings, symbols, stacks.
//!
//! Addresses and sizes are in bytes. Everything was read while the guest stood still, for `standstill_us`; `incomplete` says
//! what could not be read, a line for each reason.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a user names a process: digits are a pid, anything else is a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProcessName {
    /// By number.
    Pid(i32),
    /// By the name that the kernel has of it (comm), or of a kernel thread the long one that `ps` shows.
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

/// How an answer came about.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// How long the guest stood still, in microseconds.
    pub standstill_us: u64,
    /// What is missing, for the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub incomplete: Vec<String>,
}

/// A process or thread, as `ps` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number: of the process, or of the thread where threads are listed.
    pub pid: i32,
    /// Number of the process it belongs to.
    pub tgid: i32,
    /// Its parent's.
    pub ppid: i32,
    /// State letter of proc(5).
    pub state: char,
    /// Name, as the kernel has it.
    pub comm: String,
    /// A thread of the kernel's own.
    pub kernel_thread: bool,
    /// Threads of its process.
    pub threads: u32,
    /// When it was started, in nanoseconds since the guest's boot.
    pub start_ns: u64,
    /// vCPU it runs on or ran on last.
    pub cpu: u32,
    /// Its arguments; none of a kernel thread.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<String>,
    /// Path of its program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

/// Processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processes {
    /// Them, in the order of their creation.
    pub processes: Vec<Process>,
    /// How they were read.
    #[serde(flatten)]
    pub reading: Reading,
}

/// Mappings of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maps {
    /// Whose.
    pub pid: i32,
    /// Its name.
    pub comm: String,
    /// Them, ascending by address.
    pub mappings: Vec<Mapping>,
    /// How they were read.
    #[serde(flatten)]
    pub reading: Reading,
}

/// A mapping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// One past the last.
    pub end: u64,
    /// `r`, `w`, `x` or `-` each, then `p` (private) or `s` (shared).
    pub permissions: String,
    /// Offset in the file.
    pub offset: u64,
    /// Major and minor number of the file's device.
    pub device: (u32, u32),
    /// The file's inode; 0 without a file.
    pub inode: u64,
    /// Path, or a name in brackets, or nothing.
    pub name: String,
}

/// Symbols.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Symbols {
    /// What was found.
    pub symbols: Vec<Symbol>,
    /// What was not, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<String>,
    /// How.
    #[serde(flatten)]
    pub reading: Reading,
}

/// A symbol, or a place behind one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Symbol {
    /// The address.
    pub address: u64,
    /// Name of the symbol it belongs to.
    pub name: String,
    /// Bytes behind the symbol.
    pub offset: u64,
    /// Type letter, as nm(1) has it.
    pub kind: char,
    /// Module or file; nothing for the kernel itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
}

/// Stacks of the threads of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stacks {
    /// Whose.
    pub pid: i32,
    /// Its name.
    pub comm: String,
    /// Its threads.
    pub threads: Vec<ThreadStack>,
    /// How they were read.
    #[serde(flatten)]
    pub reading: Reading,
}

/// A thread's stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadStack {
    /// The thread.
    pub tid: i32,
    /// Its name.
    pub comm: String,
    /// State letter of proc(5).
    pub state: char,
    /// Frames in the kernel, innermost first; none where it runs in user mode.
    pub kernel: Vec<Frame>,
    /// Why the kernel's part ends where it does, if not at its bottom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_end: Option<String>,
    /// Frames of the program.
    pub user: Vec<Frame>,
    /// Why the program's part ends where it does, if not at its bottom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_end: Option<String>,
}

/// A frame of a stack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// The instruction, or the return address.
    pub address: u64,
    /// Function, demangled; nothing if it has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Bytes behind the function's start; of a frame without a name its address in the file, as the program headers have it.
    pub offset: u64,
    /// Module or file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// What is to be doubted about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doubt: Option<String>,
}
