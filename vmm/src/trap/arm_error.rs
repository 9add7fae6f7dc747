//! Errors of arming a site.

use introspect::x86_64::paging;
use introspect::{Gpa, Gva};

/// The reason that a site cannot be armed.
#[derive(Debug, thiserror::Error)]
pub enum ArmError {
    /// The address is not mapped.
    #[error("trap at {address}: not mapped in the guest ({source})")]
    NotMapped {
        /// The requested address.
        address: Gva,
        /// The result of the page walk.
        source: paging::TranslateError,
    },
    /// The page is not executable. An example is a bogus return address.
    #[error(
        "trap at {address}: the guest does not execute that page; give the address of an instruction"
    )]
    NotExecutable {
        /// The requested address.
        address: Gva,
    },
    /// No code returns to the address. The stack's return address points to data or into the middle
    /// of an instruction.
    #[error("trap at {address}: no call returns there")]
    NoReturnAddress {
        /// The requested address.
        address: Gva,
    },
    /// The address maps to something other than RAM.
    #[error("trap at {address}: guest-physical {physical} is not RAM")]
    NotRam {
        /// The requested address.
        address: Gva,
        /// The GPA that the address maps to.
        physical: Gpa,
    },
    /// The bytes at the address are not an instruction.
    #[error(
        "trap at {address}: invalid instruction bytes {bytes}; give the address of an instruction"
    )]
    NoInstruction {
        /// The requested address.
        address: Gva,
        /// The bytes at the address, in hex.
        bytes: String,
    },
    /// The instruction can be neither emulated nor stepped on this host.
    #[error(
        "trap at {address}: `{instruction}` can be neither emulated nor single-stepped on this host"
    )]
    CannotPass {
        /// The requested address.
        address: Gva,
        /// The instruction at the address.
        instruction: String,
    },
    /// The guest has not set up its breakpoint handler yet.
    #[error(
        "trap at {address}: the guest has no breakpoint handler yet, which user traps on this host need; wait until it runs programs"
    )]
    NoBreakpointHandler {
        /// The requested address.
        address: Gva,
    },
    /// The memory belongs to no file and may change without notice.
    #[error("trap at {address}: in memory of no file, which may be freed or written at any time")]
    NotOfFile {
        /// The requested address.
        address: Gva,
    },
    /// A trap of the machine's own stands at the address.
    #[error(
        "trap at {address}: the machine has a trap of its own there, at the guest's breakpoint entry or its panic function; a panic ends the run and is reported without a probe"
    )]
    Reserved {
        /// The requested address.
        address: Gva,
    },
}
