//! Reads of guest-virtual memory, across pages.
//!
//! The caller pauses the CPUs or accepts torn reads. Nothing here allocates.

use super::paging::{AddressSpace, PAGE, TranslateError, translate};
use crate::{Gpa, Gva, PhysicalMemory, PhysicalReadError};

/// The reason why virtual memory could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReadVirtualError {
    /// A page is not mapped.
    #[error(transparent)]
    Translate(#[from] TranslateError),
    /// A page is mapped to an address that is not RAM: a device, or nothing.
    #[error("{gva}: {source}")]
    Physical {
        /// The first byte of the part that failed.
        gva: Gva,
        /// The physical memory's error.
        source: PhysicalReadError,
    },
    /// The range runs past the end of the address space.
    #[error("{length} bytes at {gva} run past the end of the address space")]
    PastEnd {
        /// The first byte of the requested range.
        gva: Gva,
        /// The number of bytes requested.
        length: usize,
    },
}

/// Memory accessed through page tables, the basis of all reads here.
pub(crate) trait Pages {
    /// Returns the GPA of the byte at `gva`, and the number of bytes from there to the end of the
    /// page.
    fn locate(&self, gva: Gva) -> Result<(Gpa, u64), TranslateError>;

    /// Fills `buf` from `gpa`.
    fn read_physical(&self, gpa: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError>;

    /// Fills `buf` from `gva`, page by page. Nothing is promised about `buf` after an error.
    fn read_pages(&self, gva: Gva, buf: &mut [u8]) -> Result<(), ReadVirtualError> {
        let length = buf.len();
        let past_end = ReadVirtualError::PastEnd { gva, length };
        // The last byte must have an address; one past it need not.
        let last = u64::try_from(length.saturating_sub(1)).map_err(|_| past_end)?;
        gva.0.checked_add(last).ok_or(past_end)?;
        let (mut rest, mut at) = (buf, gva);
        while !rest.is_empty() {
            let read = self.read_page(at, rest)?;
            at = Gva(at.0.wrapping_add(read as u64));
            rest = rest.get_mut(read..).unwrap_or_default();
        }
        Ok(())
    }

    /// Fills as much of `buf` as lies in the page of `gva`. Returns the number of bytes, at least 1
    /// unless `buf` is empty.
    fn read_page(&self, gva: Gva, buf: &mut [u8]) -> Result<usize, ReadVirtualError> {
        let (gpa, left) = self.locate(gva)?;
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        let (part, _) = buf.split_at_mut(left.min(buf.len()));
        self.read_physical(gpa, part)
            .map_err(|source| ReadVirtualError::Physical { gva, source })?;
        Ok(part.len())
    }

    /// Reads a part of the string at `gva`, of which `done` bytes are read: as much of `rest` as
    /// lies in one small page. A string rarely fills a large page. Returns the number of bytes, and
    /// the position of the NUL in them.
    fn read_string_part(
        &self,
        gva: Gva,
        done: usize,
        rest: &mut [u8],
    ) -> Result<(usize, Option<usize>), ReadVirtualError> {
        let past_end = ReadVirtualError::PastEnd {
            gva,
            length: done.saturating_add(1),
        };
        let at = gva.0.checked_add(done as u64).ok_or(past_end)?;
        let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
        let (part, _) = rest.split_at_mut(in_page.min(rest.len()));
        let read = self.read_page(Gva(at), part)?;
        Ok((read, memchr::memchr(0, part)))
    }
}

/// An address space that is walked for each page.
struct Walked<'m, M: ?Sized>(&'m M, AddressSpace);

impl<M: PhysicalMemory + ?Sized> Pages for Walked<'_, M> {
    fn locate(&self, gva: Gva) -> Result<(Gpa, u64), TranslateError> {
        let page = translate(self.0, self.1, gva)?;
        Ok((page.gpa, page.bytes_left_in_page()))
    }

    fn read_physical(&self, gpa: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        self.0.read_physical(gpa, buf)
    }
}

/// Fills `buf` from `gva`, page by page. Nothing is promised about `buf` after an error.
///
/// # Errors
/// If any byte of the range is not mapped to RAM.
pub fn read_virtual(
    memory: &(impl PhysicalMemory + ?Sized),
    space: AddressSpace,
    gva: Gva,
    buf: &mut [u8],
) -> Result<(), ReadVirtualError> {
    Walked(memory, space).read_pages(gva, buf)
}

/// Reads the little-endian `u64` at `gva`.
///
/// # Errors
/// If any byte of it is not mapped to RAM.
#[inline]
pub fn read_u64(
    memory: &(impl PhysicalMemory + ?Sized),
    space: AddressSpace,
    gva: Gva,
) -> Result<u64, ReadVirtualError> {
    match memory.word_at(space, gva) {
        Some(word) => Ok(word),
        None => read_u64_by_bytes(memory, space, gva),
    }
}

/// Reads the `u64` at any address, and returns the reason if it cannot be read.
#[cold]
fn read_u64_by_bytes(
    memory: &(impl PhysicalMemory + ?Sized),
    space: AddressSpace,
    gva: Gva,
) -> Result<u64, ReadVirtualError> {
    let mut bytes = [0; 8];
    read_virtual(memory, space, gva, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Reads the little-endian `u32` at `gva`.
///
/// # Errors
/// If any byte of it is not mapped to RAM.
pub fn read_u32(
    memory: &(impl PhysicalMemory + ?Sized),
    space: AddressSpace,
    gva: Gva,
) -> Result<u32, ReadVirtualError> {
    let mut bytes = [0; 4];
    read_virtual(memory, space, gva, &mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

/// A string that was read into the caller's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CStringRead<'a> {
    /// The bytes before the NUL, or the whole buffer if there was none.
    pub bytes: &'a [u8],
    /// True if the NUL was found. If not, the string continues past the buffer.
    pub complete: bool,
}

/// Reads the string at `gva`, at most `buf.len()` bytes of it. Pages after the one with the NUL are
/// not read.
///
/// # Errors
/// If a byte before the NUL (within the buffer's length) is not mapped to RAM.
pub fn read_c_string<'a>(
    memory: &(impl PhysicalMemory + ?Sized),
    space: AddressSpace,
    gva: Gva,
    buf: &'a mut [u8],
) -> Result<CStringRead<'a>, ReadVirtualError> {
    let pages = Walked(memory, space);
    let mut done = 0;
    while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let (read, nul) = pages.read_string_part(gva, done, rest)?;
        if let Some(nul) = nul {
            let bytes = buf.get(..done + nul).unwrap_or_default();
            return Ok(CStringRead {
                bytes,
                complete: true,
            });
        }
        done += read;
    }
    Ok(CStringRead {
        bytes: buf,
        complete: false,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::test_memory::{Flags, TestMemory};
    use crate::{Gpa, Gva};

    pub(crate) const BASE: u64 = 0x40_0000;

    /// Returns a guest with two adjacent virtual pages on separate physical pages, then a device
    /// page, then an unmapped page.
    pub(crate) fn guest() -> (TestMemory, AddressSpace) {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        for (page, gpa) in [(0, 0x18_0000), (1, 0x1a_0000), (2, 0xfee0_0000)] {
            memory.map(space, BASE + page * 4096, gpa, 4096, Flags::default());
        }
        memory.write(0x18_0ffc, b"over");
        memory.write(0x1a_0000, b" the edge\0");
        memory.write(0x1a_0ff8, b"01234567");
        (memory, space)
    }

    #[test]
    fn reads_cross_pages() {
        let (memory, space) = guest();
        let mut buf = [0; 8];
        read_virtual(&memory, space, Gva(BASE + 0xffc), &mut buf).unwrap();
        assert_eq!(&buf, b"over the");
        assert_eq!(
            read_u64(&memory, space, Gva(BASE + 0xffc)),
            Ok(u64::from_le_bytes(*b"over the"))
        );
        assert_eq!(
            read_u32(&memory, space, Gva(BASE + 0xffe)),
            Ok(u32::from_le_bytes(*b"er t"))
        );
    }

    #[test]
    fn reads_that_fail_name_the_first_bad_page() {
        let (memory, space) = guest();
        let device = ReadVirtualError::Physical {
            gva: Gva(BASE + 0x2000),
            source: PhysicalReadError {
                address: Gpa(0xfee0_0000),
                length: 4,
            },
        };
        let nothing = TranslateError::NotPresent {
            gva: Gva(BASE + 0x3000),
            level: 1,
            entry: 0,
        };
        for (gva, expected) in [
            (BASE + 0x1ffc, device),
            (BASE + 0x3000, nothing.into()),
            (
                u64::MAX - 6,
                ReadVirtualError::PastEnd {
                    gva: Gva(u64::MAX - 6),
                    length: 8,
                },
            ),
        ] {
            assert_eq!(
                read_u64(&memory, space, Gva(gva)),
                Err(expected),
                "{gva:#x}"
            );
        }
        assert_eq!(
            read_virtual(&memory, space, Gva(1 << 60), &mut []),
            Ok(()),
            "nothing asked, nothing read"
        );
    }

    #[test]
    fn strings_end_at_their_nul_or_at_the_buffer() {
        let (memory, space) = guest();
        for (offset, room, expected, complete) in [
            (0xffc, 64, "over the edge", true),
            (0xffc, 4, "over", false),
            (0x1009, 64, "", true),
            (0x1ff8, 8, "01234567", false),
            (0xffc, 0, "", false),
        ] {
            let mut buf = vec![0xff; room];
            let read = read_c_string(&memory, space, Gva(BASE + offset), &mut buf).unwrap();
            assert_eq!(
                (read.bytes, read.complete),
                (expected.as_bytes(), complete),
                "{offset:#x}"
            );
        }
        let mut buf = [0; 16];
        assert!(
            read_c_string(&memory, space, Gva(BASE + 0x1ff8), &mut buf).is_err(),
            "no NUL before the device"
        );
    }
}
