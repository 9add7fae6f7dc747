//! A machine's trace devices as files: a file system (FUSE) in this process, whose files are the
//! machine's ports.
//!
//! This module owns the mount. Each open of a file is a connection of its own to the machine, and
//! opens, reads and writes have threads of their own: none delays another. No read waits for
//! events: as on Plan 9, 0 bytes mean that there are none now.
//!
//! The mount ends by umount(8), or when [`Mounted`] is dropped. Open files and reads then fail at
//! once.

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

/// The device of the kernel's FUSE.
const DEVICE: &str = "/dev/fuse";
/// The program that mounts for unprivileged users.
const HELPER: &str = "fusermount3";
/// The time that the kernel has to release the file system.
const PATIENCE: Duration = Duration::from_secs(2);
/// The interval of checks whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// The files cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The path is not a usable folder.
    #[error("{path}: {source}", path = path.display())]
    Folder {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The folder has a file system whose process was killed.
    #[error("{path}: the file system mounted there does not answer; unmount it first: umount {path}", path = path.display())]
    Dead {
        /// The path.
        path: PathBuf,
    },
    /// The folder is not empty: the mount would hide its content.
    #[error("{path}: the folder is not empty", path = path.display())]
    NotEmpty {
        /// The path.
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
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The sockets of a machine that the files need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    /// The machine's name.
    pub name: String,
    /// That of its [ports](crate::server::ports).
    pub ports: PathBuf,
    /// The socket of the device dt(4).
    pub dt: PathBuf,
}

/// The mount. Ends when dropped.
pub struct Mounted {
    folder: PathBuf,
    /// Never dropped: that would unmount whatever is at the folder's path by then, even of another
    /// owner.
    session: ManuallyDrop<BackgroundSession>,
}

impl Mounted {
    /// Mounts a machine's ports on `folder`.
    ///
    /// # Errors
    /// If the folder is not empty or no folder, or nothing may be mounted.
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
        // These threads only distribute requests.
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

    /// Checks whether it has been unmounted.
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
                // A file is still open. The kernel cuts it off when this process ends.
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
