//! The memory of a paused or saved guest, read page by page from files and cached: `/proc/PID/mem`
//! of QEMU, memory files, dumps.

use std::fmt;
use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use introspect::{Gpa, PhysicalMemory, PhysicalReadError};
use lru::LruCache;
use parking_lot::Mutex;

/// The size of a page in bytes.
pub(crate) const PAGE: u64 = 4096;
/// The largest number of pages that are kept: 64 MiB.
const KEPT: NonZeroUsize = NonZeroUsize::new(16 << 10).unwrap();

/// Guest-physical ranges, and the place in a file of the first byte of each.
pub(crate) type Places = Vec<(Range<u64>, u64)>;
pub(crate) type Page = Box<[u8; PAGE as usize]>;

/// Pages of memory that does not change.
pub(crate) trait PageSource: fmt::Debug + Send + Sync {
    /// Fills a page from its address. Returns `None` if it is not there.
    fn page(&self, address: u64, page: &mut Page) -> Option<()>;

    /// Returns the ranges of memory in bytes, ascending and disjoint.
    fn ranges(&self) -> Vec<Range<u64>>;
}

/// The memory in places of files.
#[derive(Debug)]
pub(crate) struct FilePlaces {
    files: Vec<File>,
    /// Ranges, with the number of the file and the place in it; ascending and disjoint.
    ranges: Vec<(Range<u64>, usize, u64)>,
}

/// The memory of a guest that does not change meanwhile, with the pages that were read last.
#[derive(Debug)]
pub(crate) struct FileMemory<S: PageSource> {
    source: S,
    pages: Mutex<LruCache<u64, Page>>,
}

impl FilePlaces {
    /// Returns the memory in these places. Of ranges that overlap, the first one counts.
    fn new(places: Vec<(File, Places)>) -> Self {
        let (mut files, mut ranges) = (Vec::new(), Vec::new());
        for (file, places) in places {
            let number = files.len();
            ranges.extend(
                places
                    .into_iter()
                    .map(|(range, place)| (range, number, place)),
            );
            files.push(file);
        }
        ranges.sort_by_key(|(range, ..)| range.start);
        let mut end = 0;
        ranges.retain(|(range, ..)| {
            let is_behind = range.start >= end && range.end > range.start;
            if is_behind {
                end = range.end;
            }
            is_behind
        });
        Self { files, ranges }
    }
}

impl PageSource for FilePlaces {
    fn page(&self, address: u64, page: &mut Page) -> Option<()> {
        let after = self
            .ranges
            .partition_point(|(range, ..)| range.start <= address);
        let (range, file, place) = self.ranges.get(after.checked_sub(1)?)?;
        // A page that RAM has in part is none.
        if address.checked_add(PAGE)? > range.end {
            return None;
        }
        let place = place.checked_add(address - range.start)?;
        self.files
            .get(*file)?
            .read_exact_at(&mut **page, place)
            .ok()
    }

    fn ranges(&self) -> Vec<Range<u64>> {
        self.ranges
            .iter()
            .map(|(range, ..)| range.clone())
            .collect()
    }
}

impl FileMemory<FilePlaces> {
    /// Returns the memory in these places; see [`FilePlaces::new`].
    pub(crate) fn in_places(places: Vec<(File, Places)>) -> Self {
        Self::new(FilePlaces::new(places))
    }
}

impl<S: PageSource> FileMemory<S> {
    pub(crate) fn new(source: S) -> Self {
        Self {
            source,
            pages: Mutex::new(LruCache::new(KEPT)),
        }
    }

    /// Copies a part of the page at `address`, from `offset` on.
    fn copy(&self, address: u64, offset: usize, part: &mut [u8]) -> Option<()> {
        let mut pages = self.pages.lock();
        if let Some(page) = pages.get(&address) {
            part.copy_from_slice(page.get(offset..offset + part.len())?);
            return Some(());
        }
        let mut page: Page = Box::new([0; PAGE as usize]);
        self.source.page(address, &mut page)?;
        part.copy_from_slice(page.get(offset..offset + part.len())?);
        pages.put(address, page);
        Some(())
    }
}

impl<S: PageSource> PhysicalMemory for FileMemory<S> {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        let length = buf.len();
        let lost = || PhysicalReadError { address, length };
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = address.0.checked_add(done as u64).ok_or_else(lost)?;
            let offset = usize::try_from(at % PAGE).unwrap_or_default();
            let piece = rest.len().min(PAGE as usize - offset);
            let (part, _) = rest.split_at_mut(piece);
            self.copy(at - at % PAGE, offset, part).ok_or_else(lost)?;
            done += piece;
        }
        Ok(())
    }

    fn ram(&self) -> Vec<Range<u64>> {
        self.source.ranges()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use super::*;

    #[test]
    fn bytes_come_from_their_place_in_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        for page in 0..4u8 {
            file.write_all(&[page; PAGE as usize]).unwrap();
        }
        let places = vec![
            (0..PAGE, 3 * PAGE),
            (0x10_0000..0x10_0000 + 2 * PAGE, PAGE),
            // Half a page, and one that overlaps.
            (0x20_0000..0x20_0800, 0),
            (0x10_1000..0x10_3000, 0),
            // Beyond the file.
            (0x30_0000..0x30_1000, 8 * PAGE),
        ];
        let memory = FileMemory::in_places(vec![(file, places)]);
        for (address, expected) in [
            (0, Some([3, 3])),
            (0xfff, None),
            (0x10_0000, Some([1, 1])),
            (0x10_0fff, Some([1, 2])),
            (0x10_1fff, None),
            (0x20_0000, None),
            (0x30_0000, None),
            (u64::MAX, None),
        ] {
            for _ in 0..2 {
                let mut bytes = [9; 2];
                let read = memory.read_physical(Gpa(address), &mut bytes);
                assert_eq!(read.ok().map(|()| bytes), expected, "{address:#x}");
            }
        }
    }
}
