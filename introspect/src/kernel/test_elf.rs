//! A writer of small ELF kernel images for tests.
#![allow(clippy::unwrap_used)]

use object::elf;

use crate::test_elf::{self, Class, Program, Symbol};

const CLASS: Class = Class::Wide;
/// The link and load address of a [`TestElf`]'s first segment.
pub(super) const TEXT: (u64, u64) = (0xffff_ffff_8100_0000, 0x100_0000);

/// A section: name, type, flags, address, bytes, link, entry size.
struct Section(&'static str, u32, u32, u64, Vec<u8>, u32, u64);

/// A builder of an image.
#[derive(Default)]
pub(super) struct TestElf {
    segments: Vec<(u64, u64, u64, Vec<u8>)>,
    note: Vec<u8>,
    sections: Vec<Section>,
}

impl TestElf {
    /// Adds a load segment, of which `extra` bytes are only in memory.
    pub(super) fn segment(mut self, (virt, phys): (u64, u64), bytes: &[u8], extra: u64) -> Self {
        self.segments
            .push((virt, phys, bytes.len() as u64 + extra, bytes.to_vec()));
        self
    }

    /// Adds a note.
    pub(super) fn note(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        for word in [name.len() as u32 + 1, value.len() as u32, kind] {
            self.note.extend(word.to_le_bytes());
        }
        for part in [format!("{name}\0").as_bytes(), value] {
            self.note.extend(part);
            self.note.resize(self.note.len().next_multiple_of(4), 0);
        }
        self
    }

    /// Adds a section whose bytes are in the file.
    pub(super) fn section(
        mut self,
        name: &'static str,
        flags: u32,
        address: u64,
        bytes: &[u8],
    ) -> Self {
        self.sections.push(Section(
            name,
            elf::SHT_PROGBITS,
            flags,
            address,
            bytes.to_vec(),
            0,
            0,
        ));
        self
    }

    /// Adds a symbol table of (name, type, binding, section number, value). Sections count from 1
    /// in the order in which they were added.
    pub(super) fn symbols(mut self, symbols: &[(&str, u8, u8, u16, u64)]) -> Self {
        let (mut table, mut names) = (vec![0; CLASS.symbol_size()], vec![0]);
        for (name, kind, binding, section, value) in symbols {
            let symbol = Symbol {
                name: names.len() as u32,
                kind: *kind,
                binding: *binding,
                section: *section,
                value: *value,
                size: 0,
            };
            CLASS.symbol(&mut table, &symbol);
            names.extend(name.bytes().chain([0]));
        }
        let strings = self.sections.len() as u32 + 2;
        self.sections.push(Section(
            ".symtab",
            elf::SHT_SYMTAB,
            0,
            0,
            table,
            strings,
            24,
        ));
        self.sections
            .push(Section(".strtab", elf::SHT_STRTAB, 0, 0, names, 0, 0));
        self
    }

    /// Returns the file. Its first segment's bytes follow the headers; the section headers come
    /// last.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let programs = self.segments.len() + usize::from(!self.note.is_empty());
        let mut data = CLASS.header_size() + CLASS.program_size() * programs;
        let mut out = vec![0; data];
        let mut table = Vec::new();
        let note = (!self.note.is_empty()).then_some((
            elf::PT_NOTE,
            0,
            0,
            self.note.len() as u64,
            &self.note,
        ));
        let loads = self
            .segments
            .iter()
            .map(|(v, p, size, bytes)| (elf::PT_LOAD, *v, *p, *size, bytes));
        for (kind, virt, phys, memory_size, bytes) in loads.chain(note) {
            let program = Program {
                kind,
                flags: elf::PF_R | elf::PF_X,
                offset: data as u64,
                virtual_address: virt,
                physical_address: phys,
                file_size: bytes.len() as u64,
                memory_size,
            };
            CLASS.program(&mut table, &program);
            data += bytes.len();
            out.extend(bytes);
        }
        let start = CLASS.header_size();
        out[start..start + table.len()].copy_from_slice(&table);
        let (mut headers, mut names) = (vec![0; 64], vec![0]);
        let shstrtab = Section(".shstrtab", elf::SHT_STRTAB, 0, 0, Vec::new(), 0, 0);
        for section in self.sections.iter().chain([&shstrtab]) {
            let Section(name, kind, flags, address, bytes, link, entry_size) = section;
            let name_offset = names.len() as u32;
            names.extend(name.bytes().chain([0]));
            // The names of the sections end with the last section's own.
            let bytes = if *name == ".shstrtab" { &names } else { bytes };
            let header = test_elf::Section {
                name: name_offset,
                kind: *kind,
                flags: *flags,
                address: *address,
                offset: out.len() as u64,
                size: bytes.len() as u64,
                link: *link,
                entry_size: *entry_size,
            };
            CLASS.section(&mut headers, &header);
            out.extend(bytes);
        }
        let section_table = out.len() as u64;
        out.extend(headers);
        let sections = (section_table, self.sections.len() + 2);
        let header = CLASS.header(elf::ET_EXEC, TEXT.1, programs, Some(sections));
        out[..header.len()].copy_from_slice(&header);
        out
    }
}
