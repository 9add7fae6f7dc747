//! Where a serial port's output goes, and how promptly.

use std::io::{self, ErrorKind, Write};

/// Bytes kept before a buffered output is written in the middle of a line.
const BUFFER: usize = 4096;

/// A writer that cannot fail: what cannot be written is counted and forgotten.
///
/// A closed pipe or a full disk must not stop the guest, and retrying would stall its vCPU.
/// Writing blocks as long as the writer does, so a terminal stopped with Ctrl-S stops a guest that
/// prints.
pub struct ConsoleOutput {
    writer: Box<dyn Write + Send>,
    /// Bytes not yet written; always empty for a write-through output.
    pending: Vec<u8>,
    write_through: bool,
    lost: u64,
}

impl ConsoleOutput {
    /// Every byte is written and flushed at once: for terminals and pipes, where prompts without a
    /// newline must show.
    #[must_use]
    pub fn write_through(writer: impl Write + Send + 'static) -> Self {
        Self::with(Box::new(writer), true)
    }

    /// Bytes are written by lines, or every 4096 bytes: for files. [`ConsoleOutput::drain`]
    /// writes an unfinished line; dropping the output does too.
    #[must_use]
    pub fn by_lines(writer: impl Write + Send + 'static) -> Self {
        Self::with(Box::new(writer), false)
    }

    /// Everything is accepted and forgotten.
    #[must_use]
    pub fn null() -> Self {
        Self::with(Box::new(io::sink()), true)
    }

    fn with(writer: Box<dyn Write + Send>, write_through: bool) -> Self {
        Self {
            writer,
            pending: Vec::new(),
            write_through,
            lost: 0,
        }
    }

    /// Bytes that could not be written so far.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Writes what is pending.
    pub fn drain(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        self.send(&pending);
        // The allocation is used again.
        self.pending = pending;
        self.pending.clear();
    }

    fn send(&mut self, mut bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let length = bytes.len();
        while !bytes.is_empty() {
            match self.writer.write(bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(written) if written > 0 => bytes = bytes.get(written..).unwrap_or_default(),
                Ok(_) | Err(_) => break,
            }
        }
        // A writer with a buffer of its own fails only here, with all that it had accepted.
        let flushed = self.writer.flush().is_ok();
        let lost = if flushed { bytes.len() } else { length };
        self.lost = self
            .lost
            .saturating_add(u64::try_from(lost).unwrap_or(u64::MAX));
    }
}

impl Default for ConsoleOutput {
    fn default() -> Self {
        Self::null()
    }
}

impl Drop for ConsoleOutput {
    fn drop(&mut self) {
        self.drain();
    }
}

/// The register model's side: one call of each per byte. Neither returns an error.
impl Write for ConsoleOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.write_through {
            self.send(bytes);
        } else {
            self.pending.extend_from_slice(bytes);
            if bytes.contains(&b'\n') || self.pending.len() >= BUFFER {
                self.drain();
            }
        }
        Ok(bytes.len())
    }

    /// Does nothing: the register model flushes after every byte. See [`ConsoleOutput::drain`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
