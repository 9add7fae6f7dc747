//! Interprets the memory of a Linux guest. It walks page tables and finds the kernel's symbols,
//! types and modules, from its image or from memory. It finds tasks with their VMAs and open files,
//! programs and libraries in the page cache, and stacks.
//!
//! The caller owns the memory and the registers, and passes them through the traits of [`memory`].
//! A saved memory image is enough. This crate does not use KVM, arms no breakpoints and trusts
//! nothing that it reads. Every count and pointer that comes from the guest is bounded.
//!
//! [`system`] combines the readers for one guest; each can also be used alone.
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
#[cfg(test)]
mod test_says;
pub mod user;
pub mod x86_64;

pub use memory::{CpuRegisters, Gpa, Gva, PAGE_WORDS, PhysicalMemory, PhysicalReadError};
pub use memory_view::{MemoryView, PausedMemory};
