//! The users that a process acts as and that own a file, as numbers of the initial user namespace.

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// The location of a task's user and of a file's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CredentialsLayout {
    /// Offset in `task_struct`.
    credentials: u64,
    /// Offset in `cred`.
    user: u64,
    /// Offset in `inode`.
    owner: u64,
}

impl CredentialsLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        Ok(Self {
            credentials: offset(btf, "task_struct.cred", 8)?,
            user: offset(btf, "cred.euid", 4)?,
            owner: offset(btf, "inode.i_uid", 4)?,
        })
    }

    /// Returns the effective user of a task.
    ///
    /// # Errors
    /// If a structure cannot be read.
    pub fn user_of(&self, view: MemoryView<'_>, task: Gva) -> Result<u32, StructureError> {
        let task = Structure::at(view, "task_struct", task)?;
        task.follow_always(self.credentials, "cred")?.u32(self.user)
    }

    /// Returns the owner of a file by its inode.
    ///
    /// # Errors
    /// If the inode cannot be read.
    pub fn owner_of(&self, view: MemoryView<'_>, inode: Gva) -> Result<u32, StructureError> {
        Structure::at(view, "inode", inode)?.u32(self.owner)
    }
}
