//! Makes the demo and test guests: kernels, initramfs archives, small programs, and the micro
//! guest.
//!
//! The caller owns the machine that runs them and the words that the host needs on the command
//! line. This crate makes files and bytes; it starts no machine and has no code for KVM or tracing.
//!
//! * [`micro::elf`]: a 64-bit kernel of a few kilobytes, assembled in memory, for exact tests and
//!   benchmarks.
//! * [`elf::program`]: a program, or a kernel, of a few instructions.
//! * [`kernel::small`], [`kernel::rich`]: Linux built from Debian's source.
//! * [`debian::cloud_kernel`], [`debian::suite_kernel`]: Debian's own kernels as they are.
//! * [`programs::build`]: small static programs with known behaviour.
//! * [`dynamic::files`]: programs linked with Debian's C library, and that library.
//! * [`initramfs::tiny`], [`initramfs::full`]: the root file systems of guests; [`cpio`] writes the
//!   archives.
//!
//! Slow results are made once and kept in a [`Cache`]; a [`Progress`] reports how far the work is.
#![forbid(unsafe_code)]

mod apt;
mod archive;
mod cache;
pub mod command;
mod compile;
pub mod cpio;
pub mod debian;
pub mod dynamic;
pub mod elf;
pub mod initramfs;
pub mod kernel;
mod make_error;
pub mod micro;
pub mod packages;
pub mod programs;
mod progress;

pub use archive::SuiteError;
pub use cache::{Cache, CacheError, Lock, Scratch, failed, short};
pub use command::CommandError;
pub use make_error::MakeError;
pub use packages::PackageError;
pub use progress::{Progress, Silent, Terminal};
