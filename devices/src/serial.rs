//! A 16550A serial port: `vm-superio`'s register model with adapted output, input and state.
//!
//! Output goes through a [`ConsoleOutput`], which never fails the guest. Bytes that cannot be
//! written are counted. The caller pushes input up to the receive FIFO's size, keeps the rest, and
//! is notified when there is room. Transmission takes no time: the transmitter is always empty. Its
//! interrupt comes with every byte while the guest has it enabled.
//!
//! Not modelled: baud rate, parity, line breaks, the FIFO control register (writes are ignored).

mod output;
mod state;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial as Uart, SerialState as UartState};

use crate::bus::BusDevice;
use crate::signals::InterruptLine;
use output::Observer;

pub use output::{Backlog, ConsoleOutput, Promptness};
pub use state::SerialState;

/// The first port of the first serial port, Linux's ttyS0.
pub const COM1_BASE: u64 = 0x3f8;
/// The interrupt line of the first serial port.
pub const COM1_IRQ: u32 = 4;
/// The number of ports of one UART.
pub const UART_LENGTH: u64 = 8;

/// The interrupt identification register, its bit for "nothing is pending" and that for received
/// data.
const IDENTIFICATION: u8 = 2;
const NONE_PENDING: u8 = 0x01;
const DATA_PENDING: u8 = 0x04;
/// The bit of the interrupt enable register for received data.
const DATA_ENABLED: u8 = 0x01;
/// The modem control register, and its loopback bit.
const MODEM_CONTROL: u8 = 4;
const LOOPBACK: u8 = 0x10;
/// The size in bytes of the register model's receive FIFO.
const INPUT_FIFO: usize = 64;

/// The reason why a serial port's saved state was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SerialError {
    /// The state has more input than the FIFO holds.
    #[error(
        "serial state: {found} bytes in the receive FIFO, which holds {INPUT_FIFO}: the snapshot is \
         damaged or of another version"
    )]
    InputTooLong {
        /// The number of bytes in the state.
        found: usize,
    },
}

/// The counts of a serial port since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SerialStats {
    /// The number of bytes from the guest that could not be written out, for example to a closed
    /// pipe.
    pub output_lost: u64,
    /// The number of interrupts that the interrupt controller rejected.
    pub interrupts_lost: u64,
}

/// An adapter of [`InterruptLine`] to the register model. It counts failures, so that none can
/// abort a register access.
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
    /// A copy of the guest's loopback bit. Nothing can be received while it is set.
    loopback: bool,
    on_room: Option<Box<dyn Fn() + Send>>,
    /// A callback that sees the bytes that the guest is given.
    on_input: Option<Observer>,
    /// True if a push was cut short, so that its caller waits for `on_room`.
    input_waits: bool,
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serial")
            .field("loopback", &self.loopback)
            .field("input_waits", &self.input_waits)
            .finish_non_exhaustive()
    }
}

impl Serial {
    /// Makes a port as after power-on, which sends to `output` and interrupts on `line`.
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
            on_input: None,
            input_waits: false,
        }
    }

    /// Sets the callback for when a push was cut short and all input has since been read.
    ///
    /// It runs on the vCPU's thread with this device locked. It should only wake the thread that
    /// pushes (an eventfd, a condition variable).
    pub fn on_input_room(&mut self, callback: impl Fn() + Send + 'static) {
        self.on_room = Some(Box::new(callback));
    }

    /// Sets the callback that sees all input as it comes into the receive FIFO. It runs with this
    /// device locked.
    pub fn on_input(&mut self, callback: impl FnMut(&[u8]) + Send + 'static) {
        self.on_input = Some(Box::new(callback));
    }

    /// Puts as much of `input` as fits into the receive FIFO, and returns the number of bytes. The
    /// caller keeps the rest, and [`Serial::on_input_room`] notifies it when to retry.
    pub fn push_input(&mut self, input: &[u8]) -> usize {
        // An error means a full FIFO, not a lost interrupt. `Line` counts those.
        let taken = self.uart.enqueue_raw_bytes(input).unwrap_or(0);
        self.input_waits = taken < input.len();
        let accepted = input.get(..taken).unwrap_or_default();
        if let (Some(see), false) = (&mut self.on_input, accepted.is_empty()) {
            see(accepted);
        }
        taken
    }

    /// Returns the number of bytes that [`Serial::push_input`] would accept now.
    #[must_use]
    pub fn input_room(&self) -> usize {
        if self.loopback {
            0
        } else {
            self.uart.fifo_capacity()
        }
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn stats(&self) -> SerialStats {
        SerialStats {
            output_lost: self.uart.writer().lost(),
            interrupts_lost: self.uart.interrupt_evt().lost.load(Ordering::Relaxed),
        }
    }

    /// Returns the state to save: all registers and the FIFO. Bytes on their way to the backend are
    /// not included.
    #[must_use]
    pub fn state(&self) -> SerialState {
        self.uart.state().into()
    }

    /// Restores a saved state, and raises the interrupts that are pending in it. The interrupt
    /// controller must be restored first. Output, callback and counts are kept.
    ///
    /// # Errors
    /// If the state holds more input than the FIFO. The port is then unchanged.
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

    /// Returns the pending interrupts. The register model clears received data when one byte of it
    /// is read; a 16550A has it pending as long as there is any. Linux's handler reads 256 bytes at
    /// most and then looks here (`serial8250_rx_chars` in drivers/tty/serial/8250/8250_port.c).
    /// Without this, the rest would stay until more is typed.
    fn pending(&mut self) -> u8 {
        let pending = self.uart.read(IDENTIFICATION);
        let has_input = self.uart.fifo_capacity() < INPUT_FIFO;
        // The state is a copy of all registers, so it is made only if there is input.
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

/// Returns the register number for an offset in this device's range. Wider accesses go to
/// consecutive registers, as on the ISA bus.
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
            // Neither the line nor the output can fail, because both count failures.
            let _ = self.uart.write(register, byte);
        }
        self.tell_room();
    }
}

#[cfg(test)]
mod tests;
