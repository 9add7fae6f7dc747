//! A writer of small ELF kernel images for tests.

use object::build::elf::{Builder, SectionData};
use object::elf;

use crate::test_elf::{self, Symbol};

/// The link and load address of a [`TestElf`]'s first segment.
pub(super) const TEXT: (u64, u64) = (0xffff_ffff_8100_0000, 0x100_0000);

/// A builder of an image.
#[derive(Default)]
pub(super) struct TestElf {
    segments: Vec<(u64, u64, u64, Vec<u8>)>,
    note: Vec<u8>,
    sections: Vec<(&'static str, u32, u64, Vec<u8>)>,
    symbols: Vec<Symbol<'static>>,
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
        self.sections.push((name, flags, address, bytes.to_vec()));
        self
    }

    /// Adds symbols (name, type, binding, section number, value). Sections count from 1 in the
    /// order in which they were added.
    pub(super) fn symbols(mut self, symbols: &[(&'static str, u8, u8, u16, u64)]) -> Self {
        let symbols = symbols.iter().map(|&(n, k, b, s, v)| (n, k, b, s, v, 0));
        self.symbols.extend(symbols);
        self
    }

    /// Returns the file. The bytes of segments are sections without a name, after all others.
    pub(super) fn bytes<'a>(&'a self) -> Vec<u8> {
        let mut file = test_elf::start(true, elf::ET_EXEC, TEXT.1);
        test_elf::add(&mut file.symbols, self.symbols.iter().copied());
        let note = (elf::PT_NOTE, 0, 0, self.note.len() as u64, &self.note);
        let loads = self.segments.iter();
        let loads = loads.map(|(v, p, size, bytes)| (elf::PT_LOAD, *v, *p, *size, bytes));
        let segments: Vec<_> = loads
            .chain(Some(note).filter(|_| !self.note.is_empty()))
            .collect();
        let headers = file.file_header_size() + file.class().program_header_size() * segments.len();
        let mut end = headers as u64;
        let mut put = |file: &mut Builder<'a>, name, flags, address, bytes: &'a [u8]| {
            let data = SectionData::Data(bytes.into());
            let section = test_elf::section(file, name, elf::SHT_PROGBITS, flags, data);
            section.sh_addr = address;
            section.sh_addralign = 1;
            section.sh_offset = end;
            section.sh_size = bytes.len() as u64;
            end += section.sh_size;
            section.sh_offset
        };
        for (name, flags, address, bytes) in &self.sections {
            put(&mut file, name, *flags, *address, bytes);
        }
        for (kind, virt, phys, size, bytes) in segments {
            let offset = put(&mut file, "", elf::SHF_ALLOC, virt, bytes);
            let segment = file.segments.add();
            segment.p_type = kind;
            segment.p_flags = elf::PF_R | elf::PF_X;
            segment.p_offset = offset;
            segment.p_vaddr = virt;
            segment.p_paddr = phys;
            segment.p_filesz = bytes.len() as u64;
            segment.p_memsz = size;
            // Readers of notes use the alignment.
            segment.p_align = if kind == elf::PT_NOTE { 4 } else { 8 };
        }
        test_elf::finish(file)
    }
}
