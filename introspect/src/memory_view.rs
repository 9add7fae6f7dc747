//! Memory of a paused guest, seen through one address space. All readers of kernel structures and
//! processes use it.
//!
//! The caller pauses the CPUs, makes a [`PausedMemory`] and drops it before they resume, because
//! page walks are cached meanwhile. A [`MemoryView`] is a small value to pass around.
//! [`MemoryView::with_space`] returns the view of another process over the same memory and cache.
//!
//! Pages that Linux keeps without access rights (`PROT_NONE`, NUMA hinting) are read like all
//! others. Their bytes are there, and a read from outside is not an access by the guest.

use std::fmt;

use crate::x86_64::virtual_memory::Pages;
use crate::x86_64::{AddressSpace, PAGE, ReadVirtualError, TranslateError, TranslationCache};
use crate::{Gpa, Gva, PhysicalMemory, PhysicalReadError};

/// The number of bytes of a string that are read at a time. Most strings are short.
const PART: usize = 256;

/// The physical memory of a paused guest, with a cache of page walks.
pub struct PausedMemory<'m> {
    memory: &'m dyn PhysicalMemory,
    walks: TranslationCache,
}

impl fmt::Debug for PausedMemory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PausedMemory").finish_non_exhaustive()
    }
}

impl<'m> PausedMemory<'m> {
    /// Wraps memory that nothing writes while this value lives.
    #[must_use]
    pub fn new(memory: &'m dyn PhysicalMemory) -> Self {
        Self {
            memory,
            walks: TranslationCache::default(),
        }
    }

    /// Wraps memory for reads of a few pages, such as one stack's. It is cheaper to make than
    /// [`new`](Self::new).
    #[must_use]
    pub fn brief(memory: &'m dyn PhysicalMemory) -> Self {
        Self {
            memory,
            walks: TranslationCache::brief(),
        }
    }

    /// Returns the physical memory.
    #[must_use]
    pub fn physical(&self) -> &'m dyn PhysicalMemory {
        self.memory
    }

    /// Returns the view through an address space.
    #[must_use]
    pub fn view(&self, space: AddressSpace) -> MemoryView<'_> {
        MemoryView {
            paused: self,
            space,
        }
    }
}

/// The virtual memory of one address space. Numbers are little-endian.
#[derive(Clone, Copy)]
pub struct MemoryView<'p> {
    paused: &'p PausedMemory<'p>,
    space: AddressSpace,
}

impl fmt::Debug for MemoryView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryView")
            .field("space", &self.space)
            .finish_non_exhaustive()
    }
}

impl<'p> MemoryView<'p> {
    /// Returns the address space of this view.
    #[must_use]
    pub fn space(&self) -> AddressSpace {
        self.space
    }

    /// Returns the physical memory of this view.
    #[must_use]
    pub fn physical(&self) -> &'p dyn PhysicalMemory {
        self.paused.memory
    }

    /// Returns a view of the same memory through another address space.
    #[must_use]
    pub fn with_space(self, space: AddressSpace) -> Self {
        Self { space, ..self }
    }

    /// Returns the GPA of the byte at `gva`, and the number of bytes from there to the end of the
    /// page.
    ///
    /// # Errors
    /// If it is not mapped.
    pub fn locate(&self, gva: Gva) -> Result<(Gpa, u64), TranslateError> {
        let paused = self.paused;
        match paused.walks.translate(paused.memory, self.space, gva) {
            Ok(page) => Ok((page.gpa, page.bytes_left_in_page())),
            Err(TranslateError::NoAccess { gpa, .. }) => Ok((gpa, PAGE - gva.0 % PAGE)),
            Err(error) => Err(error),
        }
    }

    /// Fills `buf` from `gva`, across pages. Nothing is promised about `buf` after an error.
    ///
    /// # Errors
    /// If any byte is not mapped to RAM.
    pub fn read(&self, gva: Gva, buf: &mut [u8]) -> Result<(), ReadVirtualError> {
        self.read_pages(gva, buf)
    }

    /// Reads `N` bytes at `gva`.
    ///
    /// # Errors
    /// If any of them is not mapped to RAM.
    pub fn array<const N: usize>(&self, gva: Gva) -> Result<[u8; N], ReadVirtualError> {
        let mut bytes = [0; N];
        self.read(gva, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads `length` bytes at `gva`. The caller bounds `length`.
    ///
    /// # Errors
    /// If any of them is not mapped to RAM.
    pub fn bytes(&self, gva: Gva, length: usize) -> Result<Vec<u8>, ReadVirtualError> {
        let mut bytes = vec![0; length];
        self.read(gva, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the byte at `gva`.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn u8(&self, gva: Gva) -> Result<u8, ReadVirtualError> {
        self.array::<1>(gva).map(|[byte]| byte)
    }

    /// Reads the `u16` at `gva`.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn u16(&self, gva: Gva) -> Result<u16, ReadVirtualError> {
        self.array(gva).map(u16::from_le_bytes)
    }

    /// Reads the `u32` at `gva`.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn u32(&self, gva: Gva) -> Result<u32, ReadVirtualError> {
        self.array(gva).map(u32::from_le_bytes)
    }

    /// Reads the `u64` at `gva`.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn u64(&self, gva: Gva) -> Result<u64, ReadVirtualError> {
        self.array(gva).map(u64::from_le_bytes)
    }

    /// Reads the pointer at `gva`. Returns `None` if it is null.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn pointer(&self, gva: Gva) -> Result<Option<Gva>, ReadVirtualError> {
        let value = self.u64(gva)?;
        Ok((value != 0).then_some(Gva(value)))
    }

    /// Reads the string at `gva` without its NUL, truncated to `most` bytes. Pages after the one
    /// with the NUL are not read.
    ///
    /// # Errors
    /// If a byte before the NUL, and before `most`, is not mapped to RAM.
    pub fn c_string(&self, gva: Gva, most: usize) -> Result<Vec<u8>, ReadVirtualError> {
        let mut text = Vec::new();
        while text.len() < most {
            let done = text.len();
            text.resize(most.min(done.saturating_add(PART)), 0);
            let rest = text.get_mut(done..).unwrap_or_default();
            let (read, nul) = self.read_string_part(gva, done, rest)?;
            text.truncate(done + nul.unwrap_or(read));
            if nul.is_some() {
                break;
            }
        }
        Ok(text)
    }
}

impl Pages for MemoryView<'_> {
    fn locate(&self, gva: Gva) -> Result<(Gpa, u64), TranslateError> {
        MemoryView::locate(self, gva)
    }

    fn read_physical(&self, gpa: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        self.paused.memory.read_physical(gpa, buf)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::test_memory::TestMemory;
    use crate::test_says::assert_says;
    use crate::x86_64::paging::ADDRESS;
    use crate::x86_64::virtual_memory::tests::{self, BASE};

    /// Returns the guest of the plain read tests, followed by a page without access and an unmapped
    /// page.
    fn guest() -> (TestMemory, AddressSpace) {
        let (mut memory, space) = tests::guest();
        // Linux stores the address in such an entry inverted.
        memory.map_entry(space, BASE + 0x3000, 1, !0x1b_0000u64 & ADDRESS | 1 << 8);
        memory.write(0x1b_0000, b"hidden\0");
        (memory, space)
    }

    #[test]
    fn numbers_and_strings_are_read_across_pages() {
        let (memory, space) = guest();
        let paused = PausedMemory::new(&memory);
        let view = paused.view(space);
        let over = u64::from_le_bytes(*b"over the");
        assert_eq!(view.u64(Gva(BASE + 0xffc)), Ok(over));
        assert_eq!(view.pointer(Gva(BASE + 0xffc)), Ok(Some(Gva(over))));
        assert_eq!(view.pointer(Gva(BASE)), Ok(None));
        assert_eq!(view.u8(Gva(BASE + 0xfff)), Ok(b'r'));
        assert_eq!(view.u16(Gva(BASE + 0xfff)), Ok(0x2072));
        assert_eq!(view.u32(Gva(BASE + 0x1ffc)), Ok(0x3736_3534));
        assert_eq!(view.bytes(Gva(BASE + 0xffe), 4), Ok(b"er t".to_vec()));
        for (offset, most, expected) in [
            (0xffc, 64, Ok("over the edge")),
            (0xffc, 4, Ok("over")),
            (0xffc, 0, Ok("")),
            (0x1009, 64, Ok("")),
            (0x1ff8, 8, Ok("01234567")),
            (0x3000, 64, Ok("hidden")),
            (0x1ff8, 9, Err(())),
        ] {
            let read = view.c_string(Gva(BASE + offset), most).map_err(|_| ());
            assert_eq!(
                read,
                expected.map(|text: &str| text.as_bytes().to_vec()),
                "{offset:#x}"
            );
        }
    }

    #[test]
    fn reads_that_fail_name_the_first_bad_byte() {
        let (memory, space) = guest();
        let paused = PausedMemory::new(&memory);
        let view = paused.view(space);
        for (gva, part) in [
            (BASE + 0x1ffc, "0x402000: guest-physical 0xfee00000"),
            (BASE + 0x3ffc, "0x404000 is not mapped"),
            (u64::MAX - 6, "past the end of the address space"),
            (1 << 60, "not a canonical address"),
        ] {
            assert_says(view.u64(Gva(gva)).unwrap_err(), part);
        }
        assert_eq!(view.read(Gva(1 << 60), &mut []), Ok(()), "nothing asked");
    }
}
