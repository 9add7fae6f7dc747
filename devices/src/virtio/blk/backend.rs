//! The storage of a block device's sectors.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock};
use rustix::io::Errno;

use super::SECTOR;

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

    /// Writes the whole of `data` from `offset` on.
    ///
    /// # Errors
    /// If it cannot be written. A part of it may have been written.
    fn write_at(&mut self, data: &[u8], offset: u64) -> io::Result<()>;

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
}

/// The reason why an image file cannot be used as a disk.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file cannot be opened.
    #[error("disk {path}: {source}")]
    Open {
        /// The path of the file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file is not a whole number of sectors.
    #[error(
        "disk {path}: {length} bytes; a disk has whole sectors of {SECTOR} bytes, at least one (`truncate -s` changes a file's size)"
    )]
    Length {
        /// The path of the file.
        path: PathBuf,
        /// The size in bytes.
        length: u64,
    },
    /// Another process uses the file.
    #[error(
        "disk {path}: in use by another machine; only machines that all have it read-only may share it"
    )]
    InUse {
        /// The path of the file.
        path: PathBuf,
    },
}

/// A raw image: the file's bytes are the disk's.
///
/// The file is locked, shared if it is only read, so that no other machine writes it meanwhile.
#[derive(Debug)]
pub struct FileBackend {
    file: File,
    length: u64,
}

impl FileBackend {
    /// Opens an image.
    ///
    /// # Errors
    /// If the file cannot be opened, is not a whole number of sectors, or is used by another
    /// machine.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, ImageError> {
        let own = || path.to_path_buf();
        let failed = |source| ImageError::Open {
            path: own(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            // Opening a FIFO would wait for its peer.
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(path)
            .map_err(failed)?;
        let kind = file.metadata().map_err(failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let message = "neither a regular file nor a block device";
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, message)));
        }
        let lock = match read_only {
            true => FlockOperation::NonBlockingLockShared,
            false => FlockOperation::NonBlockingLockExclusive,
        };
        match flock(&file, lock) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(ImageError::InUse { path: own() }),
            Err(error) => return Err(failed(error.into())),
        }
        // The metadata of a block device has length 0.
        let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
        if length == 0 || !length.is_multiple_of(SECTOR) {
            return Err(ImageError::Length {
                path: own(),
                length,
            });
        }
        Ok(Self { file, length })
    }
}

impl BlockBackend for FileBackend {
    fn length(&self) -> u64 {
        self.length
    }

    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn write_at(&mut self, data: &[u8], offset: u64) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn image(length: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(length).unwrap();
        file
    }

    #[test]
    fn what_is_no_disk_is_refused_with_the_reason() {
        for (length, said) in [(0, "0 bytes"), (511, "511 bytes"), (1025, "1025 bytes")] {
            let file = image(length);
            let error = FileBackend::open(file.path(), true)
                .unwrap_err()
                .to_string();
            assert!(error.contains(said), "{error}");
        }
        let error = FileBackend::open(Path::new("/nowhere/disk"), true).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("disk /nowhere/disk: No such file")
        );
    }

    #[test]
    fn an_image_has_one_writer_or_many_readers() {
        let file = image(512);
        let open = |read_only| FileBackend::open(file.path(), read_only);
        let reader = open(true).unwrap();
        let second = open(true).unwrap();
        assert!(matches!(open(false), Err(ImageError::InUse { .. })));
        drop((reader, second));
        let _writer = open(false).unwrap();
        assert!(matches!(open(false), Err(ImageError::InUse { .. })));
        assert!(matches!(open(true), Err(ImageError::InUse { .. })));
    }

    #[test]
    fn what_is_discarded_reads_as_zeros_and_takes_no_room() {
        const LENGTH: u64 = 1 << 20;
        let file = image(LENGTH);
        let mut backend = FileBackend::open(file.path(), false).unwrap();
        backend.write_at(&vec![7; LENGTH as usize], 0).unwrap();
        backend.flush().unwrap();
        let before = file.as_file().metadata().unwrap().blocks();
        if !backend.discard(4096..LENGTH - 4096).unwrap() {
            // A file system without holes keeps the content.
            return;
        }
        let mut back = vec![1; LENGTH as usize];
        backend.read_at(&mut back, 0).unwrap();
        let kept = back.iter().filter(|byte| **byte == 7).count();
        assert_eq!((kept, back[4095], back[4096]), (8192, 7, 0));
        let metadata = file.as_file().metadata().unwrap();
        assert_eq!(metadata.len(), LENGTH);
        assert!(metadata.blocks() < before, "{} blocks", metadata.blocks());
    }
}
