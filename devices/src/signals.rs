//! What a device tells the rest of the machine: interrupts and requests about the machine itself.

use std::fmt;
use std::io;

/// The far end of an edge-triggered interrupt pin.
///
/// Called from the thread whose access caused the interrupt, with the device locked: it must not
/// call back into the device.
pub trait InterruptLine: Send + Sync {
    /// Raises the pin and lowers it again.
    ///
    /// # Errors
    /// Whatever the interrupt controller reports. A device counts the failure and goes on.
    fn pulse(&self) -> io::Result<()>;
}

/// How the guest asked for a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResetCause {
    /// A pulse of the keyboard controller's reset output (Linux: `reboot=k`).
    KeyboardController,
    /// A rising reset bit in port 0xcf9 (Linux: `reboot=p`).
    ResetPort,
}

impl fmt::Display for ResetCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeyboardController => "keyboard controller (port 0x64)",
            Self::ResetPort => "reset control register (port 0xcf9)",
        })
    }
}

/// Where devices send requests that concern the whole machine.
///
/// Called from a vCPU's thread inside the access, with the device locked. An implementation notes
/// the request and returns; it neither waits for other vCPUs nor calls back into the device.
/// The same request may arrive more than once.
pub trait MachineSignals: Send + Sync {
    /// The guest asked to be reset.
    fn request_reset(&self, cause: ResetCause);
}

/// The far ends that this crate's tests give to devices.
#[cfg(test)]
pub(crate) mod testing {
    #![allow(clippy::unwrap_used)]

    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    /// Remembers what was requested.
    #[derive(Default)]
    pub(crate) struct Signals(Mutex<Vec<ResetCause>>);

    impl Signals {
        pub(crate) fn causes(&self) -> Vec<ResetCause> {
            self.0.lock().unwrap().clone()
        }
    }

    impl MachineSignals for Signals {
        fn request_reset(&self, cause: ResetCause) {
            self.0.lock().unwrap().push(cause);
        }
    }

    /// Counts pulses; fails while told to.
    #[derive(Default)]
    pub(crate) struct Line {
        pulses: AtomicUsize,
        pub(crate) broken: AtomicBool,
    }

    impl Line {
        /// Pulses since the last call.
        pub(crate) fn take(&self) -> usize {
            self.pulses.swap(0, Ordering::Relaxed)
        }
    }

    impl InterruptLine for Line {
        fn pulse(&self) -> io::Result<()> {
            if self.broken.load(Ordering::Relaxed) {
                return Err(io::Error::other("no interrupt controller"));
            }
            self.pulses.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }
}
