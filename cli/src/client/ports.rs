//! One port of a machine in another process, by [messages](crate::protocol::ports).

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use probes::clock::Clock;
use rustix::io::Errno;

use crate::protocol::end::MachineEnd;
use crate::protocol::ports::{LONGEST_REQUEST, Request, Target, Waited, clock_of, receive_answer};
use crate::protocol::socket::{GoneError, connect};

/// The time limit for an answer. Arming a thousand probes takes seconds, and a stopped machine
/// never answers.
const PATIENCE: Duration = Duration::from_secs(60);

/// A port cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The device or the machine refused the request.
    #[error("{text}")]
    Refused {
        /// The error number.
        errno: Errno,
        /// The reason.
        text: String,
    },
    /// The machine does not answer.
    #[error(transparent)]
    Gone(GoneError),
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> Self {
        Self::Gone(error.into())
    }
}

/// An open port; closed when dropped.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    record_bytes: usize,
}

impl Client {
    /// Opens `target` of the machine with the socket `path`.
    ///
    /// # Errors
    /// If the machine does not answer, or refuses.
    pub fn open(path: &Path, target: Target) -> Result<Self, CallError> {
        let stream = connect(path).map_err(CallError::Gone)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut client = Self {
            stream,
            record_bytes: 0,
        };
        let record = client.call(&Request::Open(target))?;
        client.record_bytes = usize::try_from(u32::from_le_bytes(fixed(&record)?)).unwrap_or(0);
        Ok(client)
    }

    /// Returns the size of a record in bytes; 0 if the port has no records.
    pub fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    /// Sends a command and waits until it is carried out.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn command(&mut self, command: &[u8]) -> Result<(), CallError> {
        if command.len() > LONGEST_REQUEST {
            return Err(CallError::Refused {
                errno: Errno::INVAL,
                text: format!(
                    "a command has at most {LONGEST_REQUEST} bytes, this has {}",
                    command.len()
                ),
            });
        }
        self.call(&Request::Command(command.to_vec())).map(drop)
    }

    /// Returns the present content: whole records of at most `most` bytes together, or all of a
    /// port's text.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn read(&mut self, most: u32) -> Result<Vec<u8>, CallError> {
        self.call(&Request::Read(most))
    }

    /// Waits for events for `limit` or less.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn wait(&mut self, limit: Duration) -> Result<Waited, CallError> {
        let limit = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        let [waited] = fixed(&self.call(&Request::Wait(limit))?)?;
        Ok(Waited::of(waited).ok_or_else(garbled)?)
    }

    /// Returns the number of records that were dropped because this client was too slow.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn dropped(&mut self) -> Result<u64, CallError> {
        let dropped = self.call(&Request::Dropped)?;
        Ok(u64::from_le_bytes(fixed(&dropped)?))
    }

    /// Returns the machine's clock, if it is known.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn clock(&mut self) -> Result<Option<Clock>, CallError> {
        Ok(clock_of(&self.call(&Request::Clock)?))
    }

    /// Returns the symbol at a kernel address, if it is known.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn name(&mut self, address: u64) -> Result<Option<String>, CallError> {
        let name = self.call(&Request::Name(address))?;
        let name = String::from_utf8_lossy(&name).into_owned();
        Ok(Some(name).filter(|name| !name.is_empty()))
    }

    /// Returns the machine's end, if it has ended.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn end(&mut self) -> Result<Option<MachineEnd>, CallError> {
        let end = self.call(&Request::End)?;
        match end.is_empty() {
            true => Ok(None),
            false => Ok(Some(serde_json::from_slice(&end).map_err(|_| garbled())?)),
        }
    }

    fn call(&mut self, request: &Request) -> Result<Vec<u8>, CallError> {
        request.send(&mut self.stream)?;
        let (error, bytes) = receive_answer(&mut self.stream)?;
        match i32::try_from(error).ok().filter(|error| *error > 0) {
            None => Ok(bytes),
            Some(error) => Err(CallError::Refused {
                errno: Errno::from_raw_os_error(error),
                text: String::from_utf8_lossy(&bytes).into_owned(),
            }),
        }
    }
}

/// Converts an answer of a fixed size.
fn fixed<const N: usize>(bytes: &[u8]) -> io::Result<[u8; N]> {
    bytes.try_into().map_err(|_| garbled())
}

fn garbled() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "unexpected answer of the machine",
    )
}
