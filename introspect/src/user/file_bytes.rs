//! The sources of a file's bytes: the page cache, a process's memory, a slice, or several of them
//! in layers.
//!
//! Every source may lack bytes, and reports which.

use std::fmt;
use std::io;
use std::ops::Range;

use crate::x86_64::PAGE;
use crate::{Gpa, Gva, MemoryView, PhysicalMemory};

/// Bytes of a file that a source does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("bytes {offset:#x} to {:#x} of the file {cause}", .offset.saturating_add(*.length))]
pub struct Missing {
    /// The first byte requested.
    pub offset: u64,
    /// The number of bytes requested, of which at least one is missing.
    pub length: u64,
    /// The cause.
    pub cause: MissingCause,
}

/// The cause of missing bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MissingCause {
    /// The file ends before them.
    #[error("lie past its end at {size:#x}")]
    PastEnd {
        /// The size of the file in bytes.
        size: u64,
    },
    /// They were not read lately, or were dropped.
    #[error("are not in the guest's memory")]
    NotInMemory,
    /// The host could not read them.
    #[error("cannot be read on the host: {0}")]
    Host(io::ErrorKind),
}

/// A file that can be read at any offset, as far as its bytes are available.
pub trait FileBytes {
    /// Returns the size of the file in bytes.
    fn size(&self) -> u64;

    /// Fills `buf` from `offset`. Nothing is promised about `buf` after an error.
    ///
    /// # Errors
    /// If any byte of the range is missing.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing>;
}

/// Returns the error for `buf` at `offset`.
pub(super) fn missing(offset: u64, buf: &[u8], cause: MissingCause) -> Missing {
    Missing {
        offset,
        length: buf.len() as u64,
        cause,
    }
}

/// Reads `length` bytes at `offset`. The caller bounds `length`.
pub(super) fn read_bytes(
    file: &dyn FileBytes,
    offset: u64,
    length: usize,
) -> Result<Vec<u8>, Missing> {
    let size = file.size();
    let end = offset.checked_add(length as u64);
    if end.is_none_or(|end| end > size) {
        // Checked before anything is allocated.
        return Err(Missing {
            offset,
            length: length as u64,
            cause: MissingCause::PastEnd { size },
        });
    }
    let mut bytes = vec![0; length];
    file.read_at(offset, &mut bytes)?;
    Ok(bytes)
}

impl FileBytes for &[u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        let found = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..start.checked_add(buf.len())?));
        let size = self.size();
        buf.copy_from_slice(
            found.ok_or_else(|| missing(offset, buf, MissingCause::PastEnd { size }))?,
        );
        Ok(())
    }
}

impl FileBytes for Vec<u8> {
    fn size(&self) -> u64 {
        self.as_slice().size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        self.as_slice().read_at(offset, buf)
    }
}

/// A file whose 4 KiB pages are anywhere in physical memory, as in the page cache.
pub struct PagedBytes<'m, F> {
    memory: &'m dyn PhysicalMemory,
    size: u64,
    page: F,
}

impl<F> fmt::Debug for PagedBytes<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedBytes")
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl<'m, F: Fn(u64) -> Option<Gpa>> PagedBytes<'m, F> {
    /// Makes a file of `size` bytes. `page` returns the GPA of the page of an index (offset /
    /// 4096), if it is in memory.
    #[must_use]
    pub fn new(memory: &'m dyn PhysicalMemory, size: u64, page: F) -> Self {
        Self { memory, size, page }
    }
}

impl<F: Fn(u64) -> Option<Gpa>> FileBytes for PagedBytes<'_, F> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        check_end(self.size, offset, buf)?;
        each_page(offset, buf, |at, part| {
            let gpa = (self.page)(at / PAGE).and_then(|page| page.0.checked_add(at % PAGE));
            gpa.is_some_and(|gpa| self.memory.read_physical(Gpa(gpa), part).is_ok())
        })
    }
}

/// A file as one process has it mapped.
///
/// Private pages that the process has written (relocations) replace the file's own bytes. So pass
/// only mappings that it cannot write, and prefer the page cache.
#[derive(Debug)]
pub struct MappedBytes<'p> {
    view: MemoryView<'p>,
    size: u64,
    mappings: Vec<FileMapping>,
}

/// A range of a process's memory that maps a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileMapping {
    /// The first address.
    pub start: Gva,
    /// The address after the last.
    pub end: Gva,
    /// The offset in the file of the byte at `start`.
    pub file_offset: u64,
    /// True if the process may execute it.
    pub executable: bool,
}

impl FileMapping {
    /// Returns the range of the file that it maps, empty if `end` is not above `start`.
    #[must_use]
    pub fn file_range(&self) -> Range<u64> {
        let length = self.end.0.saturating_sub(self.start.0);
        self.file_offset..self.file_offset.saturating_add(length)
    }

    /// Returns the offset in the file of the byte at `gva`, if it is mapped.
    #[must_use]
    pub fn file_offset_of(&self, gva: Gva) -> Option<u64> {
        let distance = gva.0.checked_sub(self.start.0)?;
        let inside = gva.0 < self.end.0;
        self.file_offset.checked_add(distance).filter(|_| inside)
    }
}

impl<'p> MappedBytes<'p> {
    /// Makes the file of `size` bytes that `mappings` of the process show. The view is of the
    /// process's address space.
    #[must_use]
    pub fn new(view: MemoryView<'p>, size: u64, mappings: Vec<FileMapping>) -> Self {
        Self {
            view,
            size,
            mappings,
        }
    }
}

impl FileBytes for MappedBytes<'_> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        check_end(self.size, offset, buf)?;
        each_page(offset, buf, |at, part| {
            let mut shown = self
                .mappings
                .iter()
                .filter(|mapping| mapping.file_range().contains(&at))
                .filter_map(|mapping| mapping.start.0.checked_add(at - mapping.file_offset));
            shown.any(|gva| self.view.read(Gva(gva), part).is_ok())
        })
    }
}

/// One file from several sources. Each page comes from the first source that has it.
///
/// The caller ensures that they are the same file, of the same size.
pub struct LayeredBytes<'f> {
    sources: Vec<&'f dyn FileBytes>,
}

impl fmt::Debug for LayeredBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayeredBytes")
            .field("sources", &self.sources.len())
            .finish_non_exhaustive()
    }
}

impl<'f> LayeredBytes<'f> {
    /// Makes a file of sources, the best first. Without a source it is empty.
    #[must_use]
    pub fn new(sources: Vec<&'f dyn FileBytes>) -> Self {
        Self { sources }
    }
}

impl FileBytes for LayeredBytes<'_> {
    fn size(&self) -> u64 {
        self.sources.first().map_or(0, |source| source.size())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        check_end(self.size(), offset, buf)?;
        each_page(offset, buf, |at, part| {
            let mut sources = self.sources.iter();
            sources.any(|source| source.read_at(at, part).is_ok())
        })
    }
}

fn check_end(size: u64, offset: u64, buf: &[u8]) -> Result<(), Missing> {
    match offset.checked_add(buf.len() as u64) {
        Some(end) if end <= size => Ok(()),
        _ => Err(missing(offset, buf, MissingCause::PastEnd { size })),
    }
}

/// Calls `fill` for each part of `buf` that lies in one page of the file, with its offset. `fill`
/// returns whether it succeeded.
fn each_page(
    offset: u64,
    buf: &mut [u8],
    mut fill: impl FnMut(u64, &mut [u8]) -> bool,
) -> Result<(), Missing> {
    let (mut at, mut rest) = (offset, buf);
    while !rest.is_empty() {
        let (part, behind) = rest.split_at_mut(bytes_in_page(at).min(rest.len()));
        if !fill(at, part) {
            return Err(missing(at, part, MissingCause::NotInMemory));
        }
        at = at.saturating_add(part.len() as u64);
        rest = behind;
    }
    Ok(())
}

/// Returns the number of bytes from `offset` to the end of its page.
pub(super) fn bytes_in_page(offset: u64) -> usize {
    usize::try_from(PAGE - offset % PAGE).unwrap_or(1)
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::test_memory::{Flags, TestMemory};

    const RAM: u64 = 0x10_0000;
    /// The size of the file in bytes.
    pub(crate) const SIZE: u64 = 0x3800;

    /// Returns pages 0, 1 and 3 of a file of 3.5 pages, apart in memory and each full of its digit.
    pub(crate) fn cache() -> (TestMemory, impl Fn(u64) -> Option<Gpa>) {
        let mut memory = TestMemory::new(RAM, 1 << 20);
        let pages = [
            (0u64, RAM + 0x8_0000),
            (1, RAM + 0x6_0000),
            (3, RAM + 0x9_0000),
        ];
        for (index, gpa) in pages {
            memory.write(gpa, &[b'0' + u8::try_from(index).unwrap(); 4096]);
        }
        let page = move |index| pages.iter().find(|p| p.0 == index).map(|p| Gpa(p.1));
        (memory, page)
    }

    fn read(file: &dyn FileBytes, offset: u64, length: usize) -> Result<String, Missing> {
        read_bytes(file, offset, length).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn a_cached_file_is_read_across_pages_and_its_holes_are_named() {
        let (memory, page) = cache();
        let file = PagedBytes::new(&memory, SIZE, page);
        let past_end = MissingCause::PastEnd { size: SIZE };
        for (offset, length, expected) in [
            (0, 2, Ok("00")),
            (0xffe, 4, Ok("0011")),
            (0x37fe, 2, Ok("33")),
            (SIZE, 0, Ok("")),
            (0x1ffe, 4, Err((0x2000, 2, MissingCause::NotInMemory))),
            (0x2ffe, 4, Err((0x2ffe, 2, MissingCause::NotInMemory))),
            (0x37fe, 3, Err((0x37fe, 3, past_end))),
            (u64::MAX, 2, Err((u64::MAX, 2, past_end))),
        ] {
            let expected = expected
                .map(str::to_owned)
                .map_err(|(offset, length, cause)| Missing {
                    offset,
                    length,
                    cause,
                });
            assert_eq!(read(&file, offset, length), expected, "{offset:#x}");
        }
    }

    #[test]
    fn a_mapped_file_is_read_through_whichever_mapping_shows_it() {
        let (mut memory, page) = cache();
        let space = memory.address_space(4);
        // The second mapping starts at page 1; page 0 is in the first only, and page 1 is not
        // present there.
        for (gva, index) in [(0x7000_0000, 0), (0x7100_0000, 1), (0x7100_2000, 3)] {
            memory.map(
                space,
                gva,
                page(index).unwrap().0,
                4096,
                Flags::default().user(),
            );
        }
        let mapping = |start, pages: u64, file_offset| FileMapping {
            start: Gva(start),
            end: Gva(start + pages * 4096),
            file_offset,
            executable: false,
        };
        let paused = PausedMemory::new(&memory);
        let mappings = vec![mapping(0x7000_0000, 2, 0), mapping(0x7100_0000, 3, 0x1000)];
        let file = MappedBytes::new(paused.view(space), SIZE, mappings);
        assert_eq!(read(&file, 0xffe, 4).as_deref(), Ok("0011"));
        assert_eq!(read(&file, 0x3000, 2).as_deref(), Ok("33"));
        let error = read(&file, 0x1ffe, 4).unwrap_err();
        assert_eq!(
            error.to_string(),
            "bytes 0x2000 to 0x2002 of the file are not in the guest's memory"
        );
    }

    #[test]
    fn a_layer_fills_the_holes_of_the_one_above() {
        let (memory, page) = cache();
        let cached = PagedBytes::new(&memory, SIZE, page);
        let host = vec![b'h'; SIZE as usize];
        let file = LayeredBytes::new(vec![&cached, &host]);
        assert_eq!(read(&file, 0x1ffe, 4).as_deref(), Ok("11hh"));
        assert_eq!(read(&file, 0x2ffe, 4).as_deref(), Ok("hh33"));
        read(&file, 0x37ff, 2).unwrap_err();
        assert_eq!(LayeredBytes::new(Vec::new()).size(), 0);
    }
}
