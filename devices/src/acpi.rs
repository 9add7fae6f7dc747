//! The ACPI registers of a hardware-reduced machine: sleep, reset, and the power button's event.
//!
//! Four ports of one byte each, at a base that the machine chooses. The FADT names the first three.
//! The event register belongs to this machine: the `_EVT` method of its generic event device reads
//! and acknowledges it.
//!
//! Source: ACPI Specification 6.5, 4.8.3.6 (reset register), 4.8.3.7 (sleep control and status
//! registers), 5.6.9 (interrupt-signaled events).

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::signals::{InterruptLine, MachineSignals, ResetCause};

/// The number of ports.
pub const LENGTH: u64 = 4;
/// The offset of the sleep control register.
pub const SLEEP_CONTROL: u64 = 0;
/// The offset of the sleep status register. It reads as 0: this machine never wakes up.
pub const SLEEP_STATUS: u64 = 1;
/// The offset of the reset register.
pub const RESET: u64 = 2;
/// The offset of the event register. A bit is set by its event and cleared by writing 1 to it.
pub const EVENTS: u64 = 3;

/// The sleep type of the state S5 (soft off), the only one there is.
pub const SLEEP_TYPE_S5: u8 = 5;
/// The value that resets the machine when it is written to the reset register.
pub const RESET_VALUE: u8 = 1;
/// The bit of the event register for a press of the power button.
pub const POWER_BUTTON: u8 = 0x01;

/// SLP_TYPx: bits 2 to 4 of the sleep control register.
const SLEEP_TYPE_SHIFT: u32 = 2;
const SLEEP_TYPE: u8 = 0x1c;
/// SLP_EN: bit 5, which reads as 0.
const SLEEP_ENABLE: u8 = 0x20;

/// The registers' contents, to save and restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AcpiState {
    /// The value of a read of the sleep control register.
    pub sleep_control: u8,
    /// The value of a read of the event register.
    pub events: u8,
}

/// A power button, which the guest's system handles as a request to shut down.
pub struct PowerButton {
    line: Arc<dyn InterruptLine>,
    pressed: bool,
    interrupts_lost: u64,
}

impl fmt::Debug for PowerButton {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PowerButton")
            .field("pressed", &self.pressed)
            .finish_non_exhaustive()
    }
}

impl PowerButton {
    /// Makes a button that interrupts on `line`, the input of the generic event device.
    #[must_use]
    pub fn new(line: Arc<dyn InterruptLine>) -> Self {
        Self {
            line,
            pressed: false,
            interrupts_lost: 0,
        }
    }

    /// Presses the button. Presses that the guest has yet to acknowledge count as one.
    pub fn press(&mut self) {
        self.pressed = true;
        if self.line.pulse().is_err() {
            self.interrupts_lost = self.interrupts_lost.saturating_add(1);
        }
    }

    /// Returns the number of interrupts that the interrupt controller rejected.
    #[must_use]
    pub fn interrupts_lost(&self) -> u64 {
        self.interrupts_lost
    }

    fn events(&self) -> u8 {
        if self.pressed { POWER_BUTTON } else { 0 }
    }

    fn acknowledge(&mut self, events: u8) {
        if events & POWER_BUTTON != 0 {
            self.pressed = false;
        }
    }
}

/// The registers of the sleep states, the reset and the events.
pub struct AcpiPorts {
    sleep_control: u8,
    button: PowerButton,
    signals: Arc<dyn MachineSignals>,
}

impl fmt::Debug for AcpiPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcpiPorts")
            .field("sleep_control", &self.sleep_control)
            .field("button", &self.button)
            .finish_non_exhaustive()
    }
}

impl AcpiPorts {
    /// Makes registers that report power-off and resets to `signals`.
    #[must_use]
    pub fn new(button: PowerButton, signals: Arc<dyn MachineSignals>) -> Self {
        Self {
            sleep_control: 0,
            button,
            signals,
        }
    }

    /// Returns the power button.
    pub fn power_button(&mut self) -> &mut PowerButton {
        &mut self.button
    }

    /// Returns the state to save.
    #[must_use]
    pub fn state(&self) -> AcpiState {
        AcpiState {
            sleep_control: self.sleep_control,
            events: self.button.events(),
        }
    }

    /// Restores a saved state. It never ends the machine and never interrupts: an interrupt that is
    /// pending is in the interrupt controllers' state.
    pub fn restore(&mut self, state: &AcpiState) {
        self.sleep_control = state.sleep_control & SLEEP_TYPE;
        self.button.pressed = state.events & POWER_BUTTON != 0;
    }

    fn control_sleep(&mut self, byte: u8) {
        self.sleep_control = byte & SLEEP_TYPE;
        let is_s5 = self.sleep_control == SLEEP_TYPE_S5 << SLEEP_TYPE_SHIFT;
        if byte & SLEEP_ENABLE != 0 && is_s5 {
            self.signals.request_power_off();
        }
    }
}

impl BusDevice for AcpiPorts {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (port, byte) in (offset..).zip(data) {
            *byte = match port {
                SLEEP_CONTROL => self.sleep_control,
                EVENTS => self.button.events(),
                _ => 0,
            };
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (port, &byte) in (offset..).zip(data) {
            match port {
                SLEEP_CONTROL => self.control_sleep(byte),
                RESET if byte == RESET_VALUE => {
                    self.signals.request_reset(ResetCause::AcpiRegister);
                }
                EVENTS => self.button.acknowledge(byte),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::signals::testing::{Line, Signals};

    fn ports() -> (AcpiPorts, Arc<Signals>, Arc<Line>) {
        let (signals, line) = (Arc::new(Signals::default()), Arc::new(Line::default()));
        let button = PowerButton::new(line.clone());
        (AcpiPorts::new(button, signals.clone()), signals, line)
    }

    fn get(ports: &mut AcpiPorts, port: u64) -> u8 {
        let mut byte = [0xff];
        ports.read(port, &mut byte);
        byte[0]
    }

    /// `acpi_hw_extended_sleep` clears the wake status, then writes type and enable bit at once.
    #[test]
    fn linux_powers_off() {
        let (mut ports, signals, _) = ports();
        ports.write(SLEEP_STATUS, &[0x80]);
        assert_eq!(signals.power_offs(), 0);
        ports.write(SLEEP_CONTROL, &[SLEEP_TYPE_S5 << 2 | 0x20]);
        assert_eq!(signals.power_offs(), 1);
        assert!(signals.causes().is_empty());
        assert_eq!(get(&mut ports, SLEEP_CONTROL), SLEEP_TYPE_S5 << 2);
        assert_eq!(get(&mut ports, SLEEP_STATUS), 0);
    }

    #[test]
    fn only_the_type_of_s5_with_its_enable_bit_powers_off() {
        for byte in 0..=u8::MAX {
            let (mut ports, signals, _) = ports();
            ports.write(SLEEP_CONTROL, &[byte]);
            let off = byte & 0x3c == SLEEP_TYPE_S5 << 2 | 0x20;
            assert_eq!(signals.power_offs(), usize::from(off), "{byte:#x}");
            assert_eq!(get(&mut ports, SLEEP_CONTROL), byte & 0x1c);
        }
    }

    #[test]
    fn only_the_reset_value_resets() {
        for byte in 0..=u8::MAX {
            let (mut ports, signals, _) = ports();
            ports.write(RESET, &[byte]);
            let resets = signals.causes();
            match byte {
                RESET_VALUE => assert_eq!(resets, [ResetCause::AcpiRegister]),
                _ => assert!(resets.is_empty(), "{byte:#x}"),
            }
            assert_eq!(get(&mut ports, RESET), 0);
        }
    }

    #[test]
    fn a_press_stays_until_it_is_acknowledged() {
        let (mut ports, _, line) = ports();
        assert_eq!(get(&mut ports, EVENTS), 0);
        ports.power_button().press();
        ports.power_button().press();
        assert_eq!(line.take(), 2);
        assert_eq!(get(&mut ports, EVENTS), POWER_BUTTON);
        ports.write(EVENTS, &[!POWER_BUTTON]);
        assert_eq!(get(&mut ports, EVENTS), POWER_BUTTON);
        ports.write(EVENTS, &[POWER_BUTTON]);
        assert_eq!(get(&mut ports, EVENTS), 0);
    }

    #[test]
    fn a_rejected_interrupt_is_counted() {
        let (mut ports, _, line) = ports();
        line.broken.store(true, Ordering::Relaxed);
        ports.power_button().press();
        assert_eq!(ports.power_button().interrupts_lost(), 1);
        assert_eq!(get(&mut ports, EVENTS), POWER_BUTTON);
    }

    #[test]
    fn a_restored_state_neither_ends_the_machine_nor_interrupts() {
        let (mut saved, _, _) = ports();
        saved.write(SLEEP_CONTROL, &[SLEEP_TYPE_S5 << 2]);
        saved.power_button().press();
        let (mut ports, signals, line) = ports();
        ports.restore(&saved.state());
        assert_eq!(ports.state(), saved.state());
        let damaged = AcpiState {
            sleep_control: 0xff,
            events: 0xff,
        };
        ports.restore(&damaged);
        assert_eq!(ports.state().sleep_control, 0x1c);
        assert_eq!(ports.state().events, POWER_BUTTON);
        assert_eq!(
            (signals.power_offs(), signals.causes().len(), line.take()),
            (0, 0, 0)
        );
    }

    #[test]
    fn an_access_may_span_all_registers() {
        let (mut ports, signals, _) = ports();
        ports.power_button().press();
        let mut all = [0xff; LENGTH as usize];
        ports.read(0, &mut all);
        assert_eq!(all, [0, 0, 0, POWER_BUTTON]);
        ports.write(0, &[0xff; LENGTH as usize]);
        assert_eq!((signals.power_offs(), signals.causes().len()), (0, 0));
        assert_eq!(get(&mut ports, EVENTS), 0);
    }
}
