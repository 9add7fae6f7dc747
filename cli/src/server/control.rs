//! The server of a machine's control socket.
//!
//! Requests of all clients are answered one after the other, because a snapshot must be alone. Only
//! `stop` and `info` are answered at any time. An idle client delays nobody and is disconnected
//! after a while. Traces and scripts stream beside all that.

use std::fmt::Display;
use std::io::{self, BufRead, BufReader, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::listener::{ListenError, Listener, Rules, check_peer};
use crate::protocol::control::{Answer, Command, LONGEST_QUESTION, MOST_DESCRIPTORS};
use crate::protocol::error::{ErrorKind, RequestError};

/// The time that a client has to send its line, and the time it may be idle during an answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time that a client has to receive an answer.
const LONGEST_TALK: Duration = Duration::from_secs(30);
/// The time that a request waits for those before it.
const LONGEST_TURN: Duration = Duration::from_secs(60);
/// The listener's rules. A stream ends with its machine, once its client has all records: it is not
/// cut.
const RULES: Rules = Rules {
    name: "control",
    most: 64,
    grace: None,
};

/// The interface of a machine to its server.
pub trait Machine: Send + Sync + 'static {
    /// Carries out `command`. For [`Command::Stop`] this only starts the end.
    fn answer(&self, command: Command) -> Answer;

    /// Saves to the files whose descriptors `client` has sent: the machine as it is, for
    /// [`Command::Snapshot`], or as it was so long `ago`, for [`Command::Rewind`].
    fn save(&self, descriptors: Vec<OwnedFd>, ago: Option<Duration>, client: &UnixStream)
    -> Answer;

    /// Traces to `stream` until its peer closes it or the machine ends, for [`Command::Trace`],
    /// [`Command::Script`] and [`Command::Gdb`].
    fn stream(&self, command: Command, stream: UnixStream);
}

/// A control socket server. It ends when dropped.
pub struct Server(#[expect(dead_code, reason = "serves until it is dropped")] Listener);

impl Server {
    /// Listens on `path` for `machine`.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn start(path: &Path, machine: impl Machine) -> Result<Self, ListenError> {
        // Held while a request is answered.
        let turn = Mutex::new(());
        let serve = move |stream: &UnixStream, _: &_| converse(stream, &machine, &turn);
        Listener::start(path, RULES, serve).map(Self)
    }
}

/// A client with a deadline: one that sends byte by byte must not delay the others or the machine's
/// end.
struct Client<'s> {
    stream: &'s UnixStream,
    until: Instant,
    /// The descriptors that the client has sent, at most [`MOST_DESCRIPTORS`].
    descriptors: Vec<OwnedFd>,
}

impl<'s> Client<'s> {
    fn new(stream: &'s UnixStream, time: Duration) -> Self {
        Self {
            stream,
            until: Instant::now() + time,
            descriptors: Vec::new(),
        }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(Some(left.min(PATIENCE))),
        }
    }
}

impl Read for Client<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        // The kernel closes descriptors beyond this space.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(buf)];
        let received = recvmsg(
            self.stream,
            &mut parts,
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                let room = MOST_DESCRIPTORS - self.descriptors.len();
                self.descriptors.extend(descriptors.take(room));
            }
        }
        Ok(received.bytes)
    }
}

impl Write for Client<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn error(kind: ErrorKind, reason: impl Display) -> Answer {
    Answer::Error(RequestError::new(kind, reason))
}

/// Returns the machine's answer, or an error if it panics.
fn guarded(answer: impl FnOnce() -> Answer) -> Answer {
    let answer = catch_unwind(AssertUnwindSafe(answer));
    answer.unwrap_or_else(|_| {
        let why = "a fault in exotrace itself; its own standard error has more. Please report it";
        error(ErrorKind::Internal, why)
    })
}

fn converse(stream: &UnixStream, machine: &impl Machine, turn: &Mutex<()>) -> io::Result<()> {
    let answer = match check_peer(stream) {
        Ok(()) => {
            let mut line = String::new();
            let mut client = Client::new(stream, PATIENCE);
            BufReader::new(Read::take(&mut client, LONGEST_QUESTION)).read_line(&mut line)?;
            let descriptors = client.descriptors;
            match crate::protocol::control::decode(&line) {
                Ok(command @ (Command::Trace(_) | Command::Script(_) | Command::Gdb { .. })) => {
                    machine.stream(command, stream.try_clone()?);
                    return Ok(());
                }
                // Needs no pause, so it is answered while another command waits for one.
                Ok(command @ (Command::Stop | Command::PowerButton | Command::Info)) => {
                    guarded(|| machine.answer(command))
                }
                Ok(command) => match turn.try_lock_for(LONGEST_TURN) {
                    Some(_turn) => guarded(|| match command {
                        Command::Snapshot => machine.save(descriptors, None, stream),
                        Command::Rewind { ago_ms } => {
                            let ago = Duration::from_millis(ago_ms);
                            machine.save(descriptors, Some(ago), stream)
                        }
                        command => machine.answer(command),
                    }),
                    None => error(
                        ErrorKind::Busy,
                        format_args!(
                            "busy with another command for {} s; `exotrace stop` is answered all the same",
                            LONGEST_TURN.as_secs()
                        ),
                    ),
                },
                Err(invalid) => error(ErrorKind::Invalid, invalid),
            }
        }
        Err(foreign) => error(ErrorKind::NotPermitted, foreign),
    };
    send(stream, &answer)
}

/// Sends a message to a client that may be slow.
///
/// # Errors
/// If the client has disconnected, or does not read.
pub(super) fn send(stream: &UnixStream, answer: &Answer) -> io::Result<()> {
    let line = crate::protocol::control::encode(answer).map_err(io::Error::other)?;
    Client::new(stream, LONGEST_TALK).write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;
    use crate::client::control as client;
    use crate::registry::Running;

    struct Echo;
    impl Machine for Echo {
        fn stream(&self, command: Command, mut stream: UnixStream) {
            writeln!(stream, "{command:?}").unwrap();
        }

        /// Writes to each file.
        fn save(&self, descriptors: Vec<OwnedFd>, _: Option<Duration>, _: &UnixStream) -> Answer {
            let bytes = descriptors.len() as u64;
            for descriptor in descriptors {
                std::fs::File::from(descriptor).write_all(b"saved").unwrap();
            }
            Answer::Saved {
                bytes,
                paused_us: 0,
                ago_ms: 0,
            }
        }

        fn answer(&self, command: Command) -> Answer {
            match command {
                Command::Stop => Answer::Stopping,
                Command::Info => panic!("a fault for the test"),
                other => error(ErrorKind::Other, format_args!("{other:?}")),
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
        let refused = client::ask(&machine, &Command::Stat { hash: false })
            .unwrap_err()
            .to_string();
        assert_eq!(refused, "machine vm1: Stat { hash: false }");
        drop(server);
        let gone = client::ask(&machine, &Command::Stop)
            .unwrap_err()
            .to_string();
        assert!(gone.contains("has it just ended?"), "{gone}");
    }

    #[test]
    fn the_machine_gets_the_descriptors_that_a_client_sends() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let _server = Server::start(&socket, Echo).unwrap();
        let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
        let descriptors = files.each_ref().map(AsFd::as_fd);
        let answer = client::ask_with(&running(socket), &Command::Snapshot, &descriptors, |_| ());
        let saved = Answer::Saved {
            bytes: 2,
            paused_us: 0,
            ago_ms: 0,
        };
        assert_eq!(answer.unwrap(), saved);
        for file in files {
            assert_eq!(file.metadata().unwrap().len(), 5);
        }
    }

    #[test]
    fn a_fault_in_an_answer_is_told_and_does_not_end_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let _server = Server::start(&socket, Echo).unwrap();
        let machine = running(socket);
        let told = client::ask(&machine, &Command::Info).unwrap_err();
        assert!(told.to_string().contains("exotrace itself"), "{told}");
        assert_eq!(
            client::ask(&machine, &Command::Stop).unwrap(),
            Answer::Stopping
        );
    }

    /// Like a machine with a stopped process: the kernel accepts the connection, but nobody reads
    /// the request.
    #[test]
    fn a_machine_that_does_not_answer_is_waited_for_only_as_long_as_one_likes() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let _listener = UnixListener::bind(&socket).unwrap();
        let patience = Duration::from_millis(50);
        let told = client::ask_within(&running(socket), &Command::Info, patience).unwrap_err();
        assert!(told.to_string().contains("has not answered"), "{told}");
    }

    #[test]
    fn a_client_that_comes_byte_by_byte_is_hung_up_on() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let client = std::thread::spawn(move || {
            while theirs.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let began = Instant::now();
        let mut line = String::new();
        let read = BufReader::new(Client::new(&ours, PATIENCE / 10)).read_line(&mut line);
        assert!(read.is_err(), "{line:?}");
        assert!(began.elapsed() >= PATIENCE / 10);
        drop(ours);
        client.join().unwrap();
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
