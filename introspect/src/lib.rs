//! What the bytes in a Linux guest's memory mean: page walks; the kernel's symbols, types and modules, from its image or
//! from memory; tasks, their memory areas and open files; programs and libraries from the page cache; stacks.
//!
//! The caller owns the memory and the registers, given through the traits of [`memory`]; a saved memory
//! image is enough. This crate knows no KVM, arms no breakpoints and trusts nothing it reads: every count
//! and pointer that comes from the guest is bounded.
//!
//! [`system`] puts the readers together for one guest; each can be used alone.
#![forbid(unsafe_code)]

pub mod build_id;
mod bytes;
pub mod core_file;
pub mod kernel;
pub mod memory;
pub mod memory_budget;
pub mod memory_view;
pub mod regular_file;
pub mod stack;
pub mod system;
#[cfg(test)]
mod test_elf;
#[cfg(any(test, feature = "test-utils"))]
pub mod test_memory;
pub mod user;
pub mod x86_64;

pub use memory::{CpuRegisters, Gpa, Gva, PhysicalMemory, PhysicalReadError};
pub use memory_view::{MemoryView, PausedMemory};
