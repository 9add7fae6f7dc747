//! Everything that names an x86-64 register, segment, MSR or instruction.

pub mod cpuid;
pub mod emulate;
pub mod entry;
pub mod msr;
pub mod segments;
