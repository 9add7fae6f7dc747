//! The reset control register at port 0xcf9 (Intel chipsets; Linux `reboot=p`).

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::signals::{MachineSignals, ResetCause};

/// The register's port.
pub const RESET_PORT_BASE: u64 = 0xcf9;
/// The number of ports. The neighbours belong to PCI configuration, which must be reached by wider
/// accesses.
pub const RESET_PORT_LENGTH: u64 = 1;

/// Bit 2, "reset CPU": a change from 0 to 1 resets. The other bits only select the kind of reset.
const RESET_CPU: u8 = 0x04;
/// The bits that keep a written value: system reset (1), reset CPU (2), full reset (3).
const WRITABLE: u8 = 0x0e;

/// The register's content, to save and restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ResetPortState {
    /// The value of a read.
    pub value: u8,
}

/// The register at port 0xcf9.
pub struct ResetPort {
    value: u8,
    signals: Arc<dyn MachineSignals>,
}

impl fmt::Debug for ResetPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResetPort")
            .field("value", &self.value)
            .finish_non_exhaustive()
    }
}

impl ResetPort {
    /// Makes a register that reports resets to `signals`.
    #[must_use]
    pub fn new(signals: Arc<dyn MachineSignals>) -> Self {
        Self { value: 0, signals }
    }

    /// Returns the state to save.
    #[must_use]
    pub fn state(&self) -> ResetPortState {
        ResetPortState { value: self.value }
    }

    /// Restores a saved state. It never resets the machine.
    pub fn restore(&mut self, state: &ResetPortState) {
        self.value = state.value & WRITABLE;
    }
}

impl BusDevice for ResetPort {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(self.value);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        for &byte in data {
            let rises = byte & !self.value & RESET_CPU != 0;
            self.value = byte & WRITABLE;
            if rises {
                self.signals.request_reset(ResetCause::ResetPort);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::testing::Signals;

    fn get(device: &mut ResetPort) -> u8 {
        let mut byte = [0];
        device.read(0, &mut byte);
        byte[0]
    }

    /// BOOT_CF9 in `native_machine_emergency_restart` selects the kind, then sets the reset bit.
    #[test]
    fn linux_reboots_through_the_register() {
        for code in [0x06, 0x0e] {
            let signals = Arc::new(Signals::default());
            let mut device = ResetPort::new(signals.clone());
            let old = get(&mut device) & !code;
            device.write(0, &[old | 0x02]);
            assert!(signals.causes().is_empty(), "not before bit 2 rises");
            device.write(0, &[old | code]);
            assert_eq!(signals.causes(), [ResetCause::ResetPort]);
        }
    }

    #[test]
    fn a_restored_register_does_not_reset_again() {
        let signals = Arc::new(Signals::default());
        let mut device = ResetPort::new(signals.clone());
        device.write(0, &[0x0e]);
        let mut restored = ResetPort::new(signals.clone());
        restored.restore(&device.state());
        restored.write(0, &[0x0e]);
        assert_eq!(signals.causes().len(), 1);
        assert_eq!(get(&mut restored), 0x0e);
    }
}
