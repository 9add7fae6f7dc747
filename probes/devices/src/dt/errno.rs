//! Errors of requests with OpenBSD's numbers (errno(2)), which clients read on the wire. Two of
//! them differ on Linux.

/// An error number of OpenBSD, as dt(4) and its ioctls return it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// Tracing is not allowed here, or not to this client.
    Eperm = 1,
    /// No such probe; nothing to record; no file is mapped at the address.
    Enoent = 2,
    /// No such process.
    Esrch = 3,
    /// The client sent another request, or disconnected, while it waited for events.
    Eintr = 4,
    /// Part of the guest could not be read.
    Eio = 5,
    /// The machine has ended.
    Enxio = 6,
    /// Not enough memory, timers, sessions or bytes.
    Enomem = 12,
    /// Already recording.
    Ebusy = 16,
    /// The session has the probe already.
    Eexist = 17,
    /// An argument is invalid.
    Einval = 22,
    /// No such request.
    Enotty = 25,
    /// The buffer is too small for everything.
    Enospc = 28,
    /// A read of 0 bytes.
    Emsgsize = 40,
    /// A rate that the clock does not support, in the older ABI.
    Eopnotsupp = 45,
}

impl Errno {
    /// Returns the number on the wire.
    #[must_use]
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// A refused request: the client's error number, and a sentence with details.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Refused {
    /// The error number for the client.
    pub errno: Errno,
    /// The request, the cause and a remedy.
    pub why: String,
}

impl Refused {
    /// Creates a refusal with its reason.
    pub fn new(errno: Errno, why: impl Into<String>) -> Self {
        Self {
            errno,
            why: why.into(),
        }
    }
}
