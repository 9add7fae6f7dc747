//! Keeps a guest's serial output.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmm::machine::SerialOutput;

/// The most bytes that are kept of one machine: a guest that prints without end does not fill the
/// host's memory.
const MOST: usize = 8 << 20;

/// The whole output of a serial port. Clones share it.
#[derive(Clone, Default)]
pub struct SerialLog(Arc<Shared>);

#[derive(Default)]
struct Shared {
    printed: Mutex<Vec<u8>>,
    grown: Condvar,
}

impl SerialLog {
    /// Returns the end that a machine writes to.
    pub fn output(&self) -> SerialOutput {
        SerialOutput::write_through(self.clone())
    }

    /// Returns the number of bytes so far, as a position to read from.
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// Returns whether nothing was printed yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the output from position `from` on.
    pub fn since(&self, from: usize) -> String {
        let bytes = self.bytes();
        String::from_utf8_lossy(bytes.get(from..).unwrap_or_default()).into_owned()
    }

    /// Waits until `done` finds a match in the output from `from` on; `None` if `limit` passes
    /// before.
    pub fn wait<T>(
        &self,
        from: usize,
        limit: Duration,
        mut done: impl FnMut(&str) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + limit;
        let mut bytes = self.bytes();
        loop {
            let text = String::from_utf8_lossy(bytes.get(from..).unwrap_or_default());
            if let Some(found) = done(&text) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            let waited = self.0.grown.wait_timeout(bytes, left);
            bytes = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0
            .printed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for SerialLog {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let mut bytes = self.bytes();
        let room = MOST.saturating_sub(bytes.len());
        bytes.extend(data.iter().take(room));
        self.0.grown.notify_all();
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
