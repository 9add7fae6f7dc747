//! One client of one port, by [messages](crate::protocol::ports).

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use trace_devices::port::{EventReader, PortError, Refusal};

use crate::listener::{Leave, Seen, has_gone, look};
use crate::protocol::ports::{LONGEST_READ, Request, Target, Waited, answer, clock_bytes};
use crate::server::ports::{Control, Ports, Reader};

/// The interval of checks whether a client has disconnected or the machine ends.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The time that a client has to complete a request, or to receive an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time that a client with an open port has for its next request once the machine ends.
const LAST_THOUGHT: Duration = Duration::from_secs(1);
/// The longest wait for events. Clients repeat the request.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Answers requests until the client closes its connection or the machine ends.
///
/// # Errors
/// If the connection fails.
pub fn serve(mut stream: &UnixStream, leave: &Leave, ports: &Arc<Ports>) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut open = None;
    while comes_request(stream, leave)? {
        let request = Request::receive(&mut stream)?;
        let answered = match (request, &mut open) {
            (Err(refused), _) => Err(refused),
            (Ok(Request::Open(target)), None) => Open::new(ports, target).map(|new| {
                let record = new.record_bytes();
                open = Some(new);
                record.to_le_bytes().to_vec()
            }),
            (Ok(Request::Clock), Some(_)) => {
                let clock = (ports.guest.clock)();
                Ok(clock.map(clock_bytes).unwrap_or_default())
            }
            (Ok(Request::Name(address)), Some(_)) => {
                let name = (ports.guest.name)(address);
                Ok(name.unwrap_or_default().into_bytes())
            }
            (Ok(Request::End), Some(_)) => Ok(match (ports.guest.end)() {
                Some(end) => serde_json::to_vec(&end).map_err(io::Error::other)?,
                None => Vec::new(),
            }),
            (Ok(request), Some(open)) => open.answer(request, stream, leave)?,
            (Ok(_), None) => Err(PortError::new(Refusal::Invalid, "no port is open")),
        };
        answer(&mut stream, &answered)?;
        if open.is_none() {
            return Ok(());
        }
    }
    Ok(())
}

/// Waits for a request and returns `false` when none will come.
fn comes_request(stream: &UnixStream, leave: &Leave) -> io::Result<bool> {
    let mut last: Option<Instant> = None;
    loop {
        match look(stream, LOOK_INTERVAL)? {
            // The end of a stream also polls as readable.
            Seen::Input => return has_bytes(stream),
            Seen::Gone => return Ok(false),
            Seen::Nothing if leave.is_asked() => {
                let until = *last.get_or_insert_with(|| Instant::now() + LAST_THOUGHT);
                if Instant::now() >= until {
                    return Ok(false);
                }
            }
            Seen::Nothing => {}
        }
    }
}

fn has_bytes(stream: &UnixStream) -> io::Result<bool> {
    let mut byte = [0];
    let flags = rustix::net::RecvFlags::PEEK;
    let (read, _) = rustix::net::recv(stream, &mut byte, flags)?;
    Ok(read > 0)
}

/// The target that a client has opened.
enum Open<'p> {
    Control(&'p Control),
    Events(Reader),
    Stat(&'p Ports),
}

impl<'p> Open<'p> {
    fn new(ports: &'p Ports, target: Target) -> Result<Self, PortError> {
        Ok(match target {
            Target::Control(name) => Self::Control(ports.control(name)),
            Target::Events(name) => Self::Events(ports.events(name).open()?),
            Target::Stat => Self::Stat(ports),
        })
    }

    fn record_bytes(&self) -> u32 {
        match self {
            Self::Events(reader) => u32::try_from(reader.record_bytes()).unwrap_or(u32::MAX),
            Self::Control(_) | Self::Stat(_) => 0,
        }
    }

    fn answer(
        &mut self,
        request: Request,
        stream: &UnixStream,
        leave: &Leave,
    ) -> io::Result<Result<Vec<u8>, PortError>> {
        let invalid = |why: &str| Err(PortError::new(Refusal::Invalid, why));
        Ok(match (request, self) {
            (Request::Open(_), _) => invalid("a port is open already"),
            (Request::Clock | Request::Name(_) | Request::End, _) => invalid("not asked of a port"),
            (Request::Command(command), Self::Control(control)) => {
                control.command(&command).map(|()| Vec::new())
            }
            (Request::Command(_), _) => invalid("this port takes no commands"),
            (Request::Read(most), Self::Events(reader)) => {
                let most = usize::try_from(most).unwrap_or(usize::MAX);
                Ok(reader.read(most.min(LONGEST_READ)))
            }
            (Request::Read(_), Self::Control(control)) => {
                control.configuration().map(String::into_bytes)
            }
            (Request::Read(_), Self::Stat(ports)) => Ok(ports.stat().into_bytes()),
            (Request::Wait(limit), open) => {
                let limit = Duration::from_millis(limit.into()).min(LONGEST_WAIT);
                let waited = open.wait(limit, stream, leave)?;
                Ok(vec![waited.byte()])
            }
            (Request::Dropped, Self::Events(reader)) => Ok(reader.dropped().to_le_bytes().to_vec()),
            (Request::Dropped, _) => Ok(0_u64.to_le_bytes().to_vec()),
        })
    }

    /// Waits for events, or for the machine's end if the target has no events.
    fn wait(&mut self, limit: Duration, stream: &UnixStream, leave: &Leave) -> io::Result<Waited> {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // Read before the wait, so that everything recorded until then is read.
            let is_last = leave.is_asked();
            let step = left.min(LOOK_INTERVAL);
            let something = match self {
                Self::Events(reader) => reader.wait(step),
                Self::Control(_) | Self::Stat(_) => {
                    std::thread::sleep(if is_last { Duration::ZERO } else { step });
                    false
                }
            };
            if something {
                return Ok(Waited::Something);
            }
            if is_last {
                return Ok(Waited::Ended);
            }
            if left.is_zero() {
                return Ok(Waited::Nothing);
            }
            if has_gone(stream)? {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
    }
}
