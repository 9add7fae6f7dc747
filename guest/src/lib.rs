//! How the demo and test guests are made: kernels, initramfs archives, small programs, and the micro guest.
//!
//! The caller owns the machine that runs them and whatever words the host needs on the command line.
//! This crate makes files and bytes; it starts no machine and knows nothing of KVM or of tracing.
//!
//! * [`micro::elf`]: a 64-bit kernel of a few kilobytes, assembled in memory, for exact tests and benchmarks.
#![forbid(unsafe_code)]

pub mod micro;
