//! System calls that a signal may interrupt: they are made again.

use std::io;

use rustix::io::Errno;

/// The number of calls that a signal may interrupt in a row.
const INTERRUPTIONS: usize = 8;

/// Makes a call again that a signal has interrupted, a few times.
///
/// # Errors
/// The call's; `WouldBlock` after too many interruptions.
pub(super) fn uninterrupted<T>(mut call: impl FnMut() -> Result<T, Errno>) -> io::Result<T> {
    for _ in 0..INTERRUPTIONS {
        match call() {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
    Err(io::ErrorKind::WouldBlock.into())
}
