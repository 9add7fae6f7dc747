//! One machine's folder in the run directory, and the lock that says whether it is alive.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::{RegistryError, VmName, check_private, failed};

/// The lock file; its content is the process's id.
const LOCK: &str = "lock";
/// The control socket.
pub(super) const CONTROL: &str = "control";
/// The socket of the device dt(4).
pub(super) const DT: &str = "dt";
/// Everything that listens in a machine's folder: those two, and the sockets of the
/// [ports](crate::server::ports).
pub const SOCKETS: [&str; 7] = [
    CONTROL,
    DT,
    "ports",
    "tracectl",
    "trace",
    "ptrace",
    "ptracectl",
];
/// The number of attempts to lock, and the pause between them: a mere observer holds the lock for
/// an instant.
const TRIES: usize = 5;
const WAIT: Duration = Duration::from_millis(10);
/// The longest process id accepted from a lock file, in bytes.
const LONGEST_PID: u64 = 20;

/// This process's entry in the run directory. Removed when dropped.
#[derive(Debug)]
pub struct Entry {
    name: VmName,
    folder: PathBuf,
    /// The locked file.
    _lock: File,
}

impl Entry {
    pub(super) fn claim(
        base: &Path,
        name: VmName,
    ) -> Result<(Self, Option<String>), RegistryError> {
        let folder = base.join(name.as_str());
        let mut last_pid = String::new();
        for _ in 0..TRIES {
            make_folder(&folder)?;
            let mut lock = match open_lock(&folder, true) {
                // The last owner has just removed the folder.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(failed("open", &folder.join(LOCK)))?,
            };
            last_pid = read_pid(&mut lock);
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    std::thread::sleep(WAIT);
                    continue;
                }
                Err(errno) => return Err(failed("lock", &folder.join(LOCK))(errno.into())),
            }
            if !is_current(&lock, &folder) {
                continue;
            }
            let left_behind = (!last_pid.is_empty()).then(|| last_pid.clone());
            for socket in SOCKETS {
                let socket = folder.join(socket);
                remove_file(&socket).map_err(failed("remove", &socket))?;
            }
            write_pid(&mut lock).map_err(failed("write", &folder.join(LOCK)))?;
            return Ok((
                Self {
                    name,
                    folder,
                    _lock: lock,
                },
                left_behind,
            ));
        }
        let pid = if last_pid.is_empty() {
            "unknown".into()
        } else {
            last_pid
        };
        Err(RegistryError::InUse { name, pid })
    }

    /// Returns the name.
    pub fn name(&self) -> &VmName {
        &self.name
    }

    /// Returns the path for the control socket.
    pub fn control(&self) -> PathBuf {
        self.folder.join(CONTROL)
    }

    /// Returns the path for the socket of the device dt(4).
    pub fn dt(&self) -> PathBuf {
        self.folder.join(DT)
    }

    /// Returns the folder for the other [`SOCKETS`], under their names.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // While the lock is held: no other process can have claimed this folder.
        if let Err(error) = remove_all(&self.folder) {
            log::warn!("{} is not removed: {error}", self.folder.display());
        }
    }
}

/// The state of a name.
pub(super) enum Lookup {
    /// A running machine.
    Running { pid: String },
    /// The folder of a dead machine, now removed.
    Removed,
    /// No folder.
    Nothing,
}

/// Returns the process that holds `folder`; `None` if no machine runs there.
pub(super) fn owner(folder: &Path) -> Option<String> {
    let mut lock = open_lock(folder, false).ok()?;
    let pid = read_pid(&mut lock);
    // Shared: another observer at the same time is no owner.
    match flock(&lock, FlockOperation::NonBlockingLockShared) {
        Err(_) => Some(pid),
        Ok(()) => None,
    }
}

/// Checks whether a machine runs, and removes what a dead one left behind.
pub(super) fn look(base: &Path, name: &VmName) -> Lookup {
    let folder = base.join(name.as_str());
    let Ok(mut lock) = open_lock(&folder, false) else {
        return Lookup::Nothing;
    };
    let pid = read_pid(&mut lock);
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(_) => Lookup::Running { pid },
        // The folder's machine has not written its id yet, or has ended in order.
        Ok(()) if pid.is_empty() || !is_current(&lock, &folder) => Lookup::Nothing,
        Ok(()) => match remove_all(&folder) {
            Ok(()) => Lookup::Removed,
            Err(error) => {
                log::warn!("{}: {error}", folder.display());
                Lookup::Nothing
            }
        },
    }
}

fn make_folder(folder: &Path) -> Result<(), RegistryError> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(failed("make", folder)(error))
        }
        _ => check_private(folder).or_else(|error| match error {
            // Removed by its last owner: the caller tries again.
            RegistryError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => Ok(()),
            other => Err(other),
        }),
    }
}

fn open_lock(folder: &Path, create: bool) -> io::Result<File> {
    let no_links = OFlags::NOFOLLOW.bits().cast_signed();
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .custom_flags(no_links)
        .open(folder.join(LOCK))
}

/// Checks whether the locked file is still the one at that path.
fn is_current(lock: &File, folder: &Path) -> bool {
    let (Ok(locked), Ok(named)) = (lock.metadata(), fs::symlink_metadata(folder.join(LOCK))) else {
        return false;
    };
    (locked.dev(), locked.ino()) == (named.dev(), named.ino())
}

/// Returns the process id in a lock file; empty if there is none.
pub(crate) fn read_pid(lock: &mut impl Read) -> String {
    let mut text = String::new();
    match Read::take(lock, LONGEST_PID).read_to_string(&mut text) {
        Ok(_) => text.trim().chars().filter(char::is_ascii_digit).collect(),
        Err(_) => String::new(),
    }
}

fn write_pid(lock: &mut File) -> io::Result<()> {
    lock.set_len(0)?;
    io::Seek::rewind(lock)?;
    writeln!(lock, "{}", std::process::id())
}

/// Removes a file; a missing file is no error.
fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes exotrace's files and the folder. Nothing else is ever put there, and nothing else is
/// removed.
fn remove_all(folder: &Path) -> io::Result<()> {
    // The lock last: while it exists, the others are known to be exotrace's.
    for file in SOCKETS.into_iter().chain([LOCK]) {
        remove_file(&folder.join(file))?;
    }
    fs::remove_dir(folder)
}
