//! A decompressed x86-64 kernel image (`vmlinux`, ELF): its segments, entry points, symbols and
//! types.
//!
//! The caller owns decompression (a bzImage is refused with a hint) and loading. This module reads
//! segments, entry points, the version banner, and bytes by link address. It also finds the two
//! tables that a kernel carries about itself: symbols and BTF. It does not look at a running guest;
//! see [`slide`](super::slide).

use std::ops::Range;
use std::sync::Arc;

use memchr::memmem;
use object::elf;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};
use object::{LittleEndian, read};

use super::btf::{Btf, BtfError};
use super::elf_symbols::{self, ElfSymbolsError};
use super::kallsyms::{self, KallsymsError};
use super::symbols::Symbols;
use crate::Gpa;

/// The ELF note of a Xen-style PVH kernel, with the physical address of its 32-bit entry point
/// (`XEN_ELFNOTE_PHYS32_ENTRY`, include/xen/interface/elfnote.h).
const NOTE_PHYS32_ENTRY: u32 = 18;
const NOTE_XEN: &[u8] = b"Xen";
/// Offset and magic of the setup header of the Linux boot protocol
/// (Documentation/arch/x86/boot.rst).
const BZIMAGE_MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
/// The maximum length of a banner in bytes.
const MAX_BANNER: usize = 512;
/// The maximum number of banners searched for the one with the build number.
const MAX_BANNERS: usize = 8;

/// A range of the image to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The link-time virtual address; 0 for the per-CPU template of kernels up to 6.14.
    pub virtual_address: u64,
    /// The physical address to load at, before any relocation.
    pub physical_address: u64,
    /// Size in memory in bytes; bytes beyond those in the file are zero.
    pub memory_size: u64,
    /// The range of the segment's bytes in the file.
    pub file: Range<usize>,
    /// Whether the segment holds code.
    pub executable: bool,
}

impl Segment {
    /// Returns the guest-physical range that the segment loads to, in bytes.
    #[must_use]
    pub fn physical_range(&self) -> Range<u64> {
        let start = self.physical_address;
        start..start.saturating_add(self.memory_size)
    }
}

/// A parsed kernel image. Holds the whole file, possibly shared with the reader of the file.
#[derive(Debug)]
pub struct KernelImage {
    bytes: Arc<Vec<u8>>,
    segments: Vec<Segment>,
    entry: u64,
    pvh_entry: Option<u64>,
    btf: Option<Range<usize>>,
    banner: Option<String>,
}

/// An error in parsing a kernel image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file is a compressed kernel.
    #[error("this is a bzImage, not an ELF kernel: decompress its payload first")]
    BzImage,
    /// The file is neither ELF nor a bzImage.
    #[error("not an ELF file: it starts with the bytes {start:02x?}; give a vmlinux or a bzImage")]
    NotElf {
        /// The first bytes found, at most 8.
        start: Vec<u8>,
    },
    /// The file is ELF, but 32-bit or cut short in its header.
    #[error("not a 64-bit ELF file: {0}")]
    WrongClass(read::Error),
    /// The ELF file is of a big-endian machine.
    #[error("the ELF file is big-endian, x86-64 is not: the kernel is for another CPU")]
    BigEndian,
    /// The ELF file is of another machine.
    #[error(
        "ELF machine {found} is not x86-64 ({}): the kernel is for another CPU",
        elf::EM_X86_64
    )]
    WrongMachine {
        /// The `e_machine` found.
        found: u16,
    },
    /// The ELF file is an object file or a core.
    #[error(
        "ELF type {found} is neither an executable (2) nor position-independent (3): a vmlinux is needed"
    )]
    NotExecutable {
        /// The `e_type` found.
        found: u16,
    },
    /// Headers, sections or notes reach past the end of the file.
    #[error("the ELF headers cannot be read, the file is damaged or cut short: {0}")]
    Headers(#[from] read::Error),
    /// A segment's bytes are not all in the file.
    #[error(
        "load segment {index} wants bytes {offset:#x} to {end:#x} of a file of {length:#x} bytes: \
         the file is damaged or cut short"
    )]
    TruncatedSegment {
        /// The index in the program header table.
        index: usize,
        /// Offset of the first byte.
        offset: u64,
        /// Offset past the last byte; it may have wrapped in a damaged file.
        end: u64,
        /// Size of the file in bytes.
        length: usize,
    },
    /// A segment's sizes are impossible.
    #[error(
        "load segment {index} at {address:#x} has {file_size:#x} bytes in the file and {memory_size:#x} in \
         memory: the file is damaged"
    )]
    BadSegment {
        /// The index in the program header table.
        index: usize,
        /// The virtual address.
        address: u64,
        /// `p_filesz`.
        file_size: u64,
        /// `p_memsz`.
        memory_size: u64,
    },
    /// The file has no segment to load.
    #[error("the ELF file has no load segment: nothing could be run")]
    NoSegments,
}

/// An error in reading an image's symbols.
#[derive(Debug, thiserror::Error)]
pub enum ImageSymbolsError {
    /// The image has neither kallsyms nor an ELF symbol table.
    #[error(
        "the kernel image names no symbols: no .symtab, and kallsyms: {kallsyms}; \
         build the kernel with CONFIG_KALLSYMS=y"
    )]
    Neither {
        /// The error of kallsyms.
        kallsyms: KallsymsError,
    },
    /// The `.symtab` exists but is broken.
    #[error(transparent)]
    Elf(#[from] ElfSymbolsError),
}

/// An error in reading an image's types.
#[derive(Debug, thiserror::Error)]
pub enum ImageBtfError {
    /// The image has no `.BTF` section.
    #[error(
        "the kernel image has no .BTF section (built without CONFIG_DEBUG_INFO_BTF): tasks (pid, comm), \
         struct members and argument names are not available; function probes and registers are"
    )]
    NoSection,
    /// The section is broken.
    #[error("the .BTF section cannot be used: {0}")]
    Damaged(#[from] BtfError),
}

impl KernelImage {
    /// Parses the file's headers and keeps the file. Symbols and BTF are read on demand.
    ///
    /// # Errors
    /// If these are not the bytes of a complete x86-64 ELF executable.
    pub fn parse(bytes: impl Into<Arc<Vec<u8>>>) -> Result<Self, ImageError> {
        let bytes = bytes.into();
        if !bytes.starts_with(&elf::ELFMAG) {
            let (offset, magic) = BZIMAGE_MAGIC;
            return Err(match bytes.get(offset..offset + magic.len()) {
                Some(found) if found == magic => ImageError::BzImage,
                _ => ImageError::NotElf {
                    start: bytes.iter().take(8).copied().collect(),
                },
            });
        }
        let data = bytes.as_slice();
        let header =
            elf::FileHeader64::<LittleEndian>::parse(data).map_err(ImageError::WrongClass)?;
        if !header.is_little_endian() {
            return Err(ImageError::BigEndian);
        }
        let machine = header.e_machine(LittleEndian);
        if machine != elf::EM_X86_64 {
            return Err(ImageError::WrongMachine { found: machine });
        }
        let file_type = header.e_type(LittleEndian);
        if !matches!(file_type, elf::ET_EXEC | elf::ET_DYN) {
            return Err(ImageError::NotExecutable { found: file_type });
        }
        let programs = header.program_headers(LittleEndian, data)?;
        let segments = load_segments(programs, data.len())?;
        let pvh_entry = pvh_entry(programs, data)?;
        let btf = match header.section_headers(LittleEndian, data)?.is_empty() {
            true => None,
            false => btf_section(header, data)?,
        };
        let (entry, banner) = (header.e_entry(LittleEndian), banner(data));
        Ok(Self {
            bytes,
            segments,
            entry,
            pvh_entry,
            btf,
            banner,
        })
    }

    /// Returns the segments to load, in file order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns `e_entry`, which for a kernel is a physical address.
    #[must_use]
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// Returns the physical address of the 32-bit PVH entry point, if the kernel has one
    /// (`CONFIG_PVH`).
    #[must_use]
    pub fn pvh_entry(&self) -> Option<u64> {
        self.pvh_entry
    }

    /// Returns the line that starts with `Linux version`, without its newline.
    #[must_use]
    pub fn banner(&self) -> Option<&str> {
        self.banner.as_deref()
    }

    /// Returns the whole file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the `length` bytes of the file that are linked at `address`. Returns `None` outside
    /// the segments, across two of them, and in the part of a segment that is not in the file
    /// (bss).
    #[must_use]
    pub fn read_at_vaddr(&self, address: u64, length: usize) -> Option<&[u8]> {
        self.segments.iter().find_map(|segment| {
            let offset = usize::try_from(address.checked_sub(segment.virtual_address)?).ok()?;
            let bytes = self.bytes.get(segment.file.clone())?;
            bytes.get(offset..offset.checked_add(length)?)
        })
    }

    /// Returns the load address of the byte linked at `address`; `None` outside the segments.
    #[must_use]
    pub fn physical(&self, address: u64) -> Option<Gpa> {
        self.segments.iter().find_map(|segment| {
            let offset = address.checked_sub(segment.virtual_address)?;
            let inside = offset < segment.memory_size;
            inside.then(|| Gpa(segment.physical_address.saturating_add(offset)))
        })
    }

    /// Returns the bytes of the `.BTF` section, if the kernel has one.
    #[must_use]
    pub fn btf_bytes(&self) -> Option<&[u8]> {
        self.bytes.get(self.btf.clone()?)
    }

    /// Parses the kernel's types.
    ///
    /// # Errors
    /// If there is no `.BTF` section or it is damaged.
    pub fn btf(&self) -> Result<Btf, ImageBtfError> {
        let bytes = self.btf_bytes().ok_or(ImageBtfError::NoSection)?;
        Ok(Btf::parse(bytes)?)
    }

    /// Reads the kernel's symbols at their link addresses, from kallsyms or the ELF symbol table.
    /// The ELF table is used if there is no kallsyms. It is also used, where it exists, if kallsyms
    /// names only functions (no `CONFIG_KALLSYMS_ALL`).
    ///
    /// # Errors
    /// If the image has neither, or the ELF table is damaged.
    pub fn symbols(&self) -> Result<Symbols, ImageSymbolsError> {
        let tables = kallsyms::find(&self.bytes, |offset| self.address_of(offset));
        match tables.and_then(|tables| tables.symbols(self.end())) {
            Ok(symbols)
                if symbols
                    .iter()
                    .any(|s| matches!(s.kind, 'd' | 'D' | 'b' | 'B')) =>
            {
                Ok(symbols)
            }
            Ok(symbols) => Ok(elf_symbols::read(&self.bytes, self.end())?.unwrap_or(symbols)),
            Err(kallsyms) => elf_symbols::read(&self.bytes, self.end())?
                .ok_or(ImageSymbolsError::Neither { kallsyms }),
        }
    }

    /// Returns the link address of a byte of the file; `None` if it is not loaded.
    fn address_of(&self, offset: usize) -> Option<u64> {
        let segment = self.segments.iter().find(|s| s.file.contains(&offset))?;
        let distance = u64::try_from(offset - segment.file.start).ok()?;
        segment.virtual_address.checked_add(distance)
    }

    /// Returns the first virtual address past the highest segment.
    fn end(&self) -> Option<u64> {
        let ends = self
            .segments
            .iter()
            .map(|s| s.virtual_address.saturating_add(s.memory_size));
        ends.max()
    }
}

fn load_segments(
    programs: &[elf::ProgramHeader64<LittleEndian>],
    length: usize,
) -> Result<Vec<Segment>, ImageError> {
    let mut segments = Vec::new();
    for (index, program) in programs.iter().enumerate() {
        if program.p_type(LittleEndian) != elf::PT_LOAD {
            continue;
        }
        let (offset, file_size) = program.file_range(LittleEndian);
        let (address, memory_size) = (program.p_vaddr(LittleEndian), program.p_memsz(LittleEndian));
        let file = || {
            let start = usize::try_from(offset).ok()?;
            let end = start.checked_add(usize::try_from(file_size).ok()?)?;
            (end <= length).then_some(start..end)
        };
        let file = file().ok_or(ImageError::TruncatedSegment {
            index,
            offset,
            end: offset.wrapping_add(file_size),
            length,
        })?;
        let physical_address = program.p_paddr(LittleEndian);
        let wraps = |start: u64| {
            memory_size
                .checked_sub(1)
                .and_then(|last| start.checked_add(last))
                .is_none()
        };
        if file_size > memory_size
            || (memory_size > 0 && (wraps(address) || wraps(physical_address)))
        {
            return Err(ImageError::BadSegment {
                index,
                address,
                file_size,
                memory_size,
            });
        }
        segments.push(Segment {
            virtual_address: address,
            physical_address,
            memory_size,
            file,
            executable: program.p_flags(LittleEndian) & elf::PF_X != 0,
        });
    }
    match segments.is_empty() {
        true => Err(ImageError::NoSegments),
        false => Ok(segments),
    }
}

fn pvh_entry(
    programs: &[elf::ProgramHeader64<LittleEndian>],
    data: &[u8],
) -> Result<Option<u64>, ImageError> {
    for program in programs {
        let Some(mut notes) = program.notes(LittleEndian, data)? else {
            continue;
        };
        while let Some(note) = notes.next()? {
            if note.name() == NOTE_XEN && note.n_type(LittleEndian) == NOTE_PHYS32_ENTRY {
                let value = note.desc();
                return Ok(crate::bytes::u64_at(value, 0)
                    .or_else(|| crate::bytes::u32_at(value, 0).map(u64::from)));
            }
        }
    }
    Ok(None)
}

fn btf_section(
    header: &elf::FileHeader64<LittleEndian>,
    data: &[u8],
) -> Result<Option<Range<usize>>, ImageError> {
    let sections = header.sections(LittleEndian, data)?;
    let Some((_, section)) = sections.section_by_name(LittleEndian, b".BTF") else {
        return Ok(None);
    };
    // This read proves that the range is in the file.
    section.data(LittleEndian, data)?;
    let range = section.file_range(LittleEndian).and_then(|(offset, size)| {
        let start = usize::try_from(offset).ok()?;
        Some(start..start.checked_add(usize::try_from(size).ok()?)?)
    });
    Ok(range)
}

/// Finds the banner: a `Linux version ` that a digit follows. Some kernels hold it twice
/// (init/version.c and init/version-timestamp.c). The running kernel prints the one with the build
/// number, `#1`.
pub(super) fn banner(data: &[u8]) -> Option<String> {
    const START: &[u8] = b"Linux version ";
    let mut lines = memmem::find_iter(data, START).filter_map(|start| {
        let line = data.get(start..)?;
        let line = line.get(..MAX_BANNER).unwrap_or(line);
        line.get(START.len()).filter(|byte| byte.is_ascii_digit())?;
        let line = line.split(|byte| matches!(byte, 0 | b'\n')).next()?;
        Some(String::from_utf8_lossy(line))
    });
    let first = lines.next()?;
    let numbered = |line: &str| {
        let after = line.split_once(" #").map(|(_, after)| after);
        after.is_some_and(|after| after.starts_with(|c: char| c.is_ascii_digit()))
    };
    if numbered(&first) {
        return Some(first.into_owned());
    }
    let better = lines.take(MAX_BANNERS).find(|line| numbered(line));
    Some(better.unwrap_or(first).into_owned())
}
