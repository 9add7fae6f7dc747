//! Writes an executable with a few loadable segments and function symbols.
//!
//! The caller owns addresses and permissions.

use object::build::Error;
use object::build::elf::SectionData;
use object::elf;

use super::asm::Symbol;
use super::layout::PAGE;
use crate::elf::builder;

/// A loadable piece of memory, which is also one section.
#[derive(Debug, Clone)]
pub struct Segment {
    /// The section's name.
    pub name: &'static str,
    /// The virtual and physical address; must be a multiple of the page size.
    pub address: u64,
    /// The bytes in the file.
    pub bytes: Vec<u8>,
    /// The size in memory, in bytes. Memory beyond `bytes` is zero.
    pub memory: u64,
    /// The permissions.
    pub kind: Kind,
}

/// The permissions of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Read and execute.
    Text,
    /// Read and write.
    Data,
}

/// Writes an executable that starts at `entry`. A symbol in a text segment is a function, any other
/// an object.
///
/// # Errors
/// If there is no memory for the file.
pub fn write(entry: u64, segments: &[Segment], symbols: &[Symbol]) -> Result<Vec<u8>, Error> {
    let mut file = builder(entry);
    let mut homes = Vec::new();
    let mut offset = PAGE;
    for segment in segments {
        let (flags, kind) = match segment.kind {
            Kind::Text => (elf::SHF_EXECINSTR, elf::STT_FUNC),
            Kind::Data => (elf::SHF_WRITE, elf::STT_OBJECT),
        };
        let section = file.sections.add();
        section.name = segment.name.into();
        section.sh_type = elf::SHT_PROGBITS;
        section.sh_flags = (elf::SHF_ALLOC | flags).into();
        section.sh_addr = segment.address;
        section.sh_offset = offset;
        section.sh_size = segment.bytes.len() as u64;
        section.sh_addralign = PAGE;
        section.data = SectionData::Data(segment.bytes.as_slice().into());
        let load = file.segments.add_load_segment(section.p_flags(), PAGE);
        load.append_section_range(section);
        load.p_memsz = segment.memory;
        offset = (offset + section.sh_size).next_multiple_of(PAGE);
        let range = segment.address..segment.address + segment.memory;
        homes.push((range, section.id(), kind));
    }
    for symbol in symbols {
        let home = (homes.iter()).find(|(range, ..)| range.contains(&symbol.address));
        let Some((_, section, kind)) = home else {
            continue;
        };
        let added = file.symbols.add();
        added.name = symbol.name.into();
        added.section = Some(*section);
        added.set_st_info(elf::STB_GLOBAL, *kind);
        added.st_value = symbol.address;
        added.st_size = symbol.size;
    }
    for (name, data) in [
        (".symtab", SectionData::Symbol),
        (".strtab", SectionData::String),
        (".shstrtab", SectionData::SectionString),
    ] {
        let section = file.sections.add();
        section.name = name.into();
        section.data = data;
    }
    let mut out = Vec::new();
    file.write(&mut out)?;
    Ok(out)
}
