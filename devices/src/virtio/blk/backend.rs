//! The storage of a block device's sectors.

use std::io;
use std::ops::Range;

use super::DirectIo;
use crate::MemorySlice;
use crate::virtio::device::OverlayFile;

/// The backend of a block device: bytes 0 to [`BlockBackend::length`], all of which can be read at
/// any time.
///
/// The device requests only ranges inside the length, and one at a time.
pub trait BlockBackend: Send {
    /// Returns the size in bytes, a multiple of 512. It never changes.
    fn length(&self) -> u64;

    /// Fills the whole of `buffer` from `offset` on.
    ///
    /// # Errors
    /// If a byte of it cannot be read.
    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Fills the whole of `buffer` from `offset` on, for an observer and not for the guest.
    ///
    /// # Errors
    /// If a byte of it cannot be read.
    fn peek(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_at(buffer, offset)
    }

    /// Writes the whole of `data` from `offset` on.
    ///
    /// # Errors
    /// If it cannot be written. A part of it may have been written.
    fn write_at(&mut self, data: &[u8], offset: u64) -> io::Result<()>;

    /// Sets the calls by which a backend of a file may move bytes straight from and to guest
    /// memory.
    fn use_direct_io(&mut self, io: &'static dyn DirectIo) {
        let _ = io;
    }

    /// Fills guest memory from `offset` on, as [`read_at`](Self::read_at) fills a buffer. Returns
    /// `None` if the bytes have to go through a buffer; a part of the memory may be filled.
    fn read_direct(&mut self, targets: &[MemorySlice<'_>], offset: u64) -> Option<io::Result<()>> {
        let _ = (targets, offset);
        None
    }

    /// Writes guest memory from `offset` on, as [`write_at`](Self::write_at) writes a buffer.
    /// Returns `None`, with nothing done, if the bytes have to go through a buffer.
    fn write_direct(&mut self, sources: &[MemorySlice<'_>], offset: u64) -> Option<io::Result<()>> {
        let _ = (sources, offset);
        None
    }

    /// Returns once all earlier writes would survive a crash of the host.
    ///
    /// # Errors
    /// If that cannot be ensured.
    fn flush(&mut self) -> io::Result<()>;

    /// Discards the content of `range`. Returns whether it now reads as zeros; if not, it is
    /// unchanged.
    ///
    /// # Errors
    /// If the attempt failed for another reason than lack of support.
    fn discard(&mut self, range: Range<u64>) -> io::Result<bool>;

    /// Returns the file that alone holds the guest's writes, up to date, if the backend has one.
    ///
    /// It is to be copied before the next write.
    ///
    /// # Errors
    /// If earlier writes cannot be brought into it.
    fn overlay(&mut self) -> io::Result<Option<OverlayFile>> {
        Ok(None)
    }
}
