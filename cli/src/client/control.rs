//! Requests to a running machine over its control socket.

use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::protocol::control::{Answer, Command, LONGEST_ANSWER, MessageError};
use crate::protocol::error::RequestError;
use crate::registry::Running;

/// The longest answer before a stream of another kind, in bytes.
const LONGEST_FIRST: u64 = 1 << 16;

/// A request to a machine failed.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The socket cannot be used.
    #[error("machine {name}: {path}: {source}; has it just ended?", path = path.display())]
    Socket {
        /// The machine's name.
        name: String,
        /// The path of its socket.
        path: PathBuf,
        /// The error of the socket.
        source: io::Error,
    },
    /// No answer came in time.
    #[error(
        "machine {name} has not answered for {} s: its process is stopped, or busy with another question",
        patience.as_secs()
    )]
    Silent {
        /// The machine's name.
        name: String,
        /// The time that was waited.
        patience: Duration,
    },
    /// The answer is not a valid message.
    #[error("machine {name}: {source}")]
    Message {
        /// The machine's name.
        name: String,
        /// The fault in the message.
        source: MessageError,
    },
    /// The machine refused the request.
    #[error("machine {name}: {error}")]
    Refused {
        /// The machine's name.
        name: String,
        /// The reason.
        error: RequestError,
    },
    /// The answer does not fit the request.
    #[error("machine {name}: an answer to another question: {answer}")]
    Unexpected {
        /// The machine's name.
        name: String,
        /// The answer.
        answer: String,
    },
}

/// Sends `command` to `machine` and waits for its answer without a time limit.
///
/// # Errors
/// If the machine cannot be reached, or reports an error.
pub fn ask(machine: &Running, command: &Command) -> Result<Answer, AskError> {
    Talk {
        descriptors: &[],
        progress: &mut |_| (),
        patience: None,
    }
    .ask(machine, command)
}

/// As [`ask`]; the machine also gets `descriptors`, at most
/// [`MOST_DESCRIPTORS`](crate::protocol::control::MOST_DESCRIPTORS), and `progress` what comes
/// before the answer.
///
/// # Errors
/// As [`ask`].
pub fn ask_with(
    machine: &Running,
    command: &Command,
    descriptors: &[BorrowedFd<'_>],
    mut progress: impl FnMut(Answer),
) -> Result<Answer, AskError> {
    Talk {
        descriptors,
        progress: &mut progress,
        patience: None,
    }
    .ask(machine, command)
}

/// Asks as [`ask`] does, but waits no longer than `patience`: one machine must not keep a user from
/// the others.
///
/// # Errors
/// As [`ask`], and if no answer came in time.
pub fn ask_within(
    machine: &Running,
    command: &Command,
    patience: Duration,
) -> Result<Answer, AskError> {
    Talk {
        descriptors: &[],
        progress: &mut |_| (),
        patience: Some(patience),
    }
    .ask(machine, command)
}

/// The parameters of a request.
struct Talk<'t> {
    /// The descriptors that are sent along.
    descriptors: &'t [BorrowedFd<'t>],
    /// The receiver of messages before the answer.
    progress: &'t mut dyn FnMut(Answer),
    /// The longest time without a message from the machine.
    patience: Option<Duration>,
}

impl Talk<'_> {
    fn ask(&mut self, machine: &Running, command: &Command) -> Result<Answer, AskError> {
        let name = || machine.name.to_string();
        let patience = self.patience;
        let failed = |source: io::Error| match (source.kind(), patience) {
            (io::ErrorKind::WouldBlock, Some(patience)) => AskError::Silent {
                name: name(),
                patience,
            },
            _ => AskError::Socket {
                name: name(),
                path: machine.socket.clone(),
                source,
            },
        };
        let line = crate::protocol::control::encode(command).map_err(io::Error::other);
        let answers = line.and_then(|line| self.send(machine, &line));
        let mut answers = BufReader::new(answers.map_err(failed)?);
        loop {
            let mut line = String::new();
            let read = answers.by_ref().take(LONGEST_ANSWER).read_line(&mut line);
            if read.map_err(failed)? == 0 {
                return Err(failed(io::ErrorKind::UnexpectedEof.into()));
            }
            let answer =
                crate::protocol::control::decode(&line).map_err(|source| AskError::Message {
                    name: name(),
                    source,
                })?;
            match answer {
                Answer::Error(error) => {
                    return Err(AskError::Refused {
                        name: name(),
                        error,
                    });
                }
                progress @ Answer::Saving { .. } => (self.progress)(progress),
                answer => return Ok(answer),
            }
        }
    }

    /// Sends a line and returns the connection for the answer.
    fn send(&self, machine: &Running, line: &str) -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(&machine.socket)?;
        stream.set_read_timeout(self.patience)?;
        let sent = match self.descriptors {
            [] => 0,
            descriptors => send_with(&stream, line.as_bytes(), descriptors)?,
        };
        stream.write_all(line.as_bytes().get(sent..).unwrap_or_default())?;
        Ok(stream)
    }
}

/// Returns the error for an answer that does not fit the request.
pub fn unexpected(machine: &Running, answer: &Answer) -> AskError {
    AskError::Unexpected {
        name: machine.name.to_string(),
        answer: format!("{answer:?}"),
    }
}

/// Sends `command` to `machine` and returns the connection for its answers.
///
/// # Errors
/// If the machine cannot be reached.
pub fn connect(machine: &Running, command: &Command) -> Result<UnixStream, AskError> {
    let connected = crate::protocol::control::encode(command)
        .map_err(io::Error::other)
        .and_then(|line| {
            let mut stream = UnixStream::connect(&machine.socket)?;
            stream.write_all(line.as_bytes())?;
            Ok(stream)
        });
    connected.map_err(|source| AskError::Socket {
        name: machine.name.to_string(),
        path: machine.socket.clone(),
        source,
    })
}

/// Reads the first answer on a connection of [`connect`], and nothing behind it.
///
/// # Errors
/// If the machine closes the connection, or refuses the request.
pub fn first_answer(machine: &Running, mut stream: &UnixStream) -> Result<Answer, AskError> {
    let name = || machine.name.to_string();
    let mut line = Vec::new();
    let mut byte = [0];
    while line.last() != Some(&b'\n') && (line.len() as u64) < LONGEST_FIRST {
        stream
            .read_exact(&mut byte)
            .map_err(|source| AskError::Socket {
                name: name(),
                path: machine.socket.clone(),
                source,
            })?;
        line.extend(byte);
    }
    let text = String::from_utf8_lossy(&line);
    let answer = crate::protocol::control::decode(&text);
    match answer.map_err(|source| AskError::Message {
        name: name(),
        source,
    })? {
        Answer::Error(error) => Err(AskError::Refused {
            name: name(),
            error,
        }),
        answer => Ok(answer),
    }
}

/// Sends descriptors with the first bytes of `bytes` and returns the number of these bytes.
fn send_with(
    stream: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit();
        rustix::cmsg_space!(ScmRights(crate::protocol::control::MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let parts = [IoSlice::new(bytes)];
    Ok(sendmsg(stream, &parts, &mut control, SendFlags::NOSIGNAL)?)
}
