//! Images of guests' disks: opened for a look at what they boot, and for the files of a boot.
//!
//! An image is opened for reading alone, whatever its format.

use std::io;
use std::path::{Path, PathBuf};

use image::{BootError, BootFiles, Image, OpenError, ReadAt};
use parking_lot::Mutex;
use vmm::boot::KernelFile;
use vmm::machine::{BlockBackend, DiskConfig, ImageError};

use crate::guest_kernel::{GuestKernel, GuestKernelError};

/// The reason why an image was not opened, or does not boot.
#[derive(Debug, thiserror::Error)]
pub enum GuestImageError {
    /// The disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] ImageError),
    /// The disk can be opened, and not be read.
    #[error("image {path}: {error}")]
    Contents {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: OpenError,
    },
    /// The image has nothing to boot, or its files cannot be read.
    #[error("image {path}: {error}")]
    Boot {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: BootError,
    },
    /// The file that the image boots is no kernel.
    #[error("image {path}: {error}")]
    Kernel {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: GuestKernelError,
    },
}

/// A disk as the reader of images takes it.
struct Bytes(Mutex<Box<dyn BlockBackend>>);

impl ReadAt for Bytes {
    fn length(&self) -> u64 {
        self.0.lock().length()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut disk = self.0.lock();
        let end = offset.checked_add(buffer.len() as u64);
        match end.is_some_and(|end| end <= disk.length()) {
            true => disk.read_at(buffer, offset),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Opens an image, and reads its partitions and entries.
///
/// # Errors
/// The file cannot be opened or read.
pub fn open(disk: &DiskConfig) -> Result<Image, GuestImageError> {
    let bytes = Bytes(Mutex::new(disk.open_read_only()?));
    Image::open(Box::new(bytes)).map_err(|error| GuestImageError::Contents {
        path: disk.path.clone(),
        error,
    })
}

/// Reads the files that an image boots.
///
/// # Errors
/// As [`open`], and if the image has nothing to boot.
pub fn boot_files(disk: &DiskConfig) -> Result<BootFiles, GuestImageError> {
    let files = open(disk)?.boot_files();
    files.map_err(|error| GuestImageError::Boot {
        path: disk.path.clone(),
        error,
    })
}

/// Reads the kernel that an image boots, without its initramfs.
///
/// # Errors
/// As [`boot_files`] and [`kernel`].
pub fn boot_kernel(disk: &DiskConfig) -> Result<(GuestKernel, KernelFile), GuestImageError> {
    let read = open(disk)?.boot_kernel();
    let (bytes, path) = read.map_err(|error| GuestImageError::Boot {
        path: disk.path.clone(),
        error,
    })?;
    kernel(disk, bytes, &path)
}

/// Reads the kernel of an image, whose path is shown as `IMAGE:/PATH`.
///
/// # Errors
/// If the file is no kernel for this machine.
pub fn kernel(
    disk: &DiskConfig,
    bytes: Vec<u8>,
    path: &str,
) -> Result<(GuestKernel, KernelFile), GuestImageError> {
    let shown = format!("{}:{path}", disk.path.display());
    GuestKernel::from_bytes(bytes, Path::new(&shown)).map_err(|error| GuestImageError::Kernel {
        path: disk.path.clone(),
        error,
    })
}
