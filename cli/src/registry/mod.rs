//! The run directory: the running machines of this user, and their sockets.
//!
//! `$XDG_RUNTIME_DIR/exotrace/NAME/` belongs to the process that holds the lock on its file `lock`,
//! which names that process. If that folder is not the user's own, it is
//! `/run/user/UID/exotrace/NAME/`, or without one `/tmp/exotrace-UID/NAME/`. The kernel releases
//! the lock when the process dies, however it dies.
//!
//! Beside it are the control socket `control`, `dt` for the device dt(4), and the sockets of the
//! other trace devices' ports. Everything is for its owner only (0700). A directory of another
//! owner, or a symbolic link, is refused.

mod entry;
mod name;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use entry::Entry;
#[cfg(test)]
pub use entry::SOCKETS;
#[cfg(feature = "test-utils")]
pub(crate) use entry::read_pid as pid_in;
pub use name::{NameError, VmName};

/// The interval of checks whether a machine has ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// The number of default names tried.
const MOST_NUMBERED: u32 = 1000;

/// The run directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// A file operation failed.
    #[error("run directory: cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Another user could change the directory's content.
    #[error(
        "run directory {path}: {found}; it must be a directory of user {uid} with mode 0700: remove it, or set XDG_RUNTIME_DIR",
        path = path.display()
    )]
    Unsafe {
        /// The directory.
        path: PathBuf,
        /// The fault.
        found: String,
        /// The required owner.
        uid: u32,
    },
    /// The name is taken.
    #[error(
        "a machine named {name} runs already (process {pid}); choose another --name, or end it: exotrace stop --vm {name}"
    )]
    InUse {
        /// The requested name.
        name: VmName,
        /// The process of the running machine, as far as known.
        pid: String,
    },
    /// No default name is free.
    #[error("vm1 to vm{MOST_NUMBERED} are all in use; choose a --name")]
    NoFreeName,
    /// No machine of that name runs.
    #[error("no machine named {name} runs{running}")]
    NotRunning {
        /// The requested name.
        name: VmName,
        /// The running machines, as the rest of the sentence.
        running: String,
    },
    /// No machine runs.
    #[error("no machine runs; start one with exotrace run")]
    NoneRuns,
    /// Several machines run and none was named.
    #[error("several machines run ({names}); say which one with --vm NAME")]
    Several {
        /// Their names.
        names: String,
    },
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RegistryError {
    let path = path.to_path_buf();
    move |source| RegistryError::Io {
        action,
        path,
        source,
    }
}

/// A running machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// The machine's name.
    pub name: VmName,
    /// The id of its process.
    pub pid: String,
    /// The path of its control socket.
    pub socket: PathBuf,
}

impl Running {
    /// Waits at most `limit` until the machine has left the run directory, and returns whether it
    /// has. A later machine of the same name is not waited for.
    pub fn wait_gone(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let folder = self.socket.parent().unwrap_or(&self.socket);
        while entry::owner(folder).is_some_and(|pid| pid == self.pid) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        true
    }

    /// Returns the path of another socket of the machine.
    pub fn beside(&self, socket: &str) -> PathBuf {
        self.socket.with_file_name(socket)
    }

    /// Returns the path of the socket of the device dt(4).
    pub fn dt(&self) -> PathBuf {
        self.beside(entry::DT)
    }
}

/// The run directory.
#[derive(Debug, Clone)]
pub struct Registry {
    base: PathBuf,
}

impl Registry {
    /// Opens the user's own run directory.
    ///
    /// # Errors
    /// If it cannot be made or is not safe to use.
    pub fn open() -> Result<Self, RegistryError> {
        let user = user();
        let named = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty());
        let of_session = PathBuf::from(format!("/run/user/{user}"));
        let places = named.map(PathBuf::from).into_iter().chain([of_session]);
        // After a change of user the variable is still the previous user's.
        let is_own = |place: &PathBuf| fs::metadata(place).is_ok_and(|meta| meta.uid() == user);
        let base = match places.into_iter().find(is_own) {
            Some(place) => place.join("exotrace"),
            None => PathBuf::from(format!("/tmp/exotrace-{user}")),
        };
        Self::at(base)
    }

    /// Opens the run directory at `base`, and makes it if it does not exist.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn at(base: PathBuf) -> Result<Self, RegistryError> {
        match DirBuilder::new().mode(0o700).create(&base) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("make", &base)(error));
            }
            _ => {}
        }
        check_private(&base)?;
        Ok(Self { base })
    }

    /// Registers this process as the machine `name`, or without a name as the first free `vmN`.
    /// Also returns a message for the user if a dead machine of that name had left files behind.
    ///
    /// # Errors
    /// If the name is in use or the directory cannot be made.
    pub fn claim(&self, name: Option<VmName>) -> Result<(Entry, Option<String>), RegistryError> {
        if let Some(name) = name {
            return Entry::claim(&self.base, name);
        }
        for number in 1..=MOST_NUMBERED {
            match Entry::claim(&self.base, VmName::numbered(number)) {
                Err(RegistryError::InUse { .. }) => {}
                other => return other,
            }
        }
        Err(RegistryError::NoFreeName)
    }

    /// Returns the running machines by name, and the names of dead ones whose remains were removed.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn list(&self) -> Result<(Vec<Running>, Vec<VmName>), RegistryError> {
        let (mut running, mut removed) = (Vec::new(), Vec::new());
        for item in fs::read_dir(&self.base).map_err(failed("list", &self.base))? {
            let item = item.map_err(failed("list", &self.base))?;
            // An entry without a valid name is not exotrace's.
            let Some(name) = item
                .file_name()
                .to_str()
                .and_then(|n| n.parse::<VmName>().ok())
            else {
                continue;
            };
            match entry::look(&self.base, &name) {
                entry::Lookup::Running { pid } => {
                    let socket = item.path().join(entry::CONTROL);
                    running.push(Running { name, pid, socket });
                }
                entry::Lookup::Removed => removed.push(name),
                entry::Lookup::Nothing => {}
            }
        }
        running.sort_by(|a, b| a.name.cmp(&b.name));
        Ok((running, removed))
    }
}

/// Checks whether the machine runs whose folder has `socket`.
pub fn runs_beside(socket: &Path) -> bool {
    let folder = socket.parent();
    folder.is_some_and(|folder| entry::owner(folder).is_some())
}

/// Returns the machine `name` of those that run; without a name the only one.
///
/// # Errors
/// If there is no such machine, or several run and no name was given.
pub fn choose(mut running: Vec<Running>, name: Option<VmName>) -> Result<Running, RegistryError> {
    let names = running
        .iter()
        .map(|r| r.name.as_str())
        .collect::<Vec<_>>()
        .join(", ");
    match name {
        Some(name) => {
            running
                .into_iter()
                .find(|r| r.name == name)
                .ok_or_else(|| RegistryError::NotRunning {
                    name,
                    running: if names.is_empty() {
                        String::new()
                    } else {
                        format!("; these do: {names}")
                    },
                })
        }
        None if running.len() > 1 => Err(RegistryError::Several { names }),
        None => running.pop().ok_or(RegistryError::NoneRuns),
    }
}

/// Returns the user that this process acts for.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Checks that only this user can change the content of `path`.
fn check_private(path: &Path) -> Result<(), RegistryError> {
    let meta = fs::symlink_metadata(path).map_err(failed("look at", path))?;
    let uid = user();
    let found = if !meta.is_dir() {
        "not a directory (a symbolic link or a file)".to_owned()
    } else if meta.uid() != uid {
        format!("belongs to user {}", meta.uid())
    } else if meta.mode() & 0o077 != 0 {
        format!("has mode {:04o}", meta.mode() & 0o7777)
    } else {
        return Ok(());
    };
    Err(RegistryError::Unsafe {
        path: path.to_path_buf(),
        found,
        uid,
    })
}

#[cfg(test)]
mod tests;
