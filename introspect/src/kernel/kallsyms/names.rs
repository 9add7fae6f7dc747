//! `kallsyms_num_syms`, `kallsyms_names` and `kallsyms_markers`: the count, the stream of
//! compressed names and the markers. A compressed name is a length, then that many tokens. The
//! markers are the stream's offset at every 256th name.
//!
//! In all layouts the three are in this order before the token table. `kallsyms_seqs_of_names` (3
//! bytes a symbol) may lie between. The markers are recognised first, as a rising run of offsets.
//! The count and the stream must then match them byte for byte.

use super::MAX_SYMBOLS;
use crate::bytes::u32_at;

/// The number of names between two markers.
const BLOCK: usize = 256;
/// Size in bytes of 256 names: at least one length and one token each, and far less than a page of
/// tokens each.
const BLOCK_BYTES: std::ops::RangeInclusive<u32> = 512..=256 * 514;
/// The maximum distance of the markers from the token table: the sequence table and the markers of
/// [`MAX_SYMBOLS`].
const MAX_DISTANCE: usize = MAX_SYMBOLS * 3 + MAX_SYMBOLS / BLOCK * 4 + 64;
/// The number of bytes searched for the start of the stream beyond what the markers cover: the
/// names of its last block.
const MAX_TAIL: usize = 48 << 10;
/// The maximum number of false marker runs that are tried.
const MAX_RUNS: usize = 512;

/// The maximum number of names walked in all; a real image takes a little more than it has symbols.
const MAX_WALKED: usize = 4 * MAX_SYMBOLS;

/// The position of the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Names {
    /// The number of symbols.
    pub(super) count: usize,
    /// Offset of `kallsyms_num_syms`.
    pub(super) count_offset: usize,
    /// Offset of the stream.
    pub(super) start: usize,
}

impl Names {
    /// Returns the compressed names, in address order.
    pub(super) fn iter<'a>(&self, bytes: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let mut at = self.start;
        (0..self.count).map_while(move |_| {
            let (name, next) = name_at(bytes, at)?;
            at = next;
            Some(name)
        })
    }
}

/// Returns the compressed name at `at` and the offset of the next. A length with its top bit set
/// has a second byte (since Linux 6.1).
fn name_at(bytes: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let low = usize::from(*bytes.get(at)?);
    let (length, start) = match low & 0x80 {
        0 => (low, at + 1),
        _ => (low & 0x7f | usize::from(*bytes.get(at + 1)?) << 7, at + 2),
    };
    let name = bytes
        .get(start..start + length)
        .filter(|name| !name.is_empty())?;
    Some((name, start + length))
}

/// Finds the names that belong to the token table at `tokens`.
pub(super) fn find_before(bytes: &[u8], tokens: usize) -> Option<Names> {
    find_within(bytes, tokens, &mut { MAX_WALKED })
}

/// Finds the names as [`find_before`] does. Each name walked decrements `walks_left`, and none is
/// walked when it is 0.
fn find_within(bytes: &[u8], tokens: usize, walks_left: &mut usize) -> Option<Names> {
    let nearest = tokens.checked_sub(8)? & !3;
    let furthest = tokens.saturating_sub(MAX_DISTANCE);
    let mut runs = 0;
    for markers in (furthest..=nearest).rev().filter(|at| at % 4 == 0) {
        if u32_at(bytes, markers) != Some(0) {
            continue;
        }
        let run = rising_run(bytes, markers, tokens);
        if run.len() < 2 {
            continue;
        }
        runs += 1;
        if runs > MAX_RUNS {
            return None;
        }
        // The bytes after the markers can look like one or two more.
        for blocks in (run.len().saturating_sub(2).max(2)..=run.len()).rev() {
            let found = run
                .get(..blocks)
                .and_then(|run| with_markers(bytes, markers, run, walks_left));
            if found.is_some() {
                return found;
            }
        }
    }
    None
}

/// Reads the markers that start at `at`: 0, then offsets that rise by the size that 256 names can
/// have.
fn rising_run(bytes: &[u8], at: usize, end: usize) -> Vec<u32> {
    let mut run = vec![0u32];
    for offset in (at + 4..end).step_by(4).take(MAX_SYMBOLS / BLOCK) {
        let (Some(marker), Some(previous)) = (u32_at(bytes, offset), run.last().copied()) else {
            break;
        };
        if !marker
            .checked_sub(previous)
            .is_some_and(|bytes| BLOCK_BYTES.contains(&bytes))
        {
            break;
        }
        run.push(marker);
    }
    run
}

/// Finds the stream that ends before `markers` and matches them.
fn with_markers(
    bytes: &[u8],
    markers: usize,
    run: &[u32],
    walks_left: &mut usize,
) -> Option<Names> {
    let until_last = usize::try_from(*run.last()?).ok()?;
    let latest = markers.checked_sub(until_last)?.checked_sub(2)? & !3;
    let earliest = latest.saturating_sub(MAX_TAIL);
    for start in (earliest..=latest).rev().filter(|at| at % 4 == 0) {
        // The count is a u32 with its own alignment, so it may or may not be padded to 8 bytes.
        for count_offset in [start.checked_sub(8), start.checked_sub(4)]
            .into_iter()
            .flatten()
        {
            let Some(count) = u32_at(bytes, count_offset).and_then(|n| usize::try_from(n).ok())
            else {
                continue;
            };
            if count.div_ceil(BLOCK) != run.len() {
                continue;
            }
            let names = Names {
                count,
                count_offset,
                start,
            };
            if agrees(bytes, names, markers, run, walks_left) {
                return Some(names);
            }
        }
    }
    None
}

/// Walks the stream and compares it with the markers. Every 256th name must be at its marker, and
/// the last must end at the markers except for padding. Each name walked decrements `walks_left`.
/// Otherwise a crafted stream that fits at many places would be walked from each.
fn agrees(bytes: &[u8], names: Names, markers: usize, run: &[u32], walks_left: &mut usize) -> bool {
    let mut at = names.start;
    for index in 0..names.count {
        match walks_left.checked_sub(1) {
            Some(left) => *walks_left = left,
            None => return false,
        }
        if index % BLOCK == 0 {
            let marker = run
                .get(index / BLOCK)
                .and_then(|m| usize::try_from(*m).ok());
            if marker != at.checked_sub(names.start) {
                return false;
            }
        }
        match name_at(bytes, at) {
            Some((_, next)) if next <= markers => at = next,
            _ => return false,
        }
    }
    markers - at < 8
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::KallsymsError;
    use super::super::test_tables::{kernel_like, write};
    use super::super::tests::{VARIANTS, find as found_in};
    use super::*;

    /// A stream that could start anywhere, with a count everywhere.
    #[test]
    fn tables_made_to_waste_time_are_given_up() {
        let good = write(&kernel_like(600, true), VARIANTS[3]);
        let tokens = found_in(&good).unwrap().tokens.start();
        let count = 0x1_0001u32;
        let mut bytes = vec![0; 4096];
        bytes.extend(std::iter::repeat_n([1, 0], count as usize + 40_000).flatten());
        bytes.resize(bytes.len().next_multiple_of(8) + 16, 0);
        for marker in 0..count.div_ceil(256) {
            bytes.extend((marker * 512).to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let damaged = bytes.len();
        bytes.extend(&good[tokens..]);
        let mut walks_left = MAX_WALKED;
        assert_eq!(find_within(&bytes, damaged, &mut walks_left), None);
        assert_eq!(walks_left, 0, "more walks are possible than are allowed");
        assert!(matches!(
            found_in(&bytes),
            Err(KallsymsError::NoNames { .. })
        ));
    }
}
