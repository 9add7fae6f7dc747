//! Writes small libraries and programs for tests.
#![allow(clippy::unwrap_used)]

use object::elf;

use crate::test_elf::{Class, Program, Section, Symbol};

/// The link-time address and file offset of the code, which has [`TEXT_SIZE`] bytes.
pub(super) const TEXT: u64 = 0x1000;
/// The size of the code in bytes.
pub(super) const TEXT_SIZE: u64 = 0x100;
/// The number of the code's section.
const TEXT_SECTION: u16 = 1;

/// A symbol: name, type, binding, link-time address (0: undefined), size.
pub(super) type TestSymbol = (&'static str, u8, u8, u64, u64);

/// Makes a global or local function of 16 bytes.
pub(super) fn function(name: &'static str, index: u64, binding: u8) -> TestSymbol {
    (name, elf::STT_FUNC, binding, TEXT + index * 0x10, 0x10)
}

/// An object under construction. File offsets and link-time addresses are the same.
#[derive(Clone)]
pub(crate) struct TestObject {
    class: Class,
    gnu_hash: bool,
    section_headers: bool,
    relocated_by: u64,
    build_id: Vec<u8>,
    dynamic: Vec<TestSymbol>,
    full: Vec<TestSymbol>,
    debug_data: Vec<u8>,
    others: Vec<(&'static str, u64, Vec<u8>)>,
}

/// The file so far, its sections and their names.
#[derive(Default)]
struct Layout {
    out: Vec<u8>,
    sections: Vec<Section>,
    names: Vec<u8>,
}

impl Layout {
    /// Appends bytes and returns their offset.
    fn put(&mut self, bytes: &[u8]) -> usize {
        self.out.resize(self.out.len().next_multiple_of(8), 0);
        let at = self.out.len();
        self.out.extend(bytes);
        at
    }

    /// Appends a section's contents, notes its header and returns the offset. `link` and
    /// `entry_size` are those of a table, else 0.
    fn section(
        &mut self,
        name: &str,
        kind: u32,
        flags: u32,
        bytes: &[u8],
        link: u32,
        entry_size: usize,
    ) -> usize {
        let at = self.put(bytes);
        let loaded = flags & elf::SHF_ALLOC != 0;
        let header = Section {
            kind,
            flags,
            address: if loaded { at as u64 } else { 0 },
            offset: at as u64,
            size: bytes.len() as u64,
            link,
            entry_size: entry_size as u64,
            name: 0,
        };
        self.header(name, header);
        at
    }

    fn header(&mut self, name: &str, section: Section) {
        let start = self.names.len() as u32;
        self.names.extend(name.bytes().chain([0]));
        self.sections.push(Section {
            name: start,
            ..section
        });
    }

    /// Returns the number of the section after the next one.
    fn after_next(&self) -> u32 {
        self.sections.len() as u32 + 1
    }
}

impl TestObject {
    /// Makes a 64-bit library without symbols.
    pub(crate) fn library() -> Self {
        Self {
            class: Class::Wide,
            gnu_hash: true,
            section_headers: true,
            relocated_by: 0,
            build_id: Vec::new(),
            dynamic: Vec::new(),
            full: Vec::new(),
            debug_data: Vec::new(),
            others: Vec::new(),
        }
    }

    /// Makes it 32-bit.
    pub(super) fn narrow(self) -> Self {
        Self {
            class: Class::Narrow,
            ..self
        }
    }

    /// Omits section headers.
    pub(super) fn without_sections(self) -> Self {
        Self {
            section_headers: false,
            ..self
        }
    }

    /// Uses `DT_HASH` in place of `DT_GNU_HASH`.
    pub(super) fn sysv_hash(self) -> Self {
        Self {
            gnu_hash: false,
            ..self
        }
    }

    /// Uses addresses in the dynamic table as a dynamic linker leaves them in memory.
    pub(super) fn relocated_by(self, relocated_by: u64) -> Self {
        Self {
            relocated_by,
            ..self
        }
    }

    /// Adds a build id.
    pub(super) fn build_id(mut self, id: &[u8]) -> Self {
        self.build_id = [4, id.len() as u32, elf::NT_GNU_BUILD_ID]
            .map(u32::to_le_bytes)
            .concat();
        self.build_id.extend(b"GNU\0");
        self.build_id.extend(id);
        self
    }

    /// Exports functions of 16 bytes, in a row from the start of the code.
    pub(crate) fn exports(self, names: &[&'static str]) -> Self {
        let functions = (0..).zip(names);
        let functions = functions.map(|(index, name)| function(name, index, elf::STB_GLOBAL));
        let functions: Vec<_> = functions.collect();
        self.dynamic(&functions)
    }

    /// Adds symbols to `.dynsym`.
    pub(super) fn dynamic(mut self, symbols: &[TestSymbol]) -> Self {
        self.dynamic.extend(symbols);
        self
    }

    /// Adds symbols to `.symtab`.
    pub(super) fn full(mut self, symbols: &[TestSymbol]) -> Self {
        self.full.extend(symbols);
        self
    }

    /// Sets the contents of `.gnu_debugdata`.
    pub(super) fn debug_data(mut self, packed: &[u8]) -> Self {
        self.debug_data = packed.to_vec();
        self
    }

    /// Adds a section that is not loaded but has the link-time address `address`.
    pub(super) fn section(mut self, name: &'static str, address: u64, bytes: &[u8]) -> Self {
        self.others.push((name, address, bytes.to_vec()));
        self
    }

    /// Returns the file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut file = Layout {
            out: vec![0; self.class.header_size() + 3 * self.class.program_size()],
            ..Layout::default()
        };
        file.header("", Section::default());
        let text = Section {
            kind: elf::SHT_PROGBITS,
            flags: elf::SHF_ALLOC | elf::SHF_EXECINSTR,
            address: TEXT,
            offset: TEXT,
            size: TEXT_SIZE,
            ..Section::default()
        };
        file.header(".text", text);
        let note = file.section(".note", elf::SHT_NOTE, elf::SHF_ALLOC, &self.build_id, 0, 0);
        let code_end = (TEXT + TEXT_SIZE) as usize;
        let mut programs = vec![
            (elf::PT_LOAD, elf::PF_R | elf::PF_X, 0, code_end),
            (elf::PT_NOTE, elf::PF_R, note, self.build_id.len()),
        ];
        let entry_size = self.class.symbol_size();
        if !self.dynamic.is_empty() {
            let (symbols, names) = self.table(&self.dynamic);
            let link = file.after_next();
            let loaded = elf::SHF_ALLOC;
            let symbols_at = file.section(
                ".dynsym",
                elf::SHT_DYNSYM,
                loaded,
                &symbols,
                link,
                entry_size,
            );
            let names_at = file.section(".dynstr", elf::SHT_STRTAB, loaded, &names, 0, 0);
            let hash_at = file.put(&self.hash());
            let hash_tag = if self.gnu_hash {
                elf::DT_GNU_HASH
            } else {
                elf::DT_HASH
            };
            let mut table = Vec::new();
            for (tag, value) in [
                (elf::DT_STRTAB, names_at as u64 + self.relocated_by),
                (elf::DT_SYMTAB, symbols_at as u64 + self.relocated_by),
                (elf::DT_STRSZ, names.len() as u64),
                (hash_tag, hash_at as u64 + self.relocated_by),
                (elf::DT_NULL, 0),
            ] {
                self.class.word(&mut table, tag as u64);
                self.class.word(&mut table, value);
            }
            let table_at = file.put(&table);
            programs.push((elf::PT_DYNAMIC, elf::PF_R, table_at, table.len()));
        }
        assert!(
            file.out.len() as u64 <= TEXT,
            "too many symbols for the first page"
        );
        file.out.resize(code_end, 0);
        if !self.full.is_empty() {
            let (symbols, names) = self.table(&self.full);
            let link = file.after_next();
            file.section(".symtab", elf::SHT_SYMTAB, 0, &symbols, link, entry_size);
            file.section(".strtab", elf::SHT_STRTAB, 0, &names, 0, 0);
        }
        if !self.debug_data.is_empty() {
            let packed = &self.debug_data;
            file.section(".gnu_debugdata", elf::SHT_PROGBITS, 0, packed, 0, 0);
        }
        for (name, address, bytes) in &self.others {
            file.section(name, elf::SHT_PROGBITS, 0, bytes, 0, 0);
            if let Some(section) = file.sections.last_mut() {
                section.address = *address;
            }
        }
        let names = [&file.names, &b".shstrtab\0"[..]].concat();
        file.section(".shstrtab", elf::SHT_STRTAB, 0, &names, 0, 0);
        let section_table = self.section_headers.then(|| {
            let mut table = Vec::new();
            for section in &file.sections {
                self.class.section(&mut table, section);
            }
            (file.put(&table) as u64, file.sections.len())
        });
        let start = self.header(section_table, &programs);
        file.out[..start.len()].copy_from_slice(&start);
        file.out
    }

    /// Builds a symbol table with its empty first symbol, and its names.
    fn table(&self, symbols: &[TestSymbol]) -> (Vec<u8>, Vec<u8>) {
        let (mut table, mut names) = (vec![0; self.class.symbol_size()], vec![0]);
        for (name, kind, binding, address, size) in symbols {
            let symbol = Symbol {
                name: names.len() as u32,
                kind: *kind,
                binding: *binding,
                section: if *address == 0 { 0 } else { TEXT_SECTION },
                value: *address,
                size: *size,
            };
            self.class.symbol(&mut table, &symbol);
            names.extend(name.bytes().chain([0]));
        }
        (table, names)
    }

    /// Builds a hash table that counts the dynamic symbols and finds none: one bucket, and hashes
    /// of 0.
    fn hash(&self) -> Vec<u8> {
        let count = self.dynamic.len() as u32 + 1;
        let mut words = vec![1, count, 1];
        if self.gnu_hash {
            words = vec![1, 1, 1, 0, 0];
            words.extend(match self.class {
                Class::Wide => &[0, 1][..],
                Class::Narrow => &[1],
            });
            words.extend((1..count).map(|index| u32::from(index == count - 1)));
        }
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    fn header(
        &self,
        sections: Option<(u64, usize)>,
        segments: &[(u32, u32, usize, usize)],
    ) -> Vec<u8> {
        let mut out = self
            .class
            .header(elf::ET_DYN, TEXT, segments.len(), sections);
        for (kind, flags, offset, size) in segments {
            let (offset, size) = (*offset as u64, *size as u64);
            let program = Program {
                kind: *kind,
                flags: *flags,
                offset,
                virtual_address: offset,
                physical_address: offset,
                file_size: size,
                memory_size: size,
            };
            self.class.program(&mut out, &program);
        }
        out
    }
}
