//! Ports: the files of the devices trace(3) and ptrace(3), as sockets, a mount and the guest's
//! virtio-console present them.
//!
//! A control port accepts commands and reports the configuration. An event port returns whole
//! records of one size, each reader at its own position. The server of a port brings the transport
//! and its threads; nothing here waits unless it is asked to.

mod log;
pub mod stream;

use std::fmt;
use std::time::Duration;

pub use log::{EventLog, LogCounts, LogReader};

/// A port that accepts commands.
pub trait ControlPort: Send + Sync {
    /// Carries out one command: the text of one write, without its newline.
    ///
    /// # Errors
    /// As in the device's manual page; nothing is changed then.
    fn command(&self, text: &str) -> Result<(), PortError>;

    /// Returns the text of a read from the beginning.
    fn configuration(&self) -> String;
}

/// A port that returns events.
pub trait EventPort: Send + Sync {
    /// Returns the size of each record in bytes.
    fn record_bytes(&self) -> usize;

    /// Opens a reader. It begins with the oldest record that nobody has read yet.
    ///
    /// # Errors
    /// The device allows no (more) readers.
    fn open(&self) -> Result<Box<dyn EventReader>, PortError>;
}

/// One open of an event port, closed when it is dropped.
pub trait EventReader: Send {
    /// Returns the oldest records that this reader has not read yet: whole ones, as many as fit
    /// into `most` bytes. It is empty if there are none now.
    fn read(&mut self, most: usize) -> Vec<u8>;

    /// Waits until there is something to read, at most for `limit`. Returns whether there is.
    fn wait(&mut self, limit: Duration) -> bool;

    /// Returns the number of records that others have read and this reader has lost by being too
    /// slow.
    fn dropped(&self) -> u64;
}

/// A refusal by a port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct PortError {
    /// The kind of refusal.
    pub kind: Refusal,
    /// The device's own text.
    pub text: String,
}

impl PortError {
    /// Makes a refusal with its text.
    pub fn new(kind: Refusal, text: impl fmt::Display) -> Self {
        Self {
            kind,
            text: text.to_string(),
        }
    }
}

/// The kinds of refusals, for transports that have numbers for errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The command, or a word of it, is wrong (`EINVAL`).
    Invalid,
    /// The named object does not exist (`ENOENT`).
    NotFound,
    /// The object to make exists already (`EEXIST`).
    Exists,
    /// Another client uses it (`EBUSY`).
    Busy,
    /// The object is too large, or there is no room (`ENOSPC`).
    NoRoom,
    /// This opener is not permitted (`EPERM`).
    NotPermitted,
    /// There is no such process (`ESRCH`).
    NoProcess,
    /// The guest cannot be traced, now or at all (`EIO`).
    Failed,
}
