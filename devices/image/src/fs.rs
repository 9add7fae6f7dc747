//! The file systems that are read: ext2 to ext4, and FAT.
//!
//! Both are read as a boot loader does: without the journal, and without the checksums. Their
//! readers are ours. `ext4-view` panics on a damaged directory index, and neither its journal nor
//! its trees of extents have a limit. `fatfs` overflows on a hostile boot sector, and follows a
//! circle of clusters for ever.

pub(crate) mod ext;
pub(crate) mod fat;

use std::io;

use crate::file::File;

/// The most bytes of a directory.
const MOST_DIRECTORY: u64 = 4 << 20;
/// The most names of a directory.
const MOST_NAMES: usize = 10_000;
/// The most components of a path, those of its symbolic links included.
const MOST_COMPONENTS: usize = 128;

/// The reason why a file was not read.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    /// There is no such file.
    #[error("no such file")]
    NotFound,
    /// A component of the path is not a folder, or a folder was asked for.
    #[error("not a folder")]
    NotAFolder,
    /// A folder, a device or a socket was to be read.
    #[error("not a regular file")]
    NotAFile,
    /// The symbolic links of a path lead nowhere.
    #[error("the path has too many components or symbolic links")]
    TooManyLinks,
    /// The file is larger than the caller's limit.
    #[error("{size} bytes are more than the limit of {limit}")]
    TooLarge {
        /// The file's size.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// A structure makes no sense.
    #[error("the file system is damaged: {0}")]
    Damaged(&'static str),
    /// The file system uses what is not read.
    #[error("the file system uses {0}, which is not read")]
    Unsupported(&'static str),
    /// The image cannot be read.
    #[error("the image cannot be read: {0}")]
    Io(#[from] io::Error),
}

/// An inode of ext2, ext3 or ext4 as a running system has it in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredInode {
    /// The UUID of its file system; `None` if the system does not keep it (ext2).
    pub file_system: Option<[u8; 16]>,
    /// The inode's number.
    pub number: u64,
    /// The inode's generation, another one each time that the number is used again.
    pub generation: u32,
    /// The file's length in bytes.
    pub size: u64,
    /// The space that the file takes, in units of 512 bytes.
    pub sectors: u64,
    /// The time of the inode's last change: seconds since 1970, and nanoseconds.
    pub changed: (i64, u32),
}

/// A name in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Item {
    pub name: String,
    pub is_folder: bool,
}

/// A file system that can be read. Paths begin at its root, with or without a slash.
#[derive(Debug, Clone)]
pub(crate) enum FileSystem {
    Ext(ext::Ext),
    Fat(fat::Fat),
}

impl FileSystem {
    /// Opens a regular file; symbolic links are followed within the file system.
    pub(crate) fn open(&self, path: &str) -> Result<File, FsError> {
        match self {
            Self::Ext(ext) => ext.open(path),
            Self::Fat(fat) => fat.open(path),
        }
    }

    /// Returns the names of a folder, in the order of the file system, without `.` and `..`.
    pub(crate) fn list(&self, path: &str) -> Result<Vec<Item>, FsError> {
        match self {
            Self::Ext(ext) => ext.list(path),
            Self::Fat(fat) => fat.list(path),
        }
    }

    /// Returns whether there is a regular file of this name.
    pub(crate) fn has_file(&self, path: &str) -> bool {
        self.open(path).is_ok()
    }

    /// Returns whether there is a folder of this name.
    pub(crate) fn has_folder(&self, path: &str) -> bool {
        self.list(path).is_ok()
    }

    /// Reads a whole file of at most `limit` bytes.
    pub(crate) fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>, FsError> {
        use crate::disk::ReadAt as _;
        let file = self.open(path)?;
        file.read_all(limit)?.ok_or(FsError::TooLarge {
            size: file.length(),
            limit,
        })
    }

    /// Reads a file of text; what is not UTF-8 is replaced.
    pub(crate) fn text(&self, path: &str, limit: u64) -> Result<String, FsError> {
        let bytes = self.read(path, limit)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Returns the components of a path, the last one first.
fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.rsplit(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
}

#[cfg(test)]
mod tests;
