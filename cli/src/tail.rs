//! The end of a text, kept while the text is written elsewhere: of a guest's console, and of a
//! run's trace.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::report::printable;

/// The number of bytes kept.
const KEPT: usize = 32 << 10;
/// The number of console lines kept for a report.
const CONSOLE_LINES: usize = 60;
/// The number of characters shown of a line.
const LONGEST_LINE: usize = 400;

/// The last bytes of a text; clones share them.
#[derive(Debug, Clone)]
pub struct Tail {
    bytes: Arc<Mutex<VecDeque<u8>>>,
    most: usize,
}

impl Tail {
    /// Returns a tail for a guest's console.
    pub fn of_console() -> Self {
        Self::new(CONSOLE_LINES)
    }

    /// Returns a tail that shows `most` lines.
    pub fn new(most: usize) -> Self {
        Self {
            bytes: Arc::default(),
            most,
        }
    }

    /// Returns a writer to `writer` that also keeps the bytes here, whether or not they can be
    /// written there.
    pub fn tee<W: Write>(&self, writer: W) -> Tee<W> {
        Tee {
            tail: self.clone(),
            writer,
        }
    }

    /// Returns a function that keeps the end of all bytes passed to it.
    pub fn observer(&self) -> impl FnMut(&[u8]) + Send + 'static {
        let tail = self.clone();
        move |bytes| tail.push(bytes)
    }

    /// Returns the last lines, without characters that a terminal acts on.
    pub fn lines(&self) -> Vec<String> {
        let mut bytes: Vec<u8> = self.bytes().iter().copied().collect();
        if bytes.len() >= KEPT {
            // The rest of the first line.
            let behind = bytes.iter().position(|byte| *byte == b'\n');
            bytes.drain(..behind.map_or(0, |at| at + 1));
        }
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<String> = text.lines().map(line).collect();
        let more = lines.len().saturating_sub(self.most);
        lines.into_iter().skip(more).collect()
    }

    fn bytes(&self) -> MutexGuard<'_, VecDeque<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, new: &[u8]) {
        let mut bytes = self.bytes();
        let new = new.get(new.len().saturating_sub(KEPT)..);
        bytes.extend(new.unwrap_or_default());
        let more = bytes.len().saturating_sub(KEPT);
        bytes.drain(..more);
    }
}

/// Returns a line in its shown form.
fn line(line: &str) -> String {
    // Consoles end lines with both.
    let line = line.trim_end_matches('\r').replace('\t', "    ");
    match line.char_indices().nth(LONGEST_LINE) {
        Some((at, _)) => printable(line.get(..at).unwrap_or_default()) + "...",
        None => printable(&line),
    }
}

/// The writer of [`Tail::tee`].
#[derive(Debug)]
pub struct Tee<W> {
    tail: Tail,
    writer: W,
}

impl<W: Write> Write for Tee<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.writer.write(bytes) {
            Ok(written) => {
                // The rest is written again.
                self.tail.push(bytes.get(..written).unwrap_or_default());
                Ok(written)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => {
                self.tail.push(bytes);
                Err(error)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const LINES: usize = 60;

    #[test]
    fn the_end_of_a_console_is_kept_and_harmless() {
        let long = "x".repeat(LONGEST_LINE + 1);
        let cut = format!("{}...", "x".repeat(LONGEST_LINE));
        for (written, expected) in [
            ("", vec![]),
            ("one\r\ntwo", vec!["one", "two"]),
            ("a\x1b[2Jb\tc\u{9b}\n", vec!["a?[2Jb    c?"]),
            (long.as_str(), vec![cut.as_str()]),
        ] {
            let tail = Tail::new(LINES);
            let mut tee = tail.tee(Vec::new());
            // A serial port writes byte by byte.
            for byte in written.bytes() {
                tee.write_all(&[byte]).unwrap();
            }
            assert_eq!(tail.lines(), expected);
            assert_eq!(tee.writer, written.as_bytes());
        }
    }

    #[test]
    fn a_guest_that_floods_its_console_fills_no_memory() {
        let tail = Tail::new(LINES);
        let mut tee = tail.tee(io::sink());
        for number in 0..100_000 {
            writeln!(tee, "line {number}").unwrap();
        }
        let lines = tail.lines();
        assert_eq!(lines.len(), LINES);
        assert_eq!(lines.last().unwrap(), "line 99999");
        assert!(tail.bytes().len() <= KEPT);
        // One line without an end.
        tee.write_all(&vec![b'y'; 2 * KEPT]).unwrap();
        let lines = tail.lines();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].starts_with("yyy") && lines[0].len() < KEPT);
    }

    #[test]
    fn what_cannot_be_written_is_kept() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let tail = Tail::new(LINES);
        assert!(tail.tee(Full).write_all(b"panic\n").is_err());
        assert_eq!(tail.lines(), ["panic"]);
    }
}
