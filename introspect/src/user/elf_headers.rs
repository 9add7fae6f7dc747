//! Reads the headers of an ELF file of either class into one form.

use object::LittleEndian;
use object::elf;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};

use super::file_bytes::{FileBytes, read_bytes};
use super::lost::{LostPart, LostReason, Part};
use super::object_file::{ObjectError, Section, Segment};
use super::sparse_bytes::SparseBytes;

/// The maximum size of program headers in bytes. The kernel's own loader accepts no more
/// (fs/binfmt_elf.c, `load_elf_phdrs`).
const MAX_PROGRAM_HEADERS: usize = 65536;
/// The maximum number of sections. A linked object has a few dozen.
const MAX_SECTIONS: u64 = 4096;
/// The maximum size of section names in bytes.
const MAX_SECTION_NAMES: u64 = 1 << 20;
/// The maximum length of a section name in bytes.
const MAX_SECTION_NAME: usize = 256;

/// The headers in the form common to both classes of ELF.
#[derive(Debug, Clone)]
pub(super) struct Headers {
    pub(super) wide: bool,
    pub(super) segments: Vec<Segment>,
    pub(super) sections: Vec<Section>,
    pub(super) lost: Vec<LostPart>,
}

/// Reads the headers of an x86 file that can be run or loaded.
///
/// # Errors
/// As [`ObjectFile::parse`](super::object_file::ObjectFile::parse).
pub(super) fn read(bytes: &dyn FileBytes) -> Result<Headers, ObjectError> {
    let ident = read_bytes(bytes, 0, size_of::<elf::Ident>())?;
    let (class, encoding) = match ident.as_slice() {
        [0x7f, b'E', b'L', b'F', class, encoding, ..] => (*class, *encoding),
        other => {
            let start = other.first_chunk().copied().unwrap_or_default();
            return Err(ObjectError::NotElf { start });
        }
    };
    match (class, encoding) {
        (elf::ELFCLASS64, elf::ELFDATA2LSB) => headers::<elf::FileHeader64<LittleEndian>>(bytes),
        (elf::ELFCLASS32, elf::ELFDATA2LSB) => headers::<elf::FileHeader32<LittleEndian>>(bytes),
        _ => Err(ObjectError::WrongFormat { class, encoding }),
    }
}

fn headers<Elf: FileHeader<Endian = LittleEndian>>(
    bytes: &dyn FileBytes,
) -> Result<Headers, ObjectError> {
    let start = read_bytes(bytes, 0, size_of::<Elf>())?;
    // The buffer has the header's size, so the error cannot occur.
    let (header, _) = object::pod::from_bytes::<Elf>(&start)
        .map_err(|()| ObjectError::NotElf { start: [0; 4] })?;
    let machine = header.e_machine(LittleEndian);
    if !matches!(machine, elf::EM_X86_64 | elf::EM_386) {
        return Err(ObjectError::WrongMachine { found: machine });
    }
    let file_type = header.e_type(LittleEndian);
    if !matches!(file_type, elf::ET_EXEC | elf::ET_DYN) {
        return Err(ObjectError::WrongType { found: file_type });
    }
    let segments = segments(header, bytes)?;
    let mut lost = Vec::new();
    let sections = sections(header, bytes, &mut lost).unwrap_or_else(|reason| {
        let part = Part::SectionHeaders;
        lost.push(LostPart { part, reason });
        Vec::new()
    });
    Ok(Headers {
        wide: header.is_type_64(),
        segments,
        sections,
        lost,
    })
}

fn segments<Elf: FileHeader<Endian = LittleEndian>>(
    header: &Elf,
    bytes: &dyn FileBytes,
) -> Result<Vec<Segment>, ObjectError> {
    let (count, size) = (
        header.e_phnum(LittleEndian),
        header.e_phentsize(LittleEndian),
    );
    let length = usize::from(count) * size_of::<Elf::ProgramHeader>();
    if count == 0 {
        return Ok(Vec::new());
    }
    let damaged = ObjectError::ProgramHeaders { count, size };
    if usize::from(size) != size_of::<Elf::ProgramHeader>() || length > MAX_PROGRAM_HEADERS {
        return Err(damaged);
    }
    let table = read_bytes(bytes, header.e_phoff(LittleEndian).into(), length)?;
    let (table, _) =
        object::pod::slice_from_bytes::<Elf::ProgramHeader>(&table, usize::from(count))
            .map_err(|()| damaged)?;
    let segment = |program: &Elf::ProgramHeader| Segment {
        kind: program.p_type(LittleEndian),
        flags: program.p_flags(LittleEndian),
        offset: program.p_offset(LittleEndian).into(),
        address: program.p_vaddr(LittleEndian).into(),
        file_size: program.p_filesz(LittleEndian).into(),
        memory_size: program.p_memsz(LittleEndian).into(),
    };
    Ok(table.iter().map(segment).collect())
}

/// Returns the sections. If their names cannot be read, they have none, and the reason is added to
/// `lost`.
fn sections<Elf: FileHeader<Endian = LittleEndian>>(
    header: &Elf,
    bytes: &dyn FileBytes,
    lost: &mut Vec<LostPart>,
) -> Result<Vec<Section>, LostReason> {
    let offset: u64 = header.e_shoff(LittleEndian).into();
    if offset == 0 {
        return Ok(Vec::new());
    }
    let entry_size = header.e_shentsize(LittleEndian);
    if usize::from(entry_size) != size_of::<Elf::SectionHeader>() {
        let reason = format!("section headers of {entry_size} bytes each");
        return Err(LostReason::Damaged(reason));
    }
    let table = |count: usize| read_bytes(bytes, offset, count * size_of::<Elf::SectionHeader>());
    // Numbers that do not fit the ELF header are in the first section header.
    let mut count = u64::from(header.e_shnum(LittleEndian));
    let mut names = u32::from(header.e_shstrndx(LittleEndian));
    if count == 0 || names == u32::from(elf::SHN_XINDEX) {
        let first = table(1)?;
        if let Ok((first, _)) = object::pod::from_bytes::<Elf::SectionHeader>(&first) {
            if count == 0 {
                count = first.sh_size(LittleEndian).into();
            }
            if names == u32::from(elf::SHN_XINDEX) {
                names = first.sh_link(LittleEndian);
            }
        }
    }
    let count = LostReason::bounded(count, MAX_SECTIONS)?;
    let table = table(count)?;
    let (table, _) = object::pod::slice_from_bytes::<Elf::SectionHeader>(&table, count)
        .map_err(|()| LostReason::Damaged(format!("{count} section headers")))?;
    let names = match (names, table.get(names as usize)) {
        (0, _) => Ok(None),
        (_, Some(section)) => section_names(section, bytes).map(Some),
        (number, None) => {
            let reason = format!("they are in section {number} of {count}");
            Err(LostReason::Damaged(reason))
        }
    };
    let (names, reason) = match names {
        Ok(names) => {
            let reason = names.as_ref().and_then(LostReason::of_pages);
            (names, reason)
        }
        Err(reason) => (None, Some(reason)),
    };
    lost.extend(reason.map(|reason| LostPart {
        part: Part::SectionNames,
        reason,
    }));
    let section = |section: &Elf::SectionHeader| {
        let name = names.as_ref().and_then(|names| {
            let start = usize::try_from(section.sh_name(LittleEndian)).ok()?;
            names.c_string(start, MAX_SECTION_NAME).ok()
        });
        Section {
            name: String::from_utf8_lossy(name.unwrap_or_default()).into_owned(),
            kind: section.sh_type(LittleEndian),
            flags: section.sh_flags(LittleEndian).into(),
            address: section.sh_addr(LittleEndian).into(),
            offset: section.sh_offset(LittleEndian).into(),
            size: section.sh_size(LittleEndian).into(),
            link: section.sh_link(LittleEndian),
            entry_size: section.sh_entsize(LittleEndian).into(),
        }
    };
    Ok(table.iter().map(section).collect())
}

fn section_names<Section: SectionHeader<Endian = LittleEndian>>(
    section: &Section,
    bytes: &dyn FileBytes,
) -> Result<SparseBytes, LostReason> {
    let size = LostReason::bounded(section.sh_size(LittleEndian).into(), MAX_SECTION_NAMES)?;
    let offset = section.sh_offset(LittleEndian).into();
    Ok(SparseBytes::read(bytes, offset, size)?)
}
