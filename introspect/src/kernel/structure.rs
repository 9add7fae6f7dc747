//! A structure in the kernel's memory, read member by member.
//!
//! The caller has the offsets ([`super::layout`]). This checks that the address is in the kernel's
//! half. Errors say which structure at which address could not be read.

use std::fmt;

use crate::x86_64::ReadVirtualError;
use crate::{Gva, MemoryView};

/// An error in reading a structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StructureError {
    /// The pointer to the structure is invalid.
    #[error("{structure}: its pointer is {found}, expected a kernel address")]
    NoKernelAddress {
        /// The kind of structure.
        structure: &'static str,
        /// The pointer.
        found: Gva,
    },
    /// The structure is not mapped, or not to RAM.
    #[error("{structure} at {address} cannot be read: {source}")]
    Unreadable {
        /// The kind of structure.
        structure: &'static str,
        /// The structure's address.
        address: Gva,
        /// The cause.
        source: ReadVirtualError,
    },
}

/// Checks whether an address is in the kernel's half of the address space.
#[must_use]
pub fn is_kernel_address(address: Gva) -> bool {
    address.0 >> 63 == 1
}

/// A structure of a known kind.
#[derive(Clone, Copy)]
pub struct Structure<'p> {
    view: MemoryView<'p>,
    kind: &'static str,
    address: Gva,
}

impl fmt::Debug for Structure<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Structure")
            .field("kind", &self.kind)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl<'p> Structure<'p> {
    /// Makes the structure at `address` without reading it.
    ///
    /// # Errors
    /// If that is not a kernel address.
    pub fn at(
        view: MemoryView<'p>,
        kind: &'static str,
        address: Gva,
    ) -> Result<Self, StructureError> {
        match is_kernel_address(address) {
            true => Ok(Self {
                view,
                kind,
                address,
            }),
            false => Err(StructureError::NoKernelAddress {
                structure: kind,
                found: address,
            }),
        }
    }

    /// Returns the structure's kind.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// Returns the structure's address.
    #[must_use]
    pub fn address(&self) -> Gva {
        self.address
    }

    /// Returns the address of the member at `offset`.
    #[must_use]
    pub fn member(&self, offset: u64) -> Gva {
        Gva(self.address.0.wrapping_add(offset))
    }

    /// Reads the `N` bytes at `offset`.
    ///
    /// # Errors
    /// If one of them is not mapped to RAM.
    pub fn array<const N: usize>(&self, offset: u64) -> Result<[u8; N], StructureError> {
        let mut bytes = [0; N];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `buf` from `offset` on. The content of `buf` is undefined after an error.
    ///
    /// # Errors
    /// If a byte is not mapped to RAM.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), StructureError> {
        let past_end = ReadVirtualError::PastEnd {
            gva: self.address,
            length: buf.len(),
        };
        let at = self.address.0.checked_add(offset).ok_or(past_end);
        at.and_then(|at| self.view.read(Gva(at), buf))
            .map_err(|source| self.unreadable(source))
    }

    /// Reads the byte at `offset`.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn u8(&self, offset: u64) -> Result<u8, StructureError> {
        self.array(offset).map(u8::from_le_bytes)
    }

    /// Reads the number at `offset`.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn u16(&self, offset: u64) -> Result<u16, StructureError> {
        self.array(offset).map(u16::from_le_bytes)
    }

    /// Reads the number at `offset`.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn u32(&self, offset: u64) -> Result<u32, StructureError> {
        self.array(offset).map(u32::from_le_bytes)
    }

    /// Reads the number at `offset`.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn i32(&self, offset: u64) -> Result<i32, StructureError> {
        self.array(offset).map(i32::from_le_bytes)
    }

    /// Reads the number at `offset`.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn u64(&self, offset: u64) -> Result<u64, StructureError> {
        self.array(offset).map(u64::from_le_bytes)
    }

    /// Reads the pointer at `offset`; `None` if it is null.
    ///
    /// # Errors
    /// If it is not mapped to RAM.
    pub fn pointer(&self, offset: u64) -> Result<Option<Gva>, StructureError> {
        let value = self.u64(offset)?;
        Ok((value != 0).then_some(Gva(value)))
    }

    /// Follows the pointer at `offset` to a structure; `None` if it is null.
    ///
    /// # Errors
    /// If the pointer cannot be read or is not a kernel address.
    pub fn follow(&self, offset: u64, kind: &'static str) -> Result<Option<Self>, StructureError> {
        self.pointer(offset)?
            .map(|address| Self::at(self.view, kind, address))
            .transpose()
    }

    /// Follows the pointer at `offset` to a structure. For pointers that are never null in the
    /// kernel.
    ///
    /// # Errors
    /// If the pointer cannot be read, is null or is not a kernel address.
    pub fn follow_always(&self, offset: u64, kind: &'static str) -> Result<Self, StructureError> {
        Self::at(self.view, kind, Gva(self.u64(offset)?))
    }

    /// Reads the string that the pointer at `offset` leads to, cut after `most` bytes. Returns
    /// `None` if the pointer is null.
    ///
    /// # Errors
    /// If pointer or string cannot be read.
    pub fn string(
        &self,
        offset: u64,
        kind: &'static str,
        most: usize,
    ) -> Result<Option<Vec<u8>>, StructureError> {
        let Some(text) = self.follow(offset, kind)? else {
            return Ok(None);
        };
        let read = self.view.c_string(text.address, most);
        read.map(Some).map_err(|source| text.unreadable(source))
    }

    /// Reads the string in the member at `offset`, cut after `most` bytes.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn text(&self, offset: u64, most: usize) -> Result<Vec<u8>, StructureError> {
        self.view
            .c_string(self.member(offset), most)
            .map_err(|source| self.unreadable(source))
    }

    /// Makes the error of a failed read of this structure.
    #[must_use]
    pub fn unreadable(&self, source: ReadVirtualError) -> StructureError {
        StructureError::Unreadable {
            structure: self.kind,
            address: self.address,
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::test_kernel::{BASE, TestKernel};

    #[test]
    fn members_are_read_and_pointers_followed() {
        let mut kernel = TestKernel::default();
        kernel.put(BASE, 0x0102_0304_8506_0708u64.to_le_bytes());
        kernel.put(BASE + 8, (BASE + 0x100).to_le_bytes());
        kernel.put(BASE + 0x100, *b"some text\0");
        let paused = PausedMemory::new(&kernel.memory);
        let it = Structure::at(kernel.view(&paused), "thing", Gva(BASE)).unwrap();
        assert_eq!(it.u8(1), Ok(0x07));
        assert_eq!(it.u16(0), Ok(0x0708));
        assert_eq!(it.u32(0), Ok(0x8506_0708));
        assert_eq!(it.i32(0), Ok(0x8506_0708u32.cast_signed()));
        assert_eq!(it.u64(0), Ok(0x0102_0304_8506_0708));
        assert_eq!(it.pointer(8), Ok(Some(Gva(BASE + 0x100))));
        assert_eq!(it.string(8, "text", 4), Ok(Some(b"some".to_vec())));
        let other = it.follow(8, "other").unwrap().unwrap();
        assert_eq!(other.address(), Gva(BASE + 0x100));
        assert!(it.follow(16, "other").unwrap().is_none());
    }

    #[test]
    fn errors_name_the_structure_its_address_and_the_pointer() {
        let kernel = TestKernel::default();
        let paused = PausedMemory::new(&kernel.memory);
        let view = kernel.view(&paused);
        let user = Structure::at(view, "thing", Gva(0x40_0000)).err().unwrap();
        assert_eq!(
            user.to_string(),
            "thing: its pointer is 0x400000, expected a kernel address"
        );
        let wild = Structure::at(view, "thing", Gva(u64::MAX - 64)).unwrap();
        for offset in [0, 62, 100] {
            let error = wild.u32(offset).unwrap_err().to_string();
            let start = "thing at 0xffffffffffffffbf cannot be read: ";
            assert!(error.starts_with(start), "{error}");
        }
        let null = Structure::at(view, "thing", Gva(BASE)).unwrap();
        let error = null.follow_always(0, "other").err().unwrap().to_string();
        assert!(error.starts_with("other: its pointer is 0x0"), "{error}");
    }
}
