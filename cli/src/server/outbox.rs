//! Output on a thread of its own, so that the writer of events never waits for a slow reader. The
//! module [`ending`] defines how long the end waits for that reader.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel,
};
use std::thread::JoinHandle;

use crate::ending;

/// The number of parts that wait to be written.
const WAITING: usize = 64;
/// The number of bytes in one write.
const PIECE: usize = 16 << 10;

/// An output with its thread.
pub struct Outbox {
    parts: SyncSender<Vec<u8>>,
    /// The part that found no room.
    left: Option<Vec<u8>>,
    thread: JoinHandle<io::Result<()>>,
    /// The bytes that the output has accepted.
    taken: Arc<AtomicU64>,
    /// Disconnected when the thread is done.
    done: Receiver<()>,
}

impl Outbox {
    /// Starts a thread that writes to `output`.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn new(mut output: Box<dyn Write + Send>) -> io::Result<Self> {
        let (parts, received) = sync_channel::<Vec<u8>>(WAITING);
        let (working, done) = channel();
        let taken = Arc::new(AtomicU64::new(0));
        let count = taken.clone();
        let thread = std::thread::Builder::new()
            .name("output".into())
            .spawn(move || {
                let _working = working;
                for part in received {
                    // In pieces, so that the progress of a slow reader is seen.
                    for piece in part.chunks(PIECE) {
                        output.write_all(piece)?;
                        output.flush()?;
                        count.fetch_add(piece.len() as u64, Ordering::Relaxed);
                    }
                }
                Ok(())
            })?;
        Ok(Self {
            parts,
            left: None,
            thread,
            taken,
            done,
        })
    }

    /// Checks whether the next part would be accepted at once.
    ///
    /// # Errors
    /// If the output cannot be written any more; [`Self::finish`] returns the reason.
    pub fn has_room(&mut self) -> Result<bool, OutputEnded> {
        if let Some(part) = self.left.take() {
            self.put(part)?;
        }
        Ok(self.left.is_none())
    }

    /// Queues `part` to be written after everything before it.
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

    /// Waits until everything is written.
    ///
    /// # Errors
    /// The output's error, or that its reader has stopped when the run is to end.
    pub fn finish(self) -> io::Result<()> {
        let mut parts = Some(self.parts);
        let mut left = self.left;
        let is_done = |limit| {
            if let Some(part) = left.take()
                && let Some(parts) = &parts
                && let Err(TrySendError::Full(part)) = parts.try_send(part)
            {
                left = Some(part);
            }
            // If the rest is not accepted any more, the thread returns the reason.
            if left.is_none() {
                parts = None;
            }
            self.done.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
        };
        if !ending::wait(is_done, || self.taken.load(Ordering::Relaxed)) {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "its reader has stopped; the rest of the output is lost",
            ));
        }
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
