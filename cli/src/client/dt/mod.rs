//! A client of a machine's device dt(4) in another process: one open of it, by the messages of
//! [`trace_devices::dt::wire`].

pub mod show;

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use trace_devices::dt::abi::{self, LIST_SIZE, NAME_SIZE, PROBE_INFO_SIZE};
use trace_devices::dt::codes::Request;
use trace_devices::dt::wire::{MAGIC, NAME, OPEN_CURRENT, READ, REASON};
use trace_devices::dt::{Abi, Errno};

use crate::listener::{Seen, look};
use crate::protocol::ports::{receive, send};
use crate::protocol::socket::{GoneError, connect};

/// The requested layout.
pub const ABI: Abi = Abi::Current;
/// The time limit for an answer that does not wait for events.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest answer in bytes: a list of some hundred thousand probes.
const LONGEST_ANSWER: usize = 64 << 20;

/// The device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DtError {
    /// The device refuses the request.
    #[error("dt: {0}")]
    Refused(String),
    /// There is no such probe.
    #[error(
        "dt: no probe {0:?}; expected the three parts of its name, such as kprobe:vfs_read:entry"
    )]
    NoProbe(String),
    /// The machine has ended, and all events were read.
    #[error("dt: the machine has ended")]
    Ended,
    /// The machine does not answer.
    #[error(transparent)]
    Gone(#[from] GoneError),
}

impl From<io::Error> for DtError {
    fn from(error: io::Error) -> Self {
        Self::Gone(error.into())
    }
}

/// An open of the device. Dropping it closes the device, which removes its probes from the guest.
pub struct DtClient {
    stream: UnixStream,
    /// Set while a read of events has not been answered.
    reads: bool,
}

impl DtClient {
    /// Opens the device with the socket `path`.
    ///
    /// # Errors
    /// If the machine does not answer, or refuses.
    pub fn open(path: &Path) -> Result<Self, DtError> {
        let stream = connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut client = Self {
            stream,
            reads: false,
        };
        let open = [MAGIC, OPEN_CURRENT, 0].map(u32::to_le_bytes).concat();
        client.stream.write_all(&open)?;
        match receive(&mut client.stream, LONGEST_ANSWER)? {
            (0, _) => Ok(client),
            (error, _) => {
                let why = format!("cannot be opened (error {error} of OpenBSD)");
                Err(DtError::Refused(why))
            }
        }
    }

    /// Returns the number of a probe.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn find(&mut self, list: &[u8], probe: &str) -> Result<u32, DtError> {
        let no_probe = || DtError::NoProbe(probe.to_owned());
        let parts: Vec<&str> = probe.split(':').collect();
        let parts = <[&str; 3]>::try_from(parts).map_err(|_| no_probe())?;
        // The list has only the beginnings of long names.
        let parts = parts.map(|part| abi::cut(part.as_bytes(), NAME_SIZE));
        for info in list.chunks_exact(PROBE_INFO_SIZE) {
            if let Some((number, names)) = abi::listed_names(info)
                && names == parts
                && self.call(NAME, &number.to_le_bytes())? == probe.as_bytes()
            {
                return Ok(number);
            }
        }
        Err(no_probe())
    }

    /// Returns all probes, as `struct dtioc_probe_info`.
    ///
    /// # Errors
    /// If the machine does not answer, or refuses.
    pub fn list(&mut self) -> Result<Vec<u8>, DtError> {
        let code = Request::ListProbes.code(ABI);
        let mut argument = [0; LIST_SIZE];
        let sized = self.call(code, &argument)?;
        abi::set_list_size(&mut argument, abi::list_size(&sized).unwrap_or(0));
        let mut list = self.call(code, &argument)?;
        Ok(list.split_off(LIST_SIZE.min(list.len())))
    }

    /// Adds a probe whose events have the fields selected by `flags`.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn enable(&mut self, probe: u32, flags: u64) -> Result<(), DtError> {
        let code = Request::Enable.code(ABI);
        self.call(code, &ABI.request(probe, flags)).map(drop)
    }

    /// Starts or stops recording.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn record(&mut self, on: bool) -> Result<(), DtError> {
        let code = Request::Record.code(ABI);
        self.call(code, &i32::from(on).to_le_bytes()).map(drop)
    }

    /// Waits for events at most for `limit` and returns them, or nothing.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn read(&mut self, most: usize, limit: Duration) -> Result<Vec<u8>, DtError> {
        if !self.reads {
            let room = (most * ABI.event_size()) as u64;
            send(&mut self.stream, READ, &room.to_le_bytes())?;
            self.reads = true;
        }
        match look(&self.stream, limit)? {
            Seen::Input => {}
            Seen::Nothing => return Ok(Vec::new()),
            Seen::Gone => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        }
        self.events()
    }

    /// Returns the remaining events and the number of dropped ones. Ends a waiting read.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn counts(&mut self) -> Result<(Vec<u8>, u64), DtError> {
        let code = Request::Stats.code(ABI);
        send(&mut self.stream, code, &[])?;
        let events = match self.reads {
            true => self.events()?,
            false => Vec::new(),
        };
        let stats = self.answer()?;
        Ok((events, ABI.read_stat(&stats).dropped))
    }

    /// Returns the answer to a read.
    fn events(&mut self) -> Result<Vec<u8>, DtError> {
        let (error, bytes) = receive(&mut self.stream, LONGEST_ANSWER)?;
        self.reads = false;
        match error {
            0 => Ok(bytes),
            // The read ends because of another request.
            _ if error == Errno::Eintr.number() => Ok(Vec::new()),
            _ if error == Errno::Enxio.number() => Err(DtError::Ended),
            _ => Err(self.refusal(error)),
        }
    }

    fn call(&mut self, code: u32, argument: &[u8]) -> Result<Vec<u8>, DtError> {
        send(&mut self.stream, code, argument)?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Vec<u8>, DtError> {
        match receive(&mut self.stream, LONGEST_ANSWER)? {
            (0, bytes) => Ok(bytes),
            (error, _) => Err(self.refusal(error)),
        }
    }

    fn refusal(&mut self, error: u32) -> DtError {
        let asked = send(&mut self.stream, REASON, &[])
            .and_then(|()| receive(&mut self.stream, LONGEST_ANSWER));
        DtError::Refused(match asked {
            Ok((0, reason)) if !reason.is_empty() => String::from_utf8_lossy(&reason).into_owned(),
            _ => format!("error {error} of OpenBSD"),
        })
    }
}
