//! The vdso: a small shared library that the kernel maps into every process without a file.
//!
//! Its pages are part of the kernel's own data, where all of them are always present.
//! [`VdsoLayout`] reads it there, by the process's `mm_struct`. If the kernel's types do not
//! describe it, the caller finds the mapping called `[vdso]`. Pages that the process has not
//! accessed yet are then missing.

use super::file_bytes::{FileBytes, FileMapping, MappedBytes, Missing};
use super::load_base::LoadBase;
use super::object_file::{ObjectError, ObjectFile};
use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// The maximum size of a vdso in bytes. That of x86-64 has two or three pages.
const MAX_VDSO: u64 = 1 << 20;

/// The vdso of one process.
#[derive(Debug)]
pub struct Vdso<'p> {
    bytes: MappedBytes<'p>,
    start: Gva,
}

/// The members by which a kernel names the vdso of a process (`mm_struct.context`,
/// arch/x86/include/asm/mmu.h). Also those of its bytes (`struct vdso_image`,
/// arch/x86/include/asm/vdso.h).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdsoLayout {
    start: u64,
    image: u64,
    data: u64,
    size: u64,
}

/// The reason why a vdso could not be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VdsoError {
    /// A structure is not in memory, or the pointer to it is invalid.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// The size is invalid.
    #[error("the vdso from {start} to {end} does not have 1 to {MAX_VDSO} bytes")]
    Range {
        /// The first address.
        start: Gva,
        /// The address after the last.
        end: Gva,
    },
}

impl VdsoLayout {
    /// Finds the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe the vdso.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        Ok(Self {
            start: offset(btf, "mm_struct.context.vdso", 8)?,
            image: offset(btf, "mm_struct.context.vdso_image", 8)?,
            data: offset(btf, "vdso_image.data", 8)?,
            size: offset(btf, "vdso_image.size", 8)?,
        })
    }

    /// Finds the vdso of the process with the `mm_struct` at `mm`, or `None` if it has none.
    /// `kernel` must map the kernel.
    ///
    /// # Errors
    /// If the structures cannot be read, or have an invalid size.
    pub fn find<'p>(&self, kernel: MemoryView<'p>, mm: Gva) -> Result<Option<Vdso<'p>>, VdsoError> {
        let mm = Structure::at(kernel, "mm_struct", mm)?;
        let start = Gva(mm.u64(self.start)?);
        let image = mm.follow(self.image, "vdso_image")?;
        let Some(image) = image.filter(|_| start.0 != 0) else {
            return Ok(None);
        };
        let data = Gva(image.u64(self.data)?);
        let size = image.u64(self.size)?;
        let end = Gva(data.0.wrapping_add(size));
        let vdso = Vdso::mapped(kernel, data, end)?;
        Ok(Some(Vdso { start, ..vdso }))
    }
}

impl<'p> Vdso<'p> {
    /// Makes the vdso mapped from `start` to `end` in the address space of `view`.
    ///
    /// # Errors
    /// If the range is empty or too large.
    pub fn mapped(view: MemoryView<'p>, start: Gva, end: Gva) -> Result<Self, VdsoError> {
        let size = end.0.checked_sub(start.0);
        let size = size
            .filter(|size| (1..=MAX_VDSO).contains(size))
            .ok_or(VdsoError::Range { start, end })?;
        let mapping = FileMapping {
            start,
            end,
            file_offset: 0,
            executable: true,
        };
        Ok(Self {
            bytes: MappedBytes::new(view, size, vec![mapping]),
            start,
        })
    }

    /// Parses its headers.
    ///
    /// # Errors
    /// If they are not in memory or damaged.
    pub fn object(&self) -> Result<ObjectFile<'_>, ObjectError> {
        Ok(ObjectFile::parse(self)?.relocated_by(self.start.0))
    }

    /// Returns its load base. It is linked at address 0.
    #[must_use]
    pub fn load_base(&self) -> LoadBase {
        LoadBase::at(self.start)
    }
}

impl FileBytes for Vdso<'_> {
    fn size(&self) -> u64 {
        self.bytes.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        self.bytes.read_at(offset, buf)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::test_memory::{Flags, TestMemory};
    use crate::test_says::assert_says;
    use crate::user::symbols::FunctionSymbols;
    use crate::user::test_object::{TEXT, TestObject};
    use crate::x86_64::AddressSpace;

    const START: Gva = Gva(0x7fff_f7fc_1000);
    const MM: Gva = Gva(0xffff_8880_0000_0000);
    const IMAGE: Gva = Gva(0xffff_8880_0000_0800);
    const DATA: Gva = Gva(0xffff_ffff_8200_0000);
    const LAYOUT: VdsoLayout = VdsoLayout {
        start: 0x10,
        image: 0x18,
        data: 0,
        size: 8,
    };

    /// Makes memory with the file in the kernel at [`DATA`] and in the process at [`START`].
    /// Returns it and the file's size.
    fn guest() -> (TestMemory, AddressSpace, u64) {
        let file = TestObject::library()
            .exports(&["__vdso_gettimeofday", "clock_gettime"])
            .bytes();
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        let size = (file.len() as u64).next_multiple_of(4096);
        for page in (0..size).step_by(4096) {
            for (base, flags) in [(START, Flags::default().user()), (DATA, Flags::default())] {
                memory.map(space, base.0 + page, 0x18_0000 + page, 4096, flags);
            }
        }
        memory.write(0x18_0000, &file);
        memory.map(space, MM.0, 0x17_0000, 4096, Flags::default());
        (memory, space, size)
    }

    fn named(vdso: &Vdso<'_>) -> (String, u64) {
        let symbols = FunctionSymbols::read(&vdso.object().unwrap());
        let ip = Gva(START.0 + TEXT + 0x12);
        let (function, offset) = symbols
            .resolve(vdso.load_base().address_in_file(ip))
            .unwrap();
        (function.name.to_owned(), offset)
    }

    #[test]
    fn functions_of_the_vdso_are_named_by_their_address_in_the_process() {
        let (mut memory, space, size) = guest();
        for (at, value) in [
            (0x10, START.0),
            (0x18, IMAGE.0),
            (0x800, DATA.0),
            (0x808, size),
        ] {
            memory.write(0x17_0000 + at, &value.to_le_bytes());
        }
        let paused = PausedMemory::new(&memory);
        let view = paused.view(space);
        let expected = ("clock_gettime".to_owned(), 2);
        let mapped = Vdso::mapped(view, START, Gva(START.0 + size)).unwrap();
        assert_eq!(named(&mapped), expected);
        let found = LAYOUT.find(view, MM).unwrap().unwrap();
        assert_eq!(named(&found), expected);
    }

    #[test]
    fn a_process_without_vdso_has_none_and_a_broken_one_is_an_error() {
        for (start, image, data, size, expected) in [
            (0, IMAGE.0, DATA.0, 4096, Ok(())),
            (START.0, 0, DATA.0, 4096, Ok(())),
            (
                START.0,
                1 << 60,
                DATA.0,
                4096,
                Err("vdso_image: its pointer is 0x1000000000000000, expected a kernel address"),
            ),
            (
                START.0,
                IMAGE.0,
                DATA.0,
                0,
                Err("the vdso from 0xffffffff82000000 to 0xffffffff82000000"),
            ),
            (
                START.0,
                IMAGE.0,
                DATA.0,
                MAX_VDSO + 1,
                Err("does not have 1 to 1048576 bytes"),
            ),
            (
                START.0,
                IMAGE.0,
                DATA.0,
                u64::MAX,
                Err("does not have 1 to 1048576 bytes"),
            ),
        ] {
            let (mut memory, space, _) = guest();
            for (at, value) in [(0x10, start), (0x18, image), (0x800, data), (0x808, size)] {
                memory.write(0x17_0000 + at, &value.to_le_bytes());
            }
            let paused = PausedMemory::new(&memory);
            match (LAYOUT.find(paused.view(space), MM), expected) {
                (Ok(None), Ok(())) => {}
                (Err(error), Err(part)) => {
                    assert_says(error, part);
                }
                (found, _) => panic!("{image:#x} {size:#x}: {:?}", found.map(|v| v.is_some())),
            }
        }
    }

    #[test]
    fn a_vdso_that_is_not_mapped_yet_is_missing() {
        let (memory, space, _) = guest();
        let paused = PausedMemory::new(&memory);
        let elsewhere = Gva(START.0 + (1 << 20));
        let vdso = Vdso::mapped(paused.view(space), elsewhere, Gva(elsewhere.0 + 4096)).unwrap();
        let error = vdso.object().unwrap_err().to_string();
        assert!(error.ends_with("are not in the guest's memory"), "{error}");
    }
}
