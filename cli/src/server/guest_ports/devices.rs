//! The devices behind a guest's ports: the machine's own, as the host's sockets show them.
//!
//! A guest with write access has dt(4) as any client of its socket. A guest with read access has no
//! dt(4), because the device returns only events whose tracing its client has requested.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use trace_devices::port::stream::{Access, ControlStream, EventStream, PortStream};
use trace_devices::port::{ControlPort, EventPort, EventReader, PortError, Refusal};
use trace_devices::ptrace::record::RECORD_BYTES;
use trace_devices::trace_line::LINE_BYTES;

use crate::protocol::ports::{ControlName, EventName};
use crate::server::ports::Ports;

/// The largest log of trace(3) that a guest may request, in lines: 16 MB.
const MOST_LINES: u64 = 1 << 17;
/// The time limit for a message to the device's server.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time of one check for the server's messages.
const LOOK: Duration = Duration::from_millis(1);
/// The number of message bytes read at once.
const PIECE: usize = 64 << 10;

/// Returns the device behind the port of that name, if any.
pub fn stream(
    name: &str,
    ports: &Arc<Ports>,
    dt: PathBuf,
    access: Access,
) -> Option<Box<dyn PortStream>> {
    let control = |name| {
        let port = Arc::new(Control(ports.clone(), name));
        Some(Box::new(ControlStream::new(port, access)) as Box<dyn PortStream>)
    };
    let events = |name| {
        let port = Arc::new(Events(ports.clone(), name));
        Some(Box::new(EventStream::new(port)) as Box<dyn PortStream>)
    };
    match (name, access) {
        ("tracectl", _) => control(ControlName::Tracectl),
        ("ptracectl", _) => control(ControlName::Ptracectl),
        ("trace", _) => events(EventName::Trace),
        ("ptrace", _) => events(EventName::Ptrace),
        ("dt", Access::ReadWrite) => Some(Box::new(Dt {
            path: dt,
            server: None,
            pending: Vec::new(),
        })),
        _ => None,
    }
}

struct Control(Arc<Ports>, ControlName);

impl ControlPort for Control {
    fn command(&self, text: &str) -> Result<(), PortError> {
        if asks_too_much(self.1, text) {
            let why = format!("a guest's log has at most {MOST_LINES} lines");
            return Err(PortError::new(Refusal::NoRoom, why));
        }
        self.0.control(self.1).command(text.as_bytes())
    }

    fn configuration(&self) -> String {
        let configuration = self.0.control(self.1).configuration();
        configuration.unwrap_or_else(|error| format!("#error {error}\n"))
    }
}

/// Checks whether a command requests more of the host's memory than a guest may have. Of the two
/// logs, that of trace(3) has no small bound of its own.
fn asks_too_much(name: ControlName, text: &str) -> bool {
    let words: Vec<&str> = text.split_whitespace().collect();
    let lines = match (name, words.as_slice()) {
        (ControlName::Tracectl, ["size", exponent]) => {
            let exponent = exponent.parse().ok();
            exponent.map(|exponent| 1u64.checked_shl(exponent).unwrap_or(u64::MAX))
        }
        (ControlName::Tracectl, ["logsize", lines]) => lines.parse().ok(),
        _ => None,
    };
    // The device refuses malformed numbers.
    lines.is_some_and(|lines| lines > MOST_LINES)
}

struct Events(Arc<Ports>, EventName);

impl EventPort for Events {
    fn record_bytes(&self) -> usize {
        match self.1 {
            EventName::Trace => LINE_BYTES,
            EventName::Ptrace => RECORD_BYTES,
        }
    }

    fn open(&self) -> Result<Box<dyn EventReader>, PortError> {
        // It counts among the host's readers.
        Ok(Box::new(self.0.events(self.1).open()?))
    }
}

/// The device dt(4): a client of its socket while the guest has the port open.
struct Dt {
    path: PathBuf,
    server: Option<UnixStream>,
    /// The bytes read and not yet returned to the guest.
    pending: Vec<u8>,
}

impl Dt {
    fn connect(&self) -> io::Result<UnixStream> {
        let server = UnixStream::connect(&self.path)?;
        server.set_write_timeout(Some(PATIENCE))?;
        server.set_read_timeout(Some(LOOK))?;
        Ok(server)
    }

    fn end(&mut self, why: &dyn std::fmt::Display) {
        log::info!("the guest's port dt: {why}");
        self.server = None;
    }
}

impl PortStream for Dt {
    fn open(&mut self) {
        match self.connect() {
            Ok(server) => self.server = Some(server),
            Err(error) => self.end(&error),
        }
    }

    fn close(&mut self, _unread: u64) {
        self.server = None;
        self.pending.clear();
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(server) = &mut self.server
            && let Err(error) = server.write_all(bytes)
        {
            self.end(&error);
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        let count = buffer.len().min(self.pending.len());
        for (place, byte) in buffer.iter_mut().zip(self.pending.drain(..count)) {
            *place = byte;
        }
        count
    }

    fn has_data(&mut self) -> bool {
        if self.pending.is_empty()
            && let Some(server) = &mut self.server
        {
            self.pending.resize(PIECE, 0);
            let read = server.read(&mut self.pending);
            self.pending.truncate(*read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => self.end(&"its server has closed the connection"),
                Ok(_) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => self.end(&error),
            }
        }
        !self.pending.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_has_a_share_of_the_hosts_memory() {
        for (text, expected) in [
            ("size 17", false),
            ("size 18", true),
            (" size\t28\n", true),
            ("size 64", true),
            ("size 4294967296", false),
            ("logsize 131072", false),
            ("logsize 262144", true),
            ("size many", false),
            ("trace f on", false),
        ] {
            assert_eq!(
                asks_too_much(ControlName::Tracectl, text),
                expected,
                "{text:?}"
            );
        }
        assert!(!asks_too_much(ControlName::Ptracectl, "size 524288"));
    }
}
