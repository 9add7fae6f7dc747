//! The headers of an ELF object: a 64-bit or 32-bit program or shared library for x86.
//!
//! The caller provides its bytes, of which some may be missing. The ELF header and the program
//! headers are required. Section headers are optional: they are at the end of a file and often not
//! in a guest's memory. Parts that could not be read are kept as [`LostPart`]. Contents are read on
//! request.

use std::fmt;

use object::elf;

use super::elf_headers::{self, Headers};
use super::file_bytes::{FileBytes, Missing, read_bytes};
use super::lost::{LostPart, LostReason};
use super::sparse_bytes::SparseBytes;

/// A part of the object's address space (`Elf64_Phdr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// `p_type`, such as `PT_LOAD`.
    pub kind: u32,
    /// `p_flags`.
    pub flags: u32,
    /// The offset of the first byte in the file.
    pub offset: u64,
    /// The link-time address of that byte.
    pub address: u64,
    /// The size in the file, in bytes.
    pub file_size: u64,
    /// The size in memory, in bytes.
    pub memory_size: u64,
}

impl Segment {
    /// Checks whether it is loaded (`PT_LOAD`).
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.kind == elf::PT_LOAD
    }

    /// Checks whether it is loaded and holds code.
    #[must_use]
    pub fn is_code(&self) -> bool {
        self.is_loaded() && self.flags & elf::PF_X != 0
    }

    /// Returns the file offset of a link-time address, and the number of bytes from there to the
    /// end of the segment. Returns `None` if the segment is not loaded, or does not have the byte
    /// in the file.
    #[must_use]
    pub fn file_offset_of(&self, address: u64) -> Option<(u64, u64)> {
        let distance = address.checked_sub(self.address)?;
        let left = self.file_size.checked_sub(distance)?;
        let offset = self.offset.checked_add(distance)?;
        (self.is_loaded() && left > 0).then_some((offset, left))
    }
}

/// A section (`Elf64_Shdr`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// The name, empty if the names are missing.
    pub name: String,
    /// `sh_type`, such as `SHT_PROGBITS`.
    pub kind: u32,
    /// `sh_flags`.
    pub flags: u64,
    /// The link-time address, 0 if it is not loaded.
    pub address: u64,
    /// The offset of the first byte in the file.
    pub offset: u64,
    /// The size in bytes. A `SHT_NOBITS` section has them only in memory.
    pub size: u64,
    /// `sh_link`, for a symbol table the section of its strings.
    pub link: u32,
    /// The size of a table's entry in bytes.
    pub entry_size: u64,
}

impl Section {
    /// Checks whether it is loaded and holds code.
    #[must_use]
    pub fn is_code(&self) -> bool {
        let code = u64::from(elf::SHF_ALLOC | elf::SHF_EXECINSTR);
        self.flags & code == code
    }
}

/// The reason why bytes are not an object that a process on x86-64 could have mapped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// The headers are not available.
    #[error("the ELF headers cannot be read: {0}")]
    Headers(#[from] Missing),
    /// The bytes are not ELF.
    #[error("not an ELF file: it starts with the bytes {start:02x?}")]
    NotElf {
        /// The first bytes.
        start: [u8; 4],
    },
    /// The class is neither 32 nor 64 bits, or the encoding is big-endian.
    #[error(
        "ELF class {class} with data encoding {encoding}: class 1 or 2 (32 or 64 bits) and encoding 1 \
         (little-endian) are read"
    )]
    WrongFormat {
        /// `EI_CLASS`.
        class: u8,
        /// `EI_DATA`.
        encoding: u8,
    },
    /// The file is for another machine.
    #[error(
        "ELF machine {found} is neither x86-64 ({}) nor i386 ({})",
        elf::EM_X86_64,
        elf::EM_386
    )]
    WrongMachine {
        /// `e_machine`.
        found: u16,
    },
    /// The file is a relocatable object or a core.
    #[error("ELF type {found} is neither an executable (2) nor a shared object (3)")]
    WrongType {
        /// `e_type`.
        found: u16,
    },
    /// The program headers have an invalid size or number.
    #[error("{count} program headers of {size} bytes each: the file is damaged")]
    ProgramHeaders {
        /// `e_phnum`.
        count: u16,
        /// `e_phentsize`.
        size: u16,
    },
}

/// An ELF object whose headers have been read.
#[derive(Clone)]
pub struct ObjectFile<'f> {
    bytes: &'f dyn FileBytes,
    headers: Headers,
    relocated_by: u64,
}

impl fmt::Debug for ObjectFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.headers, f)
    }
}

impl<'f> ObjectFile<'f> {
    /// Reads the headers.
    ///
    /// # Errors
    /// If the ELF header or the program headers are missing or damaged, or are those of another
    /// kind of file.
    pub fn parse(bytes: &'f dyn FileBytes) -> Result<Self, ObjectError> {
        Ok(Self {
            bytes,
            headers: elf_headers::read(bytes)?,
            relocated_by: 0,
        })
    }

    /// Sets the load bias of bytes that come from a process's memory. There the dynamic linker may
    /// have added it to the addresses of the dynamic table (see
    /// [`LoadBase`](super::load_base::LoadBase)).
    #[must_use]
    pub fn relocated_by(self, bias: u64) -> Self {
        Self {
            relocated_by: bias,
            ..self
        }
    }

    /// Checks whether addresses have 64 bits.
    #[must_use]
    pub fn is_64_bit(&self) -> bool {
        self.headers.wide
    }

    /// Returns the segments, in file order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.headers.segments
    }

    /// Returns the sections, in file order, by the number that other parts of the file use. There
    /// are none if there are no section headers or they are [lost](Self::lost).
    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.headers.sections
    }

    /// Returns the parts of the headers that could not be read.
    #[must_use]
    pub fn lost(&self) -> &[LostPart] {
        &self.headers.lost
    }

    /// Returns the first section called `name`.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections().iter().find(|section| section.name == name)
    }

    /// Reads the contents of a section of this object, at most `most` bytes.
    ///
    /// # Errors
    /// If bytes are missing, if there are more than `most`, or the file has none.
    pub fn section_bytes(&self, section: &Section, most: u64) -> Result<Vec<u8>, LostPart> {
        let read = |size| Ok(read_bytes(self.bytes, section.offset, size)?);
        self.section_size(section, most)
            .and_then(read)
            .map_err(|reason| LostPart::section(section, reason))
    }

    /// Reads the contents of a section as [`section_bytes`](Self::section_bytes) does, but pages
    /// may be missing.
    pub(super) fn sparse_section(
        &self,
        section: &Section,
        most: u64,
    ) -> Result<SparseBytes, LostReason> {
        let size = self.section_size(section, most)?;
        Ok(SparseBytes::read(self.bytes, section.offset, size)?)
    }

    fn section_size(&self, section: &Section, most: u64) -> Result<usize, LostReason> {
        if section.kind == elf::SHT_NOBITS {
            let reason = "this file holds none of its bytes".to_owned();
            return Err(LostReason::Damaged(reason));
        }
        LostReason::bounded(section.size, most)
    }

    /// Reads the bytes that a segment has in the file, at most `most`.
    ///
    /// # Errors
    /// If bytes are missing, or there are more than `most`.
    pub fn segment_bytes(&self, segment: &Segment, most: u64) -> Result<Vec<u8>, LostReason> {
        let size = LostReason::bounded(segment.file_size, most)?;
        Ok(read_bytes(self.bytes, segment.offset, size)?)
    }

    /// Reads bytes at a link-time address, of which pages may be missing. It reads at most `most`
    /// bytes, and no more than the segment has in the file.
    pub(super) fn sparse_at(&self, address: u64, most: u64) -> Result<SparseBytes, LostReason> {
        let (offset, left) = self.file_offset_of(address).ok_or_else(|| {
            LostReason::Damaged(format!("{address:#x} is in no load segment of the file"))
        })?;
        let size = LostReason::bounded(most.min(left), most)?;
        Ok(SparseBytes::read(self.bytes, offset, size)?)
    }

    /// Returns the file offset of a link-time address, and the number of bytes from there to the
    /// end of its segment. Returns `None` if no load segment has the byte in the file.
    #[must_use]
    pub fn file_offset_of(&self, address: u64) -> Option<(u64, u64)> {
        let mut segments = self.segments().iter();
        segments.find_map(|segment| segment.file_offset_of(address))
    }

    /// Converts an address found in the dynamic table to a link-time address.
    pub(super) fn dynamic_address(&self, found: u64) -> u64 {
        match self.file_offset_of(found) {
            Some(_) => found,
            None => found.wrapping_sub(self.relocated_by),
        }
    }
}
