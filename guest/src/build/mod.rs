//! Makes kernels, root file systems and programs for guests.
//!
//! It installs packages, and runs compilers and other programs. A shipped binary need not be able
//! to, so all of it needs the feature `build`.

mod apt;
mod archive;
pub mod command;
mod compile;
pub mod cpio;
pub mod debian;
pub mod dynamic;
pub mod initramfs;
pub mod kernel;
mod make_error;
pub mod packages;
pub mod programs;

pub use archive::SuiteError;
pub use command::CommandError;
pub use make_error::MakeError;
pub use packages::PackageError;
