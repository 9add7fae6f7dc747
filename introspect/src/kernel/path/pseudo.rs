//! Files without a place in a directory: pipes, sockets and others that the kernel names on demand.
//!
//! Their dentry has a function for the name (`d_dname`). The magic number of the file system tells
//! which function it is.

use super::{GuestPath, PathError, Reach};
use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::structure::{Structure, StructureError};

/// The magic numbers (include/uapi/linux/magic.h).
const PIPEFS: u64 = 0x5049_5045;
const SOCKFS: u64 = 0x534f_434b;
const ANON_INODE_FS: u64 = 0x0904_1934;
const NSFS: u64 = 0x6e73_6673;
const PIDFS: u64 = 0x5049_4446;
const DMA_BUF: u64 = 0x444d_4142;
/// The maximum length in bytes of a namespace's kind (`net`, `pid_for_children`) or of a buffer's
/// name.
const MAX_KIND: usize = 32;

/// The offsets for the names of such files.
#[derive(Debug, Clone)]
pub(super) struct PseudoLayout {
    /// Offsets in `struct dentry`.
    operations: u64,
    superblock: u64,
    inode: u64,
    /// Offset in `struct dentry_operations`.
    naming: u64,
    /// Offset in `struct super_block`.
    magic: u64,
    /// Offsets in `struct inode`.
    number: u64,
    private: u64,
    /// Offsets in `struct ns_common` and the structure that it points to.
    namespace: Option<(u64, u64)>,
    /// Offsets of the name in `struct dma_buf`, and of the name in its dentry.
    buffer: Option<(u64, u64)>,
}

impl PseudoLayout {
    pub(super) fn new(btf: &Btf) -> Result<Self, LayoutError> {
        let pair = |first, second| offset(btf, first, 8).ok().zip(offset(btf, second, 8).ok());
        Ok(Self {
            operations: offset(btf, "dentry.d_op", 8)?,
            superblock: offset(btf, "dentry.d_sb", 8)?,
            inode: offset(btf, "dentry.d_inode", 8)?,
            naming: offset(btf, "dentry_operations.d_dname", 8)?,
            magic: offset(btf, "super_block.s_magic", 8)?,
            number: offset(btf, "inode.i_ino", 8)?,
            private: offset(btf, "inode.i_private", 8)?,
            namespace: pair("ns_common.ops", "proc_ns_operations.name"),
            buffer: pair("dma_buf.name", "dentry.d_fsdata"),
        })
    }

    /// Returns the text for a dentry that is not a mount's root; `None` if it has a place. `name`
    /// reads the dentry's own name.
    pub(super) fn path(
        &self,
        dentry: &Structure<'_>,
        name: impl Fn() -> Result<Vec<u8>, PathError>,
    ) -> Result<Option<GuestPath>, PathError> {
        let Some(operations) = dentry.follow(self.operations, "dentry_operations")? else {
            return Ok(None);
        };
        if operations.pointer(self.naming)?.is_none() {
            return Ok(None);
        }
        let superblock = dentry.follow_always(self.superblock, "super_block")?;
        let (text, deleted) = match superblock.u64(self.magic)? {
            PIPEFS => (self.numbered(dentry, b"pipe")?, false),
            SOCKFS => (self.numbered(dentry, b"socket")?, false),
            ANON_INODE_FS => ([b"anon_inode:", name()?.as_slice()].concat(), false),
            PIDFS => (b"anon_inode:[pidfd]".to_vec(), false),
            NSFS => (self.numbered(dentry, &self.namespace(dentry)?)?, false),
            DMA_BUF => {
                let name = name()?;
                (self.buffer(dentry, &name)?, false)
            }
            // Shared memory without a file, in tmpfs, hugetlbfs or ramfs, which never had a place.
            _ => ([b"/", name()?.as_slice()].concat(), true),
        };
        Ok(Some(GuestPath {
            text,
            deleted,
            reach: Reach::Pseudo,
        }))
    }

    fn numbered(&self, dentry: &Structure<'_>, kind: &[u8]) -> Result<Vec<u8>, StructureError> {
        let inode = dentry.follow_always(self.inode, "inode")?;
        let number = format!(":[{}]", inode.u64(self.number)?);
        Ok([kind, number.as_bytes()].concat())
    }

    /// Returns the kind of a namespace.
    fn namespace(&self, dentry: &Structure<'_>) -> Result<Vec<u8>, StructureError> {
        let Some((operations, name)) = self.namespace else {
            return Ok(b"namespace".to_vec());
        };
        let inode = dentry.follow_always(self.inode, "inode")?;
        let namespace = inode.follow_always(self.private, "ns_common")?;
        let operations = namespace.follow_always(operations, "proc_ns_operations")?;
        let name = operations.string(name, "proc_ns_operations.name", MAX_KIND)?;
        Ok(name.unwrap_or_default())
    }

    fn buffer(&self, dentry: &Structure<'_>, name: &[u8]) -> Result<Vec<u8>, StructureError> {
        let mut own = None;
        if let Some((place, data)) = self.buffer
            && let Some(buffer) = dentry.follow(data, "dma_buf")?
        {
            own = buffer.string(place, "dma_buf.name", MAX_KIND)?;
        }
        let own = own.unwrap_or_default();
        Ok([b"/", name, b":", own.as_slice()].concat())
    }
}
