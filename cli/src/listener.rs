//! A Unix socket with a thread for each connection.
//!
//! The caller brings the service and the rules. It also rejects other users' clients
//! ([`check_peer`]), because it knows how to answer them. This module accepts connections and
//! closes surplus ones.
//!
//! At the end it accepts no more connections. Open ones see the request to end and have the rules'
//! time for it; then they are cut. All threads have ended afterwards. A lost client or a panic of
//! its thread does not affect the others.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::net::Shutdown;

use crate::registry;

/// The interval of checks whether a connection has ended as requested.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
/// The pause after a failed accept, for instance for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// The socket cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("{name} socket {path}: {source}{hint}", path = path.display())]
pub struct ListenError {
    name: &'static str,
    path: PathBuf,
    source: io::Error,
    hint: &'static str,
}

/// The rules for all connections of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// The socket's name, in messages and for its threads.
    pub name: &'static str,
    /// The largest number of connections at a time; more are closed at once.
    pub most: usize,
    /// The time that connections have to end once requested; unlimited if none.
    pub grace: Option<Duration>,
}

/// A request to end a connection.
#[derive(Debug, Clone, Default)]
pub struct Leave(Arc<AtomicBool>);

impl Leave {
    /// Checks whether the connection shall end.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    fn ask(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

type Serve = Box<dyn Fn(&UnixStream, &Leave) -> io::Result<()> + Send + Sync>;

/// The state shared by the threads.
struct Shared {
    rules: Rules,
    serve: Serve,
    leave: Leave,
    /// The open connections, and the threads of ended ones until the next accept.
    connections: Mutex<Vec<Connection>>,
}

/// A connection: its thread, and while it is open its socket, by which it is cut.
struct Connection {
    served: Weak<Served>,
    thread: JoinHandle<()>,
}

/// A connection's socket as its thread has it. Dropping it, also by a panic, ends the connection
/// for the client, even if copies of the descriptor exist.
struct Served(UnixStream);

impl Served {
    fn cut(&self) {
        // A connection closed by the client is as good.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.cut();
    }
}

/// A listening socket. When dropped, it ends with all connections.
pub struct Listener {
    listener: UnixListener,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens on `path` and calls `serve` for each connection until it returns.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn start(
        path: &Path,
        rules: Rules,
        serve: impl Fn(&UnixStream, &Leave) -> io::Result<()> + Send + Sync + 'static,
    ) -> Result<Self, ListenError> {
        let failed = |source: io::Error| ListenError {
            name: rules.name,
            path: path.to_path_buf(),
            hint: match source.kind() {
                io::ErrorKind::InvalidInput => "; set XDG_RUNTIME_DIR to a shorter path",
                _ => "",
            },
            source,
        };
        let listener = listen(path).map_err(failed)?;
        let accepting = listener.try_clone().map_err(failed)?;
        let shared = Arc::new(Shared {
            rules,
            serve: Box::new(serve),
            leave: Leave::default(),
            connections: Mutex::default(),
        });
        let accepts = shared.clone();
        let thread = std::thread::Builder::new()
            .name(rules.name.into())
            .spawn(move || accepts.accept(&accepting))
            .map_err(failed)?;
        Ok(Self {
            listener,
            shared,
            thread: Some(thread),
        })
    }
}

/// Makes a socket at `path` that accepts connections as soon as it is visible. bind(2) would show
/// it before listen(2), and a client in between would be refused.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let name = path.file_name().and_then(|name| name.to_str());
    // Not longer than the name, because an address has room for few bytes.
    let hidden = match name.and_then(|name| name.get(1..)) {
        Some(rest) if !rest.is_empty() => format!(".{rest}"),
        _ => ".socket".to_owned(),
    };
    let hidden = path.with_file_name(hidden);
    let listener = UnixListener::bind(&hidden)?;
    if let Err(error) = renameat_with(CWD, &hidden, CWD, path, RenameFlags::NOREPLACE) {
        // Removes the unused socket.
        let _ = std::fs::remove_file(&hidden);
        return Err(error.into());
    }
    Ok(listener)
}

impl Drop for Listener {
    fn drop(&mut self) {
        let shared = &self.shared;
        let name = shared.rules.name;
        shared.leave.ask();
        // Ends the accept(2) in which the thread waits.
        if let Err(error) = rustix::net::shutdown(&self.listener, Shutdown::Both) {
            log::warn!("{name} socket: {error}");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of the {name} socket panicked");
        }
        let connections = std::mem::take(&mut *shared.connections());
        if let Some(grace) = shared.rules.grace {
            let until = Instant::now() + grace;
            let is_open = |connection: &Connection| !connection.thread.is_finished();
            while connections.iter().any(is_open) && Instant::now() < until {
                std::thread::sleep(LOOK_INTERVAL);
            }
            for connection in &connections {
                if let Some(served) = connection.served.upgrade() {
                    served.cut();
                }
            }
        }
        for connection in connections {
            if connection.thread.join().is_err() {
                log::error!("a thread of a client of the {name} socket panicked");
            }
        }
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        while !self.leave.is_asked() {
            let accepted = listener.accept();
            if self.leave.is_asked() {
                return;
            }
            if let Err(error) = accepted.and_then(|(stream, _)| self.add(stream)) {
                log::warn!("{} socket: {error}", self.rules.name);
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn add(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let Rules { name, most, .. } = self.rules;
        let mut connections = self.connections();
        connections.retain(|connection| !connection.thread.is_finished());
        if connections.len() >= most {
            log::warn!("{name} socket: {most} clients are connected; one more is refused");
            return Ok(());
        }
        let served = Arc::new(Served(stream));
        let connection = Arc::downgrade(&served);
        let shared = self.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                if let Err(error) = (shared.serve)(&served.0, &shared.leave) {
                    log::debug!("{name} socket: a client has disconnected: {error}");
                }
            })?;
        connections.push(Connection {
            served: connection,
            thread,
        });
        Ok(())
    }
}

/// The client's user may not use this machine.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Another user got through the folder's permissions.
    #[error("user {uid} may not control this machine")]
    Stranger {
        /// The client's user.
        uid: u32,
    },
    /// The client's user is unknown.
    #[error("the client's user cannot be determined: {0}")]
    Unknown(#[from] rustix::io::Errno),
}

/// Checks that the client is the machine's own user, or root.
///
/// # Errors
/// If it is neither.
pub fn check_peer(stream: &UnixStream) -> Result<(), PeerError> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    match peer.uid.as_raw() == registry::user() || peer.uid.is_root() {
        true => Ok(()),
        false => Err(PeerError::Stranger {
            uid: peer.uid.as_raw(),
        }),
    }
}

/// A client's action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// The client has sent something, or closed its sending side: a read distinguishes these.
    Input,
    /// The client has disconnected, and does not read either.
    Gone,
    /// No action.
    Nothing,
}

/// Waits at most `limit` until a client does something. Its input is reported first, even if it has
/// disconnected since.
///
/// # Errors
/// If the connection fails.
pub fn look(stream: impl AsFd, limit: Duration) -> io::Result<Seen> {
    let seen = poll_for(&stream, PollFlags::IN, limit)?;
    Ok(if seen.contains(PollFlags::IN) {
        Seen::Input
    } else if seen.intersects(PollFlags::HUP | PollFlags::ERR) {
        Seen::Gone
    } else {
        Seen::Nothing
    })
}

/// Checks whether the peer of a connection or a pipe has stopped reading.
///
/// # Errors
/// If that cannot be determined.
pub fn has_gone(stream: impl AsFd) -> io::Result<bool> {
    let seen = poll_for(&stream, PollFlags::empty(), Duration::ZERO)?;
    Ok(seen.intersects(PollFlags::HUP | PollFlags::ERR))
}

/// Waits at most `limit` for room to send, and returns whether there is any.
///
/// # Errors
/// If that cannot be determined.
pub fn takes_more(stream: impl AsFd, limit: Duration) -> io::Result<bool> {
    let seen = poll_for(&stream, PollFlags::OUT, limit)?;
    Ok(!seen.is_empty())
}

fn poll_for(stream: &impl AsFd, flags: PollFlags, limit: Duration) -> io::Result<PollFlags> {
    let mut watched = [PollFd::new(stream, flags)];
    let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
    match poll(&mut watched, Some(&limit)) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(PollFlags::empty()),
        Err(error) => return Err(error.into()),
    }
    let [watched] = watched;
    Ok(watched.revents())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Read, Write};
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn rules(most: usize, grace: Option<Duration>) -> Rules {
        Rules {
            name: "test",
            most,
            grace,
        }
    }

    /// Sends all input back until the client closes.
    fn echo(mut stream: &UnixStream, _: &Leave) -> io::Result<()> {
        let mut byte = [0];
        while stream.read(&mut byte)? > 0 {
            match byte {
                [b'!'] => panic!("a fault for the test"),
                byte => stream.write_all(&byte)?,
            }
        }
        Ok(())
    }

    fn connect(path: &Path) -> UnixStream {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Sends a byte and returns the byte that comes back; `None` when the connection has ended.
    fn ask(mut stream: &UnixStream, byte: u8) -> Option<u8> {
        let mut answer = [0];
        stream.write_all(&[byte]).ok()?;
        match stream.read(&mut answer).ok()? {
            0 => None,
            _ => Some(answer[0]),
        }
    }

    #[test]
    fn a_socket_that_is_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = Listener::start(&path, rules(2, Some(Duration::ZERO)), echo).unwrap();
        assert!(Listener::start(&path, rules(2, None), echo).is_err());
        assert_eq!(ask(&connect(&path), b'1'), Some(b'1'));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn clients_are_served_at_the_same_time_and_too_many_are_turned_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = Listener::start(&path, rules(2, Some(Duration::ZERO)), echo).unwrap();
        let (first, second) = (connect(&path), connect(&path));
        for _ in 0..2 {
            assert_eq!(
                (ask(&first, b'1'), ask(&second, b'2')),
                (Some(b'1'), Some(b'2'))
            );
        }
        assert_eq!(ask(&connect(&path), b'3'), None);
        // A fault ends only the client's own connection, and makes room.
        assert_eq!(ask(&first, b'!'), None);
        let until = Instant::now() + LIMIT;
        while ask(&connect(&path), b'4').is_none() {
            assert!(Instant::now() < until);
        }
        assert_eq!(ask(&second, b'5'), Some(b'5'));
    }

    #[test]
    fn leaving_cuts_those_that_take_longer_than_their_time() {
        let folder = tempfile::tempdir().unwrap();
        for grace in [Duration::ZERO, Duration::from_millis(50)] {
            let path = folder.path().join(format!("{grace:?}"));
            let listener = Listener::start(&path, rules(4, Some(grace)), echo).unwrap();
            let client = connect(&path);
            assert_eq!(ask(&client, b'1'), Some(b'1'));
            let began = Instant::now();
            drop(listener);
            assert!((grace..LIMIT).contains(&began.elapsed()), "{grace:?}");
            assert_eq!(ask(&client, b'2'), None);
        }
    }

    #[test]
    fn leaving_waits_for_those_that_have_something_to_say_yet() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let begun = Arc::new(AtomicUsize::new(0));
        let seen = begun.clone();
        let last_word = move |mut stream: &UnixStream, leave: &Leave| {
            seen.fetch_add(1, Ordering::SeqCst);
            while !leave.is_asked() {
                std::thread::sleep(LOOK_INTERVAL);
            }
            stream.write_all(b"bye")
        };
        for grace in [None, Some(LIMIT)] {
            begun.store(0, Ordering::SeqCst);
            let _ = std::fs::remove_file(&path);
            let listener = Listener::start(&path, rules(4, grace), last_word.clone()).unwrap();
            let mut client = connect(&path);
            while begun.load(Ordering::SeqCst) == 0 {
                std::thread::sleep(LOOK_INTERVAL);
            }
            drop(listener);
            let mut said = String::new();
            client.read_to_string(&mut said).unwrap();
            assert_eq!(said, "bye", "{grace:?}");
        }
    }

    #[test]
    fn what_a_client_does_is_seen() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let short = Duration::from_millis(1);
        assert_eq!(look(&ours, short).unwrap(), Seen::Nothing);
        theirs.write_all(b"a").unwrap();
        assert_eq!(look(&ours, LIMIT).unwrap(), Seen::Input);
        (&ours).read_exact(&mut [0]).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(look(&ours, LIMIT).unwrap(), Seen::Input);
        assert!(!has_gone(&ours).unwrap(), "it may read yet");
        assert!(takes_more(&ours, short).unwrap());
        drop(theirs);
        assert!(has_gone(&ours).unwrap());
    }

    #[test]
    fn a_pipe_that_is_full_takes_nothing_and_one_without_a_reader_has_gone() {
        let (reader, mut writer) = io::pipe().unwrap();
        while takes_more(&writer, Duration::ZERO).unwrap() {
            writer.write_all(&[0; 4096]).unwrap();
        }
        assert!(!has_gone(&writer).unwrap());
        drop(reader);
        assert!(has_gone(&writer).unwrap());
    }
}
