//! Output that may be slow, on a thread of its own: whoever has events to write does not wait for whoever reads them.

use std::io::{self, Write};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

/// Parts that wait to be written.
const WAITING: usize = 64;

/// The output.
pub struct Outbox {
    parts: SyncSender<Vec<u8>>,
    /// What found no room.
    left: Option<Vec<u8>>,
    thread: JoinHandle<io::Result<()>>,
}

impl Outbox {
    /// Writes to `output`.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn new(mut output: Box<dyn Write + Send>) -> io::Result<Self> {
        let (parts, received) = sync_channel::<Vec<u8>>(WAITING);
        let thread = std::thread::Builder::new()
            .name("output".into())
            .spawn(move || {
                for part in received {
                    output.write_all(&part)?;
                    output.flush()?;
                }
                Ok(())
            })?;
        Ok(Self {
            parts,
            left: None,
            thread,
        })
    }

    /// Whether the next part would be taken at once.
    ///
    /// # Errors
    /// If the output cannot be written to any more; [`Self::finish`] says why.
    pub fn has_room(&mut self) -> Result<bool, OutputEnded> {
        if let Some(part) = self.left.take() {
            self.put(part)?;
        }
        Ok(self.left.is_none())
    }

    /// Has `part` written after everything before.
    ///
    /// # Errors
    /// As [`Self::has_room`].
    pub fn put(&mut self, part: Vec<u8>) -> Result<(), OutputEnded> {
        if part.is_empty() {
            return Ok(());
        }
        match &mut self.left {
            Some(left) => left.extend(part),
            None => match self.parts.try_send(part) {
                Ok(()) => {}
                Err(TrySendError::Full(part)) => self.left = Some(part),
                Err(TrySendError::Disconnected(_)) => return Err(OutputEnded),
            },
        }
        Ok(())
    }

    /// Waits until all is written.
    ///
    /// # Errors
    /// What went wrong with the output.
    pub fn finish(mut self) -> io::Result<()> {
        if let Some(left) = self.left.take() {
            // If that is not taken any more, the thread tells why.
            let _ = self.parts.send(left);
        }
        drop(self.parts);
        let panicked = |_| Err(io::Error::other("the output's thread panicked"));
        self.thread.join().unwrap_or_else(panicked)
    }
}

/// The output cannot be written to any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the output has ended")]
pub struct OutputEnded;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read;

    use super::*;

    #[test]
    fn a_reader_that_waits_holds_up_nobody_and_gets_all() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut outbox = Outbox::new(Box::new(writer)).unwrap();
        let mut parts = 0u8;
        while outbox.has_room().unwrap() {
            outbox.put(vec![parts; 64 << 10]).unwrap();
            parts += 1;
        }
        assert!(usize::from(parts) > WAITING);
        let taken = std::thread::spawn(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).unwrap();
            all
        });
        outbox.finish().unwrap();
        let all = taken.join().unwrap();
        assert_eq!(all.len(), usize::from(parts) * (64 << 10));
        assert!(all.is_sorted());
    }

    #[test]
    fn a_reader_that_has_gone_is_told() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut outbox = Outbox::new(Box::new(writer)).unwrap();
        while outbox.has_room().is_ok() && outbox.put(vec![0; 10]).is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(
            outbox.finish().unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
    }
}
