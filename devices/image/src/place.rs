//! Files of an image, as entries name them.

/// The most entries of an image.
pub(crate) const MOST_ENTRIES: usize = 256;

/// A file on a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The index of the volume; `None` if the device that was named is not on this disk.
    pub volume: Option<usize>,
    /// The path from the root of the volume.
    pub path: String,
}

impl Place {
    pub(crate) fn new(volume: usize, path: &str) -> Self {
        Self {
            volume: Some(volume),
            path: path.to_owned(),
        }
    }
}
