//! `--vsock CID,SOCKET`: sockets between programs of the guest and of the host. The host's socket
//! is made before the machine is confined, and removed at the end.
//!
//! A file that is there is never replaced, but for a socket on which nobody listens any more: the
//! remains of a run that was killed.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use vmm::machine::{FIRST_CID, VsockConfig, VsockSocket};
use vmm::snapshot::{RestoreError, saved_vsock};

use crate::confinement::{Confinement, ConfinementError, Kind, Reach};
use crate::report::say;

/// The longest path of a socket in bytes, less `_` and the largest port of a service beside it.
const LONGEST_PATH: usize = 107 - 11;
/// The number of programs that may wait to be accepted.
const BACKLOG: i32 = 128;

/// Sockets in their requested form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vsock {
    /// The guest's context id.
    pub cid: u32,
    /// The host's socket.
    pub path: PathBuf,
}

/// The argument is not in its form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VsockError {
    /// There are not two parts.
    #[error("{0:?}: expected CID,SOCKET, such as 3,/tmp/guest.vsock")]
    Form(String),
    /// The context id is not a guest's.
    #[error("invalid context id {0:?}: expected a number from {FIRST_CID} to 4294967294")]
    Cid(String),
    /// The path has no room in a socket's address.
    #[error(
        "the path has {0} bytes: at most {LONGEST_PATH} fit, since those of services have a port behind it"
    )]
    Long(usize),
}

impl FromStr for Vsock {
    type Err = VsockError;

    fn from_str(text: &str) -> Result<Self, VsockError> {
        let form = || VsockError::Form(text.to_owned());
        let (number, path) = text.split_once(',').ok_or_else(form)?;
        let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        let cid = number.parse().ok().filter(|_| digits);
        // The largest number stands for any guest.
        let cid = cid.filter(|cid| (FIRST_CID..u32::MAX).contains(cid));
        let cid = cid.ok_or_else(|| VsockError::Cid(number.to_owned()))?;
        if path.is_empty() || path.ends_with('/') {
            return Err(form());
        }
        if path.len() > LONGEST_PATH {
            return Err(VsockError::Long(path.len()));
        }
        let path = path.into();
        Ok(Self { cid, path })
    }
}

/// The guest's sockets cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is a file that is no socket.
    #[error("--vsock: {path}: there is a file that is no socket; name another path", path = .0.display())]
    File(PathBuf),
    /// Another program listens there.
    #[error("--vsock: {path}: another program listens there; name another path", path = .0.display())]
    InUse(PathBuf),
    /// The host refuses.
    #[error("--vsock: {path}: {source}", path = path.display())]
    Host {
        /// The socket.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
    /// The snapshot is unreadable.
    #[error(transparent)]
    Snapshot(#[from] RestoreError),
    /// The snapshot has no such device.
    #[error("--vsock: the machine was saved without it, and a restored one gets no new devices")]
    NoDevice,
}

/// The sockets of a run.
#[derive(Debug, Default)]
pub struct Sockets {
    /// The device of a machine that boots, or the one that a restored machine goes on with.
    pub config: Option<VsockConfig>,
    /// The host's socket, as long as it is in the file system.
    pub file: Option<SocketFile>,
}

impl Sockets {
    /// Makes the host's socket for a machine that boots, or for the one in the folder `restored`.
    ///
    /// # Errors
    /// If the socket cannot be made, or the saved machine has no such device.
    pub fn open(chosen: Option<&Vsock>, restored: Option<&Path>) -> Result<Self, OpenError> {
        let saved = restored.map(saved_vsock).transpose()?;
        match (chosen, saved) {
            (Some(_), Some(None)) => Err(OpenError::NoDevice),
            (Some(chosen), _) => Self::listen(chosen),
            (None, Some(Some(saved))) => {
                let cid = saved.cid;
                say(format_args!(
                    "the guest's sockets to the host lead nowhere: it was saved with --vsock {cid},SOCKET, which is to be named again"
                ));
                Ok(Self::default())
            }
            (None, _) => Ok(Self::default()),
        }
    }

    fn listen(chosen: &Vsock) -> Result<Self, OpenError> {
        let path = &chosen.path;
        let host = |source: io::Error| OpenError::Host {
            path: path.clone(),
            source,
        };
        remove_stale(path)?;
        let listener = listen_on(path).map_err(|error| match error {
            Errno::ADDRINUSE => OpenError::InUse(path.clone()),
            other => host(other.into()),
        })?;
        let file = SocketFile::of(path).map_err(host)?;
        let socket = VsockSocket::new(listener, path).map_err(host)?;
        Ok(Self {
            config: Some(VsockConfig {
                cid: chosen.cid,
                socket: Some(socket),
            }),
            file: Some(file),
        })
    }
}

/// Removes a socket on which nobody listens. Anything else at `path` is an error.
fn remove_stale(path: &Path) -> Result<(), OpenError> {
    let host = |source: io::Error| OpenError::Host {
        path: path.to_path_buf(),
        source,
    };
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(host(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(OpenError::File(path.to_path_buf()));
        }
        Ok(_) => {}
    }
    match try_connect(path) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(host),
        // Its queue is full, or it is of another type.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Err(OpenError::InUse(path.to_path_buf())),
        Err(error) => Err(host(error.into())),
    }
}

/// Connects to a socket without waiting.
fn try_connect(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)
}

/// Listens on a socket that this user alone may connect to.
fn listen_on(path: &Path) -> Result<UnixListener, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the socket's permissions.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// A socket in the file system. Dropping this removes it, if it is still this one.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// The device and the number of its inode.
    identity: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_path_buf(),
            identity: identity(path)?,
        })
    }

    /// Keeps the socket until the result is dropped, on a thread that is made before this one is
    /// confined. That thread may remove files of the socket's folder, and reaches no others.
    ///
    /// # Errors
    /// If there can be no such thread.
    pub fn keep(self, confinement: &Confinement) -> Result<KeptFile, ConfinementError> {
        let (end, ended) = channel::<()>();
        let (report, reported) = channel();
        let confinement = confinement.clone();
        let thread = std::thread::Builder::new()
            .name("vsock-file".into())
            .spawn(move || {
                let folder = match self.path.parent() {
                    Some(folder) if folder != Path::new("") => folder.to_path_buf(),
                    _ => ".".into(),
                };
                let reach = Reach {
                    removed: Some(folder),
                    ..Reach::default()
                };
                let confined = confinement.enter_within(Kind::Service, &reach);
                let goes_on = confined.is_ok();
                // The maker waits.
                let _ = report.send(confined);
                if goes_on {
                    // Nothing is sent: the other end is dropped.
                    let _ = ended.recv();
                }
                drop(self);
            })?;
        let kept = KeptFile {
            end: Some(end),
            thread: Some(thread),
        };
        let gone = |_| io::Error::other("the thread of a socket's file has ended");
        reported.recv().map_err(gone)??;
        Ok(kept)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            log::warn!("{}: {error}", self.path.display());
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// See [`SocketFile::keep`].
#[derive(Debug)]
pub struct KeptFile {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for KeptFile {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of a socket's file panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::{self, File};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use super::*;

    #[test]
    fn a_context_id_and_a_path_are_read() {
        for (text, cid, path) in [
            ("3,s", 3, "s"),
            ("4294967294,/run/a,b c", u32::MAX - 1, "/run/a,b c"),
            ("0052,./s", 52, "./s"),
        ] {
            let path = path.into();
            assert_eq!(text.parse(), Ok(Vsock { cid, path }), "{text}");
        }
        let longest = format!("3,{}", "x".repeat(LONGEST_PATH));
        assert!(longest.parse::<Vsock>().is_ok());
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let long = format!("3,{}", "x".repeat(LONGEST_PATH + 1));
        for (text, said) in [
            ("", "expected CID,SOCKET"),
            ("3", "expected CID,SOCKET"),
            ("3,", "expected CID,SOCKET"),
            ("3,folder/", "expected CID,SOCKET"),
            ("socket,3", "context id \"socket\""),
            (",s", "context id \"\""),
            ("0,s", "context id \"0\""),
            ("2,s", "context id \"2\""),
            ("+3,s", "context id \"+3\""),
            ("-3,s", "context id \"-3\""),
            ("0x3,s", "context id \"0x3\""),
            ("4294967295,s", "context id \"4294967295\""),
            ("4294967296,s", "context id \"4294967296\""),
            (long.as_str(), "97 bytes: at most 96"),
        ] {
            let message = text.parse::<Vsock>().unwrap_err().to_string();
            assert!(message.contains(said), "{text}: {message}");
        }
    }

    fn open(path: &Path) -> Result<Sockets, OpenError> {
        let path = path.to_path_buf();
        Sockets::open(Some(&Vsock { cid: 3, path }), None)
    }

    #[test]
    fn the_socket_is_its_users_alone_and_goes_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock");
        for is_kept in [false, true] {
            let sockets = open(&path).unwrap();
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            UnixStream::connect(&path).unwrap();
            match is_kept {
                true => drop(sockets.file.unwrap().keep(&Confinement::none()).unwrap()),
                false => drop(sockets),
            }
            assert!(!path.exists(), "{is_kept}");
        }
        // Another file that has come in its place stays.
        let sockets = open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another's").unwrap();
        drop(sockets);
        assert_eq!(fs::read(&path).unwrap(), b"another's");
    }

    #[test]
    fn only_a_socket_without_a_listener_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        drop(UnixListener::bind(at("stale")).unwrap());
        let _live = UnixListener::bind(at("live")).unwrap();
        let _datagrams = UnixDatagram::bind(at("datagrams")).unwrap();
        File::create(at("file")).unwrap();
        std::os::unix::fs::symlink(at("stale"), at("link")).unwrap();
        fs::create_dir(at("folder")).unwrap();
        for (name, said) in [
            ("live", "another program listens"),
            ("datagrams", "another program listens"),
            ("file", "no socket"),
            ("link", "no socket"),
            ("folder", "no socket"),
            ("missing/vsock", "No such file"),
            ("file/vsock", "Not a directory"),
        ] {
            let existed = at(name).exists();
            let message = open(&at(name)).unwrap_err().to_string();
            assert!(message.contains(said), "{name}: {message}");
            assert!(message.starts_with("--vsock: /"), "{name}: {message}");
            assert_eq!(at(name).exists(), existed, "{name}");
        }
        drop(open(&at("stale")).unwrap());
        assert!(!at("stale").exists());
    }

    #[test]
    fn a_snapshot_that_is_not_there_is_named() {
        let chosen = "3,s".parse().ok();
        let opened = Sockets::open(chosen.as_ref(), Some(Path::new("/nonexistent")));
        let message = opened.unwrap_err().to_string();
        assert!(message.contains("/nonexistent/state"), "{message}");
    }
}
