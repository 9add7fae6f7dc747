//! FAT12, FAT16 and FAT32 with long names, for reading (Microsoft's FAT specification 1.03).

use super::{FsError, Item, MOST_COMPONENTS, MOST_DIRECTORY, MOST_NAMES, components};
use crate::bytes::{array, byte, short, text, word};
use crate::disk::{ReadAt as _, Window};
use crate::file::{File, Run, Runs};

/// The bytes of a folder's record.
const RECORD: usize = 32;
/// Records of the allocation table are read in pieces of this size.
const PIECE: usize = 4096;

const LONG_NAME: u8 = 0x0f;
const VOLUME_LABEL: u8 = 0x08;
const FOLDER: u8 = 0x10;

const DAMAGED: FsError = FsError::Damaged("the places of a file's clusters");

/// The bits of an entry of the allocation table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    Twelve,
    Sixteen,
    ThirtyTwo,
}

/// A FAT file system.
#[derive(Debug, Clone)]
pub(crate) struct Fat {
    window: Window,
    width: Width,
    cluster: u32,
    clusters: u32,
    /// The offset and the length of the allocation table.
    table: (u64, u64),
    /// The offset and the length of the root folder, before FAT32.
    root: (u64, u64),
    /// The first cluster of the root folder, of FAT32.
    root_cluster: u32,
    /// The offset of cluster 2.
    data: u64,
    /// The serial number, as `/dev/disk/by-uuid` has it.
    pub uuid: String,
    pub label: Option<String>,
}

/// A name of a folder, and where it leads.
struct Record {
    name: String,
    /// The name of eight characters and three.
    short: String,
    is_folder: bool,
    first: u32,
    size: u32,
}

impl Fat {
    /// Reads the boot sector; `None` if it is not one of a FAT.
    pub(crate) fn open_at(window: Window) -> Option<Result<Self, FsError>> {
        let sector: [u8; 512] = window.bytes(0).ok()?;
        crate::table::is_fat(&sector).then_some(())?;
        Some(Self::of_boot_sector(window, &sector).ok_or(FsError::Damaged("its boot sector")))
    }

    fn of_boot_sector(window: Window, boot: &[u8]) -> Option<Self> {
        let sector = u64::from(short(boot, 11)?);
        let per_cluster = u64::from(byte(boot, 13)?);
        let reserved = u64::from(short(boot, 14)?);
        let tables = u64::from(byte(boot, 16).filter(|count| *count > 0)?);
        let root_bytes = u64::from(short(boot, 17)?) * RECORD as u64;
        let sectors = match short(boot, 19)? {
            0 => u64::from(word(boot, 32)?),
            count => u64::from(count),
        };
        let is_32 = short(boot, 22)? == 0;
        let table_sectors = match short(boot, 22)? {
            0 => u64::from(word(boot, 36)?),
            count => u64::from(count),
        };
        // All are products of 32 bits and less.
        let root = (reserved + tables * table_sectors) * sector;
        let data = root + root_bytes.div_ceil(sector) * sector;
        let left = (sectors * sector).checked_sub(data)?;
        let cluster = sector * per_cluster;
        let clusters = u32::try_from(left / cluster).ok()?;
        let width = match clusters {
            _ if is_32 => Width::ThirtyTwo,
            ..4085 => Width::Twelve,
            _ => Width::Sixteen,
        };
        let (serial, label) = match is_32 {
            true => (word(boot, 67)?, boot.get(71..82)?),
            false => (word(boot, 39)?, boot.get(43..54)?),
        };
        Some(Self {
            window,
            width,
            cluster: u32::try_from(cluster).ok()?,
            clusters,
            table: (reserved * sector, table_sectors * sector),
            root: (root, root_bytes),
            root_cluster: if is_32 { word(boot, 44)? } else { 0 },
            data,
            uuid: format!("{:04X}-{:04X}", serial >> 16, serial & 0xffff),
            label: text(label).filter(|label| label != "NO NAME"),
        })
    }

    /// Opens a file; case does not matter.
    pub(crate) fn open(&self, path: &str) -> Result<File, FsError> {
        let record = self.find(path)?.ok_or(FsError::NotAFile)?;
        match record.is_folder {
            true => Err(FsError::NotAFile),
            false => self.chain(record.first, Some(record.size.into())),
        }
    }

    /// Returns the names of a folder.
    pub(crate) fn list(&self, path: &str) -> Result<Vec<Item>, FsError> {
        let record = self.find(path)?;
        let records = self.records(record.as_ref())?;
        let items = records.into_iter().map(|record| Item {
            name: record.name,
            is_folder: record.is_folder,
        });
        Ok(items.collect())
    }

    /// Returns the record of a path; `None` for the root folder.
    fn find(&self, path: &str) -> Result<Option<Record>, FsError> {
        let mut left: Vec<&[u8]> = components(path.as_bytes()).collect();
        if left.len() > MOST_COMPONENTS {
            return Err(FsError::TooManyLinks);
        }
        let mut at = None;
        while let Some(wanted) = left.pop() {
            let wanted = String::from_utf8_lossy(wanted).to_lowercase();
            let mut records = self.records(at.as_ref())?.into_iter();
            let found = records.find(|record| {
                record.name.to_lowercase() == wanted || record.short.to_lowercase() == wanted
            });
            at = Some(found.ok_or(FsError::NotFound)?);
        }
        Ok(at)
    }

    /// Reads a folder.
    fn records(&self, folder: Option<&Record>) -> Result<Vec<Record>, FsError> {
        let bytes = match (folder, self.width) {
            (Some(record), _) if !record.is_folder => return Err(FsError::NotAFolder),
            (Some(record), _) => self.folder(record.first)?,
            (None, Width::ThirtyTwo) => self.folder(self.root_cluster)?,
            (None, _) => {
                let length = usize::try_from(self.root.1).map_err(|_| DAMAGED)?;
                self.window.vec(self.root.0, length)?
            }
        };
        let mut found = Vec::new();
        let mut long = LongName::default();
        for raw in bytes.chunks_exact(RECORD) {
            match (byte(raw, 0), byte(raw, 11)) {
                (Some(0), _) => break,
                (Some(0xe5), _) => long = LongName::default(),
                (_, Some(attributes)) if attributes & 0x3f == LONG_NAME => long.add(raw),
                (_, Some(attributes)) if attributes & VOLUME_LABEL != 0 => {
                    long = LongName::default();
                }
                _ => {
                    let long = std::mem::take(&mut long);
                    found.extend(
                        self.record(raw, long)
                            .filter(|record| !matches!(record.short.as_str(), "." | "..")),
                    );
                }
            }
            if found.len() > MOST_NAMES {
                return Err(FsError::Unsupported("a folder with very many names"));
            }
        }
        Ok(found)
    }

    fn record(&self, raw: &[u8], long: LongName) -> Option<Record> {
        let name = raw.get(..11)?;
        let short_name = short_name(name, byte(raw, 12)?);
        let high = match self.width {
            Width::ThirtyTwo => short(raw, 20)?,
            _ => 0,
        };
        Some(Record {
            name: long.finish(name).unwrap_or_else(|| short_name.clone()),
            short: short_name,
            is_folder: byte(raw, 11)? & FOLDER != 0,
            first: u32::from(high) << 16 | u32::from(short(raw, 26)?),
            size: word(raw, 28)?,
        })
    }

    fn folder(&self, first: u32) -> Result<Vec<u8>, FsError> {
        let chain = self.chain(first, None)?;
        let length = usize::try_from(chain.length()).map_err(|_| DAMAGED)?;
        Ok(chain.part(0, length)?)
    }

    /// Follows a chain of clusters: for a file's size, or to its end for a folder.
    fn chain(&self, first: u32, size: Option<u64>) -> Result<File, FsError> {
        let most = size.unwrap_or(MOST_DIRECTORY);
        let cluster = u64::from(self.cluster);
        let mut table = Table {
            fat: self,
            piece: Vec::new(),
            at: None,
        };
        let mut runs = Runs::new();
        let (mut at, mut offset) = (first, 0);
        while offset < most {
            let index = match at.checked_sub(2) {
                // Whole folders end with their chain, files with their size.
                Some(index) if index < self.clusters => u64::from(index),
                _ if size.is_none() => break,
                _ => return Err(DAMAGED),
            };
            let run = Run {
                at: offset,
                from: self.data + index * cluster,
                length: cluster.min(most - offset),
            };
            runs.add(run).ok_or(DAMAGED)?;
            offset += cluster;
            at = table.next(at)?;
        }
        let length = size.unwrap_or(offset.min(most));
        Ok(File::new(self.window.clone(), runs.finish(), length))
    }
}

/// The allocation table, a piece at a time.
struct Table<'a> {
    fat: &'a Fat,
    piece: Vec<u8>,
    at: Option<u64>,
}

impl Table<'_> {
    /// Returns the cluster after one; a number out of range at the end.
    fn next(&mut self, cluster: u32) -> Result<u32, FsError> {
        let cluster = u64::from(cluster);
        Ok(match self.fat.width {
            Width::Twelve => {
                let at = cluster + cluster / 2;
                let pair = u16::from_le_bytes([self.byte(at)?, self.byte(at + 1)?]);
                match cluster % 2 {
                    0 => u32::from(pair & 0xfff),
                    _ => u32::from(pair >> 4),
                }
            }
            Width::Sixteen => {
                let at = cluster * 2;
                u16::from_le_bytes([self.byte(at)?, self.byte(at + 1)?]).into()
            }
            Width::ThirtyTwo => {
                let at = cluster * 4;
                let mut bytes = [0; 4];
                for (byte, at) in bytes.iter_mut().zip(at..) {
                    *byte = self.byte(at)?;
                }
                u32::from_le_bytes(bytes) & 0x0fff_ffff
            }
        })
    }

    fn byte(&mut self, at: u64) -> Result<u8, FsError> {
        let (start, length) = self.fat.table;
        let piece = at - at % PIECE as u64;
        if self.at != Some(piece) {
            let left = length.checked_sub(piece).filter(|left| *left > 0);
            let size = left.ok_or(DAMAGED)?.min(PIECE as u64);
            let size = usize::try_from(size).map_err(|_| DAMAGED)?;
            self.piece = self.fat.window.vec(start + piece, size)?;
            self.at = Some(piece);
        }
        let within = usize::try_from(at - piece).map_err(|_| DAMAGED)?;
        self.piece.get(within).copied().ok_or(DAMAGED)
    }
}

/// A long name: its records stand before the short one, the last part first.
#[derive(Default)]
struct LongName {
    parts: Vec<[u16; 13]>,
    sum: u8,
    next: u8,
}

impl LongName {
    fn add(&mut self, raw: &[u8]) {
        let parsed = (|| {
            let order = byte(raw, 0)?;
            let sum = byte(raw, 13)?;
            let places = (1..11)
                .step_by(2)
                .chain((14..26).step_by(2))
                .chain([28, 30]);
            let mut part = [0xffff; 13];
            for (unit, at) in part.iter_mut().zip(places) {
                *unit = short(raw, at)?;
            }
            Some((order, sum, part))
        })();
        let Some((order, sum, part)) = parsed else {
            return;
        };
        match order & 0x40 {
            0 if order != self.next || sum != self.sum => *self = Self::default(),
            0 => {}
            _ => {
                *self = Self {
                    parts: Vec::new(),
                    sum,
                    next: order & 0x3f,
                }
            }
        }
        if self.next > 0 && self.parts.len() < 20 {
            self.next -= 1;
            self.parts.push(part);
        }
    }

    /// Returns the name, if it is whole and belongs to this short one.
    fn finish(self, short: &[u8]) -> Option<String> {
        let sum = short
            .iter()
            .fold(0_u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
        (self.next == 0 && sum == self.sum && !self.parts.is_empty()).then_some(())?;
        let units = self.parts.into_iter().rev().flatten();
        let units = units.take_while(|unit| !matches!(unit, 0 | 0xffff));
        Some(String::from_utf16_lossy(&units.collect::<Vec<_>>()))
    }
}

/// Returns a name of eight characters and three; its flags say which part is in small letters.
fn short_name(raw: &[u8], flags: u8) -> String {
    let part = |range, small: u8| {
        let bytes: [u8; 11] = array(raw, 0).unwrap_or([b' '; 11]);
        let text = String::from_utf8_lossy(bytes.get(range).unwrap_or_default()).into_owned();
        let text = text.trim_end_matches(' ').to_owned();
        match flags & small {
            0 => text,
            _ => text.to_lowercase(),
        }
    };
    match (part(0..8, 0x08), part(8..11, 0x10)) {
        (base, end) if end.is_empty() => base,
        (base, end) => format!("{base}.{end}"),
    }
}
