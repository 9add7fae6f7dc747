//! Transfers between a file and guest memory, without a copy in between.

use std::fmt;
use std::fs::File;
use std::io;

use crate::MemorySlice;

/// The calls of the host for such transfers. They need `unsafe`, so the machine's owner has them.
pub trait DirectIo: fmt::Debug + Send + Sync {
    /// Fills all of `targets` from `offset` of the file on.
    ///
    /// # Errors
    /// If a byte of it cannot be read. A part of them may be filled.
    fn read(&self, file: &File, targets: &[MemorySlice<'_>], offset: u64) -> io::Result<()>;

    /// Writes all of `sources` from `offset` of the file on.
    ///
    /// # Errors
    /// If it cannot be written. A part of it may have been written.
    fn write(&self, file: &File, sources: &[MemorySlice<'_>], offset: u64) -> io::Result<()>;
}
