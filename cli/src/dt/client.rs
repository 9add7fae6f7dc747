//! The device dt(4) of a machine in another process: one open of it, by the messages of [`probes::dt::wire`].

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use probes::dt::Abi;
use probes::dt::abi::{self, LIST_SIZE, NAME_SIZE, PROBE_INFO_SIZE};
use probes::dt::codes::Request;
use probes::dt::wire::{MAGIC, NAME, READ, REASON};

use crate::listener::{Seen, look};
use crate::ports::wire::{receive, send};

/// Bytes of an event, `struct dt_evt`.
pub const EVENT_SIZE: usize = 456;
/// How long an answer may take that does not wait for events.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most bytes of an answer: a list of some hundred thousand probes.
const LONGEST_ANSWER: usize = 64 << 20;
/// Today's layout, in an open.
const CURRENT: u32 = 1;
/// `EINTR` of OpenBSD: a read of events ends since something else is asked.
const EINTR: u32 = 4;
/// Where a `struct dtioc_probe_info` has its names: provider, function, name.
const NAMES: [usize; 3] = [5, 21, 37];

/// The device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DtError {
    /// It refuses.
    #[error("dt: {0}")]
    Refused(String),
    /// There is no such probe.
    #[error("dt: no probe {0:?}; one is named by its three parts, such as kprobe:vfs_read:entry")]
    NoProbe(String),
    /// The machine does not answer.
    #[error("the machine does not answer ({0}); has it just ended?")]
    Gone(#[from] io::Error),
}

/// An open of the device; closed when dropped, which takes its probes out of the guest.
pub struct DtClient {
    stream: UnixStream,
    /// A read of events has not been answered yet.
    reads: bool,
}

impl DtClient {
    /// Opens the device whose socket `path` is.
    ///
    /// # Errors
    /// If the machine does not answer, or refuses.
    pub fn open(path: &Path) -> Result<Self, DtError> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut client = Self {
            stream,
            reads: false,
        };
        let open = [MAGIC, CURRENT, 0].map(u32::to_le_bytes).concat();
        client.stream.write_all(&open)?;
        match receive(&mut client.stream, LONGEST_ANSWER)? {
            (0, _) => Ok(client),
            (error, _) => {
                let why = format!("cannot be opened (error {error} of OpenBSD)");
                Err(DtError::Refused(why))
            }
        }
    }

    /// The number of a probe.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn find(&mut self, list: &[u8], probe: &str) -> Result<u32, DtError> {
        let no_probe = || DtError::NoProbe(probe.to_owned());
        let parts: Vec<&str> = probe.split(':').collect();
        let parts = <[&str; 3]>::try_from(parts).map_err(|_| no_probe())?;
        for info in list.chunks_exact(PROBE_INFO_SIZE) {
            // The list has the beginnings of long names.
            let fits = NAMES.into_iter().zip(parts).all(|(at, part)| {
                let listed = info.get(at..at + NAME_SIZE).unwrap_or_default();
                let listed = listed.iter().take_while(|byte| **byte != 0);
                listed.eq(part.bytes().take(NAME_SIZE - 1).collect::<Vec<_>>().iter())
            });
            let Some(number) = u32_at(info, 0).filter(|_| fits) else {
                continue;
            };
            if self.call(NAME, &number.to_le_bytes())? == probe.as_bytes() {
                return Ok(number);
            }
        }
        Err(no_probe())
    }

    /// All probes, as `struct dtioc_probe_info`.
    ///
    /// # Errors
    /// If the machine does not answer, or refuses.
    pub fn list(&mut self) -> Result<Vec<u8>, DtError> {
        let code = Request::ListProbes.code(Abi::Current);
        let mut argument = [0; LIST_SIZE];
        let sized = self.call(code, &argument)?;
        abi::set_list_size(&mut argument, abi::list_size(&sized).unwrap_or(0));
        let mut list = self.call(code, &argument)?;
        Ok(list.split_off(LIST_SIZE.min(list.len())))
    }

    /// Adds a probe whose events have what `flags` say.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn enable(&mut self, probe: u32, flags: u64) -> Result<(), DtError> {
        let mut request = u64::from(probe).to_le_bytes().to_vec();
        request.extend(flags.to_le_bytes());
        request.extend(0_u64.to_le_bytes());
        let code = Request::Enable.code(Abi::Current);
        self.call(code, &request).map(drop)
    }

    /// Starts or stops.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn record(&mut self, on: bool) -> Result<(), DtError> {
        let code = Request::Record.code(Abi::Current);
        self.call(code, &i32::from(on).to_le_bytes()).map(drop)
    }

    /// Events, waited for at most for `limit`; none if none came.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn read(&mut self, most: usize, limit: Duration) -> Result<Vec<u8>, DtError> {
        if !self.reads {
            let room = (most * EVENT_SIZE) as u64;
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

    /// Events that it had already, and how many it has lost. Ends a read that waits.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn counts(&mut self) -> Result<(Vec<u8>, u64), DtError> {
        let code = Request::Stats.code(Abi::Current);
        send(&mut self.stream, code, &[])?;
        let events = match self.reads {
            true => self.events()?,
            false => Vec::new(),
        };
        let stats = self.answer()?;
        Ok((events, u64_at(&stats, 8).unwrap_or(0)))
    }

    /// The answer to a read.
    fn events(&mut self) -> Result<Vec<u8>, DtError> {
        let (error, bytes) = receive(&mut self.stream, LONGEST_ANSWER)?;
        self.reads = false;
        match error {
            0 => Ok(bytes),
            EINTR => Ok(Vec::new()),
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

/// A number of a structure.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_le_bytes(bytes))
}

/// The same.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + 8)?.try_into().ok()?;
    Some(u64::from_le_bytes(bytes))
}
