//! The headers of an ELF object: a program or a shared library, of 64 or 32 bits, for x86.
//!
//! The caller brings its bytes, of which some may be missing. This reads the ELF header and the program headers, without
//! which nothing can be said, and the section headers if they are there: they stand at the end of a file and are
//! often not in a guest's memory. What could not be read is kept as [`LostPart`]. Contents are read when asked for.

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
    /// First byte in the file.
    pub offset: u64,
    /// Link-time address of that byte.
    pub address: u64,
    /// Bytes in the file.
    pub file_size: u64,
    /// Bytes in memory.
    pub memory_size: u64,
}

impl Segment {
    /// Whether it is loaded (`PT_LOAD`).
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.kind == elf::PT_LOAD
    }

    /// Whether it is loaded and holds code.
    #[must_use]
    pub fn is_code(&self) -> bool {
        self.is_loaded() && self.flags & elf::PF_X != 0
    }

    /// Where the byte at a link-time address stands in the file, and how many bytes follow there, itself included. `None` if
    /// the segment is not loaded, or does not have it in the file.
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
    /// Name; empty if the names are missing.
    pub name: String,
    /// `sh_type`, such as `SHT_PROGBITS`.
    pub kind: u32,
    /// `sh_flags`.
    pub flags: u64,
    /// Link-time address, 0 if it is not loaded.
    pub address: u64,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes; of a `SHT_NOBITS` section, in memory only.
    pub size: u64,
    /// `sh_link`: for a symbol table, the section of its strings.
    pub link: u32,
    /// Bytes of one entry of a table.
    pub entry_size: u64,
}

impl Section {
    /// Whether it is loaded and holds code.
    #[must_use]
    pub fn is_code(&self) -> bool {
        let code = u64::from(elf::SHF_ALLOC | elf::SHF_EXECINSTR);
        self.flags & code == code
    }
}

/// Why bytes are no object that a process on x86-64 could have mapped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// The headers are not at hand.
    #[error("the ELF headers cannot be read: {0}")]
    Headers(#[from] Missing),
    /// Something else.
    #[error("not an ELF file: it starts with the bytes {start:02x?}")]
    NotElf {
        /// The first bytes found.
        start: [u8; 4],
    },
    /// Neither 32 nor 64 bits, or big-endian.
    #[error(
        "ELF class {class} with data encoding {encoding}: class 1 or 2 (32 or 64 bits) and encoding 1 \
         (little-endian) are read"
    )]
    WrongFormat {
        /// `EI_CLASS` found.
        class: u8,
        /// `EI_DATA` found.
        encoding: u8,
    },
    /// ELF of another machine.
    #[error(
        "ELF machine {found} is neither x86-64 ({}) nor i386 ({})",
        elf::EM_X86_64,
        elf::EM_386
    )]
    WrongMachine {
        /// `e_machine` found.
        found: u16,
    },
    /// An object file before linking, or a core.
    #[error("ELF type {found} is neither an executable (2) nor a shared object (3)")]
    WrongType {
        /// `e_type` found.
        found: u16,
    },
    /// Program headers of odd size or number.
    #[error("{count} program headers of {size} bytes each: the file is damaged")]
    ProgramHeaders {
        /// `e_phnum` found.
        count: u16,
        /// `e_phentsize` found.
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
    /// If the ELF header or the program headers are missing or damaged, or are those of another kind of file.
    pub fn parse(bytes: &'f dyn FileBytes) -> Result<Self, ObjectError> {
        Ok(Self {
            bytes,
            headers: elf_headers::read(bytes)?,
            relocated_by: 0,
        })
    }

    /// To be told when the bytes come from a process's memory: there the dynamic linker may have added this load bias
    /// (see [`LoadBase`](super::load_base::LoadBase)) to the addresses of the dynamic table.
    #[must_use]
    pub fn relocated_by(self, bias: u64) -> Self {
        Self {
            relocated_by: bias,
            ..self
        }
    }

    /// Whether addresses have 64 bits.
    #[must_use]
    pub fn is_64_bit(&self) -> bool {
        self.headers.wide
    }

    /// The segments, in file order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.headers.segments
    }

    /// The sections, in file order, by the number that other parts of the file use. None if there are no section
    /// headers or they are [lost](Self::lost).
    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.headers.sections
    }

    /// What of the headers could not be read.
    #[must_use]
    pub fn lost(&self) -> &[LostPart] {
        &self.headers.lost
    }

    /// The first section called `name`.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections().iter().find(|section| section.name == name)
    }

    /// The contents of a section of this object, at most `most` bytes.
    ///
    /// # Errors
    /// If bytes are missing, if there are more than `most`, or none in the file.
    pub fn section_bytes(&self, section: &Section, most: u64) -> Result<Vec<u8>, LostPart> {
        let read = |size| Ok(read_bytes(self.bytes, section.offset, size)?);
        self.section_size(section, most)
            .and_then(read)
            .map_err(|reason| LostPart::section(section, reason))
    }

    /// As [`section_bytes`](Self::section_bytes), but pages may be missing.
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

    /// The bytes that a segment has in the file, at most `most`.
    ///
    /// # Errors
    /// If bytes are missing, or there are more than `most`.
    pub fn segment_bytes(&self, segment: &Segment, most: u64) -> Result<Vec<u8>, LostReason> {
        let size = LostReason::bounded(segment.file_size, most)?;
        Ok(read_bytes(self.bytes, segment.offset, size)?)
    }

    /// Bytes at a link-time address, of which pages may be missing. At most `most` bytes, and no more than the segment
    /// has in the file.
    pub(super) fn sparse_at(&self, address: u64, most: u64) -> Result<SparseBytes, LostReason> {
        let (offset, left) = self.file_offset_of(address).ok_or_else(|| {
            LostReason::Damaged(format!("{address:#x} is in no load segment of the file"))
        })?;
        let size = LostReason::bounded(most.min(left), most)?;
        Ok(SparseBytes::read(self.bytes, offset, size)?)
    }

    /// Where the byte at a link-time address stands in the file, and how many bytes of its segment follow there, itself
    /// included. `None` where no load segment has bytes in the file.
    #[must_use]
    pub fn file_offset_of(&self, address: u64) -> Option<(u64, u64)> {
        let mut segments = self.segments().iter();
        segments.find_map(|segment| segment.file_offset_of(address))
    }

    /// The link-time address of an address found in the dynamic table.
    pub(super) fn dynamic_address(&self, found: u64) -> u64 {
        match self.file_offset_of(found) {
            Some(_) => found,
            None => found.wrapping_sub(self.relocated_by),
        }
    }
}
