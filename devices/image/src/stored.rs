//! Files of a running system on its disks, found by the inodes that the system has in memory.
//!
//! The system changes its disks meanwhile. Its newest changes are in its memory or in a journal,
//! which is not read. So a file is used only if its inode on the disk equals the one in memory, to
//! the nanosecond of its last change, and if its blocks are as many as the inode says.

use std::fmt;

use crate::boot::{OpenError, volumes};
use crate::disk::{Disk, ReadAt};
use crate::file::File;
use crate::fs::{FileSystem, StoredInode};
use crate::volume::Volume;

/// The bytes that may be read to find the volumes of a disk and the blocks of all its files: those
/// of some thousand sound ones.
const SEARCH: u64 = 64 << 20;

/// The volumes of a disk that a running system uses.
pub struct StoredVolumes {
    volumes: Vec<Volume>,
}

impl fmt::Debug for StoredVolumes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredVolumes")
            .field("volumes", &self.volumes.len())
            .finish_non_exhaustive()
    }
}

impl StoredVolumes {
    /// Reads the partition table and the superblocks of a disk.
    ///
    /// # Errors
    /// If the disk cannot be read.
    pub fn open(source: Box<dyn ReadAt>) -> Result<Self, OpenError> {
        let disk = Disk::new(source);
        disk.allow(SEARCH);
        let (_, volumes) = volumes(&disk.window())?;
        Ok(Self { volumes })
    }

    /// Returns the files of the inode, at most one of each volume. None of a volume whose inode
    /// differs, is damaged or not read, or once too much was read.
    pub fn files<'a>(&'a self, wanted: &'a StoredInode) -> impl Iterator<Item = File> + 'a {
        self.volumes.iter().filter_map(move |volume| {
            let Some(FileSystem::Ext(ext)) = &volume.fs else {
                return None;
            };
            ext.stored(wanted).ok().flatten()
        })
    }
}

#[cfg(test)]
mod tests;
