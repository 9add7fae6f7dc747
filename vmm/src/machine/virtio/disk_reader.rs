//! The disks of a machine as an observer reads them: with all writes of the guest that the device
//! has carried out. The guest does not notice, and a recording of its input does not have it.

use std::fmt;
use std::io;

use devices::virtio::DeviceHandle;

/// A disk of a machine, for reading.
#[derive(Clone)]
pub struct DiskReader {
    pub(super) handle: DeviceHandle,
    pub(super) length: u64,
}

impl fmt::Debug for DiskReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskReader")
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl DiskReader {
    /// Returns the size of the disk in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    /// If the disk ends before, or its file cannot be read.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        match end {
            Some(end) if end <= self.length => self.handle.peek_disk(buffer, offset),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
