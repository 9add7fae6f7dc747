//! The signals that end a run. Threads that may not handle them block them, before they are
//! confined. Sources: signal(7), pthread_sigmask(3).

use std::io;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use vmm_sys_util::signal::{Error, block_signal};

/// The signals that end a run.
pub const STOP_SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Leaves these signals to other threads. The kernel may choose any thread of a process for them,
/// and their handler does what most confined threads may not: it writes to a pipe.
pub(super) fn leave_to_others() -> io::Result<()> {
    for signal in STOP_SIGNALS {
        match block_signal(signal) {
            Ok(()) | Err(Error::SignalAlreadyBlocked(_)) => {}
            Err(error) => return Err(io::Error::other(format!("{error:?}"))),
        }
    }
    Ok(())
}
