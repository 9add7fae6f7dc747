//! The inode of a file on a disk, as the kernel has it in memory: all by which the same state of
//! the file is found on the disk.

use super::btf::Btf;
use super::layout::{LayoutError, first_offset, offset};
use super::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// The magic number of ext2, ext3 and ext4 (include/uapi/linux/magic.h).
const EXT: u64 = 0xef53;
/// The bits of `i_ctime_nsec` that are nanoseconds. Since Linux 6.13 the last one says that the
/// time was asked for (`I_CTIME_QUERIED`).
const NANOSECONDS: u32 = 0x3fff_ffff;

/// An inode of ext2, ext3 or ext4 in the kernel's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredInode {
    /// The UUID of the file system; `None` if the kernel does not keep it, as with ext2.
    pub file_system: Option<[u8; 16]>,
    /// The inode's number.
    pub number: u64,
    /// The inode's generation.
    pub generation: u32,
    /// The file's length in bytes.
    pub size: u64,
    /// The space that the file takes, in units of 512 bytes.
    pub sectors: u64,
    /// The time of the inode's last change: seconds since 1970, and nanoseconds.
    pub changed: (i64, u32),
}

/// The location of these values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredInodeLayout {
    /// Offsets in `inode`.
    superblock: u64,
    number: u64,
    generation: u64,
    size: u64,
    sectors: u64,
    seconds: u64,
    nanoseconds: u64,
    /// Offsets in `super_block`.
    magic: u64,
    uuid: u64,
}

impl StoredInodeLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        // One structure until Linux 6.10.
        let time = first_offset(btf, &["inode.i_ctime", "inode.__i_ctime"], 16);
        let (seconds, nanoseconds) = match time {
            Ok(time) => (
                time + offset(btf, "timespec64.tv_sec", 8)?,
                time + offset(btf, "timespec64.tv_nsec", 8)?,
            ),
            Err(_) => (
                offset(btf, "inode.i_ctime_sec", 8)?,
                offset(btf, "inode.i_ctime_nsec", 4)?,
            ),
        };
        Ok(Self {
            superblock: offset(btf, "inode.i_sb", 8)?,
            number: offset(btf, "inode.i_ino", 8)?,
            generation: offset(btf, "inode.i_generation", 4)?,
            size: offset(btf, "inode.i_size", 8)?,
            sectors: offset(btf, "inode.i_blocks", 8)?,
            seconds,
            nanoseconds,
            magic: offset(btf, "super_block.s_magic", 8)?,
            uuid: offset(btf, "super_block.s_uuid", 16)?,
        })
    }

    /// Reads an inode; `None` if it is of another file system.
    ///
    /// # Errors
    /// If it, or its super block, cannot be read.
    pub fn read(
        &self,
        view: MemoryView<'_>,
        inode: Gva,
    ) -> Result<Option<StoredInode>, StructureError> {
        let inode = Structure::at(view, "inode", inode)?;
        let superblock = inode.follow_always(self.superblock, "super_block")?;
        if superblock.u64(self.magic)? != EXT {
            return Ok(None);
        }
        let uuid: [u8; 16] = superblock.array(self.uuid)?;
        Ok(Some(StoredInode {
            file_system: (uuid != [0; 16]).then_some(uuid),
            number: inode.u64(self.number)?,
            generation: inode.u32(self.generation)?,
            size: inode.u64(self.size)?,
            sectors: inode.u64(self.sectors)?,
            changed: (
                inode.u64(self.seconds)?.cast_signed(),
                inode.u32(self.nanoseconds)? & NANOSECONDS,
            ),
        }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::test_kernel::{BASE, HALF, Member, Struct, TestKernel, WORD, types};

    const INODE: u64 = BASE + 0x100;
    const SUPERBLOCK: u64 = BASE + 0x400;

    fn layout(is_newer: bool) -> StoredInodeLayout {
        let mut inode = vec![
            ("i_sb", 0x28, WORD),
            ("i_ino", 0x40, WORD),
            ("i_size", 0x50, WORD),
            ("i_blocks", 0x90, WORD),
            ("i_generation", 0x98, HALF),
        ];
        match is_newer {
            false => inode.push(("__i_ctime", 0x70, Member::Of("timespec64"))),
            true => inode.extend([("i_ctime_sec", 0x70, WORD), ("i_ctime_nsec", 0x78, HALF)]),
        }
        let structs: &[Struct<'_>] = &[
            ("timespec64", &[("tv_sec", 0, WORD), ("tv_nsec", 8, WORD)]),
            (
                "super_block",
                &[("s_magic", 0x60, WORD), ("s_uuid", 0x80, Member::Bytes(16))],
            ),
            ("inode", &inode),
        ];
        StoredInodeLayout::new(&types(structs)).unwrap()
    }

    #[test]
    fn an_inode_is_read_with_its_time_in_either_form() {
        for is_newer in [false, true] {
            let layout = layout(is_newer);
            let mut kernel = TestKernel::default();
            kernel.put_all(&[
                (INODE + 0x28, SUPERBLOCK, 8),
                (INODE + 0x40, 12, 8),
                (INODE + 0x50, 5000, 8),
                (INODE + 0x70, 1_700_000_000, 8),
                (INODE + 0x78, 999_999_999, 4),
                (INODE + 0x90, 16, 8),
                (INODE + 0x98, 77, 4),
                (SUPERBLOCK + 0x60, EXT, 8),
            ]);
            let expected = StoredInode {
                file_system: None,
                number: 12,
                generation: 77,
                size: 5000,
                sectors: 16,
                changed: (1_700_000_000, 999_999_999),
            };
            let read =
                |kernel: &TestKernel| kernel.look(|view| layout.read(view, Gva(INODE)).unwrap());
            assert_eq!(read(&kernel), Some(expected));
            // The time was asked for, and the file system has a name.
            kernel.put_all(&[
                (INODE + 0x78, 999_999_999 | 1 << 31, 4),
                (SUPERBLOCK + 0x80, 0x0807_0605_0403_0201, 8),
            ]);
            let uuid = [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
            let file_system = Some(uuid);
            let named = StoredInode {
                file_system,
                ..expected
            };
            assert_eq!(read(&kernel), Some(named));
            kernel.put_all(&[(SUPERBLOCK + 0x60, 0x0102_1994, 8)]);
            assert_eq!(read(&kernel), None);
        }
    }
}
