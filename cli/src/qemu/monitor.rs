//! QEMU's monitor protocol (QMP, docs/interop/qmp-spec of QEMU): a line of JSON for each command,
//! answer and event.
//!
//! A monitor serves one client at a time, and others wait without a word. So each answer is waited
//! for only so long.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};

/// The time that an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest line that is read, in bytes.
const LONGEST: usize = 16 << 20;
/// The number of bytes that are read at once.
const PIECE: usize = 1 << 16;

/// The reason that the monitor is of no use.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// There is no such socket, or the connection is broken.
    #[error("{0}; name a socket of -qmp unix:SOCKET,server=on,wait=off")]
    Connection(#[from] io::Error),
    /// QEMU is gone.
    #[error("QEMU has closed its monitor")]
    Closed,
    /// It does not answer.
    #[error(
        "the monitor does not answer within {} s: it may be serving another client, as libvirt's own does; give exotrace one of its own",
        PATIENCE.as_secs()
    )]
    Silent,
    /// It speaks something else.
    #[error("no monitor of QEMU that speaks JSON (QMP): it says {said:?}")]
    NoQmp {
        /// The beginning of its line.
        said: String,
    },
    /// It refuses a command.
    #[error("QEMU refuses {command}: {why}")]
    Refused {
        /// The command.
        command: String,
        /// Its reason.
        why: String,
    },
}

/// A connection to a monitor.
#[derive(Debug)]
pub(super) struct Monitor {
    stream: UnixStream,
    /// Bytes that were read behind the last line.
    rest: Vec<u8>,
}

impl Monitor {
    /// Connects to the monitor at a socket and agrees on the protocol.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn connect(path: &Path) -> Result<Self, MonitorError> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut monitor = Self {
            stream,
            rest: Vec::new(),
        };
        let greeting = monitor.line()?;
        if greeting.get("QMP").is_none() {
            return Err(no_qmp(&greeting.to_string()));
        }
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Returns the connection.
    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Returns the number of QEMU's process: that which listens at the socket.
    pub(super) fn process(&self) -> Option<i32> {
        let peer = rustix::net::sockopt::socket_peercred(&self.stream).ok()?;
        Some(peer.pid.as_raw_nonzero().get())
    }

    /// Asks a command and returns its result.
    ///
    /// # Errors
    /// If QEMU refuses it, does not answer, or is gone.
    pub(super) fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, MonitorError> {
        let request = request(command, &arguments);
        self.stream.write_all(&request)?;
        self.answer(command)
    }

    /// Passes a descriptor to QEMU, which stores it under `name` (`getfd`).
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub(super) fn give(&mut self, name: &str, file: &impl AsFd) -> Result<(), MonitorError> {
        let request = request("getfd", &json!({ "fdname": name }));
        let descriptors = [file.as_fd()];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        let sent = rustix::net::sendmsg(
            &self.stream,
            &[IoSlice::new(&request)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        );
        let sent = sent.map_err(io::Error::from)?;
        self.stream
            .write_all(request.get(sent..).unwrap_or_default())?;
        self.answer("getfd").map(|_| ())
    }

    /// Waits for the answer to a command. Events come in between.
    fn answer(&mut self, command: &str) -> Result<Value, MonitorError> {
        loop {
            let mut line = self.line()?;
            if let Some(error) = line.get("error") {
                let why = error.get("desc").and_then(Value::as_str);
                return Err(MonitorError::Refused {
                    command: command.to_owned(),
                    why: why.unwrap_or("without a reason").to_owned(),
                });
            }
            if let Some(result) = line.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    /// Reads a line.
    fn line(&mut self) -> Result<Value, MonitorError> {
        let mut searched = 0;
        loop {
            let end = self.rest.iter().skip(searched).position(|b| *b == b'\n');
            if let Some(end) = end {
                let line: Vec<u8> = self.rest.drain(..=searched + end).collect();
                let said = || String::from_utf8_lossy(&line).into_owned();
                return serde_json::from_slice(&line).map_err(|_| no_qmp(&said()));
            }
            searched = self.rest.len();
            if searched > LONGEST {
                return Err(no_qmp(&String::from_utf8_lossy(&self.rest)));
            }
            let mut piece = [0; PIECE];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(MonitorError::Closed),
                Ok(read) => self.rest.extend(piece.get(..read).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(match self.rest.is_empty() {
                        true => MonitorError::Silent,
                        false => no_qmp(&String::from_utf8_lossy(&self.rest)),
                    });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Returns a command as a line.
pub(super) fn request(command: &str, arguments: &Value) -> Vec<u8> {
    let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
    line.push('\n');
    line.into_bytes()
}

fn no_qmp(said: &str) -> MonitorError {
    /// The largest number of characters shown.
    const SHOWN: usize = 60;
    MonitorError::NoQmp {
        said: said.chars().take(SHOWN).collect(),
    }
}
