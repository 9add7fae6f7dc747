//! The device of one machine: whether it may be opened, and what its sessions share.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::probes::Table;
use super::{Abi, Errno, Mode, Refused, Session};
use crate::engine::Engine;
use crate::probe::Probe;

/// Most sessions at a time: each has rings of its own.
pub const MAX_SESSIONS: usize = 16;

/// What only a look into the guest tells.
pub trait Guest: Send + Sync {
    /// All tracepoints of the kernel and its modules.
    ///
    /// # Errors
    /// If the kernel does not tell of them, as a sentence: there are none then.
    fn tracepoints(&self) -> Result<Vec<Probe>, String>;

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
    allowed: AtomicBool,
    table: Mutex<Option<Arc<Table>>>,
    /// Held by every session.
    sessions: Arc<()>,
}

impl Device {
    /// The device of an engine's machine. `allowed` is what `kern.allowdt` is on OpenBSD.
    #[must_use]
    pub fn new(engine: Engine, guest: Arc<dyn Guest>, allowed: bool) -> Self {
        Self {
            engine,
            guest,
            allowed: allowed.into(),
            table: Mutex::default(),
            sessions: Arc::default(),
        }
    }

    /// Allows opens from now on, or no more. Sessions that are open stay.
    pub fn allow(&self, allowed: bool) {
        self.allowed.store(allowed, Ordering::Relaxed);
    }

    /// Opens the device.
    ///
    /// # Errors
    /// `EPERM` where it is not allowed, `ENOMEM` if too many are open.
    pub fn open(&self, options: OpenOptions) -> Result<Session, Refused> {
        if !self.allowed.load(Ordering::Relaxed) {
            let why = "the device is turned off; start the machine with --dt on";
            return Err(Refused::new(Errno::Eperm, why));
        }
        // Before it is counted: two that come at once are both seen.
        let open = self.sessions.clone();
        if Arc::strong_count(&open) - 1 > MAX_SESSIONS {
            let why = format!("{MAX_SESSIONS} sessions are open already; close one first");
            return Err(Refused::new(Errno::Enomem, why));
        }
        let (engine, guest) = (self.engine.clone(), self.guest.clone());
        Ok(Session::new(engine, guest, self.table(), options, open))
    }

    /// The probes; found out at the first open.
    #[must_use]
    pub fn table(&self) -> Arc<Table> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let found = table.get_or_insert_with(|| {
            let (tracepoints, why) = match self.guest.tracepoints() {
                Ok(found) => (found, None),
                Err(why) => (Vec::new(), Some(why)),
            };
            let mut table = Table::new(self.engine.view(), &tracepoints);
            table.add_missing(why.map(|why| format!("tracepoints: {why}")));
            for sentence in table.missing() {
                log::info!("dt: not listed: {sentence}");
            }
            Arc::new(table)
        });
        found.clone()
    }
}
