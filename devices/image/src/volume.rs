//! The contents of a partition, or of a disk without partitions.
//!
//! File systems are told apart by their magic numbers. Those that are not read have a name too, so
//! that a user learns why nothing was found on them.

use std::fmt;

use crate::bytes::{array, has, text, uuid};
use crate::disk::Window;
use crate::fs::ext::Ext;
use crate::fs::fat::Fat;
use crate::fs::{FileSystem, FsError};
use crate::table::Partition;

/// The most bytes of a file of configuration.
pub(crate) const MOST_TEXT: u64 = 1 << 20;

/// The kind of a volume's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// ext2, ext3 or ext4, which are read.
    Ext(&'static str),
    /// A FAT, which is read.
    Fat,
    /// Something that is known and not read.
    Other(&'static str),
    /// Nothing that is known.
    Unknown,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ext(name) | Self::Other(name) => name,
            Self::Fat => "FAT",
            Self::Unknown => "unknown",
        })
    }
}

/// A partition, or a whole disk, and what is on it.
#[derive(Debug, Clone)]
pub struct Volume {
    /// The partition; `None` for a disk without a table.
    pub partition: Option<Partition>,
    /// The kind of its contents.
    pub kind: Kind,
    /// The UUID of the file system, as Linux writes it.
    pub uuid: Option<String>,
    /// The file system's label.
    pub label: Option<String>,
    /// The system did not shut down: the newest changes are in a journal, which is not read.
    pub needs_recovery: bool,
    /// The reason why a file system of a known kind is not read.
    pub trouble: Option<String>,
    pub(crate) fs: Option<FileSystem>,
}

/// Names by magic: the offset, the bytes, and the place of a UUID if there is a simple one.
const MAGICS: [(usize, &[u8], &str, Option<usize>); 13] = [
    (0x10040, b"_BHRfS_M", "btrfs", Some(0x10020)),
    (0, b"XFSB", "xfs", Some(32)),
    (0, b"LUKS\xba\xbe", "LUKS", None),
    (0, b"hsqs", "squashfs", None),
    (0x8001, b"CD001", "ISO 9660", None),
    (1024, b"\xe2\xe1\xf5\xe0", "EROFS", Some(1024 + 48)),
    (1024, b"\x10\x20\xf5\xf2", "F2FS", Some(1024 + 108)),
    (4086, b"SWAPSPACE2", "swap", Some(1036)),
    (3, b"NTFS    ", "NTFS", None),
    (3, b"EXFAT   ", "exFAT", None),
    (0, b"LABELONE", "LVM", None),
    (512, b"LABELONE", "LVM", None),
    (1024, b"LABELONE", "LVM", None),
];

impl Volume {
    /// Looks at a volume.
    pub(crate) fn of(window: &Window, partition: Option<Partition>) -> Self {
        let mut volume = Self {
            partition,
            kind: Kind::Unknown,
            uuid: None,
            label: None,
            needs_recovery: false,
            trouble: None,
            fs: None,
        };
        let length = usize::try_from(window.length().min(0x11000)).unwrap_or_default();
        let Ok(start) = window.vec(0, length) else {
            return volume;
        };
        let magic = MAGICS
            .iter()
            .find(|(at, magic, ..)| has(&start, *at, magic));
        if let Some((_, _, name, place)) = magic {
            volume.kind = Kind::Other(name);
            volume.uuid = place.and_then(|at| array(&start, at)).map(uuid);
            if *name == "swap" {
                volume.label = start.get(1052..1068).and_then(text);
            }
            return volume;
        }
        if let Some(ext) = Ext::open_at(window.clone()) {
            volume.kind = Kind::Ext("ext4");
            volume.take(ext, |volume, ext| {
                volume.kind = Kind::Ext(ext.name);
                (volume.uuid, volume.label) = (Some(ext.uuid.clone()), ext.label.clone());
                volume.needs_recovery = ext.needs_recovery;
                FileSystem::Ext(ext)
            });
        } else if let Some(fat) = Fat::open_at(window.clone()) {
            volume.kind = Kind::Fat;
            volume.take(fat, |volume, fat| {
                (volume.uuid, volume.label) = (Some(fat.uuid.clone()), fat.label.clone());
                FileSystem::Fat(fat)
            });
        }
        volume
    }

    fn take<T>(
        &mut self,
        found: Result<T, FsError>,
        keep: impl FnOnce(&mut Self, T) -> FileSystem,
    ) {
        match found {
            Ok(found) => self.fs = Some(keep(self, found)),
            Err(error) => self.trouble = Some(error.to_string()),
        }
    }

    /// Returns whether files of this volume can be read.
    pub fn is_read(&self) -> bool {
        self.fs.is_some()
    }

    /// Returns the number of the partition, `None` for a whole disk.
    pub fn number(&self) -> Option<u32> {
        self.partition.as_ref().map(|part| part.number)
    }

    /// Returns a name for messages: `partition 2`, or `the disk`.
    pub fn name(&self) -> String {
        match self.number() {
            Some(number) => format!("partition {number}"),
            None => "the disk".to_owned(),
        }
    }

    /// Reads a small file of text, if there is one.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        self.fs.as_ref()?.text(path, MOST_TEXT).ok()
    }

    /// Returns the names of the regular files of a folder; none if there is no such folder.
    pub(crate) fn files(&self, path: &str) -> Vec<String> {
        self.names(path, false)
    }

    /// Returns the names of the folders in a folder.
    pub(crate) fn folders(&self, path: &str) -> Vec<String> {
        self.names(path, true)
    }

    fn names(&self, path: &str, folders: bool) -> Vec<String> {
        let items = self.fs.as_ref().and_then(|fs| fs.list(path).ok());
        let items = items.unwrap_or_default().into_iter();
        items
            .filter(|item| item.is_folder == folders)
            .map(|item| item.name)
            .collect()
    }

    /// Returns whether there is a regular file of this name.
    pub(crate) fn has_file(&self, path: &str) -> bool {
        self.fs.as_ref().is_some_and(|fs| fs.has_file(path))
    }
}
