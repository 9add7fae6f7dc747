//! Why a request is refused, by OpenBSD's numbers (errno(2)), which are what a client reads on the wire. Two of them are
//! others on Linux.

/// An error number of OpenBSD, as dt(4) and its ioctls give them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// Tracing is not allowed here, or not to this client.
    Eperm = 1,
    /// No such probe; nothing to record; no file is mapped there.
    Enoent = 2,
    /// No such process.
    Esrch = 3,
    /// The client sent another request, or went away, while it waited for events.
    Eintr = 4,
    /// Something of the guest could not be read.
    Eio = 5,
    /// The machine has ended.
    Enxio = 6,
    /// Something does not fit into memory, or a fixed number of timers, sessions or bytes.
    Enomem = 12,
    /// Already recording.
    Ebusy = 16,
    /// The session has the probe already.
    Eexist = 17,
    /// An argument is not one that is taken.
    Einval = 22,
    /// No such request.
    Enotty = 25,
    /// Not everything fits the buffer.
    Enospc = 28,
    /// A read of no bytes.
    Emsgsize = 40,
    /// A rate that the clock does not have, in the older ABI.
    Eopnotsupp = 45,
}

impl Errno {
    /// The number on the wire.
    #[must_use]
    pub fn number(self) -> u32 {
        self as u32
    }
}

/// A refusal: the number that the client gets, and a sentence for who wants to know more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Refused {
    /// What the client gets.
    pub errno: Errno,
    /// What was asked for, what was found, what to do.
    pub why: String,
}

impl Refused {
    /// A refusal with its reason.
    pub fn new(errno: Errno, why: impl Into<String>) -> Self {
        Self {
            errno,
            why: why.into(),
        }
    }
}
