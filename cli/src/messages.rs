//! Standard error for messages, written without a long wait.
//!
//! Any thread may have a message, also those that the machine's end waits for. So a standard error
//! that accepts nothing for a second (a full pipe, a terminal stopped with Ctrl-S) gets nothing
//! more until it accepts bytes again.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The longest wait for standard error.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// The number of bytes that a pipe accepts without blocking once it is writable (PIPE_BUF).
const PIECE: usize = 4096;

/// Set while standard error has not accepted a message.
static STALLED: AtomicBool = AtomicBool::new(false);

/// A writer that never fails: bytes that cannot be written are discarded.
#[derive(Debug, Clone, Copy)]
pub struct Messages;

impl Write for Messages {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Without std's lock, whose holder may be blocked.
        let stderr = io::stderr();
        for piece in bytes.chunks(PIECE) {
            if !takes(&stderr) {
                break;
            }
            let mut rest = piece;
            while let Ok(count @ 1..) = rustix::io::write(&stderr, rest) {
                rest = rest.get(count..).unwrap_or_default();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Checks whether standard error accepts a piece now, or within [`PATIENCE`] if it accepted the one
/// before.
fn takes(stderr: &impl AsFd) -> bool {
    let seconds = match STALLED.load(Ordering::Relaxed) {
        true => 0,
        false => PATIENCE.as_secs().cast_signed(),
    };
    let limit = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    let mut asked = [PollFd::new(stderr, PollFlags::OUT)];
    let takes = match poll(&mut asked, Some(&limit)) {
        Ok(ready) => ready > 0,
        // A signal counts as acceptance, because the last piece was accepted.
        Err(error) => error == rustix::io::Errno::INTR,
    };
    STALLED.store(!takes, Ordering::Relaxed);
    takes
}
