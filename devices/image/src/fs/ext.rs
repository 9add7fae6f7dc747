//! ext2, ext3 and ext4, for reading (Linux, `Documentation/filesystems/ext4`).
//!
//! Folders with an index are read as lists: their blocks have that form too. The journal is not
//! replayed, and checksums are not compared, as by GRUB. A file whose blocks are compressed,
//! encrypted or far away is refused.

mod blocks;

use super::{FsError, Item, MOST_COMPONENTS, MOST_DIRECTORY, MOST_NAMES, StoredInode, components};
use crate::bytes::{array, byte, long, short, text, uuid, word};
use crate::disk::{ReadAt as _, Window};
use crate::file::File;

const SUPERBLOCK: u64 = 1024;
const MAGIC: u16 = 0xef53;
/// The root folder's inode.
const ROOT: u32 = 2;
/// The most symbolic links of a path, as Linux has it.
const MOST_LINKS: usize = 40;
/// The most bytes of a symbolic link.
const MOST_LINK: u64 = 4095;

// Features that change how a file system is read (s_feature_incompat).
const COMPRESSION: u32 = 0x1;
const NEEDS_RECOVERY: u32 = 0x4;
const JOURNAL_DEVICE: u32 = 0x8;
const META_GROUPS: u32 = 0x10;
const EXTENTS: u32 = 0x40;
const WIDE: u32 = 0x80;
/// File types in folders, flexible groups, protection of multiple mounts, values in inodes, seeds
/// of checksums, large folders, data in inodes, encryption, names without case.
const HARMLESS: u32 = 0x2 | 0x100 | 0x200 | 0x400 | 0x2000 | 0x4000 | 0x8000 | 0x1_0000 | 0x2_0000;

// Flags of inodes.
const ENCRYPTED: u32 = 0x800;
/// The inode's space is in blocks.
const HUGE: u32 = 0x4_0000;
const HAS_EXTENTS: u32 = 0x8_0000;
const HAS_INLINE_DATA: u32 = 0x1000_0000;

/// An ext file system.
#[derive(Debug, Clone)]
pub(crate) struct Ext {
    window: Window,
    block: u32,
    inode_size: u16,
    inodes: u32,
    inodes_per_group: u32,
    /// The offset of the group descriptors.
    groups: u64,
    group_size: u16,
    /// `ext2`, `ext3` or `ext4`.
    pub name: &'static str,
    pub uuid: String,
    pub label: Option<String>,
    /// The journal has changes that were not yet made: the system did not shut down.
    pub needs_recovery: bool,
}

/// The fields of an inode.
struct Inode {
    mode: u16,
    size: u64,
    flags: u32,
    generation: u32,
    /// Its space, in units of 512 bytes unless a flag says otherwise.
    sectors: u64,
    /// The time of its last change: seconds and nanoseconds.
    changed: (i64, u32),
    has_attribute_block: bool,
    /// The root of its blocks, or a short symbolic link.
    block: [u8; 60],
}

impl Inode {
    fn is_folder(&self) -> bool {
        self.mode & 0xf000 == 0x4000
    }

    fn is_file(&self) -> bool {
        self.mode & 0xf000 == 0x8000
    }

    fn is_link(&self) -> bool {
        self.mode & 0xf000 == 0xa000
    }
}

impl Ext {
    /// Reads the superblock; `None` if there is none.
    pub(crate) fn open_at(window: Window) -> Option<Result<Self, FsError>> {
        let raw = window.vec(SUPERBLOCK, 1024).ok()?;
        (short(&raw, 0x38)? == MAGIC).then_some(())?;
        Some(Self::of_superblock(window, &raw))
    }

    fn of_superblock(window: Window, raw: &[u8]) -> Result<Self, FsError> {
        let damaged = FsError::Damaged("its superblock");
        let features = word(raw, 0x60).unwrap_or_default();
        for (feature, name) in [
            (COMPRESSION, "compression"),
            (JOURNAL_DEVICE, "a device for its journal"),
            (META_GROUPS, "the feature meta_bg"),
        ] {
            if features & feature != 0 {
                return Err(FsError::Unsupported(name));
            }
        }
        if features & !(HARMLESS | NEEDS_RECOVERY | EXTENTS | WIDE) != 0 {
            return Err(FsError::Unsupported("a feature of newer systems"));
        }
        let compatible = word(raw, 0x5c).unwrap_or_default();
        let parsed = (|| {
            let block = 1024_u32.checked_shl(word(raw, 0x18).filter(|log| *log <= 6)?)?;
            let first_block = word(raw, 0x14).filter(|first| *first <= 1)?;
            // Before revision 1, inodes had one size.
            let inode_size = match word(raw, 0x4c)? {
                0 => 128,
                _ => short(raw, 0x58)?,
            };
            let fits =
                inode_size.is_power_of_two() && inode_size >= 128 && u32::from(inode_size) <= block;
            let group_size = match features & WIDE {
                0 => 32,
                _ => short(raw, 0xfe).filter(|size| (64..=1024).contains(size))?,
            };
            fits.then_some(())?;
            Some(Self {
                window,
                block,
                inode_size,
                inodes: word(raw, 0)?,
                inodes_per_group: word(raw, 0x28).filter(|count| *count > 0)?,
                groups: u64::from(first_block + 1) * u64::from(block),
                group_size,
                name: match (features & (EXTENTS | WIDE), compatible & 0x4) {
                    (0, 0) => "ext2",
                    (0, _) => "ext3",
                    _ => "ext4",
                },
                uuid: uuid(array(raw, 0x68)?),
                label: text(raw.get(0x78..0x88)?),
                needs_recovery: features & NEEDS_RECOVERY != 0,
            })
        })();
        parsed.ok_or(damaged)
    }

    /// Opens a regular file.
    pub(crate) fn open(&self, path: &str) -> Result<File, FsError> {
        let inode = self.find(path)?;
        match inode.is_file() {
            true => self.content(&inode),
            false => Err(FsError::NotAFile),
        }
    }

    /// Returns the names of a folder.
    pub(crate) fn list(&self, path: &str) -> Result<Vec<Item>, FsError> {
        let folder = self.find(path)?;
        let mut items = Vec::new();
        self.each_name(&folder, |name, inode, kind| {
            if matches!(name, b"." | b"..") {
                return Ok(false);
            }
            let is_folder = match kind {
                0 => self.inode(inode)?.is_folder(),
                kind => kind == 2,
            };
            if items.len() >= MOST_NAMES {
                return Err(FsError::Unsupported("a folder with very many names"));
            }
            items.push(Item {
                name: String::from_utf8_lossy(name).into_owned(),
                is_folder,
            });
            Ok(false)
        })?;
        Ok(items)
    }

    /// Returns the inode of a path, with symbolic links followed.
    fn find(&self, path: &str) -> Result<Inode, FsError> {
        let mut left: Vec<Vec<u8>> = components(path.as_bytes()).map(<[u8]>::to_vec).collect();
        let mut above = Vec::new();
        let mut at = ROOT;
        let mut inode = self.inode(ROOT)?;
        let (mut steps, mut links) = (0, 0);
        while let Some(name) = left.pop() {
            steps += 1;
            if steps > MOST_COMPONENTS || left.len() > MOST_COMPONENTS {
                return Err(FsError::TooManyLinks);
            }
            if name == b".." {
                at = above.pop().unwrap_or(ROOT);
                inode = self.inode(at)?;
                continue;
            }
            let number = self.child(&inode, &name)?;
            let child = self.inode(number)?;
            if !child.is_link() {
                above.push(at);
                (at, inode) = (number, child);
                continue;
            }
            links += 1;
            if links > MOST_LINKS {
                return Err(FsError::TooManyLinks);
            }
            let target = self.link(&child)?;
            if target.starts_with(b"/") {
                above.clear();
                at = ROOT;
                inode = self.inode(ROOT)?;
            }
            left.extend(components(&target).map(<[u8]>::to_vec));
        }
        Ok(inode)
    }

    /// Returns the target of a symbolic link.
    fn link(&self, inode: &Inode) -> Result<Vec<u8>, FsError> {
        if inode.size < 60 {
            let length = usize::try_from(inode.size).unwrap_or_default();
            return Ok(inode.block.get(..length).unwrap_or_default().to_vec());
        }
        let target = self.content(inode)?.read_all(MOST_LINK)?;
        target.ok_or(FsError::Damaged("a symbolic link"))
    }

    /// Returns the inode of a name in a folder.
    fn child(&self, folder: &Inode, wanted: &[u8]) -> Result<u32, FsError> {
        let mut found = None;
        self.each_name(folder, |name, inode, _| {
            if name == wanted {
                found = Some(inode);
            }
            Ok(found.is_some())
        })?;
        found.ok_or(FsError::NotFound)
    }

    /// Calls a function for each name of a folder, its inode and its type (0 if the folder does not
    /// say), until that returns true.
    fn each_name(
        &self,
        folder: &Inode,
        mut visit: impl FnMut(&[u8], u32, u8) -> Result<bool, FsError>,
    ) -> Result<(), FsError> {
        if !folder.is_folder() {
            return Err(FsError::NotAFolder);
        }
        let file = self.content(folder)?;
        if file.length() > MOST_DIRECTORY {
            return Err(FsError::Damaged("the size of a folder"));
        }
        let block = u64::from(self.block);
        let mut offset = 0;
        while offset < file.length() {
            let length = block.min(file.length() - offset);
            let bytes = file.part(offset, usize::try_from(length).unwrap_or_default())?;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let Some((name, inode, kind, next)) = record(rest) else {
                    return Err(FsError::Damaged("a folder"));
                };
                if inode != 0 && visit(name, inode, kind)? {
                    return Ok(());
                }
                rest = next;
            }
            offset += block;
        }
        Ok(())
    }

    fn inode(&self, number: u32) -> Result<Inode, FsError> {
        let damaged = || FsError::Damaged("the number of an inode");
        let index = number
            .checked_sub(1)
            .filter(|_| number <= self.inodes)
            .ok_or_else(damaged)?;
        let group = u64::from(index / self.inodes_per_group);
        let within = u64::from(index % self.inodes_per_group);
        let at = self.groups + group * u64::from(self.group_size);
        let group = self.window.vec(at, usize::from(self.group_size))?;
        let low = word(&group, 0x8).ok_or_else(damaged)?;
        let high = word(&group, 0x28).unwrap_or_default();
        let table = u64::from(high) << 32 | u64::from(low);
        let at = table
            .checked_mul(self.block.into())
            .and_then(|at| at.checked_add(within * u64::from(self.inode_size)))
            .ok_or_else(damaged)?;
        let raw = self.window.vec(at, usize::from(self.inode_size))?;
        let parsed = (|| {
            let size = long(
                &[array::<4>(&raw, 0x4)?, array::<4>(&raw, 0x6c)?].concat(),
                0,
            )?;
            Some(Inode {
                mode: short(&raw, 0)?,
                size,
                flags: word(&raw, 0x20)?,
                generation: word(&raw, 0x64)?,
                sectors: u64::from(short(&raw, 0x74)?) << 32 | u64::from(word(&raw, 0x1c)?),
                changed: changed(&raw)?,
                has_attribute_block: word(&raw, 0x68)? != 0 || short(&raw, 0x76)? != 0,
                block: array(&raw, 0x28)?,
            })
        })();
        parsed.ok_or_else(damaged)
    }

    /// Returns the places of an inode's bytes.
    fn content(&self, inode: &Inode) -> Result<File, FsError> {
        Ok(self.content_and_blocks(inode)?.0)
    }

    /// Returns the places of an inode's bytes, and the number of blocks that they and their tree
    /// take; `None` for a map of blocks.
    fn content_and_blocks(&self, inode: &Inode) -> Result<(File, Option<u64>), FsError> {
        if inode.flags & ENCRYPTED != 0 {
            return Err(FsError::Unsupported("encryption of a file"));
        }
        if inode.flags & HAS_INLINE_DATA != 0 {
            return Err(FsError::Unsupported("data within an inode"));
        }
        let (window, block, root) = (&self.window, self.block, &inode.block);
        let (runs, blocks) = match inode.flags & HAS_EXTENTS {
            0 => (blocks::mapped(window, block, root, inode.size)?, None),
            _ => {
                let (runs, blocks) = blocks::extents(window, block, root, inode.size)?;
                (runs, Some(blocks))
            }
        };
        Ok((File::new(window.clone(), runs, inode.size), blocks))
    }

    /// Returns the file of an inode that a running system has in memory, or `None` if the disk has
    /// another one, or not yet its newest state.
    pub(crate) fn stored(&self, wanted: &StoredInode) -> Result<Option<File>, FsError> {
        if wanted.file_system.is_some_and(|id| uuid(id) != self.uuid) {
            return Ok(None);
        }
        let Ok(number) = u32::try_from(wanted.number) else {
            return Ok(None);
        };
        let inode = self.inode(number)?;
        let per_block = u64::from(self.block / 512);
        let sectors = match inode.flags & HUGE {
            0 => Some(inode.sectors),
            _ => inode.sectors.checked_mul(per_block),
        };
        let is_same = inode.is_file()
            && inode.generation == wanted.generation
            && inode.size == wanted.size
            && inode.changed == wanted.changed
            && sectors == Some(wanted.sectors);
        if !is_same {
            return Ok(None);
        }
        let (file, blocks) = self.content_and_blocks(&inode)?;
        // The nodes of its tree may be older than the inode.
        let counted = blocks.map(|blocks| blocks.saturating_add(inode.has_attribute_block.into()));
        let is_whole = counted.is_none_or(|counted| counted.checked_mul(per_block) == sectors);
        Ok(is_whole.then_some(file))
    }
}

/// Returns the time of an inode's last change: 32 bits of seconds, and behind the first 128 bytes
/// two more with the nanoseconds, if it has them.
fn changed(raw: &[u8]) -> Option<(i64, u32)> {
    let seconds = i64::from(word(raw, 0xc)?.cast_signed());
    let extra = match short(raw, 0x80) {
        // `i_extra_isize` covers the field.
        Some(size) if size >= 8 => word(raw, 0x84)?,
        _ => return Some((seconds, 0)),
    };
    Some((seconds + (i64::from(extra & 3) << 32), extra >> 2))
}

/// Splits the first record off a block of a folder: its name, inode and type, and the rest.
fn record(bytes: &[u8]) -> Option<(&[u8], u32, u8, &[u8])> {
    let length = match usize::from(short(bytes, 4)?) {
        // A block of 64 KiB with one record.
        0 | 0xffff => bytes.len(),
        length => length,
    };
    let name = bytes.get(8..8 + usize::from(byte(bytes, 6)?));
    let kind = byte(bytes, 7)?;
    let inode = word(bytes, 0)?;
    let rest = bytes.get(length..).filter(|_| length >= 8)?;
    match inode {
        // The checksum of a block, or a name that was removed.
        0 => Some((&[], 0, 0, rest)),
        _ => Some((name?, inode, kind, rest)),
    }
}
