//! The places of a guest's memory, as QEMU's monitor for people tells them.

use std::ops::Range;

/// The largest number of pieces that are read.
const MOST_PIECES: usize = 1024;

/// The reason that the places are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// There is no memory in the list.
    #[error("QEMU lists no memory of the guest (info mtree -f): it says {said:?}")]
    NoMemory {
        /// The beginning of its list.
        said: String,
    },
    /// An address of the host is missing.
    #[error("QEMU does not tell the place of the guest's memory (gpa2hva): it says {said:?}")]
    NoPlace {
        /// Its line.
        said: String,
    },
}

/// A piece of the guest's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// The guest-physical addresses.
    pub(super) range: Range<u64>,
    /// The name of QEMU's region that it is of.
    pub(super) region: String,
    /// Its first byte in the region.
    pub(super) offset: u64,
}

/// Returns the memory in a list of `info mtree -f`: the first view that the system has. Its lines
/// are `FIRST-LAST (prio N, ram): REGION @OFFSET`.
///
/// # Errors
/// If it has none.
pub(super) fn pieces(tree: &str) -> Result<Vec<Piece>, LayoutError> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut is_systems = false;
    for line in tree.lines() {
        if line.starts_with("FlatView") {
            if !pieces.is_empty() {
                break;
            }
            is_systems = false;
        }
        is_systems |= line.trim_start().starts_with("AS \"memory\"");
        if is_systems && pieces.len() < MOST_PIECES {
            pieces.extend(piece(line));
        }
    }
    match pieces.is_empty() {
        true => Err(LayoutError::NoMemory { said: shown(tree) }),
        false => Ok(pieces),
    }
}

fn piece(line: &str) -> Option<Piece> {
    let (addresses, rest) = line.trim().split_once(" (prio ")?;
    let (kind, region) = rest.split_once("): ")?;
    if kind.rsplit(", ").next() != Some("ram") {
        return None;
    }
    let (first, last) = addresses.split_once('-')?;
    let number = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let range = number(first)?..number(last)?.checked_add(1)?;
    let mut words = region.split_whitespace();
    let region = words.next()?.to_owned();
    let offset = words.find_map(|word| number(word.strip_prefix('@')?));
    Some(Piece {
        range,
        region,
        offset: offset.unwrap_or_default(),
    })
}

/// Returns the address that the answer to `gpa2hva` ends with.
///
/// # Errors
/// If it has none.
pub(super) fn host_address(said: &str) -> Result<u64, LayoutError> {
    let last = said.trim().rsplit_once(" is 0x");
    let digits = last.map(|(_, digits)| digits);
    let address = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    address.ok_or_else(|| LayoutError::NoPlace { said: shown(said) })
}

fn shown(said: &str) -> String {
    /// The largest number of characters shown.
    const SHOWN: usize = 80;
    said.trim().chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The list of QEMU 7.2 with a machine q35 of 3 GiB, shortened.
    const TREE: &str = "\
FlatView #0
 AS \"I/O\", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan

FlatView #1
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram
  00000000000a0000-00000000000affff (prio 1, ram): alias vga.chain4 @0000000000000000
  00000000000c0000-00000000000c0fff (prio 0, rom): pc.ram @00000000000c0000
  00000000000c1000-000000007fffffff (prio 0, ram): pc.ram @00000000000c1000
  00000000fed00000-00000000fed003ff (prio 0, i/o): hpet
  0000000100000000-000000013fffffff (prio 0, ram): pc.ram @0000000080000000

FlatView #2
 AS \"cpu-smm-0\", root: memory
  0000000000000000-00000000bfffffff (prio 0, ram): pc.ram
";

    #[test]
    fn the_systems_memory_is_found() {
        let found = pieces(TREE).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|piece| (piece.range.start, piece.range.end, piece.offset))
            .collect();
        assert_eq!(
            found,
            [
                (0, 0xa_0000, 0),
                (0xa_0000, 0xb_0000, 0),
                (0xc_1000, 0x8000_0000, 0xc_1000),
                (0x1_0000_0000, 0x1_4000_0000, 0x8000_0000),
            ]
        );
        pieces("unknown command: 'info mtree -f'").unwrap_err();
        pieces("FlatView #0\n AS \"memory\"\n ffffffff (prio").unwrap_err();
    }

    #[test]
    fn the_place_is_the_last_word() {
        for (said, expected) in [
            (
                "Host virtual address for 0x0 (pc.ram) is 0x7f3a40000000\r\n",
                Some(0x7f3a_4000_0000),
            ),
            ("No memory is mapped at address 0xfffff", None),
            ("Memory at address 0x0 is not RAM", None),
            ("", None),
        ] {
            assert_eq!(host_address(said).ok(), expected, "{said}");
        }
    }
}
