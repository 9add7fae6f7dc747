//! Ports: the files of the devices trace(3) and ptrace(3), as sockets, a mount and the guest's virtio-console show them.
//!
//! A control port takes commands and tells the configuration; an event port gives whole records of one size, each reader
//! at its own place. Whoever serves a port brings the transport and its threads; nothing here waits unless it is asked to.

mod log;
pub mod stream;

use std::fmt;
use std::time::Duration;

pub use log::{EventLog, LogCounts, LogReader};

/// A port that takes commands.
pub trait ControlPort: Send + Sync {
    /// Carries out one command: the text of one write, without its newline.
    ///
    /// # Errors
    /// As the device's manual page; nothing is changed then.
    fn command(&self, text: &str) -> Result<(), PortError>;

    /// What a read from the beginning gives.
    fn configuration(&self) -> String;
}

/// A port that gives events.
pub trait EventPort: Send + Sync {
    /// Bytes of each record.
    fn record_bytes(&self) -> usize;

    /// A new reader. It begins with the oldest record that nobody has read yet.
    ///
    /// # Errors
    /// If the device allows no (more) readers.
    fn open(&self) -> Result<Box<dyn EventReader>, PortError>;
}

/// One open of an event port, closed when it is dropped.
pub trait EventReader: Send {
    /// The oldest records that this reader has not got yet, whole ones, as many as fit into `most` bytes. Empty: nothing now.
    fn read(&mut self, most: usize) -> Vec<u8>;

    /// Waits until there is something to read, at most for `limit`; whether there is.
    fn wait(&mut self, limit: Duration) -> bool;

    /// Records that others have read and this reader has lost, since it was too slow.
    fn dropped(&self) -> u64;
}

/// A port refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct PortError {
    /// What kind of refusal it is.
    pub kind: Refusal,
    /// The device's own text.
    pub text: String,
}

impl PortError {
    /// A refusal with its text.
    pub fn new(kind: Refusal, text: impl fmt::Display) -> Self {
        Self {
            kind,
            text: text.to_string(),
        }
    }
}

/// What kind of refusal: for transports that have numbers for errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The command, or a word of it, is wrong (`EINVAL`).
    Invalid,
    /// What it names does not exist (`ENOENT`).
    NotFound,
    /// What it would make exists (`EEXIST`).
    Exists,
    /// Somebody else has it (`EBUSY`).
    Busy,
    /// It is too large, or there is no room (`ENOSPC`).
    NoRoom,
    /// Not for this opener (`EPERM`).
    NotPermitted,
    /// No such process (`ESRCH`).
    NoProcess,
    /// The guest cannot be traced, now or at all (`EIO`).
    Failed,
}
