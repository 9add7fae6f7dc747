//! The device of one machine: it limits the number of opens, and holds what its sessions share.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use probes::engine::Engine;
use probes::kernel_view::KernelView;
use probes::probe::Probe;

use super::probes::Table;
use super::{Abi, Errno, Mode, Refused, Session};

/// The most sessions at a time: each has rings of its own.
pub const MAX_SESSIONS: usize = 16;

/// Data that can only be read from the guest.
pub trait Guest: Send + Sync {
    /// Returns all tracepoints of the kernel of `view`, and of its modules. Called once.
    ///
    /// # Errors
    /// If the kernel does not describe them, as a sentence. There are none then.
    fn tracepoints(&self, view: &KernelView) -> Result<Vec<Probe>, String>;

    /// Returns the file that process `pid` has mapped for execution at `address`.
    ///
    /// # Errors
    /// `ESRCH` without such a process; `ENOENT` if there is no mapping, no file or no right to
    /// execute it; others if it cannot be read.
    fn resolve(&self, pid: i32, address: u64) -> Result<Mapped, Refused>;
}

/// A mapped file.
#[derive(Debug)]
pub struct Mapped {
    /// The address at which the mapping begins.
    pub start: u64,
    /// The file offset of the mapping's first byte.
    pub offset: u64,
    /// The length of the file in bytes.
    pub length: u64,
    /// The file, open for reading.
    pub file: OwnedFd,
    /// The missing parts of the file, if any.
    pub incomplete: Option<String>,
}

/// The options of an open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenOptions {
    /// The layout of the session's structures.
    pub abi: Abi,
    /// The degree of compatibility with OpenBSD's limits.
    pub mode: Mode,
    /// Whether the client may do what OpenBSD allows to root only.
    pub privileged: bool,
}

/// The dt device of a machine.
pub struct Device {
    engine: Engine,
    guest: Arc<dyn Guest>,
    table: Arc<Table>,
    /// Held by every session, to count them.
    sessions: Arc<()>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").finish_non_exhaustive()
    }
}

impl Device {
    /// Creates the device of an engine's machine, with the probes that the kernel has now.
    #[must_use]
    pub fn new(engine: Engine, guest: Arc<dyn Guest>) -> Self {
        let table = Table::new(engine.view(), guest.tracepoints(engine.view()));
        for sentence in table.missing() {
            log::info!("dt: not listed: {sentence}");
        }
        Self {
            engine,
            guest,
            table: Arc::new(table),
            sessions: Arc::default(),
        }
    }

    /// Opens the device. The caller decides whether that is allowed at all (`kern.allowdt` of
    /// OpenBSD).
    ///
    /// # Errors
    /// `ENOMEM` if too many are open.
    pub fn open(&self, options: OpenOptions) -> Result<Session, Refused> {
        // Cloned before the count, so that simultaneous opens see each other.
        let open = self.sessions.clone();
        if Arc::strong_count(&open) - 1 > MAX_SESSIONS {
            let why = format!("{MAX_SESSIONS} sessions are open already; close one first");
            return Err(Refused::new(Errno::Enomem, why));
        }
        let (engine, guest) = (self.engine.clone(), self.guest.clone());
        Ok(Session::new(
            engine,
            guest,
            self.table.clone(),
            options,
            open,
        ))
    }
}
