//! The partition table of a disk: GPT, MBR, or none.
//!
//! Sizes and places that a table states are cut off at the end of the disk. A disk without a table
//! is one volume.

mod gpt;
mod mbr;

use std::fmt;
use std::io;

use crate::bytes::{byte, has, short};
use crate::disk::Window;

/// The most partitions that are looked at.
pub(crate) const MOST_PARTITIONS: usize = 128;

/// The kind of a disk's partition table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableKind {
    /// A GUID partition table (UEFI 2.10, 5.3).
    Gpt,
    /// A GUID partition table whose copy at the end of the disk was read: the first is damaged.
    GptBackup,
    /// A master boot record, with logical partitions.
    Mbr,
    /// No table: the disk is one file system.
    None,
}

impl fmt::Display for TableKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpt => "GPT",
            Self::GptBackup => "GPT (its backup; the first is damaged)",
            Self::Mbr => "MBR",
            Self::None => "no partition table",
        })
    }
}

/// A partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The number that Linux gives it, from 1.
    pub number: u32,
    /// The offset of its first byte.
    pub start: u64,
    /// The number of its bytes.
    pub length: u64,
    /// The type, as a GUID or as two hexadecimal digits.
    pub type_id: String,
    /// The name, of a GPT.
    pub name: Option<String>,
    /// The PARTUUID, as Linux writes it.
    pub uuid: String,
}

impl Partition {
    /// Returns a name for the well-known types.
    pub fn type_name(&self) -> Option<&'static str> {
        TYPES
            .iter()
            .find(|(id, _)| *id == self.type_id)
            .map(|(_, name)| *name)
    }
}

const TYPES: [(&str, &str); 15] = [
    ("c12a7328-f81f-11d2-ba4b-00a0c93ec93b", "EFI system"),
    ("bc13c2ff-59e6-4262-a352-b275fd6f7172", "boot loader"),
    ("21686148-6449-6e6f-744e-656564454649", "BIOS boot"),
    ("0fc63daf-8483-4772-8e79-3d69d8477de4", "Linux"),
    ("4f68bce3-e8cd-4db1-96e7-fbcaf984b709", "Linux root"),
    ("8484680c-9521-48c6-9c11-b0720656f69e", "Linux /usr"),
    ("933ac7e1-2eb4-4f13-b844-0e14e2aef915", "Linux home"),
    ("0657fd6d-a4ab-43c4-84e5-0933c84b4f4f", "Linux swap"),
    ("e6d6d379-f507-44c2-a23c-238f2a3df928", "Linux LVM"),
    ("83", "Linux"),
    ("82", "Linux swap"),
    ("8e", "Linux LVM"),
    ("ef", "EFI system"),
    ("0c", "FAT32"),
    ("07", "NTFS or exFAT"),
];

/// Reads the table of a disk.
///
/// # Errors
/// The disk cannot be read.
pub(crate) fn read(disk: &Window) -> io::Result<(TableKind, Vec<Partition>)> {
    let none = (TableKind::None, Vec::new());
    let mut sector = vec![0; 512];
    match disk.length() {
        length if length < 512 => return Ok(none),
        _ => disk.read(&mut sector, 0)?,
    }
    if !has(&sector, 510, &[0x55, 0xaa]) || is_fat(&sector) {
        return Ok(none);
    }
    if mbr::is_protective(&sector)
        && let Some(found) = gpt::read(disk)
    {
        return Ok(found);
    }
    Ok(match mbr::read(disk, &sector) {
        partitions if partitions.is_empty() => none,
        partitions => (TableKind::Mbr, partitions),
    })
}

/// Returns whether a sector that ends as a boot sector does is the first one of a FAT.
pub(crate) fn is_fat(sector: &[u8]) -> bool {
    let named = has(sector, 54, b"FAT") || has(sector, 82, b"FAT");
    let sized = short(sector, 11).is_some_and(|size| matches!(size, 512 | 1024 | 2048 | 4096));
    named && sized && byte(sector, 13).is_some_and(u8::is_power_of_two)
}

#[cfg(test)]
mod tests;
