//! Standard error, for messages: written without waiting for long.
//!
//! Any thread may have something to say, also those that the machine's end waits for. So a standard error that takes
//! nothing for a second (a full pipe, a terminal stopped with Ctrl-S) gets nothing more until it does again.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long standard error is waited for.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes that a pipe takes without blocking once it is said to take any (PIPE_BUF).
const PIECE: usize = 4096;

/// It has not taken a message.
static STALLED: AtomicBool = AtomicBool::new(false);

/// The writer. Never fails: what cannot be written is forgotten.
#[derive(Debug, Clone, Copy)]
pub struct Messages;

impl Write for Messages {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Not by std's lock, which somebody may hold who is blocked.
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

/// Returns whether standard error takes a piece now, or within [`PATIENCE`] if it took the one before.
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
        // A signal: as if it took something, since it did.
        Err(error) => error == rustix::io::Errno::INTR,
    };
    STALLED.store(!takes, Ordering::Relaxed);
    takes
}
