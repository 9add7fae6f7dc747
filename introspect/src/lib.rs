//! What the bytes in a Linux guest's memory mean: page walks, the kernel image, kallsyms, BTF, tasks.
//!
//! The caller owns the memory and the registers, given through the traits of [`memory`]; a saved memory
//! image is enough. This crate knows no KVM, arms no breakpoints and trusts nothing it reads: every count
//! and pointer that comes from the guest is bounded.
#![forbid(unsafe_code)]

mod bytes;
pub mod kernel;
pub mod memory;
#[cfg(any(test, feature = "test-utils"))]
pub mod test_memory;
pub mod x86_64;

pub use memory::{CpuRegisters, Gpa, Gva, PhysicalMemory, PhysicalReadError};
