//! The guest's files where it keeps them: on its disks, which the caller can read.
//!
//! A page that left the guest's memory was written to the disk before, if it was changed. So the
//! disk has all of a file that the page cache lacks, as soon as the file's inode is written too.

use super::PausedSystem;
use crate::kernel::page_cache::CachedFile;
use crate::kernel::stored_inode::StoredInode;
use crate::user::file_bytes::FileBytes;

/// The files on the disks of a guest.
pub trait StoredFiles {
    /// Opens the file of an inode, or returns `None` if no disk that is read has it in this state.
    /// Its bytes may be older than those of the page cache.
    fn open(&self, inode: &StoredInode) -> Option<Box<dyn FileBytes + '_>>;
}

impl<'s> PausedSystem<'s> {
    /// Returns the same system, with the files on its disks. They are opened for what its memory
    /// lacks.
    #[must_use]
    pub fn with_stored(self, stored: &'s dyn StoredFiles) -> Self {
        Self {
            stored: Some(stored),
            ..self
        }
    }

    /// Opens a file of the page cache on its disk; `None` if no disk that is read has it in its
    /// newest state.
    #[must_use]
    pub fn stored_file(&self, file: &CachedFile) -> Option<Box<dyn FileBytes + 's>> {
        let (layout, stored) = self.system.stored_inodes.as_ref().zip(self.stored)?;
        let inode = layout.read(self.view, file.inode).ok()??;
        stored.open(&inode)
    }
}
