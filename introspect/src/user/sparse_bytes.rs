//! A part of a file that may lack pages.

use std::ops::Range;

use super::file_bytes::{FileBytes, Missing, MissingCause, bytes_in_page, read_bytes};

/// A part of a file that may lack pages.
pub(super) struct SparseBytes {
    bytes: Vec<u8>,
    /// The missing ranges, ascending, with adjacent ones joined.
    holes: Vec<Range<usize>>,
}

impl SparseBytes {
    /// Reads the available part of `length` bytes at `offset`. The caller bounds `length`.
    ///
    /// # Errors
    /// If none is available.
    pub(super) fn read(file: &dyn FileBytes, offset: u64, length: usize) -> Result<Self, Missing> {
        let whole = match read_bytes(file, offset, length) {
            Ok(bytes) => {
                return Ok(Self {
                    bytes,
                    holes: Vec::new(),
                });
            }
            Err(missing) => Missing {
                offset,
                length: length as u64,
                ..missing
            },
        };
        if matches!(whole.cause, MissingCause::PastEnd { .. }) {
            return Err(whole);
        }
        let mut bytes = vec![0; length];
        let mut holes: Vec<Range<usize>> = Vec::new();
        let mut start = 0;
        while start < length {
            let at = offset.saturating_add(start as u64);
            let end = length.min(start.saturating_add(bytes_in_page(at)));
            let part = bytes.get_mut(start..end).unwrap_or_default();
            if file.read_at(at, part).is_err() {
                match holes.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => holes.push(start..end),
                }
            }
            start = end;
        }
        match holes.first() {
            Some(first) if *first == (0..length) => Err(whole),
            _ => Ok(Self { bytes, holes }),
        }
    }

    /// Returns the number of bytes, including missing ones.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of missing bytes.
    pub(super) fn missing(&self) -> usize {
        self.holes.iter().map(|hole| hole.end - hole.start).sum()
    }

    /// Returns the bytes of a range, if all of them are available.
    pub(super) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        match self.next_hole(range.start) {
            Some(hole) if hole.start < range.end => None,
            _ => self.bytes.get(range),
        }
    }

    /// Returns the string at `start` without its NUL, of at most `most` bytes.
    ///
    /// # Errors
    /// The number of bytes examined, if part of it is missing or there is no NUL.
    pub(super) fn c_string(&self, start: usize, most: usize) -> Result<&[u8], usize> {
        let present = self
            .next_hole(start)
            .map_or(self.bytes.len(), |hole| hole.start);
        let end = present.min(start.saturating_add(most).saturating_add(1));
        let text = self.bytes.get(start..end).ok_or(0usize)?;
        let length = memchr::memchr(0, text).ok_or(text.len())?;
        text.get(..length).ok_or(0)
    }

    /// Returns the first hole that ends after `start`.
    fn next_hole(&self, start: usize) -> Option<&Range<usize>> {
        self.holes
            .get(self.holes.partition_point(|hole| hole.end <= start))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::user::file_bytes::PagedBytes;
    use crate::user::file_bytes::tests::{SIZE, cache};

    #[test]
    fn what_is_there_of_a_table_is_used() {
        let (memory, page) = cache();
        let file = PagedBytes::new(&memory, SIZE, page);
        let table = SparseBytes::read(&file, 0xff0, 0x2810).unwrap();
        assert_eq!((table.len(), table.missing()), (0x2810, 0x1000));
        assert_eq!(table.get(0..0x1010).map(<[u8]>::len), Some(0x1010));
        for gone in [
            0x100f..0x1011,
            0x1010..0x1011,
            0x200f..0x2010,
            0x280f..0x2811,
        ] {
            assert_eq!(table.get(gone.clone()), None, "{gone:?}");
        }
        assert_eq!(table.get(0x2010..0x2012), Some(&b"33"[..]));
        assert!(
            SparseBytes::read(&file, 0x2000, 0x1000).is_err(),
            "all missing"
        );
        assert!(
            SparseBytes::read(&file, 0x3000, 0x1000).is_err(),
            "past end"
        );
    }

    #[test]
    fn strings_end_at_their_nul_or_are_none() {
        let (mut memory, page) = cache();
        memory.write(page(1).unwrap().0 + 0xff8, b"main\0cut");
        let file = PagedBytes::new(&memory, SIZE, page);
        let table = SparseBytes::read(&file, 0x1000, 0x2800).unwrap();
        for (start, most, expected) in [
            (0xff8, 64, Ok("main")),
            (0xff8, 4, Ok("main")),
            (0xff8, 3, Err(4)),
            (0xffc, 64, Ok("")),
            (0xffd, 64, Err(3)),
            (0x1000, 64, Err(0)),
            (0x27ff, 64, Err(1)),
            (usize::MAX, 64, Err(0)),
        ] {
            let found = table.c_string(start, most);
            assert_eq!(found, expected.map(str::as_bytes), "{start:#x}");
        }
    }
}
