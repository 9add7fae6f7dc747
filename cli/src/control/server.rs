//! Answering on a machine's control socket.
//!
//! One thread, one connection at a time: what is asked is short, and a snapshot must be alone anyway. A client
//! that says nothing is hung up on after a while.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Answer, Command, LONGEST_QUESTION};
use crate::registry;

/// How long a client may take to send its line, or to take our answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The socket cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("control socket {path}: {source}{hint}", path = path.display())]
pub struct ServeError {
    path: PathBuf,
    source: io::Error,
    hint: &'static str,
}

/// What the server asks of its machine.
pub trait Machine: Send + 'static {
    /// Does what `command` says. For [`Command::Stop`] this only starts the end.
    fn answer(&self, command: Command) -> Answer;
}

/// The server. Ends when dropped.
pub struct Server {
    listener: UnixListener,
    leave: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on `path` for `machine`.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn start(path: &Path, machine: impl Machine) -> Result<Self, ServeError> {
        let failed = |source: io::Error| {
            let hint = match source.kind() {
                io::ErrorKind::InvalidInput => "; set XDG_RUNTIME_DIR to a shorter path",
                _ => "",
            };
            ServeError {
                path: path.to_path_buf(),
                source,
                hint,
            }
        };
        let listener = UnixListener::bind(path).map_err(failed)?;
        let accepting = listener.try_clone().map_err(failed)?;
        let leave = Arc::new(AtomicBool::new(false));
        let leaving = leave.clone();
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || serve(&accepting, &leaving, &machine))
            .map_err(failed)?;
        Ok(Self {
            listener,
            leave,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.leave.store(true, Ordering::SeqCst);
        // Ends the accept(2) that the thread waits in.
        if let Err(error) = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both) {
            log::warn!("control socket: {error}");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the control thread panicked");
        }
    }
}

fn serve(listener: &UnixListener, leave: &AtomicBool, machine: &impl Machine) {
    while !leave.load(Ordering::SeqCst) {
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = converse(stream, machine) {
                    log::debug!("control: a client went away: {error}");
                }
            }
            Err(_) if leave.load(Ordering::SeqCst) => return,
            Err(error) => {
                log::warn!("control: {error}");
                // Out of descriptors, perhaps: not in a tight loop.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn converse(mut stream: UnixStream, machine: &impl Machine) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    let answer = if peer.uid.as_raw() == registry::user() || peer.uid.is_root() {
        let mut line = String::new();
        BufReader::new((&stream).take(LONGEST_QUESTION)).read_line(&mut line)?;
        match super::decode(&line) {
            Ok(command) => machine.answer(command),
            Err(error) => Answer::Error {
                message: error.to_string(),
            },
        }
    } else {
        Answer::Error {
            message: format!("user {} may not control this machine", peer.uid.as_raw()),
        }
    };
    let line = super::encode(&answer).map_err(io::Error::other)?;
    stream.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::control::client;
    use crate::registry::Running;

    struct Echo;
    impl Machine for Echo {
        fn answer(&self, command: Command) -> Answer {
            match command {
                Command::Stop => Answer::Stopping,
                other => Answer::Error {
                    message: format!("{other:?}"),
                },
            }
        }
    }

    fn running(socket: PathBuf) -> Running {
        Running {
            name: "vm1".parse().unwrap(),
            pid: "1".into(),
            socket,
        }
    }

    #[test]
    fn questions_are_answered_until_the_server_goes() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let server = Server::start(&socket, Echo).unwrap();
        let machine = running(socket.clone());
        for _ in 0..3 {
            assert_eq!(
                client::ask(&machine, &Command::Stop).unwrap(),
                Answer::Stopping
            );
        }
        let refused = client::ask(&machine, &Command::Stat)
            .unwrap_err()
            .to_string();
        assert_eq!(refused, "machine vm1: Stat");
        drop(server);
        let gone = client::ask(&machine, &Command::Stop)
            .unwrap_err()
            .to_string();
        assert!(gone.contains("has it just ended?"), "{gone}");
    }

    #[test]
    fn garbage_is_answered_with_an_error_and_does_not_end_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let _server = Server::start(&socket, Echo).unwrap();
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.write_all(b"GET / HTTP/1.1\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("\"answer\":\"error\""), "{answer}");
        assert_eq!(
            client::ask(&running(socket), &Command::Stop).unwrap(),
            Answer::Stopping
        );
    }
}
