//! Raw images: the file's bytes are the disk's.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::super::{BlockBackend, DirectIo};
use super::qcow2::MAGIC;
use crate::MemorySlice;

/// A raw image.
#[derive(Debug)]
pub(super) struct RawImage {
    file: File,
    length: u64,
    /// True if the format was not named. The guest must not turn the image into another format: a
    /// later start would follow the names of files that the guest has written.
    is_guessed: bool,
    direct: Option<&'static dyn DirectIo>,
}

impl RawImage {
    pub(super) fn new(file: File, length: u64, is_guessed: bool) -> Self {
        Self {
            file,
            length,
            is_guessed,
            direct: None,
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

    fn use_direct_io(&mut self, io: &'static dyn DirectIo) {
        self.direct = Some(io);
    }

    fn read_direct(&mut self, targets: &[MemorySlice<'_>], offset: u64) -> Option<io::Result<()>> {
        Some(self.direct?.read(&self.file, targets, offset))
    }

    fn write_direct(&mut self, sources: &[MemorySlice<'_>], offset: u64) -> Option<io::Result<()>> {
        // The guest could change memory after a look at it: what may be a header is copied first.
        let may_be_header = self.is_guessed && offset == 0;
        let direct = self.direct.filter(|_| !may_be_header)?;
        Some(direct.write(&self.file, sources, offset))
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
