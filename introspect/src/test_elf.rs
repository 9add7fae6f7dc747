//! The start and the end of ELF files that tests build. The caller places sections and segments.
#![allow(clippy::unwrap_used)]

use object::Endianness;
use object::build::elf::{Builder, Header, Section, SectionData, Symbols};
use object::elf;

/// A symbol: name, type, binding, section number, address, size.
pub(crate) type Symbol<'d> = (&'d str, u8, u8, u16, u64, u64);

/// Returns a file of 64 or 32 bits without contents.
pub(crate) fn start<'d>(wide: bool, kind: u16, entry: u64) -> Builder<'d> {
    let mut file = Builder::new(Endianness::Little, wide);
    file.header = Header {
        e_type: kind,
        e_machine: if wide { elf::EM_X86_64 } else { elf::EM_386 },
        e_entry: entry,
        e_phoff: file.file_header_size() as u64,
        ..Header::default()
    };
    file
}

/// Adds a section.
pub(crate) fn section<'f, 'd>(
    file: &'f mut Builder<'d>,
    name: &'d str,
    kind: u32,
    flags: u32,
    data: SectionData<'d>,
) -> &'f mut Section<'d> {
    let section = file.sections.add();
    section.name = name.into();
    section.sh_type = kind;
    section.sh_flags = flags.into();
    section.sh_addralign = 8;
    section.data = data;
    section
}

/// Adds symbols.
pub(crate) fn add<'d, const DYNAMIC: bool>(
    table: &mut Symbols<'d, DYNAMIC>,
    symbols: impl IntoIterator<Item = Symbol<'d>>,
) {
    for (name, kind, binding, section, address, size) in symbols {
        let symbol = table.add();
        symbol.name = name.into();
        symbol.set_st_info(binding, kind);
        symbol.st_shndx = section;
        symbol.st_value = address;
        symbol.st_size = size;
    }
}

/// Adds the tables of symbols and names, and returns the file.
pub(crate) fn finish(mut file: Builder<'_>) -> Vec<u8> {
    if !file.symbols.is_empty() {
        section(&mut file, ".symtab", 0, 0, SectionData::Symbol);
        section(&mut file, ".strtab", 0, 0, SectionData::String);
    }
    section(&mut file, ".shstrtab", 0, 0, SectionData::SectionString);
    let mut out = Vec::new();
    file.write(&mut out).unwrap();
    out
}
