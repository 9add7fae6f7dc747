//! The guest's files where it keeps them: on its disks, which the caller can read.
//!
//! A page that left the guest's memory was written to the disk before, if it was changed. So the
//! disk has all of a file that the page cache lacks, as soon as the file's inode is written too.

use std::cell::OnceCell;
use std::fmt;

use super::PausedSystem;
use crate::kernel::page_cache::CachedFile;
use crate::kernel::stored_inode::StoredInode;
use crate::user::file_bytes::{FileBytes, Missing, MissingCause};

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

    /// Returns a file of the page cache as its disk has it.
    #[must_use]
    pub fn stored_file(&self, file: &CachedFile) -> StoredFile<'s> {
        StoredFile {
            look: *self,
            file: *file,
            opened: OnceCell::new(),
        }
    }
}

/// A file of the page cache as its disk has it. It is opened for the first read, and has no bytes
/// if no disk that is read has its newest state.
pub struct StoredFile<'s> {
    look: PausedSystem<'s>,
    file: CachedFile,
    opened: OnceCell<Option<Box<dyn FileBytes + 's>>>,
}

impl fmt::Debug for StoredFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredFile")
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl<'s> StoredFile<'s> {
    fn open(&self) -> Option<Box<dyn FileBytes + 's>> {
        let system = self.look.system;
        let (layout, stored) = system.stored_inodes.as_ref().zip(self.look.stored)?;
        let inode = layout.read(self.look.view, self.file.inode).ok()??;
        stored.open(&inode)
    }
}

impl FileBytes for StoredFile<'_> {
    fn size(&self) -> u64 {
        self.file.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        match self.opened.get_or_init(|| self.open()) {
            Some(file) => file.read_at(offset, buf),
            None => Err(Missing {
                offset,
                length: buf.len() as u64,
                cause: MissingCause::NotInMemory,
            }),
        }
    }
}
