//! The kernel's text, read once for all that is made of it.

use std::ops::Range;

/// The number of bytes that are read at once.
const PIECE: usize = 1 << 20;
/// The largest size in bytes of a text that is read.
const MOST: u64 = 256 << 20;
/// The size of a page in bytes.
const PAGE: u64 = 4096;

/// The bytes of the kernel's text, but for pages that cannot be read.
#[derive(Debug, Default)]
pub(super) struct Text {
    /// The first address and the bytes of each part without a gap, ascending.
    parts: Vec<(u64, Vec<u8>)>,
}

impl Text {
    /// Reads the text at a range of addresses. `read` reads memory, and returns the number of bytes
    /// before the first that cannot be read.
    pub(super) fn read(range: &Range<u64>, read: impl Fn(u64, &mut [u8]) -> usize) -> Self {
        let end = range.end.min(range.start.saturating_add(MOST));
        let mut parts: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut piece = vec![0; PIECE];
        let mut at = range.start;
        while at < end {
            let length = usize::try_from(end - at).map_or(PIECE, |rest| rest.min(PIECE));
            let wanted = piece.get_mut(..length).unwrap_or_default();
            let count = read(at, wanted);
            let bytes = wanted.get(..count).unwrap_or_default();
            let last = parts.last_mut();
            match last.filter(|(start, part)| start + part.len() as u64 == at) {
                Some((_, part)) => part.extend_from_slice(bytes),
                None if bytes.is_empty() => {}
                None => parts.push((at, bytes.to_vec())),
            }
            at += bytes.len() as u64;
            if bytes.len() < length {
                // A guest may say that its text reaches to the last page.
                let Some(page) = (at | (PAGE - 1)).checked_add(1) else {
                    break;
                };
                at = page;
            }
        }
        Self { parts }
    }

    /// Returns `length` bytes at an address, or those that are there.
    pub(super) fn at(&self, address: u64, length: usize) -> &[u8] {
        let behind = self.parts.partition_point(|(start, _)| *start <= address);
        let part = behind.checked_sub(1).and_then(|at| self.parts.get(at));
        let rest = part.and_then(|(start, bytes)| {
            let offset = usize::try_from(address - start).ok()?;
            bytes.get(offset..)
        });
        let rest = rest.unwrap_or_default();
        rest.get(..length).unwrap_or(rest)
    }

    /// Returns the ascending addresses of a sequence of bytes.
    pub(super) fn find(&self, code: &[u8]) -> impl Iterator<Item = u64> {
        let found = self.parts.iter().flat_map(move |(start, bytes)| {
            let places = bytes.windows(code.len().max(1)).zip(*start..);
            places.filter(move |(bytes, _)| *bytes == code)
        });
        found.map(|(_, at)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a reader of memory in which each byte is the low byte of its address, without one
    /// page.
    fn without(gap: u64) -> impl Fn(u64, &mut [u8]) -> usize {
        move |at, piece| {
            let until = if at < gap { gap } else { u64::MAX };
            let readable = if (gap..gap + PAGE).contains(&at) {
                0
            } else {
                usize::try_from(until - at).unwrap_or(usize::MAX)
            };
            let count = piece.len().min(readable);
            for (byte, at) in piece.iter_mut().zip(at..).take(count) {
                *byte = at as u8;
            }
            count
        }
    }

    #[test]
    fn a_page_that_cannot_be_read_leaves_a_gap() {
        let range = 0x10_0000..0x30_0010;
        let text = Text::read(&range, without(0x12_3000));
        assert_eq!(text.at(0x12_2ffe, 4), [0xfe, 0xff]);
        assert!(text.at(0x12_3000, 4).is_empty());
        assert_eq!(text.at(0x12_4001, 2), [1, 2]);
        // Over the border of two reads, and at both ends.
        assert_eq!(text.at(0x22_3fff, 2), [0xff, 0]);
        assert!(text.at(0x0f_ffff, 2).is_empty());
        assert_eq!(text.at(0x30_000e, 4), [0x0e, 0x0f]);
        let found: Vec<u64> = text.find(&[0xff, 0]).collect();
        assert_eq!(found.first(), Some(&0x10_00ff));
        // The sequence at the gap's start is cut off.
        assert_eq!(found.len(), 0x2000 - 0x10 - 1);
        assert!(!found.contains(&0x12_2fff) && found.contains(&0x2f_ffff));
    }

    #[test]
    fn a_text_that_reaches_to_the_last_address_ends_there() {
        let text = Text::read(&(u64::MAX - 2 * PAGE..u64::MAX), |_, _| 0);
        assert!(text.parts.is_empty());
    }
}
