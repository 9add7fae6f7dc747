//! Master boot records, with the chain of logical partitions.

use super::{MOST_PARTITIONS, Partition};
use crate::bytes::{byte, has, word};
use crate::disk::Window;

const SECTOR: u64 = 512;
const ENTRIES: usize = 446;
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
const PROTECTIVE: u8 = 0xee;

/// One of the four entries of a record, in sectors.
struct Entry {
    kind: u8,
    first: u64,
    count: u64,
}

fn entry(record: &[u8], index: usize) -> Option<Entry> {
    let at = ENTRIES + 16 * index;
    // Anything else is a boot sector's code.
    byte(record, at).filter(|status| matches!(status, 0 | 0x80))?;
    let entry = Entry {
        kind: byte(record, at + 4)?,
        first: word(record, at + 8)?.into(),
        count: word(record, at + 12)?.into(),
    };
    (entry.kind != 0 && entry.count > 0).then_some(entry)
}

/// Returns whether a record stands before a GPT.
pub(super) fn is_protective(record: &[u8]) -> bool {
    (0..4).any(|index| entry(record, index).is_some_and(|entry| entry.kind == PROTECTIVE))
}

/// Returns the partitions of a record, extended ones replaced by those in them.
pub(super) fn read(disk: &Window, record: &[u8]) -> Vec<Partition> {
    let signature = word(record, 440).unwrap_or_default();
    let mut found = Vec::new();
    let mut extended = None;
    for (number, index) in (1..).zip(0..4) {
        match entry(record, index) {
            Some(entry) if EXTENDED.contains(&entry.kind) => {
                extended = extended.or(Some(entry.first));
            }
            Some(entry) if entry.first > 0 && entry.kind != PROTECTIVE => {
                found.extend(partition(disk, signature, number, entry.first, &entry));
            }
            _ => {}
        }
    }
    if let Some(start) = extended {
        logical(disk, signature, start, &mut found);
    }
    found
}

/// Adds the logical partitions: each has a record of its own, with the place of the next one.
fn logical(disk: &Window, signature: u32, start: u64, found: &mut Vec<Partition>) {
    let mut at = start;
    for number in 5.. {
        // A chain that goes in a circle ends here.
        if found.len() >= MOST_PARTITIONS || number as usize > MOST_PARTITIONS {
            return;
        }
        let record = at
            .checked_mul(SECTOR)
            .and_then(|at| disk.bytes::<512>(at).ok());
        let Some(record) = record.filter(|record| has(record, 510, &[0x55, 0xaa])) else {
            return;
        };
        if let Some(entry) = entry(&record, 0) {
            let first = at.saturating_add(entry.first);
            found.extend(partition(disk, signature, number, first, &entry));
        }
        match entry(&record, 1) {
            Some(next) if EXTENDED.contains(&next.kind) => at = start.saturating_add(next.first),
            _ => return,
        }
    }
}

fn partition(
    disk: &Window,
    signature: u32,
    number: u32,
    first: u64,
    entry: &Entry,
) -> Option<Partition> {
    let start = first.checked_mul(SECTOR)?;
    let part = disk.part(start, entry.count.checked_mul(SECTOR)?)?;
    Some(Partition {
        number,
        start,
        length: part.length(),
        type_id: format!("{:02x}", entry.kind),
        name: None,
        uuid: format!("{signature:08x}-{number:02x}"),
    })
}
