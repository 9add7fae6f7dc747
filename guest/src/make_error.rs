//! What can fail wherever something is made and kept: the cache, Debian's packages, the programs that are run.

use crate::cache::CacheError;
use crate::command::CommandError;
use crate::packages::PackageError;

/// Something for the cache could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A package that is needed is missing.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// A program that makes it failed: gcc, make.
    #[error(transparent)]
    Command(#[from] CommandError),
}
