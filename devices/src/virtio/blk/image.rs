//! Disk images: raw files and qcow2, directly or below an overlay.
//!
//! [`open`] is the only way in. An image is locked while it is open, shared if it is only read, so
//! that no other machine writes it meanwhile. A qcow2 image names files itself, and its author may
//! be hostile: a backing file is opened only if it lies in the image's own folder or the caller has
//! named it. The format is found by content unless it is named. A guest cannot change it then.

mod qcow2;
mod raw;

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{BlockBackend, SECTOR};
pub use qcow2::Damage;
use raw::RawImage;

/// The format of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageFormat {
    /// The file's bytes are the disk's.
    Raw,
    /// QEMU's format, versions 2 and 3.
    Qcow2,
}

/// The file for the guest's writes, if the image is to stay as it is: a qcow2 image with the image
/// as its backing file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Overlay {
    /// A nameless file that is gone with the machine.
    Temporary,
    /// This file. It is made if it does not exist.
    Kept(PathBuf),
}

/// The choices for an image besides its file. By default the guest may write to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageOptions {
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The format; by content if it is `None`.
    pub format: Option<ImageFormat>,
    /// The backing file of a qcow2 image instead of the one that the image names.
    pub backing: Option<PathBuf>,
    /// The file for the guest's writes; the image itself if it is `None`.
    pub overlay: Option<Overlay>,
    /// A saved overlay, with whose content a temporary one begins.
    pub saved_overlay: Option<PathBuf>,
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
    /// The disk is not a whole number of sectors.
    #[error(
        "disk {path}: {length} bytes; a disk has whole sectors of {SECTOR} bytes, at least one (`truncate -s` changes a raw image's size)"
    )]
    Length {
        /// The path of the file.
        path: PathBuf,
        /// The size in bytes.
        length: u64,
    },
    /// Another process uses the file.
    #[error(
        "disk {path}: in use by another machine; only machines that all have it read-only, or as the image under an overlay, may share it"
    )]
    InUse {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file is not a usable qcow2 image.
    #[error(
        "disk {path}: not a usable qcow2 image: {source}; `qemu-img check` examines it, `format=raw` takes it as it is"
    )]
    Qcow2 {
        /// The path of the file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file is a damaged qcow2 image, which would be damaged more if it were written.
    #[error(
        "disk {path}: a damaged qcow2 image: {source}; `qemu-img check -r all` repairs what can be repaired, `ro` only reads it"
    )]
    Damaged {
        /// The path of the file.
        path: PathBuf,
        /// The damage.
        source: qcow2::Damage,
    },
    /// The image has a feature of qcow2 that is not supported.
    #[error(
        "disk {path}: a qcow2 image with {feature}, which is not supported; `qemu-img convert` makes a plain one of it"
    )]
    Unsupported {
        /// The path of the file.
        path: PathBuf,
        /// The feature.
        feature: &'static str,
    },
    /// The image names a backing file elsewhere.
    #[error(
        "disk {path}: its backing file {backing} is not in the same folder; name it if it is to be read: backing={backing}"
    )]
    Backing {
        /// The path of the file.
        path: PathBuf,
        /// The path of the backing file.
        backing: PathBuf,
    },
    /// The chain of backing files does not end.
    #[error(
        "disk {path}: more than {} backing files behind each other",
        qcow2::MAX_DEPTH
    )]
    Depth {
        /// The path of the file.
        path: PathBuf,
    },
    /// The overlay belongs to another image.
    #[error(
        "overlay {overlay}: made for {found}, not for {image}; name another file for this image's overlay"
    )]
    OtherImage {
        /// The path of the overlay.
        overlay: PathBuf,
        /// The path of its image.
        found: PathBuf,
        /// The path of the requested image.
        image: PathBuf,
    },
    /// The overlay cannot be made.
    #[error("overlay {path}: {source}")]
    Overlay {
        /// The path of the overlay, or the folder for a temporary one.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// Opens an image as the storage of a disk.
///
/// # Errors
/// If a file cannot be opened or is used by another machine, the image is damaged, or it names
/// files that it may not.
pub fn open(path: &Path, options: &ImageOptions) -> Result<Box<dyn BlockBackend>, ImageError> {
    let backing = options.backing.as_deref();
    if let (Some(overlay), false) = (&options.overlay, options.read_only) {
        let saved = options.saved_overlay.as_deref();
        let layer = Layer::open(path, options.format, false)?;
        return Ok(Box::new(qcow2::overlay(layer, backing, overlay, saved)?));
    }
    let layer = Layer::open(path, options.format, !options.read_only)?;
    Ok(match layer.format {
        ImageFormat::Raw => {
            let length = layer.whole_length()?;
            let is_guessed = options.format.is_none();
            Box::new(RawImage::new(layer.file, length, is_guessed))
        }
        ImageFormat::Qcow2 => Box::new(qcow2::image(layer, backing)?),
    })
}

/// A locked file of an image, whose format is known.
#[derive(Debug)]
struct Layer {
    path: PathBuf,
    file: File,
    format: ImageFormat,
    is_writable: bool,
    /// The length of the file in bytes.
    length: u64,
}

impl Layer {
    /// Opens and locks a file. The format is found by content if it is `None`.
    fn open(
        path: &Path,
        format: Option<ImageFormat>,
        is_writable: bool,
    ) -> Result<Self, ImageError> {
        let own = || path.to_path_buf();
        let failed = |source| ImageError::Open {
            path: own(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(is_writable)
            // Opening a FIFO would wait for its peer.
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(path)
            .map_err(failed)?;
        let kind = file.metadata().map_err(failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let message = "neither a regular file nor a block device";
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, message)));
        }
        lock(&file, path, is_writable)?;
        // The metadata of a block device has length 0.
        let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let mut magic = [0; qcow2::MAGIC.len()];
        let format = match format {
            Some(format) => format,
            None if length < magic.len() as u64 => ImageFormat::Raw,
            None => {
                file.read_exact_at(&mut magic, 0).map_err(failed)?;
                match magic == qcow2::MAGIC {
                    true => ImageFormat::Qcow2,
                    false => ImageFormat::Raw,
                }
            }
        };
        Ok(Self {
            path: own(),
            file,
            format,
            is_writable,
            length,
        })
    }

    /// Returns the length of a raw image's disk in bytes.
    fn whole_length(&self) -> Result<u64, ImageError> {
        whole(&self.path, self.length)
    }
}

/// Checks that a disk of `length` bytes has whole sectors.
fn whole(path: &Path, length: u64) -> Result<u64, ImageError> {
    match length > 0 && length.is_multiple_of(SECTOR) {
        true => Ok(length),
        false => Err(ImageError::Length {
            path: path.to_path_buf(),
            length,
        }),
    }
}

/// Locks a file: for its only writer, or for one of many readers.
fn lock(file: &File, path: &Path, is_writer: bool) -> Result<(), ImageError> {
    let path = || path.to_path_buf();
    let lock = match is_writer {
        true => FlockOperation::NonBlockingLockExclusive,
        false => FlockOperation::NonBlockingLockShared,
    };
    match flock(file, lock) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => Err(ImageError::InUse { path: path() }),
        Err(error) => Err(ImageError::Open {
            path: path(),
            source: error.into(),
        }),
    }
}

#[cfg(test)]
mod tests;
