//! Ports as streams of bytes, as a guest's virtio-console has them: opened, written to, read from and closed, without waiting.
//!
//! The caller brings the transport. What the other side writes is bounded: a line that is too long is refused as a whole.

use std::sync::Arc;

use super::{ControlPort, EventPort, EventReader, PortError, Refusal};

/// Longest command, in bytes.
pub const LONGEST_COMMAND: usize = 4096;
/// Bytes of events that are taken from a reader at once.
const CHUNK: usize = 1 << 16;

/// Whether the other side may change what is traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It may read.
    ReadOnly,
    /// It may do everything.
    ReadWrite,
}

/// A port as a stream. Every open ends with a close; reads and writes come in between.
pub trait PortStream: Send {
    /// The other side has opened the port.
    fn open(&mut self);
    /// The other side has closed it.
    fn close(&mut self);
    /// Takes what the other side has written; all of it.
    fn write(&mut self, bytes: &[u8]);
    /// Gives bytes to be read; how many. 0: none now.
    fn read(&mut self, buffer: &mut [u8]) -> usize;
    /// Whether `read` would give something.
    fn has_data(&mut self) -> bool;
}

/// Bytes that wait to be read.
#[derive(Debug, Default)]
struct Pending {
    bytes: Vec<u8>,
    taken: usize,
}

impl Pending {
    fn set(&mut self, bytes: Vec<u8>) {
        *self = Self { bytes, taken: 0 };
    }

    fn is_empty(&self) -> bool {
        self.taken >= self.bytes.len()
    }

    fn take(&mut self, buffer: &mut [u8]) -> usize {
        let left = self.bytes.get(self.taken..).unwrap_or_default();
        let count = left.len().min(buffer.len());
        for (place, byte) in buffer.iter_mut().zip(left) {
            *place = *byte;
        }
        self.taken += count;
        count
    }
}

/// A control port: what is read is the configuration at the time of the open, with the last error as a comment behind it; each line that is
/// written is a command, also one that the close ends.
pub struct ControlStream {
    port: Arc<dyn ControlPort>,
    access: Access,
    pending: Pending,
    line: Vec<u8>,
    /// The line has become too long: it is thrown away up to its end.
    overlong: bool,
    error: Option<PortError>,
}

impl ControlStream {
    /// A stream of `port`, closed.
    #[must_use]
    pub fn new(port: Arc<dyn ControlPort>, access: Access) -> Self {
        Self {
            port,
            access,
            pending: Pending::default(),
            line: Vec::new(),
            overlong: false,
            error: None,
        }
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let invalid = |text: &str| Err(PortError::new(Refusal::Invalid, text));
        let done = if std::mem::take(&mut self.overlong) {
            invalid("a command of more than 4096 bytes")
        } else if line.iter().all(u8::is_ascii_whitespace) {
            return;
        } else if self.access == Access::ReadOnly {
            let text = "permission denied: this guest may not change what is traced";
            Err(PortError::new(Refusal::NotPermitted, text))
        } else {
            match std::str::from_utf8(&line) {
                Ok(text) => self.port.command(text),
                Err(_) => invalid("a command that is no text"),
            }
        };
        self.error = done.err();
    }
}

impl PortStream for ControlStream {
    fn open(&mut self) {
        let mut text = self.port.configuration();
        if let Some(error) = &self.error {
            // It may quote what the other side wrote.
            let told: String = error.text.chars().filter(|c| !c.is_control()).collect();
            text.push_str(&format!("#error {told}\n"));
        }
        self.pending.set(text.into_bytes());
    }

    fn close(&mut self) {
        self.end_line();
        self.pending.set(Vec::new());
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' => self.end_line(),
                _ if self.line.len() >= LONGEST_COMMAND => self.overlong = true,
                byte => self.line.push(*byte),
            }
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        self.pending.take(buffer)
    }

    fn has_data(&mut self) -> bool {
        !self.pending.is_empty()
    }
}

/// An event port: a reader of its own while it is open. What is written is taken and means nothing here.
pub struct EventStream {
    port: Arc<dyn EventPort>,
    reader: Option<Box<dyn EventReader>>,
    /// Of records that did not fit into a buffer.
    pending: Pending,
}

impl EventStream {
    /// A stream of `port`, closed.
    #[must_use]
    pub fn new(port: Arc<dyn EventPort>) -> Self {
        Self {
            port,
            reader: None,
            pending: Pending::default(),
        }
    }
}

impl PortStream for EventStream {
    fn open(&mut self) {
        // A port that refuses has nothing to be read.
        self.reader = match self.port.open() {
            Ok(reader) => Some(reader),
            Err(error) => {
                log::info!("a port of the guest's stays empty: {error}");
                None
            }
        };
    }

    fn close(&mut self) {
        self.reader = None;
        self.pending.set(Vec::new());
    }

    fn write(&mut self, _bytes: &[u8]) {}

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        let mut filled = 0;
        while let Some(room) = buffer.get_mut(filled..).filter(|room| !room.is_empty()) {
            if self.pending.is_empty() && !self.has_data() {
                break;
            }
            filled += self.pending.take(room);
        }
        filled
    }

    fn has_data(&mut self) -> bool {
        if self.pending.is_empty()
            && let Some(reader) = &mut self.reader
        {
            self.pending.set(reader.read(CHUNK));
        }
        !self.pending.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Mutex;

    use super::super::EventLog;
    use super::*;

    #[derive(Default)]
    struct Port(Mutex<Vec<String>>);

    impl ControlPort for Port {
        fn command(&self, text: &str) -> Result<(), PortError> {
            if text.starts_with("bad") {
                return Err(PortError::new(Refusal::Invalid, format!("{text}?\x1b")));
            }
            self.0.lock().unwrap().push(text.to_owned());
            Ok(())
        }

        fn configuration(&self) -> String {
            format!("{} commands\n", self.0.lock().unwrap().len())
        }
    }

    fn read_all(stream: &mut dyn PortStream, at_once: usize) -> String {
        let (mut text, mut buffer) = (Vec::new(), vec![0; at_once]);
        while stream.has_data() {
            let count = stream.read(&mut buffer);
            text.extend_from_slice(&buffer[..count]);
        }
        assert_eq!(stream.read(&mut buffer), 0);
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn commands_are_lines_and_the_configuration_is_that_of_the_open() {
        let port = Arc::new(Port::default());
        let mut stream = ControlStream::new(port.clone(), Access::ReadWrite);
        for (written, told) in [
            (&["sta", "rt\n", "stop"][..], "0 commands\n"),
            (&["\n\n  \n"], "2 commands\n"),
            (&["bad\n"], "2 commands\n"),
            (&["good\n"], "2 commands\n#error bad?\n"),
            (&[], "3 commands\n"),
        ] {
            stream.open();
            for part in written {
                stream.write(part.as_bytes());
            }
            assert_eq!(read_all(&mut stream, 3), told);
            stream.close();
        }
        stream.open();
        stream.write(&[b'x'; 10_000]);
        stream.write(b"\nnext\n\xff\xfe\n");
        stream.close();
        stream.open();
        assert_eq!(
            read_all(&mut stream, 99),
            "4 commands\n#error a command that is no text\n"
        );
        assert_eq!(*port.0.lock().unwrap(), ["start", "stop", "good", "next"]);
    }

    #[test]
    fn one_who_may_only_read_changes_nothing_and_is_told_so() {
        let port = Arc::new(Port::default());
        let mut stream = ControlStream::new(port.clone(), Access::ReadOnly);
        stream.open();
        stream.write(b"start\n");
        stream.close();
        stream.open();
        assert!(read_all(&mut stream, 99).starts_with("0 commands\n#error permission denied"));
        assert!(port.0.lock().unwrap().is_empty());
    }

    impl EventPort for EventLog {
        fn record_bytes(&self) -> usize {
            EventLog::record_bytes(self)
        }

        fn open(&self) -> Result<Box<dyn EventReader>, PortError> {
            Ok(Box::new(self.reader()))
        }
    }

    #[test]
    fn records_pass_whatever_the_size_of_the_buffers() {
        let log = EventLog::new(5, 100);
        let mut stream = EventStream::new(Arc::new(log.clone()));
        for at_once in [1, 4, 5, 7, 100] {
            log.push([b"abcd\n".as_slice(), b"efgh\n"]);
            stream.open();
            stream.write(b"a mark");
            assert_eq!(read_all(&mut stream, at_once), "abcd\nefgh\n");
            stream.close();
            assert_eq!(log.readers(), 0);
        }
        assert!(!stream.has_data(), "closed");
    }
}
