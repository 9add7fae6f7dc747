//! Everything that names an x86-64 register, segment, MSR or instruction.

pub mod cpuid;
pub(crate) mod debug_exception;
pub mod emulate;
pub mod entry;
pub mod exception_frame;
pub mod msr;
pub(crate) mod rflags;
pub mod segments;

/// Most bytes of one instruction.
pub(crate) const LONGEST_INSTRUCTION: usize = 15;
