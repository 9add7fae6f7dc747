//! The device of one machine: how many may open it, and what its sessions share.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::probes::Table;
use super::{Abi, Errno, Mode, Refused, Session};
use crate::engine::Engine;
use crate::kernel_view::KernelView;
use crate::probe::Probe;

/// Most sessions at a time: each has rings of its own.
pub const MAX_SESSIONS: usize = 16;

/// What only a look into the guest tells.
pub trait Guest: Send + Sync {
    /// All tracepoints of the kernel, which is `view`'s, and its modules. Asked for once.
    ///
    /// # Errors
    /// If the kernel does not tell of them, as a sentence: there are none then.
    fn tracepoints(&self, view: &KernelView) -> Result<Vec<Probe>, String>;

    /// The file that process `pid` has mapped for execution at `address`.
    ///
    /// # Errors
    /// `ESRCH` without such a process, `ENOENT` if there is no mapping, no file or no right to execute it; others if it cannot be read.
    fn resolve(&self, pid: i32, address: u64) -> Result<Mapped, Refused>;
}

/// A file that is mapped.
#[derive(Debug)]
pub struct Mapped {
    /// Where the mapping begins.
    pub start: u64,
    /// Offset in the file of its first byte.
    pub offset: u64,
    /// Bytes of the file.
    pub length: u64,
    /// The file, to be read.
    pub file: OwnedFd,
    /// What of it is not there, if anything.
    pub incomplete: Option<String>,
}

/// How a session is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenOptions {
    /// The layout of its structures.
    pub abi: Abi,
    /// How closely OpenBSD's limits are kept.
    pub mode: Mode,
    /// Whether the client may do what OpenBSD leaves to root.
    pub privileged: bool,
}

/// The device.
pub struct Device {
    engine: Engine,
    guest: Arc<dyn Guest>,
    table: Arc<Table>,
    /// Held by every session.
    sessions: Arc<()>,
}

impl Device {
    /// The device of an engine's machine. Its probes are those that the kernel has now.
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

    /// Opens the device. Whether that is allowed at all (`kern.allowdt` of OpenBSD) is for the caller to ask.
    ///
    /// # Errors
    /// `ENOMEM` if too many are open.
    pub fn open(&self, options: OpenOptions) -> Result<Session, Refused> {
        // Before it is counted: two that come at once are both seen.
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
