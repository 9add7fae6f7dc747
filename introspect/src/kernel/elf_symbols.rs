//! The symbols of an ELF file's `.symtab`, as nm(1) shows them.
//!
//! For kernels without kallsyms. A stripped kernel has neither.

use object::elf;
use object::read::elf::{FileHeader, SectionHeader, Sym};
use object::{LittleEndian, SectionIndex};

use super::symbols::{MAX_NAME_BYTES, Symbols, SymbolsBuilder, TooManySymbols};

/// An error of [`read`].
#[derive(Debug, thiserror::Error)]
pub enum ElfSymbolsError {
    /// The section headers, the table or its strings reach past the end of the file.
    #[error("the ELF symbol table cannot be read: {0}")]
    Damaged(#[from] object::read::Error),
    /// The symbols are too many.
    #[error(transparent)]
    TooMany(#[from] TooManySymbols),
}

/// The section that holds the initial values of per-CPU variables. It is linked at address 0 up to
/// Linux 6.14, so its symbols are offsets.
const PER_CPU_SECTION: &[u8] = b".data..percpu";

/// Reads the functions, variables and labels of `.symtab`. Returns `None` if there is no such
/// table. Section and file symbols are left out. `end` is as in [`SymbolsBuilder::finish`].
pub(super) fn read(bytes: &[u8], end: Option<u64>) -> Result<Option<Symbols>, ElfSymbolsError> {
    let header = elf::FileHeader64::<LittleEndian>::parse(bytes)?;
    let sections = header.sections(LittleEndian, bytes)?;
    let table = sections.symbols(LittleEndian, bytes, elf::SHT_SYMTAB)?;
    if table.is_empty() {
        return Ok(None);
    }
    // Looked up once, because names of sections are of any length as well.
    let per_cpu = sections
        .section_by_name(LittleEndian, PER_CPU_SECTION)
        .filter(|(_, header)| header.sh_addr(LittleEndian) == 0)
        .map(|(index, _)| index);
    let mut builder = SymbolsBuilder::with_capacity(table.len());
    let mut name_bytes = 0usize;
    for symbol in table.iter() {
        let kind = symbol.st_type();
        let section = symbol.st_shndx(LittleEndian);
        if matches!(kind, elf::STT_SECTION | elf::STT_FILE) || section == elf::SHN_UNDEF {
            continue;
        }
        let name = table.symbol_name(LittleEndian, symbol)?;
        // Names may overlap, so a damaged table could name the same megabytes repeatedly.
        name_bytes = name_bytes.saturating_add(name.len());
        if name_bytes > MAX_NAME_BYTES {
            return Err(ElfSymbolsError::TooMany(TooManySymbols {
                symbols: table.len(),
                names: name_bytes,
            }));
        }
        if name.is_empty() {
            continue;
        }
        let index = SectionIndex(usize::from(section));
        let header = match section {
            elf::SHN_ABS => None,
            _ => sections.section(index).ok(),
        };
        let absolute = header.is_none() || per_cpu == Some(index);
        let letter = match header {
            None => b'a',
            Some(_) if symbol.st_bind() == elf::STB_WEAK && kind == elf::STT_OBJECT => b'v',
            Some(_) if symbol.st_bind() == elf::STB_WEAK => b'w',
            Some(header) => section_letter(header),
        };
        let letter = match symbol.st_bind() {
            elf::STB_LOCAL => letter,
            _ => letter.to_ascii_uppercase(),
        };
        builder.push(name, symbol.st_value(LittleEndian), letter, absolute)?;
    }
    Ok(Some(builder.finish(end)))
}

/// Returns nm's letter for a local symbol of a section with these flags.
fn section_letter(header: &elf::SectionHeader64<LittleEndian>) -> u8 {
    let flags = header.sh_flags(LittleEndian);
    let has = |flag: u32| flags & u64::from(flag) != 0;
    match () {
        () if has(elf::SHF_EXECINSTR) => b't',
        () if header.sh_type(LittleEndian) == elf::SHT_NOBITS => b'b',
        () if has(elf::SHF_WRITE) => b'd',
        () if has(elf::SHF_ALLOC) => b'r',
        () => b'n',
    }
}
