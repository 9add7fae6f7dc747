//! The output of a guest's console.
//!
//! A backend may stall: a pipe without a reader, a terminal stopped with Ctrl-S, a disk that hangs.
//! So bytes go through a queue to a thread that writes them. A full queue is reported by its
//! [`Backlog`]. The thread that runs the guest waits for room there, in a way that can be
//! interrupted.

mod queue;

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;

use queue::Queue;
pub use queue::{Backlog, Promptness};

/// A callback that sees all bytes as the guest sends them.
pub(super) type Observer = Box<dyn FnMut(&[u8]) + Send>;

/// A writer that neither fails nor blocks. Bytes that cannot be written are counted and dropped.
pub struct ConsoleOutput {
    far: Far,
    observers: Vec<Observer>,
}

impl fmt::Debug for ConsoleOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsoleOutput")
            .field("is_queued", &matches!(self.far, Far::Queued(_)))
            .finish_non_exhaustive()
    }
}

enum Far {
    /// Output that is written at once.
    Direct {
        writer: Box<dyn Write + Send>,
        lost: u64,
    },
    Queued(Arc<Queue>),
}

impl ConsoleOutput {
    /// Makes an output with a queue, and a thread that writes it to `writer`. [`Backlog`] has the
    /// queue's bounds.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn queued(writer: impl Write + Send + 'static, promptness: Promptness) -> io::Result<Self> {
        Ok(Self::to(Far::Queued(Queue::start(
            Box::new(writer),
            promptness,
        )?)))
    }

    /// Makes an output that writes every byte at once on the guest's own thread, for writers that
    /// never block.
    #[must_use]
    pub fn write_through(writer: impl Write + Send + 'static) -> Self {
        Self::to(Far::Direct {
            writer: Box::new(writer),
            lost: 0,
        })
    }

    /// Makes an output that discards all bytes.
    #[must_use]
    pub fn null() -> Self {
        Self::write_through(io::sink())
    }

    fn to(far: Far) -> Self {
        Self {
            far,
            observers: Vec::new(),
        }
    }

    /// Passes all bytes to `observer` too, before the backend gets them.
    #[must_use]
    pub fn observed_by(mut self, observer: impl FnMut(&[u8]) + Send + 'static) -> Self {
        self.observers.push(Box::new(observer));
        self
    }

    /// Returns the number of bytes so far that could not be written.
    #[must_use]
    pub fn lost(&self) -> u64 {
        match &self.far {
            Far::Direct { lost, .. } => *lost,
            Far::Queued(queue) => queue.lost(),
        }
    }

    /// Returns the queue's state, or `None` if the output has no queue.
    #[must_use]
    pub fn backlog(&self) -> Option<Backlog> {
        match &self.far {
            Far::Direct { .. } => None,
            Far::Queued(queue) => Some(Backlog::of(queue)),
        }
    }
}

/// Writes `bytes` and returns the number lost.
fn send(writer: &mut dyn Write, mut bytes: &[u8], mut written: impl FnMut(usize)) -> usize {
    let length = bytes.len();
    while !bytes.is_empty() {
        match writer.write(bytes) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(count) if count > 0 => {
                bytes = bytes.get(count..).unwrap_or_default();
                written(count);
            }
            Ok(_) | Err(_) => break,
        }
    }
    // A writer with its own buffer fails only here, with all that it had accepted.
    match writer.flush() {
        Ok(()) => bytes.len(),
        Err(_) => length,
    }
}

impl Default for ConsoleOutput {
    fn default() -> Self {
        Self::null()
    }
}

impl Drop for ConsoleOutput {
    fn drop(&mut self) {
        if let Far::Queued(queue) = &self.far {
            queue.finish();
        }
    }
}

/// The interface to the register model, which makes one call of each per byte. Neither returns an
/// error.
impl Write for ConsoleOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for observer in &mut self.observers {
            observer(bytes);
        }
        match &mut self.far {
            Far::Direct { writer, lost } => *lost += send(writer, bytes, |_| ()) as u64,
            Far::Queued(queue) => queue.push(bytes),
        }
        Ok(bytes.len())
    }

    /// Does nothing: the register model flushes after every byte.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
