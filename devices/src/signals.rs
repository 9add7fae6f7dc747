//! The signals from a device to the rest of the machine: interrupts and requests about the machine
//! itself.

use std::fmt;
use std::io;

/// An edge-triggered interrupt pin, as a device sees it.
///
/// Called from the thread whose access caused the interrupt, with the device locked. It must not
/// call back into the device.
pub trait InterruptLine: Send + Sync {
    /// Raises the pin and lowers it again.
    ///
    /// # Errors
    /// The interrupt controller's error. A device counts the failure and continues.
    fn pulse(&self) -> io::Result<()>;
}

/// A message-signalled interrupt, as its driver has written it: the address selects vCPUs, the data
/// the vector (Intel SDM, volume 3, section 11.11).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The address.
    pub address: u64,
    /// The data.
    pub data: u32,
}

/// The receiver of message-signalled interrupts.
///
/// Called from any thread. It must not wait for vCPUs.
pub trait MessageInterrupts: Send + Sync {
    /// Delivers a message.
    ///
    /// # Errors
    /// The interrupt controller's error. A device counts the failure and continues.
    fn send(&self, message: Message) -> io::Result<()>;
}

/// The means by which the guest requested a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResetCause {
    /// A pulse of the keyboard controller's reset output (Linux: `reboot=k`).
    KeyboardController,
    /// A rising reset bit in port 0xcf9 (Linux: `reboot=p`).
    ResetPort,
    /// A write to the reset register that ACPI's FADT names (Linux: `reboot=a`).
    AcpiRegister,
}

impl fmt::Display for ResetCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeyboardController => "keyboard controller (port 0x64)",
            Self::ResetPort => "reset control register (port 0xcf9)",
            Self::AcpiRegister => "ACPI reset register",
        })
    }
}

/// The receiver of requests that concern the whole machine.
///
/// Called from a vCPU's thread inside the access, with the device locked. An implementation records
/// the request and returns. It neither waits for other vCPUs nor calls back into the device. The
/// same request may arrive more than once.
pub trait MachineSignals: Send + Sync {
    /// Records that the guest requested a reset.
    fn request_reset(&self, cause: ResetCause);

    /// Records that the guest requested to be powered off.
    fn request_power_off(&self);
}

/// The backends for this crate's tests.
#[cfg(test)]
pub(crate) mod testing {
    #![allow(clippy::unwrap_used)]

    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    /// A recorder of requests.
    #[derive(Default)]
    pub(crate) struct Signals {
        resets: Mutex<Vec<ResetCause>>,
        power_offs: AtomicUsize,
    }

    impl Signals {
        pub(crate) fn causes(&self) -> Vec<ResetCause> {
            self.resets.lock().unwrap().clone()
        }

        pub(crate) fn power_offs(&self) -> usize {
            self.power_offs.load(Ordering::Relaxed)
        }
    }

    impl MachineSignals for Signals {
        fn request_reset(&self, cause: ResetCause) {
            self.resets.lock().unwrap().push(cause);
        }

        fn request_power_off(&self) {
            self.power_offs.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A recorder of messages that can be made to fail.
    #[derive(Default)]
    pub(crate) struct Messages {
        sent: Mutex<Vec<Message>>,
        broken: AtomicBool,
    }

    impl Messages {
        /// Returns the messages since the last call.
        pub(crate) fn take(&self) -> Vec<Message> {
            std::mem::take(&mut self.sent.lock().unwrap())
        }

        pub(crate) fn break_down(&self) {
            self.broken.store(true, Ordering::Relaxed);
        }
    }

    impl MessageInterrupts for Messages {
        fn send(&self, message: Message) -> io::Result<()> {
            if self.broken.load(Ordering::Relaxed) {
                return Err(io::Error::other("no interrupt controller"));
            }
            self.sent.lock().unwrap().push(message);
            Ok(())
        }
    }

    /// A counter of pulses that can be made to fail.
    #[derive(Default)]
    pub(crate) struct Line {
        pulses: AtomicUsize,
        pub(crate) broken: AtomicBool,
    }

    impl Line {
        /// Returns the number of pulses since the last call.
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
