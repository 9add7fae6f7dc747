//! Requests and answers as bytes, for a stream between a client and one port.
//!
//! One connection to the socket `ports` is one open of one port. Closing the connection closes the
//! port. Numbers are little endian.
//!
//! | Who | What |
//! |---|---|
//! | client | u32 request, u32 length, so many bytes |
//! | machine | u32 error, u32 length, so many bytes |
//!
//! An error is 0 or Linux's number; with a number, the bytes are the error's text. Each request is
//! answered before the next is read. Only `WAIT` waits: ports are files whose reads return the
//! present content, as in Plan 9.
//!
//! | Request | Its bytes | The answer's |
//! |---|---|---|
//! | 0 `OPEN`, the first and once | the port's name, or `stat` | u32 bytes of each record; 0 if it gives none |
//! | 1 `COMMAND` | the command | |
//! | 2 `READ` | u32 the bytes that there is room for | whole records, none if there are none now; or all of the port's text |
//! | 3 `WAIT` | u32 milliseconds | one byte: 0 nothing has come, 1 there is something to read, 2 nothing will come any more |
//! | 4 `DROPPED` | | u64 records that this open has lost |
//! | 5 `CLOCK` | | u64 ticks, u64 nanoseconds since 1970 at the same moment, u64 ticks in a second; or none of them, if that is not known |
//! | 6 `NAME` | u64 an address of the kernel | what is there: `vfs_read` or `vfs_read+0x1c`; none if that is not known |
//! | 7 `END` | | nothing as long as the machine runs; else JSON: why it ended, and whether that was in order |
//!
//! The ports have their own socket because the control socket answers one request at a time, and
//! reading events must not wait for a snapshot.

use clap::ValueEnum;
use std::io::{self, Read, Write};

use probes::clock::Clock;
use rustix::io::Errno;
use trace_devices::port::{PortError, Refusal};

pub use trace_devices::port::stream::LONGEST_COMMAND;

/// The size in bytes of a message's header.
const HEADER_SIZE: usize = 8;
/// The longest request in bytes.
pub const LONGEST_REQUEST: usize = LONGEST_COMMAND;
/// The largest number of event bytes in one answer.
pub const LONGEST_READ: usize = 1 << 20;
/// The longest answer in bytes that a client accepts: a configuration may be long.
pub const LONGEST_ANSWER: usize = 16 << 20;
/// The name by which the machine's counts are opened instead of a port.
const STAT: &str = "stat";

const OPEN: u32 = 0;
const COMMAND: u32 = 1;
const READ: u32 = 2;
const WAIT: u32 = 3;
const DROPPED: u32 = 4;
const CLOCK: u32 = 5;
const NAME: u32 = 6;
const END: u32 = 7;

/// A target that can be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A port that takes commands.
    Control(ControlName),
    /// A port that returns events.
    Events(EventName),
    /// The machine's counts of its ports.
    Stat,
}

impl Target {
    const ALL: [Self; 5] = [
        Self::Control(ControlName::Tracectl),
        Self::Control(ControlName::Ptracectl),
        Self::Events(EventName::Trace),
        Self::Events(EventName::Ptrace),
        Self::Stat,
    ];

    /// Returns the target's name in a request.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Control(name) => name.as_str(),
            Self::Events(name) => name.as_str(),
            Self::Stat => STAT,
        }
    }
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// The request `OPEN`.
    Open(Target),
    /// The request `COMMAND`, not necessarily text.
    Command(Vec<u8>),
    /// The request `READ` with the available room in bytes.
    Read(u32),
    /// The request `WAIT` with its milliseconds.
    Wait(u32),
    /// The request `DROPPED`.
    Dropped,
    /// The request `CLOCK`.
    Clock,
    /// The request `NAME` with a kernel address.
    Name(u64),
    /// The request `END`.
    End,
}

/// The result of a `WAIT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// The time is up.
    Nothing,
    /// There is something to read.
    Something,
    /// Nothing more will come: the machine has ended, and everything was read.
    Ended,
}

impl Waited {
    /// Returns the result's byte in an answer.
    pub fn byte(self) -> u8 {
        match self {
            Self::Nothing => 0,
            Self::Something => 1,
            Self::Ended => 2,
        }
    }

    /// Returns the result that an answer's byte stands for.
    pub fn of(byte: u8) -> Option<Self> {
        let all = [Self::Nothing, Self::Something, Self::Ended];
        all.into_iter().find(|waited| waited.byte() == byte)
    }
}

impl Request {
    /// Sends the request.
    ///
    /// # Errors
    /// If it cannot be sent.
    pub fn send(&self, stream: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Open(target) => send(stream, OPEN, target.as_str().as_bytes()),
            Self::Command(command) => send(stream, COMMAND, command),
            Self::Read(most) => send(stream, READ, &most.to_le_bytes()),
            Self::Wait(limit) => send(stream, WAIT, &limit.to_le_bytes()),
            Self::Dropped => send(stream, DROPPED, &[]),
            Self::Clock => send(stream, CLOCK, &[]),
            Self::End => send(stream, END, &[]),
            Self::Name(address) => send(stream, NAME, &address.to_le_bytes()),
        }
    }

    /// Reads a request.
    ///
    /// # Errors
    /// If none comes, or its length is too large for a request; the inner error if the request is
    /// unknown.
    pub fn receive(stream: &mut impl Read) -> io::Result<Result<Self, PortError>> {
        let (code, bytes) = receive(stream, LONGEST_REQUEST)?;
        let number = <[u8; 4]>::try_from(bytes.as_slice()).map(u32::from_le_bytes);
        let known = match (code, number) {
            (OPEN, _) => {
                let mut all = Target::ALL.into_iter();
                let named = all.find(|target| target.as_str().as_bytes() == bytes);
                return Ok(named.map(Self::Open).ok_or_else(|| {
                    let name = String::from_utf8_lossy(&bytes);
                    PortError::new(Refusal::NotFound, format_args!("no port {name:?}"))
                }));
            }
            (COMMAND, _) => Some(Self::Command(bytes)),
            (READ, Ok(most)) => Some(Self::Read(most)),
            (WAIT, Ok(limit)) => Some(Self::Wait(limit)),
            (DROPPED, _) if bytes.is_empty() => Some(Self::Dropped),
            (CLOCK, _) if bytes.is_empty() => Some(Self::Clock),
            (END, _) if bytes.is_empty() => Some(Self::End),
            (NAME, _) => {
                let address = <[u8; 8]>::try_from(bytes.as_slice()).ok();
                address.map(|address| Self::Name(u64::from_le_bytes(address)))
            }
            _ => None,
        };
        let unknown = || PortError::new(Refusal::Invalid, format_args!("no request {code}"));
        Ok(known.ok_or_else(unknown))
    }
}

/// Returns a clock as the bytes of an answer.
pub fn clock_bytes(clock: Clock) -> Vec<u8> {
    let Clock { tsc, unix_ns, hz } = clock;
    [tsc, unix_ns, hz].map(u64::to_le_bytes).concat()
}

/// Returns the clock in an answer's bytes.
pub fn clock_of(bytes: &[u8]) -> Option<Clock> {
    let mut numbers = bytes.chunks_exact(8).map(|number| {
        let number = number.try_into().unwrap_or_default();
        u64::from_le_bytes(number)
    });
    Some(Clock {
        tsc: numbers.next()?,
        unix_ns: numbers.next()?,
        hz: numbers.next()?,
    })
}

/// Sends an answer.
///
/// # Errors
/// If the client does not read it.
pub fn answer(stream: &mut impl Write, answer: &Result<Vec<u8>, PortError>) -> io::Result<()> {
    match answer {
        Ok(bytes) => send(stream, 0, bytes),
        Err(refused) => send(
            stream,
            errno(refused.kind).raw_os_error().unsigned_abs(),
            refused.text.as_bytes(),
        ),
    }
}

/// Reads an answer: its error number, and its bytes or text.
///
/// # Errors
/// If none comes.
pub fn receive_answer(stream: &mut impl Read) -> io::Result<(u32, Vec<u8>)> {
    receive(stream, LONGEST_ANSWER)
}

/// Returns Linux's error number of a refusal.
pub fn errno(refusal: Refusal) -> Errno {
    match refusal {
        Refusal::Invalid => Errno::INVAL,
        Refusal::NotFound => Errno::NOENT,
        Refusal::Exists => Errno::EXIST,
        Refusal::Busy => Errno::BUSY,
        Refusal::NoRoom => Errno::NOSPC,
        Refusal::NotPermitted => Errno::PERM,
        Refusal::NoProcess => Errno::SRCH,
        Refusal::Failed => Errno::IO,
    }
}

/// Sends a message: a number, a length and as many bytes. The device dt(4) uses the same form.
///
/// # Errors
/// If the peer does not read it.
pub fn send(stream: &mut impl Write, number: u32, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut message = Vec::with_capacity(HEADER_SIZE + bytes.len());
    message.extend(number.to_le_bytes());
    message.extend(length.to_le_bytes());
    message.extend(bytes);
    stream.write_all(&message)
}

/// Reads a message of at most `most` bytes.
///
/// # Errors
/// If none comes, or a longer one.
pub fn receive(stream: &mut impl Read, most: usize) -> io::Result<(u32, Vec<u8>)> {
    let mut header = [0; HEADER_SIZE];
    stream.read_exact(&mut header)?;
    let [a, b, c, d, length @ ..] = header;
    let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length > most {
        let wrong = format!("a message of {length} bytes; {most} are the most");
        return Err(io::Error::new(io::ErrorKind::InvalidData, wrong));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok((u32::from_le_bytes([a, b, c, d]), bytes))
}

/// The ports that take commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub enum ControlName {
    /// trace(3)'s
    Tracectl,
    /// ptrace(3)'s
    Ptracectl,
}

/// The ports that give events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub enum EventName {
    /// trace(3)'s
    Trace,
    /// ptrace(3)'s
    Ptrace,
}

impl ControlName {
    /// As files and sockets are called.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tracectl => "tracectl",
            Self::Ptracectl => "ptracectl",
        }
    }
}

impl EventName {
    /// As files and sockets are called.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Trace => "trace",
            Self::Ptrace => "ptrace",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn requests_have_the_bytes_that_are_documented_and_read_back() {
        let opens = Target::ALL.map(|target| {
            let name = target.as_str().as_bytes();
            let bytes = [&[0, 0, 0, 0, name.len() as u8, 0, 0, 0][..], name].concat();
            (Request::Open(target), bytes)
        });
        let others = [
            (
                Request::Command(b"a\xff".to_vec()),
                vec![1, 0, 0, 0, 2, 0, 0, 0, b'a', 0xff],
            ),
            (
                Request::Read(0x0403_0201),
                vec![2, 0, 0, 0, 4, 0, 0, 0, 1, 2, 3, 4],
            ),
            (Request::Wait(258), vec![3, 0, 0, 0, 4, 0, 0, 0, 2, 1, 0, 0]),
            (Request::Dropped, vec![4, 0, 0, 0, 0, 0, 0, 0]),
            (Request::Clock, vec![5, 0, 0, 0, 0, 0, 0, 0]),
            (Request::End, vec![7, 0, 0, 0, 0, 0, 0, 0]),
            (
                Request::Name(0x102),
                vec![6, 0, 0, 0, 8, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0],
            ),
        ];
        for (request, bytes) in opens.into_iter().chain(others) {
            let mut sent = Vec::new();
            request.send(&mut sent).unwrap();
            assert_eq!(sent, bytes, "{request:?}");
            let received = Request::receive(&mut bytes.as_slice()).unwrap();
            assert_eq!(received, Ok(request));
        }
    }

    #[test]
    fn what_is_no_request_is_told_and_what_is_too_long_is_not_read() {
        for (bytes, expected) in [
            (&[8, 0, 0, 0, 0, 0, 0, 0][..], "no request 8"),
            (&[6, 0, 0, 0, 1, 0, 0, 0, 1], "no request 6"),
            (&[2, 0, 0, 0, 1, 0, 0, 0, 1], "no request 2"),
            (&[4, 0, 0, 0, 1, 0, 0, 0, 1], "no request 4"),
            (&[0, 0, 0, 0, 2, 0, 0, 0, b'd', b't'], "no port \"dt\""),
        ] {
            let refused = Request::receive(&mut &bytes[..]).unwrap().unwrap_err();
            assert_eq!(refused.text, expected);
        }
        for bytes in [
            &[1, 0, 0, 0, 1, 0x10, 0, 0, b'a'][..],
            &[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, b'a'],
            &[1, 0, 0, 0, 2, 0, 0, 0, b'a'],
            &[1, 0, 0],
        ] {
            assert!(Request::receive(&mut &bytes[..]).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn an_error_has_its_number_and_text() {
        let mut sent = Vec::new();
        let refused = PortError::new(Refusal::NoProcess, "process exited");
        answer(&mut sent, &Err(refused)).unwrap();
        assert_eq!(sent, b"\x03\0\0\0\x0e\0\0\0process exited");
        let (error, text) = receive_answer(&mut sent.as_slice()).unwrap();
        assert_eq!((error, text), (3, b"process exited".to_vec()));
        for waited in [Waited::Nothing, Waited::Something, Waited::Ended] {
            assert_eq!(Waited::of(waited.byte()), Some(waited));
        }
        assert_eq!(Waited::of(3), None);
    }
}
