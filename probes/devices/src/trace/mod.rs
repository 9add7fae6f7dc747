//! trace(3): the kernel tracing device of Plan 9, over a Linux guest.
//!
//! [`Device`] is a state machine over text. Commands are written to its control port, and the
//! configuration is read from there. Events are read as lines of 121 bytes ([`crate::trace_line`]).
//! The manual page is 9atom's; if its code and the page differ, the page counts.
//!
//! The meaning of its words here:
//! * KTZERO is `_text` of the running kernel, etext its `_etext`. A short address has KTZERO's
//!   upper bits (`address.rs`). A symbol's name, or `name+offset` (hexadecimal), is an address too.
//! * A trace covers every function that begins in its range, the ends included: E at its entry, X
//!   at its return. The program counter of an E is the function's first byte. That of an X is the
//!   return address, because it is unknown which instruction returned.
//! * A process is a Linux thread. Interrupts and the idle task are no process: their calls are
//!   ignored unless `all` was given, and then have a process number of all ones.
//! * Arguments that a function lacks, by the kernel's own types, are zero.
//! * `start` arms the traces that are on, and `stop` disarms them; the log stays.

mod address;
mod command;
mod configuration;
mod device;
mod functions;
mod program;

pub use device::{Device, DeviceCounts};
/// Parses a command of `tracectl` without carrying it out.
///
/// # Errors
/// The command is wrong; the message is the manual page's.
#[cfg(feature = "test-utils")]
pub fn read_command(text: &str) -> Result<(), crate::port::PortError> {
    command::Command::parse(text).map(drop)
}
