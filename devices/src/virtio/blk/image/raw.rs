//! Raw images: the file's bytes are the disk's.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::super::BlockBackend;
use super::qcow2::MAGIC;

/// A raw image.
#[derive(Debug)]
pub(super) struct RawImage {
    file: File,
    length: u64,
    /// True if the format was not named. The guest must not turn the image into another format: a
    /// later start would follow the names of files that the guest has written.
    is_guessed: bool,
}

impl RawImage {
    pub(super) fn new(file: File, length: u64, is_guessed: bool) -> Self {
        Self {
            file,
            length,
            is_guessed,
        }
    }
}

impl BlockBackend for RawImage {
    fn length(&self) -> u64 {
        self.length
    }

    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn write_at(&mut self, data: &[u8], offset: u64) -> io::Result<()> {
        if self.is_guessed && offset == 0 && data.starts_with(&MAGIC) {
            let message = "the guest writes a qcow2 header to a raw image whose format was not named; \
                           name it (format=raw) to permit that";
            log::warn!("{message}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        self.file.write_all_at(data, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn discard(&mut self, range: Range<u64>) -> io::Result<bool> {
        let Some(length) = range
            .end
            .checked_sub(range.start)
            .filter(|length| *length > 0)
        else {
            return Ok(true);
        };
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, hole, range.start, length) {
            Ok(()) => Ok(true),
            // The file system does not support holes.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}
