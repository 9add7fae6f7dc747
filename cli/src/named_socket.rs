//! Sockets at paths that a user names, removed at the end.
//!
//! A file that is there is never replaced, but for a socket on which nobody listens any more: the
//! remains of a run that was killed.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with,
};

use crate::confinement::{Confinement, ConfinementError, Kind, Reach};

/// The number of programs that may wait to be accepted.
const BACKLOG: i32 = 128;

/// There can be no socket at a path.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// There is a file that is no socket.
    #[error("{path}: there is a file that is no socket; name another path", path = .0.display())]
    File(PathBuf),
    /// Another program listens there.
    #[error("{path}: another program listens there; name another path", path = .0.display())]
    InUse(PathBuf),
    /// The host refuses.
    #[error("{path}: {source}", path = path.display())]
    Host {
        /// The socket.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
}

impl ListenError {
    /// Returns a function that makes the error of a path of one of the host's.
    pub fn at(path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self::Host {
            path: path.to_path_buf(),
            source,
        }
    }
}

/// Listens on a socket at `path` that this user alone may connect to. The file is there until it is
/// dropped.
///
/// # Errors
/// If there is something else than a socket without a listener, or the host refuses.
pub fn listen(path: &Path) -> Result<(UnixListener, SocketFile), ListenError> {
    let host = ListenError::at(path);
    remove_stale(path)?;
    let listener = bind_to(path).map_err(|error| match error {
        Errno::ADDRINUSE => ListenError::InUse(path.to_path_buf()),
        other => host(other.into()),
    })?;
    Ok((listener, SocketFile::of(path).map_err(host)?))
}

/// Removes a socket on which nobody listens. Anything else at `path` is an error.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let host = ListenError::at(path);
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(host(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::File(path.to_path_buf()));
        }
        Ok(_) => {}
    }
    match try_connect(path) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(host),
        // Its queue is full, or it is of another type.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            Err(ListenError::InUse(path.to_path_buf()))
        }
        Err(error) => Err(host(error.into())),
    }
}

/// Connects to a socket without waiting.
fn try_connect(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)
}

fn bind_to(path: &Path) -> Result<UnixListener, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the socket's permissions.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)?;
    rustix::net::listen(&socket, BACKLOG)?;
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
            .name("socket-file".into())
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
    fn the_socket_is_its_users_alone_and_goes_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for is_kept in [false, true] {
            let (_listener, file) = listen(&path).unwrap();
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            UnixStream::connect(&path).unwrap();
            match is_kept {
                true => drop(file.keep(&Confinement::none()).unwrap()),
                false => drop(file),
            }
            assert!(!path.exists(), "{is_kept}");
        }
        // Another file that has come in its place stays.
        let listening = listen(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another's").unwrap();
        drop(listening);
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
            ("missing/socket", "No such file"),
            ("file/socket", "Not a directory"),
        ] {
            let existed = at(name).exists();
            let message = listen(&at(name)).unwrap_err().to_string();
            assert!(message.contains(said), "{name}: {message}");
            assert!(message.starts_with('/'), "{name}: {message}");
            assert_eq!(at(name).exists(), existed, "{name}");
        }
        drop(listen(&at("stale")).unwrap());
        assert!(!at("stale").exists());
    }
}
