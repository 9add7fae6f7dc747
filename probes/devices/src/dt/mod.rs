//! dt(4), OpenBSD's dynamic tracer, as a device whose probes are in a Linux guest and are observed
//! from outside.
//!
//! The caller owns the machine and the engine. It provides what can only be read from the guest
//! ([`Guest`]), and carries requests and answers between clients and sessions. A [`Device`] is
//! created once for a machine. Each open is a [`Session`] with its own probes, rings and counts,
//! which it owns. The wire format is in [`wire`]. This module opens no sockets or files.
//!
//! * [`abi`], [`codes`], [`errno`]: OpenBSD's structures, requests and errors, in both layouts that
//!   were in use.
//! * [`probes`]: the probes' numbers, names and arguments; [`aliases`]: OpenBSD's probes and their
//!   counterparts in Linux.
//! * [`device`], [`session`], [`queue`]: opens, requests, events.
//!
//! Differences from OpenBSD: hits are handled outside the guest, so none is recursive. Closing a
//! session removes all that it has enabled. A disabled probe is silent at once. Errors of system
//! calls have Linux's numbers. A child has no return from the fork that created it. In
//! [`Mode::Normal`], size limits do not apply either.

pub mod abi;
pub mod aliases;
pub mod codes;
pub mod device;
pub mod errno;
pub mod probes;
pub mod queue;
pub mod session;
pub mod wire;

mod tasks;

pub use abi::Abi;
pub use device::{Device, Guest, Mapped, OpenOptions};
pub use errno::{Errno, Refused};
pub use session::{Reply, Session};

/// The degree of compatibility with OpenBSD's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mode {
    /// Linux's thread numbers, system calls by name, rings of 4096 events, and events of all CPUs
    /// in order of time. A disabled probe can be enabled again.
    #[default]
    Normal,
    /// OpenBSD's limits: thread numbers 100,000 above the kernel's, system calls as `sys%N`, 15
    /// events a CPU, events CPU after CPU. The older layout has rates up to 100 Hz. Enabling a
    /// disabled probe fails with `EEXIST`.
    Strict,
}

impl Mode {
    /// Returns the number added to thread numbers (`THREAD_PID_OFFSET`).
    #[must_use]
    pub fn thread_offset(self) -> u32 {
        match self {
            Self::Normal => 0,
            Self::Strict => 100_000,
        }
    }

    /// Returns the capacity of each CPU's ring in events. OpenBSD's rings have 16 slots, of which
    /// one stays empty.
    #[must_use]
    pub fn ring_events(self) -> usize {
        match self {
            Self::Normal => 4096,
            Self::Strict => 15,
        }
    }

    /// Returns the largest timer rate in Hz, in the layout with rates. It is OpenBSD's `hz`, or as
    /// many as the shortest period allows.
    #[must_use]
    pub fn fastest_rate(self) -> u32 {
        match self {
            Self::Normal => 5000,
            Self::Strict => 100,
        }
    }
}
