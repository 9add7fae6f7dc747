//! Images of guests' disks: opened for a look at what they boot.
//!
//! An image is opened for reading alone. Its format is the raw one.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use image::{Image, OpenError};

/// The reason why an image was not opened.
#[derive(Debug, thiserror::Error)]
pub enum GuestImageError {
    /// The file cannot be opened.
    #[error("image {path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// The file can be opened, and not be read.
    #[error("image {path}: {error}")]
    Contents {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: OpenError,
    },
}

/// Opens an image, and reads its partitions and entries.
///
/// # Errors
/// The file cannot be opened or read.
pub fn open(path: &Path) -> Result<Image, GuestImageError> {
    let file = File::open(path).map_err(|error| GuestImageError::File {
        path: path.to_owned(),
        error,
    })?;
    Image::open(Box::new(file)).map_err(|error| GuestImageError::Contents {
        path: path.to_owned(),
        error,
    })
}
