//! Transfers between a file and guest memory, without a copy in between.

use std::borrow::Cow;
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

/// Returns the number of bytes of all `slices`.
pub(super) fn total(slices: &[MemorySlice<'_>]) -> usize {
    slices.iter().map(MemorySlice::len).sum()
}

/// Returns the pieces of memory with `length` of the bytes of all `slices`, from `skipped` on.
pub(super) fn part<'s, 'm>(
    slices: &'s [MemorySlice<'m>],
    mut skipped: usize,
    mut length: usize,
) -> Cow<'s, [MemorySlice<'m>]> {
    if skipped == 0 && length == total(slices) {
        return Cow::Borrowed(slices);
    }
    let mut pieces = Vec::new();
    for slice in slices {
        let before = skipped.min(slice.len());
        let within = length.min(slice.len() - before);
        if within > 0
            && let Ok(piece) = slice.subslice(before, within)
        {
            pieces.push(piece);
        }
        (skipped, length) = (skipped - before, length - within);
    }
    Cow::Owned(pieces)
}
