//! Device models without KVM: the bus, the serial port, virtio devices, and the few PC parts that
//! Linux expects.
//!
//! The caller owns threads, file descriptors and the guest's memory. It passes each device its
//! backend as a trait object ([`InterruptLine`], [`MachineSignals`], a writer, a clock). It routes
//! guest accesses to devices through a [`Bus`]. Nothing here prints or blocks on its own account.
//! Only a queued `ConsoleOutput` starts a thread. Facts of interest are counted and can be queried.
//!
//! Not here: interrupt controllers and the interval timer (KVM's are used). Port 0x61 is not here
//! either; KVM's timer handles it when it is created with the speaker flag.
#![forbid(unsafe_code)]

pub mod acpi;
mod bus;
mod cmos;
mod host_writes;
mod i8042;
mod null;
pub mod pci;
mod reset_port;
mod serial;
mod signals;
pub mod virtio;

pub use bus::{Bus, BusDevice, BusError, BusStats, SharedDevice, UnknownAccess};
pub use cmos::{CMOS_BASE, CMOS_LENGTH, Cmos, CmosError, CmosMemory, CmosState, WallClock};
pub use host_writes::{HostWrites, HostWritesSlice, MemorySlice, WatchedMemory};
pub use i8042::{I8042, I8042_BASE, I8042_LENGTH};
pub use null::NullDevice;
pub use reset_port::{RESET_PORT_BASE, RESET_PORT_LENGTH, ResetPort, ResetPortState};
pub use serial::{
    Backlog, COM1_BASE, COM1_IRQ, ConsoleOutput, Promptness, Serial, SerialError, SerialState,
    SerialStats, UART_LENGTH,
};
pub use signals::{InterruptLine, MachineSignals, Message, MessageInterrupts, ResetCause};
