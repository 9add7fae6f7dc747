//! GUID partition tables (UEFI 2.10, 5.3).
//!
//! Not by a crate: `gpt` asserts the size of entries and allocates what a header states.

use super::{MOST_PARTITIONS, Partition, TableKind};
use crate::bytes::{array, guid, has, long, short, word};
use crate::disk::Window;

/// The most bytes of a table's entries; the usual ones have 16 KiB.
const MOST_BYTES: u64 = 1 << 20;
/// The bytes of a header that are defined.
const HEADER: usize = 92;

/// Reads the table, or its backup at the end of the disk; `None` if neither is sound.
pub(super) fn read(disk: &Window) -> Option<(TableKind, Vec<Partition>)> {
    for sector in [512, 4096] {
        if let Some(partitions) = table(disk, sector, sector) {
            return Some((TableKind::Gpt, partitions));
        }
    }
    for sector in [512, 4096] {
        let last = disk.length().checked_sub(sector)? / sector;
        if let Some(partitions) = table(disk, sector, last.checked_mul(sector)?) {
            return Some((TableKind::GptBackup, partitions));
        }
    }
    None
}

/// Reads the table whose header is at an offset.
fn table(disk: &Window, sector: u64, at: u64) -> Option<Vec<Partition>> {
    let mut header = disk.vec(at, 512).ok()?;
    has(&header, 0, b"EFI PART").then_some(())?;
    let size = usize::try_from(word(&header, 12)?).ok()?;
    let sum = word(&header, 16)?;
    header.get_mut(16..20)?.fill(0);
    let covered = header.get(..size).filter(|_| size >= HEADER)?;
    (crc32fast::hash(covered) == sum).then_some(())?;
    (long(&header, 24)?.checked_mul(sector)? == at).then_some(())?;

    let (count, entry) = (word(&header, 80)?, word(&header, 84)?);
    (entry >= 128 && entry % 8 == 0).then_some(())?;
    let length = u64::from(count).checked_mul(u64::from(entry))?;
    (length > 0 && length <= MOST_BYTES).then_some(())?;
    let first = long(&header, 72)?.checked_mul(sector)?;
    let entries = disk.vec(first, usize::try_from(length).ok()?).ok()?;
    (crc32fast::hash(&entries) == word(&header, 88)?).then_some(())?;

    let entries = entries.chunks_exact(usize::try_from(entry).ok()?);
    let found = (1_u32..)
        .zip(entries)
        .filter_map(|(number, entry)| partition(disk, sector, number, entry));
    Some(found.take(MOST_PARTITIONS).collect())
}

fn partition(disk: &Window, sector: u64, number: u32, entry: &[u8]) -> Option<Partition> {
    let kind = array::<16>(entry, 0).filter(|kind| *kind != [0; 16])?;
    let (first, last) = (long(entry, 32)?, long(entry, 40)?);
    let start = first.checked_mul(sector)?;
    let end = last.checked_add(1)?.checked_mul(sector)?;
    let part = disk.part(start, end.checked_sub(start)?)?;
    let name = (0..36).map_while(|at| short(entry, 56 + 2 * at).filter(|unit| *unit != 0));
    let name = String::from_utf16_lossy(&name.collect::<Vec<_>>());
    Some(Partition {
        number,
        start,
        length: part.length(),
        type_id: guid(kind),
        name: (!name.is_empty()).then_some(name),
        uuid: guid(array(entry, 16)?),
    })
}
