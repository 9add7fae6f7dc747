//! The records of ELF files (elf(5)), for tests that write some. The caller places them.

use object::elf;

/// The class of an x86 file: 64 or 32 bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Wide,
    Narrow,
}

/// The members of a program header.
pub(crate) struct Program {
    pub(crate) kind: u32,
    pub(crate) flags: u32,
    pub(crate) offset: u64,
    pub(crate) virtual_address: u64,
    pub(crate) physical_address: u64,
    pub(crate) file_size: u64,
    pub(crate) memory_size: u64,
}

/// The members of a section header.
#[derive(Default)]
pub(crate) struct Section {
    /// The offset of its name.
    pub(crate) name: u32,
    pub(crate) kind: u32,
    pub(crate) flags: u32,
    pub(crate) address: u64,
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) link: u32,
    pub(crate) entry_size: u64,
}

/// The members of a symbol.
pub(crate) struct Symbol {
    /// The offset of its name.
    pub(crate) name: u32,
    pub(crate) kind: u8,
    pub(crate) binding: u8,
    pub(crate) section: u16,
    pub(crate) value: u64,
    pub(crate) size: u64,
}

const ALIGNMENT: u64 = 8;

impl Class {
    /// Returns the size of the file's header in bytes. The program headers follow it.
    pub(crate) fn header_size(self) -> usize {
        self.choose(64, 52)
    }

    /// Returns the size of a program header in bytes.
    pub(crate) fn program_size(self) -> usize {
        self.choose(56, 32)
    }

    /// Returns the size of a symbol in bytes.
    pub(crate) fn symbol_size(self) -> usize {
        self.choose(24, 16)
    }

    /// Returns the size of an address in bytes.
    pub(crate) fn word_size(self) -> usize {
        self.choose(8, 4)
    }

    fn choose<T>(self, wide: T, narrow: T) -> T {
        match self {
            Self::Wide => wide,
            Self::Narrow => narrow,
        }
    }

    /// Appends a number of the size of an address.
    pub(crate) fn word(self, out: &mut Vec<u8>, value: u64) {
        out.extend(&value.to_le_bytes()[..self.word_size()]);
    }

    /// Returns the file's header for this number of program headers. `sections` is the offset of
    /// their table and their number. The last one has their names.
    pub(crate) fn header(
        self,
        kind: u16,
        entry: u64,
        programs: usize,
        sections: Option<(u64, usize)>,
    ) -> Vec<u8> {
        let class = self.choose(elf::ELFCLASS64, elf::ELFCLASS32);
        let machine = self.choose(elf::EM_X86_64, elf::EM_386);
        let mut out = b"\x7fELF".to_vec();
        out.extend([class, 1, 1]);
        out.resize(16, 0);
        out.extend([kind, machine].map(u16::to_le_bytes).concat());
        out.extend(1u32.to_le_bytes());
        let (table, count) = sections.unwrap_or_default();
        for value in [entry, self.header_size() as u64, table] {
            self.word(&mut out, value);
        }
        out.extend(0u32.to_le_bytes());
        let sizes = [
            self.header_size() as u16,
            self.program_size() as u16,
            programs as u16,
            self.choose(64, 40),
            count as u16,
            (count as u16).saturating_sub(1),
        ];
        out.extend(sizes.map(u16::to_le_bytes).concat());
        out
    }

    /// Appends a program header.
    pub(crate) fn program(self, out: &mut Vec<u8>, program: &Program) {
        out.extend(program.kind.to_le_bytes());
        if self == Self::Wide {
            out.extend(program.flags.to_le_bytes());
        }
        for value in [
            program.offset,
            program.virtual_address,
            program.physical_address,
            program.file_size,
            program.memory_size,
        ] {
            self.word(out, value);
        }
        if self == Self::Narrow {
            out.extend(program.flags.to_le_bytes());
        }
        // Readers of notes use the alignment.
        let alignment = if program.kind == elf::PT_NOTE {
            4
        } else {
            ALIGNMENT
        };
        self.word(out, alignment);
    }

    /// Appends a section header.
    pub(crate) fn section(self, out: &mut Vec<u8>, section: &Section) {
        out.extend([section.name, section.kind].map(u32::to_le_bytes).concat());
        for value in [
            u64::from(section.flags),
            section.address,
            section.offset,
            section.size,
        ] {
            self.word(out, value);
        }
        out.extend([section.link, 0].map(u32::to_le_bytes).concat());
        self.word(out, ALIGNMENT);
        self.word(out, section.entry_size);
    }

    /// Appends a symbol.
    pub(crate) fn symbol(self, out: &mut Vec<u8>, symbol: &Symbol) {
        let information = [symbol.binding << 4 | symbol.kind, 0];
        out.extend(symbol.name.to_le_bytes());
        if self == Self::Wide {
            out.extend(information);
            out.extend(symbol.section.to_le_bytes());
        }
        self.word(out, symbol.value);
        self.word(out, symbol.size);
        if self == Self::Narrow {
            out.extend(information);
            out.extend(symbol.section.to_le_bytes());
        }
    }
}
