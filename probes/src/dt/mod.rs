//! dt(4): the dynamic tracer of OpenBSD as a device whose probes are a Linux guest's, watched from outside.
//!
//! The caller owns the machine and the engine, tells of the guest what only a look into it can tell ([`Guest`]), and carries
//! requests and answers between clients and sessions. A [`Device`] is made once for a machine; each open of it is a
//! [`Session`] of its own, with its probes, its rings and its counts, which all go with it. The wire is described in [`wire`];
//! no sockets or files are opened here.
//!
//! * [`abi`], [`codes`], [`errno`]: OpenBSD's structures, requests and errors, in both layouts that were in use.
//! * [`probes`]: which probes there are, their numbers, names and arguments; [`aliases`]: those that OpenBSD has and what
//!   stands for them in Linux.
//! * [`device`], [`session`], [`queue`]: opens, requests, events.
//!
//! Where it differs from OpenBSD, and why: hits come from outside, so that none is recursive; what a session leaves behind is undone when
//! it is closed; a disabled probe is silent at once; errors of system calls are Linux's numbers, and a child has no return from the fork
//! that made it. In [`Mode::Normal`] limits of size are lifted too.

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

/// How closely OpenBSD's limits are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mode {
    /// Linux's thread numbers, system calls by name, rings of 4096 events, events of all CPUs in order of time, and a probe that was
    /// disabled can be enabled again.
    #[default]
    Normal,
    /// OpenBSD's: numbers of threads 100,000 above the kernel's, system calls as `sys%N`, 15 events a CPU, events CPU after CPU, rates up to
    /// 100 Hz in the older layout, `EEXIST` for a probe that was disabled.
    Strict,
}

impl Mode {
    /// Added to numbers of threads (`THREAD_PID_OFFSET`).
    #[must_use]
    pub fn thread_offset(self) -> u32 {
        match self {
            Self::Normal => 0,
            Self::Strict => 100_000,
        }
    }

    /// Events that wait for a reader on each CPU. OpenBSD's rings have 16 slots, of which one stays empty.
    #[must_use]
    pub fn ring_events(self) -> usize {
        match self {
            Self::Normal => 4096,
            Self::Strict => 15,
        }
    }

    /// Most ticks of a timer in a second, in the layout with rates: OpenBSD's `hz`, or as many as the shortest period allows.
    #[must_use]
    pub fn fastest_rate(self) -> u32 {
        match self {
            Self::Normal => 5000,
            Self::Strict => 100,
        }
    }
}
