//! The keyboard controller, only as far as a machine reset needs it. It has no keyboard and no
//! mouse.
//!
//! The status register always shows an empty input buffer and a full output buffer. With the
//! former, a reset command is accepted at once (Linux `reboot=k` polls for it before it writes
//! 0xfe). With the latter, the driver that probes for a keyboard gives up after 16 reads of a
//! buffer that never drains (`i8042_flush` in Linux). Otherwise it would wait half a second for
//! each answer to its commands.

use std::fmt;
use std::sync::Arc;

use crate::bus::BusDevice;
use crate::signals::{MachineSignals, ResetCause};

/// The first port of the controller.
pub const I8042_BASE: u64 = 0x60;
/// The number of ports, 0x60 (data) to 0x64 (status and command). Port 0x61 belongs to the interval
/// timer, which handles it before this device if KVM models it.
pub const I8042_LENGTH: u64 = 5;

const DATA: u64 = 0;
const COMMAND: u64 = 4;

/// Status: the host's byte has been read (bit 1 clear), and a byte for the host is pending (bit 0
/// set).
const STATUS: u8 = 0x01;
/// Commands 0xf0 to 0xff pulse the output lines whose bit is 0; line 0 is the processor's reset.
const PULSE: u8 = 0xf0;
const RESET_LINE: u8 = 0x01;

/// The device at ports 0x60 and 0x64. It is stateless, so a snapshot saves nothing.
pub struct I8042 {
    signals: Arc<dyn MachineSignals>,
}

impl fmt::Debug for I8042 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("I8042").finish_non_exhaustive()
    }
}

impl I8042 {
    /// Makes a controller that reports resets to `signals`.
    #[must_use]
    pub fn new(signals: Arc<dyn MachineSignals>) -> Self {
        Self { signals }
    }
}

impl BusDevice for I8042 {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (port, byte) in (offset..).zip(data) {
            *byte = match port {
                DATA => 0,
                COMMAND => STATUS,
                _ => 0xff,
            };
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (port, &byte) in (offset..).zip(data) {
            if port == COMMAND && byte & PULSE == PULSE && byte & RESET_LINE == 0 {
                self.signals.request_reset(ResetCause::KeyboardController);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::testing::Signals;

    fn status(device: &mut I8042) -> u8 {
        let mut byte = [0];
        device.read(COMMAND, &mut byte);
        byte[0]
    }

    /// `native_machine_emergency_restart` with `reboot=k` waits for an empty input buffer, then
    /// pulses the reset line.
    #[test]
    fn linux_reboots_through_the_controller() {
        let signals = Arc::new(Signals::default());
        let mut device = I8042::new(signals.clone());
        assert_eq!(status(&mut device) & 0x02, 0, "kb_wait must not spin");
        assert!(signals.causes().is_empty());
        device.write(COMMAND, &[0xfe]);
        assert_eq!(signals.causes(), [ResetCause::KeyboardController]);
    }

    /// `i8042_flush` reads at most 16 bytes while the output buffer is full; a 17th full status
    /// means "no controller found".
    #[test]
    fn linux_gives_up_looking_for_a_keyboard() {
        let mut device = I8042::new(Arc::new(Signals::default()));
        for _ in 0..17 {
            assert_eq!(status(&mut device) & 0x01, 0x01);
            device.read(DATA, &mut [0]);
        }
    }

    #[test]
    fn only_a_low_reset_line_resets() {
        // (port offset, bytes, resets)
        let cases: [(u64, &[u8], usize); 7] = [
            (COMMAND, &[0xf0], 1),
            (COMMAND, &[0xff], 0),
            (COMMAND, &[0x20], 0),
            (COMMAND, &[0xaa], 0),
            (DATA, &[0xfe], 0),
            (DATA, &[0, 0, 0, 0, 0xfe], 1),
            (1, &[0xfe], 0),
        ];
        for (offset, bytes, resets) in cases {
            let signals = Arc::new(Signals::default());
            I8042::new(signals.clone()).write(offset, bytes);
            assert_eq!(signals.causes().len(), resets, "{offset} {bytes:x?}");
        }
    }
}
