//! One open of one file: a connection to the machine.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::Errno;

use crate::client::mount::Sockets;
use crate::client::mount::filesystem::Name;
use crate::client::ports::{CallError, Client};
use crate::listener::{Seen, look};
use crate::protocol::ports::{LONGEST_READ, Target};

/// The time that a read of dt(4) waits for an answer, and a write until it is accepted. A kill of
/// the process takes effect after that.
const PATIENCE: Duration = Duration::from_secs(1);

/// The error of a failed operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The error number.
    pub errno: i32,
    /// The text.
    pub text: String,
}

impl From<CallError> for Refused {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused { errno, text } => Self {
                errno: errno.raw_os_error(),
                text,
            },
            CallError::Gone(gone) => Self {
                errno: Errno::NODEV.raw_os_error(),
                text: gone.to_string(),
            },
        }
    }
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        CallError::from(error).into()
    }
}

/// An open file.
pub enum Open {
    /// A file that returns text, and may take commands.
    Text {
        /// The port.
        client: Client,
        /// The text as last read from the beginning.
        text: Vec<u8>,
    },
    /// A file that returns events.
    Events(Client),
    /// The device dt(4).
    Dt(UnixStream),
}

impl Open {
    /// Opens a file.
    pub fn new(machine: &Sockets, name: Name) -> Result<Self, Refused> {
        Ok(match name {
            Name::Port(target) => {
                let client = Client::open(&machine.ports, target)?;
                match target {
                    Target::Events(_) => Self::Events(client),
                    Target::Control(_) | Target::Stat => Self::Text {
                        client,
                        text: Vec::new(),
                    },
                }
            }
            Name::Dt => {
                let stream = UnixStream::connect(&machine.dt)?;
                stream.set_write_timeout(Some(PATIENCE))?;
                Self::Dt(stream)
            }
        })
    }

    /// Reads. `more` follows the port's text.
    pub fn read(
        &mut self,
        offset: u64,
        size: u32,
        more: impl Fn() -> String,
    ) -> Result<Vec<u8>, Refused> {
        match self {
            Self::Text { client, text } => {
                if offset == 0 {
                    *text = client.read(u32::MAX)?;
                    text.extend(more().bytes());
                }
                let offset = usize::try_from(offset).unwrap_or(usize::MAX);
                let rest = text.get(offset..).unwrap_or_default().iter();
                Ok(rest
                    .take(usize::try_from(size).unwrap_or(usize::MAX))
                    .copied()
                    .collect())
            }
            Self::Events(client) => Ok(client.read(size)?),
            Self::Dt(stream) => match look(&*stream, PATIENCE)? {
                Seen::Nothing => Ok(Vec::new()),
                Seen::Gone => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Seen::Input => {
                    // One read returns no more than is available.
                    let room = usize::try_from(size).unwrap_or(0).min(LONGEST_READ);
                    let mut bytes = vec![0; room];
                    let read = stream.read(&mut bytes)?;
                    if read == 0 {
                        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                    }
                    bytes.truncate(read);
                    Ok(bytes)
                }
            },
        }
    }

    /// Writes commands, one a line. Those before a refused one are carried out, those after it are
    /// not.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        match self {
            Self::Text { client, .. } => {
                let commands = bytes.strip_suffix(b"\n").unwrap_or(bytes);
                for command in commands.split(|byte| *byte == b'\n') {
                    client.command(command)?;
                }
                Ok(())
            }
            Self::Events(_) => Err(Refused {
                errno: Errno::BADF.raw_os_error(),
                text: "events are read, not written".into(),
            }),
            Self::Dt(stream) => Ok(stream.write_all(bytes)?),
        }
    }
}
