//! Ports as streams of bytes, for a guest's virtio-console: opened, written to, read from and
//! closed, without waiting.
//!
//! The caller brings the transport. The other side's writes are bounded: a line that is too long is
//! refused as a whole.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use super::{ControlPort, EventPort, EventReader, PortError, Refusal};

/// The greatest length of a command in bytes: many times what any command needs.
pub const LONGEST_COMMAND: usize = 4096;
/// The number of delivered bytes that are kept: four times the 64 pages that a console port of
/// Linux's holds unread.
const MOST_KEPT: usize = 1 << 20;
/// The number of bytes of events that are read from a reader at once.
const CHUNK: usize = 1 << 16;

/// The access of the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading only.
    ReadOnly,
    /// Reading, and changing what is traced.
    ReadWrite,
}

/// A port as a stream. Every open ends with a close; reads and writes come in between.
pub trait PortStream: Send {
    /// Notes that the other side has opened the port.
    fn open(&mut self);
    /// Notes that the other side has closed the port, and dropped the last `unread` of the
    /// delivered bytes.
    fn close(&mut self, unread: u64);
    /// Accepts all bytes that the other side has written.
    fn write(&mut self, bytes: &[u8]);
    /// Reads bytes into `buffer`. Returns their number, 0 if there are none now.
    fn read(&mut self, buffer: &mut [u8]) -> usize;
    /// Checks whether `read` would return bytes.
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

/// A control port. A read returns the configuration at the time of the open, followed by the last
/// error as a comment. Each written line is a command, also one that the close ends.
pub struct ControlStream {
    port: Arc<dyn ControlPort>,
    access: Access,
    pending: Pending,
    line: Vec<u8>,
    /// Whether the line has become too long: it is dropped up to its end.
    overlong: bool,
    error: Option<PortError>,
}

impl fmt::Debug for ControlStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlStream")
            .field("access", &self.access)
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl ControlStream {
    /// Makes a closed stream of `port`.
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
        let refused = |refusal, text: &str| Err(PortError::new(refusal, text));
        let done = if std::mem::take(&mut self.overlong) {
            let text = format!("a command of more than {LONGEST_COMMAND} bytes");
            refused(Refusal::Invalid, &text)
        } else if line.iter().all(u8::is_ascii_whitespace) {
            return;
        } else if self.access == Access::ReadOnly {
            let text = "permission denied: this guest may not change what is traced";
            refused(Refusal::NotPermitted, text)
        } else {
            match std::str::from_utf8(&line) {
                Ok(text) => self.port.command(text),
                Err(_) => refused(Refusal::Invalid, "invalid command: expected UTF-8"),
            }
        };
        self.error = done.err();
    }
}

impl PortStream for ControlStream {
    fn open(&mut self) {
        let mut text = self.port.configuration();
        if let Some(error) = &self.error {
            // The error may quote the other side's bytes.
            let told: String = error.text.chars().filter(|c| !c.is_control()).collect();
            text.push_str(&format!("#error {told}\n"));
        }
        self.pending.set(text.into_bytes());
    }

    fn close(&mut self, _unread: u64) {
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

/// An event port, with a reader of its own while it is open. Writes are accepted and have no
/// effect.
///
/// Records that were delivered but unread at the close come again with the next open, as far as
/// they were kept. A driver's unread records are known by its buffers: one that stops within a
/// buffer gets its records again.
pub struct EventStream {
    port: Arc<dyn EventPort>,
    reader: Option<Box<dyn EventReader>>,
    /// Bytes of records that did not fit into a buffer.
    pending: Pending,
    /// The bytes delivered last, of which some may come back.
    given: VecDeque<u8>,
    /// The number of bytes delivered since the open.
    total: u64,
}

impl fmt::Debug for EventStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventStream")
            .field("is_open", &self.reader.is_some())
            .field("total", &self.total)
            .finish_non_exhaustive()
    }
}

impl EventStream {
    /// Makes a closed stream of `port`.
    #[must_use]
    pub fn new(port: Arc<dyn EventPort>) -> Self {
        Self {
            port,
            reader: None,
            pending: Pending::default(),
            given: VecDeque::new(),
            total: 0,
        }
    }

    /// Keeps the unread bytes, in whole records.
    fn take_back(&mut self, unread: u64) {
        let record = self.port.record_bytes().max(1);
        // A record that was begun counts as read.
        let read = self.total.saturating_sub(unread);
        let read = read.next_multiple_of(record as u64);
        let behind = self.pending.bytes.get(self.pending.taken..);
        let behind = behind.unwrap_or_default();
        let wanted = (self.total + behind.len() as u64).saturating_sub(read);
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        // The delivered and the pending bytes together end with a whole record.
        let mut kept: Vec<u8> = self.given.drain(..).collect();
        kept.extend_from_slice(behind);
        let keep = wanted.min(kept.len() / record * record);
        if keep < wanted {
            let lost = (wanted - keep) / record;
            log::info!(
                "a port of the guest's was closed with much unread: {lost} records are lost"
            );
        }
        kept.drain(..kept.len() - keep);
        self.pending.set(kept);
        self.total = 0;
    }
}

impl PortStream for EventStream {
    fn open(&mut self) {
        // If the port refuses, only the kept records can be read.
        self.reader = match self.port.open() {
            Ok(reader) => Some(reader),
            Err(error) => {
                log::info!("a port of the guest's stays empty: {error}");
                None
            }
        };
    }

    fn close(&mut self, unread: u64) {
        self.take_back(unread);
        self.reader = None;
    }

    fn write(&mut self, _bytes: &[u8]) {}

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        let mut filled = 0;
        while let Some(room) = buffer.get_mut(filled..).filter(|room| !room.is_empty()) {
            if !self.has_data() {
                break;
            }
            filled += self.pending.take(room);
        }
        self.total += filled as u64;
        self.given.extend(buffer.iter().take(filled));
        let too_many = self.given.len().saturating_sub(MOST_KEPT);
        self.given.drain(..too_many);
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
            stream.close(0);
        }
        stream.open();
        stream.write(&[b'x'; 10_000]);
        stream.write(b"\nnext\n\xff\xfe\n");
        stream.close(0);
        stream.open();
        assert_eq!(
            read_all(&mut stream, 99),
            "4 commands\n#error invalid command: expected UTF-8\n"
        );
        assert_eq!(*port.0.lock().unwrap(), ["start", "stop", "good", "next"]);
    }

    #[test]
    fn one_who_may_only_read_changes_nothing_and_is_told_so() {
        let port = Arc::new(Port::default());
        let mut stream = ControlStream::new(port.clone(), Access::ReadOnly);
        stream.open();
        stream.write(b"start\n");
        stream.close(0);
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
            stream.close(0);
            assert_eq!(log.readers(), 0);
        }
        assert!(!stream.has_data(), "closed");
    }

    #[test]
    fn records_that_were_not_looked_at_come_again() {
        for (taken, unread, again) in [
            (15, 0, ""),
            (15, 5, "ijkl\n"),
            (15, 7, "ijkl\n"),
            (15, 10, "efgh\nijkl\n"),
            (15, 15, "abcd\nefgh\nijkl\n"),
            (15, 99, "abcd\nefgh\nijkl\n"),
            (7, 0, "ijkl\n"),
            (7, 3, "efgh\nijkl\n"),
            (5, 5, "abcd\nefgh\nijkl\n"),
            (0, 0, "abcd\nefgh\nijkl\n"),
        ] {
            let log = EventLog::new(5, 100);
            log.push([b"abcd\n".as_slice(), b"efgh\n", b"ijkl\n"]);
            let mut stream = EventStream::new(Arc::new(log.clone()));
            stream.open();
            assert!(stream.has_data());
            assert_eq!(stream.read(&mut vec![0; taken]), taken);
            stream.close(unread);
            stream.open();
            assert_eq!(
                read_all(&mut stream, 4),
                again,
                "{taken} taken, {unread} unread"
            );
        }
    }
}
