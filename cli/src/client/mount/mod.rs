//! A machine's trace devices as files: a file system (FUSE) in this process, whose files are ports of the machine's.
//!
//! This owns the mount. Each open of a file is a connection to the machine and nothing is shared between opens, so that nobody waits for
//! anybody else: opens, reads and writes have threads of their own. No read waits for events: as on Plan 9, 0 bytes mean that there are none now. It ends
//! by umount(8), or when [`Mounted`] is dropped; whoever has files open then, or reads, gets an error at once.

mod filesystem;
mod open;
#[cfg(test)]
mod tests;

use std::io;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, Config, MountOption};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use filesystem::Tree;

/// What the kernel's side of a file system is.
const DEVICE: &str = "/dev/fuse";
/// What mounts for users that may not.
const HELPER: &str = "fusermount3";
/// How long the kernel may take to let go of the file system.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often it is looked whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// The files cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// Not a place for it.
    #[error("{path}: {source}", path = path.display())]
    Folder {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file system whose process was killed.
    #[error("{path}: what was mounted there is dead; take it away first: umount {path}", path = path.display())]
    Dead {
        /// Where.
        path: PathBuf,
    },
    /// It would hide something.
    #[error("{path}: the folder is not empty", path = path.display())]
    NotEmpty {
        /// Where.
        path: PathBuf,
    },
    /// The kernel has no FUSE.
    #[error(
        "{DEVICE} is not there: load the kernel's module (modprobe fuse), or give the container this device"
    )]
    NoDevice,
    /// Neither this process nor a helper may mount.
    #[error(
        "{path} cannot be mounted on: {source}; users other than root need {HELPER} (Debian's package fuse3) and access to {DEVICE}",
        path = path.display()
    )]
    Mount {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// A machine as the files need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    /// The machine's name.
    pub name: String,
    /// That of its [ports](crate::server::ports).
    pub ports: PathBuf,
    /// That of the device dt(4).
    pub dt: PathBuf,
}

/// The mount. Ends when dropped.
pub struct Mounted {
    folder: PathBuf,
    /// Never dropped: that would unmount what stands at the folder's name by then, whosever it is.
    session: ManuallyDrop<BackgroundSession>,
}

impl Mounted {
    /// Shows a machine's ports in `folder`.
    ///
    /// # Errors
    /// If the folder is not an empty one, or nothing may be mounted.
    pub fn start(folder: &Path, machine: Sockets) -> Result<Self, MountError> {
        check_folder(folder)?;
        if !Path::new(DEVICE).exists() {
            return Err(MountError::NoDevice);
        }
        let folder = folder.canonicalize().map_err(|source| MountError::Folder {
            path: folder.to_path_buf(),
            source,
        })?;
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName(format!("exotrace-{}", machine.name)),
            MountOption::DefaultPermissions,
            MountOption::NoSuid,
            MountOption::NoDev,
            MountOption::NoExec,
        ];
        // These only hand requests out.
        config.n_threads = Some(2);
        let session = fuser::spawn_mount(Tree::new(machine), &folder, &config);
        let session = session.map_err(|source| MountError::Mount {
            path: folder.clone(),
            source,
        })?;
        Ok(Self {
            folder,
            session: ManuallyDrop::new(session),
        })
    }

    /// Whether it has been unmounted.
    pub fn has_ended(&self) -> bool {
        self.session.guard.is_finished()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.has_ended() {
            return;
        }
        let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
        match rustix::mount::unmount(&self.folder, flags) {
            Ok(()) => {}
            Err(Errno::PERM) => unmount_by_helper(&self.folder),
            Err(error) => log::warn!("{}: umount: {error}", self.folder.display()),
        }
        let until = Instant::now() + PATIENCE;
        while !self.has_ended() {
            if Instant::now() >= until {
                // Somebody has a file open. The kernel cuts him off when this process ends.
                return log::info!("{}: in use to the last", self.folder.display());
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

fn unmount_by_helper(folder: &Path) {
    let mut helper = Command::new(HELPER);
    helper.args(["-u", "-z", "--"]).arg(folder);
    helper.stdout(Stdio::null()).stderr(Stdio::null());
    match helper.status() {
        Ok(status) if status.success() => {}
        Ok(status) => log::warn!("{}: {HELPER} -u: {status}", folder.display()),
        Err(error) => log::warn!("{}: {HELPER} -u: {error}", folder.display()),
    }
}

fn check_folder(folder: &Path) -> Result<(), MountError> {
    let path = folder.to_path_buf();
    match folder.read_dir().map(|mut entries| entries.next()) {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err(MountError::NotEmpty { path }),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTCONN) => {
            Err(MountError::Dead { path })
        }
        Err(source) => Err(MountError::Folder { path, source }),
    }
}
