//! trace(3): the kernel tracing device of Plan 9, over a Linux guest.
//!
//! [`Device`] is a state machine over text: commands are written to its control port, the configuration is read from there, events are
//! read as lines of 121 bytes ([`crate::trace_line`]). The manual page is 9atom's; where its own code and the page differ the page counts.
//!
//! What its words mean here:
//! * KTZERO is `_text` of the running kernel, etext its `_etext`: addresses below KTZERO are offsets from it. A symbol's name, or
//!   `name+offset` (hexadecimal), is an address too.
//! * A trace covers every function that begins in its range, the ends included: E at its entry, X at its return. The program counter of
//!   an E is the function's first byte; that of an X is where the function has returned to, as nothing tells by which of
//!   its instructions it went.
//! * A process is a Linux thread. Interrupts and the idle task are no process: what they call is ignored unless `all` was said, and
//!   has a process number of all ones then.
//! * Arguments that a function does not take, by the kernel's own types, are zero.
//! * `start` puts the traps of what is on into the guest and `stop` takes them out; the log stays.

mod address;
mod command;
mod configuration;
mod device;
mod functions;
mod program;

pub use device::{Device, DeviceCounts};
/// Reads a command of `tracectl` and does nothing.
///
/// # Errors
/// In the words of the manual page.
#[cfg(feature = "test-utils")]
pub fn read_command(text: &str) -> Result<(), crate::port::PortError> {
    command::Command::parse(text).map(drop)
}
