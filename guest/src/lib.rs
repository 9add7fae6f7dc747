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
//! All but the micro guest, small programs and the cache need the feature `build`: it installs
//! packages and runs compilers, which a shipped binary need not be able to.
//!
//! Slow results are made once and kept in a [`Cache`]; a [`Progress`] reports how far the work is.
#![forbid(unsafe_code)]

#[cfg(feature = "build")]
mod apt;
#[cfg(feature = "build")]
mod archive;
mod cache;
#[cfg(feature = "build")]
pub mod command;
#[cfg(feature = "build")]
mod compile;
#[cfg(feature = "build")]
pub mod cpio;
#[cfg(feature = "build")]
pub mod debian;
#[cfg(feature = "build")]
pub mod dynamic;
pub mod elf;
#[cfg(feature = "build")]
pub mod initramfs;
#[cfg(feature = "build")]
pub mod kernel;
#[cfg(feature = "build")]
mod make_error;
pub mod micro;
#[cfg(feature = "build")]
pub mod packages;
#[cfg(feature = "build")]
pub mod programs;
mod progress;

#[cfg(feature = "build")]
pub use archive::SuiteError;
pub use cache::{Cache, CacheError, Lock, Scratch, failed, short};
#[cfg(feature = "build")]
pub use command::CommandError;
#[cfg(feature = "build")]
pub use make_error::MakeError;
#[cfg(feature = "build")]
pub use packages::PackageError;
pub use progress::{Progress, Silent, Terminal};
