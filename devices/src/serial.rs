//! A 16550A serial port: `vm-superio`'s register model, with output, input and state made to fit.
//!
//! Output goes through a [`ConsoleOutput`], which never fails the guest: bytes that cannot be
//! written are counted. Input is pushed by the caller up to the receive FIFO's size; the caller
//! keeps the rest and is told when there is room. Transmission takes no time: the transmitter is
//! always empty, and its interrupt comes with every byte while the guest has it enabled.
//!
//! Not modelled: baud rate, parity, line breaks, the FIFO control register (writes are ignored).

mod output;
mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial as Uart, SerialState as UartState};

use crate::bus::BusDevice;
use crate::signals::InterruptLine;

pub use output::{Backlog, ConsoleOutput, Promptness};
pub use state::SerialState;

/// First port of the first serial port, Linux's ttyS0.
pub const COM1_BASE: u64 = 0x3f8;
/// Its interrupt line.
pub const COM1_IRQ: u32 = 4;
/// Ports of one UART, in bytes.
pub const UART_LENGTH: u64 = 8;

/// Interrupt identification register, its bit for "nothing is pending" and that for received data.
const IDENTIFICATION: u8 = 2;
const NONE_PENDING: u8 = 0x01;
const DATA_PENDING: u8 = 0x04;
/// Received data interrupts: a bit of the interrupt enable register.
const DATA_ENABLED: u8 = 0x01;
/// Modem control register, and its loopback bit.
const MODEM_CONTROL: u8 = 4;
const LOOPBACK: u8 = 0x10;
/// Bytes that the receive FIFO of the register model holds.
const INPUT_FIFO: usize = 64;

/// Why a serial port's saved state was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SerialError {
    /// More input than the FIFO holds.
    #[error(
        "serial state: {found} bytes in the receive FIFO, which holds {INPUT_FIFO}: the snapshot is \
         damaged or of another version"
    )]
    InputTooLong {
        /// Bytes in the state.
        found: usize,
    },
}

/// What a serial port counted since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SerialStats {
    /// Bytes the guest sent that could not be written out, for example to a closed pipe.
    pub output_lost: u64,
    /// Interrupts that the interrupt controller refused.
    pub interrupts_lost: u64,
}

/// An [`InterruptLine`] in the register model's terms. Failures are counted here, so that none
/// can cut a register access short.
struct Line {
    far_end: Arc<dyn InterruptLine>,
    lost: AtomicU64,
}

impl Trigger for Line {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        if self.far_end.pulse().is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

type Model = Uart<Line, NoEvents, ConsoleOutput>;

/// One serial port.
pub struct Serial {
    uart: Model,
    /// Copy of the guest's loopback bit: nothing can be received while it is set.
    loopback: bool,
    on_room: Option<Box<dyn Fn() + Send>>,
    /// A push was cut short, so whoever pushed waits for `on_room`.
    input_waits: bool,
}

impl Serial {
    /// A port after power-on, which sends to `output` and interrupts on `line`.
    #[must_use]
    pub fn new(line: Arc<dyn InterruptLine>, output: ConsoleOutput) -> Self {
        let line = Line {
            far_end: line,
            lost: AtomicU64::new(0),
        };
        Self {
            uart: Model::new(line, output),
            loopback: false,
            on_room: None,
            input_waits: false,
        }
    }

    /// Sets what is called when a push was cut short and all input has since been read.
    ///
    /// It is called on the vCPU's thread with this device locked: it should only wake the thread
    /// that pushes (an eventfd, a condition variable).
    pub fn on_input_room(&mut self, callback: impl Fn() + Send + 'static) {
        self.on_room = Some(Box::new(callback));
    }

    /// Puts as much of `input` as fits into the receive FIFO, and returns how many bytes that was.
    /// The caller keeps the rest; [`Serial::on_input_room`] tells when to try again.
    pub fn push_input(&mut self, input: &[u8]) -> usize {
        // An error means a full FIFO, and no interrupt that was lost: those are counted in `Line`.
        let taken = self.uart.enqueue_raw_bytes(input).unwrap_or(0);
        self.input_waits = taken < input.len();
        taken
    }

    /// Bytes that [`Serial::push_input`] would take now.
    #[must_use]
    pub fn input_room(&self) -> usize {
        if self.loopback {
            0
        } else {
            self.uart.fifo_capacity()
        }
    }

    /// What was counted so far.
    #[must_use]
    pub fn stats(&self) -> SerialStats {
        SerialStats {
            output_lost: self.uart.writer().lost(),
            interrupts_lost: self.uart.interrupt_evt().lost.load(Ordering::Relaxed),
        }
    }

    /// The state to save: all registers and the FIFO. What is on its way to the far end is not part of it.
    #[must_use]
    pub fn state(&self) -> SerialState {
        self.uart.state().into()
    }

    /// Takes on a saved state, and raises the interrupts that are pending in it: restore the
    /// interrupt controller first. Output, callback and counts stay.
    ///
    /// # Errors
    /// If the state holds more input than the FIFO; the port is unchanged then.
    pub fn restore(&mut self, state: &SerialState) -> Result<(), SerialError> {
        let refused = SerialError::InputTooLong {
            found: state.input.len(),
        };
        if state.input.len() > INPUT_FIFO {
            return Err(refused);
        }
        let old = self.uart.interrupt_evt();
        let line = Line {
            far_end: old.far_end.clone(),
            lost: AtomicU64::new(old.lost.load(Ordering::Relaxed)),
        };
        let output = std::mem::take(self.uart.writer_mut());
        self.uart = Model::from_state(&UartState::from(state), line, NoEvents, output)
            .map_err(|_| refused)?;
        self.loopback = state.modem_control & LOOPBACK != 0;
        self.tell_room();
        Ok(())
    }

    /// Which interrupts are pending. The register model forgets received data when one byte of it is read; a 16550A has it pending as
    /// long as there is any. Linux's handler reads 256 bytes at most and then looks here: what it was not told of would stay until
    /// something else is typed (`serial8250_rx_chars` in drivers/tty/serial/8250/8250_port.c).
    fn pending(&mut self) -> u8 {
        let pending = self.uart.read(IDENTIFICATION);
        let has_input = self.uart.fifo_capacity() < INPUT_FIFO;
        // The state is a copy of everything: it is made only where there is input.
        match has_input && self.uart.state().interrupt_enable & DATA_ENABLED != 0 {
            true => pending & !NONE_PENDING | DATA_PENDING,
            false => pending,
        }
    }

    fn tell_room(&mut self) {
        if self.input_waits && self.input_room() == INPUT_FIFO {
            self.input_waits = false;
            if let Some(callback) = &self.on_room {
                callback();
            }
        }
    }
}

/// The register number for an offset in this device's range; wider accesses go to consecutive
/// registers, as on the ISA bus.
fn register(offset: u64) -> u8 {
    u8::try_from(offset).unwrap_or(u8::MAX)
}

impl BusDevice for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (offset, byte) in (offset..).zip(data) {
            *byte = match register(offset) {
                IDENTIFICATION => self.pending(),
                other => self.uart.read(other),
            };
        }
        self.tell_room();
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (offset, &byte) in (offset..).zip(data) {
            let register = register(offset);
            if register == MODEM_CONTROL {
                self.loopback = byte & LOOPBACK != 0;
            }
            // Neither the line nor the output can fail: both count instead.
            let _ = self.uart.write(register, byte);
        }
        self.tell_room();
    }
}

#[cfg(test)]
mod tests;
