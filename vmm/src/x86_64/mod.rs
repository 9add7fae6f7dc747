//! Everything that names an x86-64 register, segment, MSR or instruction.

pub(crate) mod debug_exception;
pub mod emulate;
pub mod exception_frame;
pub mod msr;
pub(crate) mod rflags;
pub mod segments;
pub mod watchpoint;

/// The trap instruction.
pub const INT3: u8 = 0xcc;
/// Most bytes of one instruction.
pub(crate) const LONGEST_INSTRUCTION: usize = 15;
