//! Makes the demo and test guests: kernels, initramfs archives, small programs, and the micro
//! guest.
//!
//! The caller owns the machine that runs them and the words that the host needs on the command
//! line. This crate makes files and bytes; it starts no machine and has no code for KVM or tracing.
//!
//! * [`micro::elf`]: a 64-bit kernel of a few kilobytes, assembled in memory, for exact tests and
//!   benchmarks.
//! * [`elf::program`]: a program, or a kernel, of a few instructions.
//! * [`build`]: the guests that take other programs to make:
//!   * [`build::kernel::small`], [`build::kernel::rich`]: Linux built from Debian's source.
//!   * [`build::debian::cloud_kernel`], [`build::debian::suite_kernel`]: Debian's own kernels as
//!     they are.
//!   * [`build::programs::build`]: small static programs with known behaviour.
//!   * [`build::dynamic::files`]: programs linked with Debian's C library, and that library.
//!   * [`build::initramfs::tiny`], [`build::initramfs::full`]: the root file systems of guests;
//!     [`build::cpio`] writes the archives.
//!
//! Slow results are made once and kept in a [`Cache`]; a [`Progress`] reports how far the work is.
#![forbid(unsafe_code)]

#[cfg(feature = "build")]
pub mod build;
mod cache;
pub mod elf;
pub mod micro;
mod progress;

pub use cache::{Cache, CacheError, Held, Lock, Scratch, failed, short};
pub use progress::{Progress, Silent, Terminal};
