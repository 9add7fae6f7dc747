//! A serial port's state in our own format, so that snapshots do not depend on another crate's
//! field order.

use serde::{Deserialize, Serialize};
use vm_superio::serial::SerialState as UartState;

/// All registers and the receive FIFO. Its version is that of the containing snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialState {
    /// Divisor latch (DLL low byte, DLM high byte).
    pub divisor: u16,
    /// IER.
    pub interrupt_enable: u8,
    /// IIR.
    pub interrupt_identification: u8,
    /// LCR.
    pub line_control: u8,
    /// LSR.
    pub line_status: u8,
    /// MCR.
    pub modem_control: u8,
    /// MSR.
    pub modem_status: u8,
    /// SCR.
    pub scratch: u8,
    /// The bytes received and not yet read by the guest, oldest first. At most 64.
    pub input: Vec<u8>,
}

impl From<UartState> for SerialState {
    fn from(uart: UartState) -> Self {
        Self {
            divisor: u16::from_le_bytes([uart.baud_divisor_low, uart.baud_divisor_high]),
            interrupt_enable: uart.interrupt_enable,
            interrupt_identification: uart.interrupt_identification,
            line_control: uart.line_control,
            line_status: uart.line_status,
            modem_control: uart.modem_control,
            modem_status: uart.modem_status,
            scratch: uart.scratch,
            input: uart.in_buffer,
        }
    }
}

impl From<&SerialState> for UartState {
    fn from(state: &SerialState) -> Self {
        let [baud_divisor_low, baud_divisor_high] = state.divisor.to_le_bytes();
        Self {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.input.clone(),
        }
    }
}
