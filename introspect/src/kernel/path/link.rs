//! Symbolic links: where they lead, as the kernel keeps it.

use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// The length of the longest path (`PATH_MAX`, include/uapi/linux/limits.h).
const LONGEST: usize = 4096;
/// The type of a file in its mode, and a link's (include/uapi/linux/stat.h).
const TYPE: u16 = 0o170_000;
const LINK: u16 = 0o120_000;

/// The location of a link's target in its inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkLayout {
    mode: u64,
    target: u64,
}

/// The target of a symbolic link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkTarget {
    /// The path.
    Text(Vec<u8>),
    /// The path is the content of the link's pages.
    InPages,
}

impl LinkLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        Ok(Self {
            mode: offset(btf, "inode.i_mode", 2)?,
            target: offset(btf, "inode.i_link", 8)?,
        })
    }

    /// Returns the target of a link; `None` if the file is no link.
    ///
    /// # Errors
    /// If the inode or its target cannot be read.
    pub fn target(
        &self,
        view: MemoryView<'_>,
        inode: Gva,
    ) -> Result<Option<LinkTarget>, StructureError> {
        let inode = Structure::at(view, "inode", inode)?;
        if u16::from_le_bytes(inode.array(self.mode)?) & TYPE != LINK {
            return Ok(None);
        }
        let text = inode.string(self.target, "inode.i_link", LONGEST)?;
        Ok(Some(text.map_or(LinkTarget::InPages, LinkTarget::Text)))
    }
}
