//! A guest that QEMU runs: its memory and CPUs, read from outside while QEMU has paused it.
//!
//! The machine's monitor (QMP) is asked to stop it and to say where its memory is. The memory is
//! read from QEMU's process, or from the file behind it, and never written. The registers come from
//! a dump of one page, which has the CPUs' notes. Nothing is installed in the guest or in QEMU.
//!
//! The guest goes on when the look is over. A process of its own does that if this one is killed.

mod guard;
mod layout;
mod monitor;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use introspect::core_file::{CoreFile, CoreFileError};
use introspect::x86_64::CpuState;
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::json;

use guard::Guard;
pub use guard::run as run_guard;
use layout::{LayoutError, Piece};
use monitor::{Monitor, MonitorError};

use crate::file_memory::{FileMemory, FilePlaces, Places};

/// The name under which QEMU keeps the descriptor of the dump.
const DUMP: &str = "exotrace";
/// The number of bytes of memory in the dump of which only the CPUs are read.
const DUMPED: u64 = 4096;
/// The size of the largest dump that is read, in bytes: the notes of 4096 CPUs and the memory.
const LONGEST: u64 = 8 << 20;
/// The states in which QEMU runs the guest (`RunState` of QEMU's QAPI).
const RUNNING: &str = "running";

/// The reason that a guest of QEMU cannot be read. It runs on as before.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// The monitor does not answer as it should.
    #[error("{path}: {source}")]
    Monitor {
        /// The monitor's socket.
        path: PathBuf,
        /// The reason.
        source: MonitorError,
    },
    /// The monitor does not say where the memory is.
    #[error("{path}: {source}")]
    Layout {
        /// The monitor's socket.
        path: PathBuf,
        /// The reason.
        source: LayoutError,
    },
    /// The memory cannot be read.
    #[error(
        "{path}: the memory of QEMU's process {pid} cannot be read ({source}), and no file is behind it: run exotrace as the user of \
         QEMU or as root, or give QEMU a memory-backend-file with share=on"
    )]
    Memory {
        /// The monitor's socket.
        path: PathBuf,
        /// QEMU's process; 0 if it is in another namespace.
        pid: i32,
        /// The reason.
        source: io::Error,
    },
    /// The process that lets the guest go on cannot be started. The guest was not paused.
    #[error("the guest would not go on if exotrace were killed: no process for that: {0}")]
    Guard(io::Error),
    /// The dump with the CPUs is none.
    #[error("{path}: QEMU's dump of the CPUs cannot be read: {source}")]
    Dump {
        /// The monitor's socket.
        path: PathBuf,
        /// The reason.
        source: DumpError,
    },
}

/// The reason that a dump has no CPUs.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// It is no core file.
    #[error(transparent)]
    Core(#[from] CoreFileError),
    /// It has no CPU.
    #[error("it has no CPU: the machine is none of x86-64, or too old")]
    NoCpu,
}

/// A guest that QEMU has paused. It goes on when this is dropped.
#[derive(Debug)]
pub struct QemuGuest {
    path: PathBuf,
    monitor: Monitor,
    /// Present while the guest is paused by us.
    guard: Option<Guard>,
    since: Instant,
}

/// The memory and the CPUs of a paused guest.
#[derive(Debug)]
pub struct Seen {
    /// The memory.
    pub(crate) memory: FileMemory<FilePlaces>,
    /// The CPUs, at least one.
    pub(crate) cpus: Vec<CpuState>,
}

impl QemuGuest {
    /// Pauses the guest behind a monitor's socket, if it runs.
    ///
    /// # Errors
    /// If the monitor does not answer. The guest runs on then.
    pub fn pause(path: &Path) -> Result<Self, QemuError> {
        let broken = |source| QemuError::Monitor {
            path: path.to_path_buf(),
            source,
        };
        let mut monitor = Monitor::connect(path).map_err(broken)?;
        let status = monitor.ask("query-status", json!({})).map_err(broken)?;
        let is_running = status["status"].as_str() == Some(RUNNING);
        let mut guest = Self {
            path: path.to_path_buf(),
            monitor,
            guard: None,
            since: Instant::now(),
        };
        if is_running {
            let guard = Guard::start(guest.monitor.stream()).map_err(QemuError::Guard)?;
            guest.guard = Some(guard);
            guest.monitor.ask("stop", json!({})).map_err(broken)?;
        }
        Ok(guest)
    }

    /// Reads where the memory is, and the CPUs.
    ///
    /// # Errors
    /// If QEMU does not say, or its memory cannot be read.
    pub fn read(&mut self) -> Result<Seen, QemuError> {
        Ok(Seen {
            cpus: self.cpus()?,
            memory: self.memory()?,
        })
    }

    /// Resumes the guest. Returns how long it was paused; `None` if it was not running before.
    ///
    /// # Errors
    /// If the monitor does not answer any more. The guard process then tries, too.
    pub fn resume(mut self) -> Result<Option<Duration>, QemuError> {
        let resumed = self.end_pause().map_err(|source| self.broken(source))?;
        Ok(resumed.then(|| self.since.elapsed()))
    }

    /// Ends the pause, if there is one. Returns whether there was. The guard sends `cont`, too, if
    /// the monitor does not answer.
    fn end_pause(&mut self) -> Result<bool, MonitorError> {
        let Some(guard) = self.guard.take() else {
            return Ok(false);
        };
        self.monitor.ask("cont", json!({}))?;
        guard.release();
        Ok(true)
    }

    fn broken(&self, source: MonitorError) -> QemuError {
        QemuError::Monitor {
            path: self.path.clone(),
            source,
        }
    }

    /// Asks a command of the monitor for people.
    fn ask_as_person(&mut self, line: &str) -> Result<String, QemuError> {
        let arguments = json!({ "command-line": line });
        let answer = self.monitor.ask("human-monitor-command", arguments);
        let answer = answer.map_err(|source| self.broken(source))?;
        Ok(answer.as_str().unwrap_or_default().to_owned())
    }

    fn memory(&mut self) -> Result<FileMemory<FilePlaces>, QemuError> {
        let path = self.path.clone();
        let lost = |source| QemuError::Layout {
            path: path.clone(),
            source,
        };
        let tree = self.ask_as_person("info mtree -f")?;
        let pieces = layout::pieces(&tree).map_err(lost)?;
        let pid = self.monitor.process().unwrap_or_default();
        let of_process = File::open(format!("/proc/{pid}/mem"));
        match of_process {
            Ok(file) => {
                let mut placed = Vec::new();
                for piece in pieces {
                    let start = piece.range.start;
                    let said = self.ask_as_person(&format!("gpa2hva {start:#x}"))?;
                    let place = layout::host_address(&said).map_err(lost)?;
                    placed.push((piece.range, place));
                }
                Ok(FileMemory::in_places(vec![(file, placed)]))
            }
            Err(source) => self.behind(&pieces).ok_or(QemuError::Memory {
                path: self.path.clone(),
                pid,
                source,
            }),
        }
    }

    /// Returns the memory that files are behind; `None` if there is none. The memory of devices has
    /// none, and is of no use.
    fn behind(&mut self, pieces: &[Piece]) -> Option<FileMemory<FilePlaces>> {
        let mut files: BTreeMap<&str, Option<(File, Places)>> = BTreeMap::new();
        for piece in pieces {
            let file = files
                .entry(&piece.region)
                .or_insert_with(|| Some((self.file_of(&piece.region)?, Vec::new())));
            if let Some((_, places)) = file {
                places.push((piece.range.clone(), piece.offset));
            }
        }
        let files: Vec<_> = files.into_values().flatten().collect();
        (!files.is_empty()).then(|| FileMemory::in_places(files))
    }

    /// Opens the file behind a region of memory.
    fn file_of(&mut self, region: &str) -> Option<File> {
        let object = format!("/objects/{region}");
        let mut property = |name: &str| {
            let arguments = json!({ "path": object, "property": name });
            self.monitor.ask("qom-get", arguments).ok()
        };
        // Memory that is not shared has its changes in QEMU alone.
        let is_shared = property("share")?.as_bool()?;
        let path = property("mem-path")?.as_str()?.to_owned();
        File::open(path).ok().filter(|_| is_shared)
    }

    /// Reads the CPUs from the notes of a dump.
    fn cpus(&mut self) -> Result<Vec<CpuState>, QemuError> {
        let lost = |path: &Path, source| QemuError::Dump {
            path: path.to_path_buf(),
            source,
        };
        let file = memfd_create(DUMP, MemfdFlags::CLOEXEC).map_err(io::Error::from);
        let mut file = File::from(file.map_err(|error| lost(&self.path, error.into()))?);
        let given = self.monitor.give(DUMP, &file);
        given.map_err(|source| self.broken(source))?;
        let dump = json!({
            "paging": false,
            "protocol": format!("fd:{DUMP}"),
            "begin": 0,
            "length": DUMPED,
        });
        let dumped = self.monitor.ask("dump-guest-memory", dump);
        dumped.map_err(|source| self.broken(source))?;
        let core = read_core(&mut file).map_err(|source| lost(&self.path, source))?;
        match core.cpus() {
            [] => Err(lost(&self.path, DumpError::NoCpu)),
            cpus => Ok(cpus.to_vec()),
        }
    }
}

fn read_core(file: &mut File) -> Result<CoreFile, DumpError> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(CoreFile::parse(bytes)?)
}

impl Drop for QemuGuest {
    fn drop(&mut self) {
        if let Err(error) = self.end_pause() {
            log::warn!("{}: {error}", self.path.display());
        }
    }
}
