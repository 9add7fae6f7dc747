//! The errors of everything that is made and kept: the cache, Debian's packages, the programs that
//! are run.

use crate::build::command::CommandError;
use crate::build::packages::PackageError;
use crate::cache::CacheError;

/// A cache entry could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A required package is missing.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// A program that makes the entry failed: gcc, make.
    #[error(transparent)]
    Command(#[from] CommandError),
}
