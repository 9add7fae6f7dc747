//! Why a trap cannot stand at an address.

use introspect::x86_64::paging;
use introspect::{Gpa, Gva};

/// A site cannot be armed.
#[derive(Debug, thiserror::Error)]
pub enum ArmError {
    /// The address is not mapped.
    #[error("trap at {address}: not mapped in the guest ({source})")]
    NotMapped {
        /// The address asked for.
        address: Gva,
        /// How the page walk ended.
        source: paging::TranslateError,
    },
    /// Nobody executes what is there: a return address that was none, say.
    #[error(
        "trap at {address}: the guest does not execute that page; give the address of an instruction"
    )]
    NotExecutable {
        /// The address asked for.
        address: Gva,
    },
    /// No code returns to the address: data, or the middle of an instruction, lies where the stack's return address points.
    #[error("trap at {address}: no call returns there")]
    NoReturnAddress {
        /// The address asked for.
        address: Gva,
    },
    /// What it maps to is not RAM.
    #[error("trap at {address}: guest-physical {physical} is not RAM")]
    NotRam {
        /// The address asked for.
        address: Gva,
        /// What it maps to.
        physical: Gpa,
    },
    /// There is no instruction there.
    #[error("trap at {address}: bytes {bytes} are no instruction; give the address of one")]
    NoInstruction {
        /// The address asked for.
        address: Gva,
        /// What stands there, in hex.
        bytes: String,
    },
    /// The instruction can be neither emulated nor stepped on this host.
    #[error(
        "trap at {address}: `{instruction}` can be neither emulated nor single-stepped on this host"
    )]
    CannotPass {
        /// The address asked for.
        address: Gva,
        /// The instruction there.
        instruction: String,
    },
    /// The guest is not far enough.
    #[error(
        "trap at {address}: the guest has no breakpoint handler yet, which user traps on this host need; wait until it runs programs"
    )]
    NoBreakpointHandler {
        /// The address asked for.
        address: Gva,
    },
    /// The memory may become something else without notice.
    #[error("trap at {address}: in memory of no file, which may be freed or written at any time")]
    NotOfFile {
        /// The address asked for.
        address: Gva,
    },
    /// The byte is taken for another purpose.
    #[error(
        "trap at {address}: a trap of the machine's own stands there (the guest's breakpoint entry or its panic function)"
    )]
    Reserved {
        /// The address asked for.
        address: Gva,
    },
}
