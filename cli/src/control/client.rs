//! Asking a running machine.

use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::{Answer, Command, LONGEST_ANSWER, MessageError};
use crate::registry::Running;

/// A machine did not answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Its socket.
    #[error("machine {name}: {path}: {source}; has it just ended?", path = path.display())]
    Socket {
        /// The machine.
        name: String,
        /// Its socket.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// It took too long.
    #[error(
        "machine {name} has not answered for {} s: its process is stopped, or busy with another question",
        patience.as_secs()
    )]
    Silent {
        /// The machine.
        name: String,
        /// How long it was waited for.
        patience: Duration,
    },
    /// Its answer.
    #[error("machine {name}: {source}")]
    Message {
        /// The machine.
        name: String,
        /// What is wrong with it.
        source: MessageError,
    },
    /// It said no.
    #[error("machine {name}: {message}")]
    Refused {
        /// The machine.
        name: String,
        /// Why.
        message: String,
    },
    /// It said something else.
    #[error("machine {name}: an answer to another question: {answer}")]
    Unexpected {
        /// The machine.
        name: String,
        /// What it said.
        answer: String,
    },
}

/// Sends `command` to `machine` and waits for its answer, as long as that takes.
///
/// # Errors
/// If the machine cannot be reached, or says that it could not do it.
pub fn ask(machine: &Running, command: &Command) -> Result<Answer, AskError> {
    ask_for(machine, command, &[], None)
}

/// As [`ask`]; the machine also gets `descriptors`, at most [`MOST_DESCRIPTORS`](super::MOST_DESCRIPTORS).
///
/// # Errors
/// As [`ask`].
pub fn ask_with(
    machine: &Running,
    command: &Command,
    descriptors: &[BorrowedFd<'_>],
) -> Result<Answer, AskError> {
    ask_for(machine, command, descriptors, None)
}

/// As [`ask`], but no longer than `patience`: where one machine must not keep a user from the others.
///
/// # Errors
/// As [`ask`], and if no answer came.
pub fn ask_within(
    machine: &Running,
    command: &Command,
    patience: Duration,
) -> Result<Answer, AskError> {
    ask_for(machine, command, &[], Some(patience))
}

fn ask_for(
    machine: &Running,
    command: &Command,
    descriptors: &[BorrowedFd<'_>],
    patience: Option<Duration>,
) -> Result<Answer, AskError> {
    let name = || machine.name.to_string();
    let line = super::encode(command).map_err(io::Error::other);
    let answer = line
        .and_then(|line| exchange(machine, &line, descriptors, patience))
        .map_err(|source| match (source.kind(), patience) {
            (io::ErrorKind::WouldBlock, Some(patience)) => AskError::Silent {
                name: name(),
                patience,
            },
            _ => AskError::Socket {
                name: name(),
                path: machine.socket.clone(),
                source,
            },
        })?;
    match super::decode(&answer).map_err(|source| AskError::Message {
        name: name(),
        source,
    })? {
        Answer::Error { message } => Err(AskError::Refused {
            name: name(),
            message,
        }),
        answer => Ok(answer),
    }
}

/// The answer does not fit the question.
pub fn unexpected(machine: &Running, answer: &Answer) -> AskError {
    AskError::Unexpected {
        name: machine.name.to_string(),
        answer: format!("{answer:?}"),
    }
}

/// Sends `command` to `machine`; what it says comes on the connection.
///
/// # Errors
/// If the machine cannot be reached.
pub fn connect(machine: &Running, command: &Command) -> Result<UnixStream, AskError> {
    let connected = super::encode(command)
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

fn exchange(
    machine: &Running,
    line: &str,
    descriptors: &[BorrowedFd<'_>],
    patience: Option<Duration>,
) -> io::Result<String> {
    let mut stream = UnixStream::connect(&machine.socket)?;
    stream.set_read_timeout(patience)?;
    let sent = match descriptors {
        [] => 0,
        _ => send(&stream, line.as_bytes(), descriptors)?,
    };
    stream.write_all(line.as_bytes().get(sent..).unwrap_or_default())?;
    let mut answer = String::new();
    BufReader::new(stream.take(LONGEST_ANSWER)).read_line(&mut answer)?;
    if answer.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(answer)
}

/// Sends descriptors with the first bytes of `bytes`; returns how many those are.
fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(super::MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let parts = [IoSlice::new(bytes)];
    Ok(sendmsg(stream, &parts, &mut control, SendFlags::NOSIGNAL)?)
}
