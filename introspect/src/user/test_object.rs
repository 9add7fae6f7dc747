//! Writes small libraries and programs for tests.

use object::build::elf::{Dynamic, SectionData};
use object::elf;

use crate::test_elf;

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
    wide: bool,
    gnu_hash: bool,
    section_headers: bool,
    relocated_by: u64,
    build_id: Vec<u8>,
    dynamic: Vec<TestSymbol>,
    full: Vec<TestSymbol>,
    debug_data: Vec<u8>,
    others: Vec<(&'static str, u64, Vec<u8>)>,
}

impl TestObject {
    /// Makes a 64-bit library without symbols.
    pub(crate) fn library() -> Self {
        Self {
            wide: true,
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
            wide: false,
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
        let mut file = test_elf::start(self.wide, elf::ET_DYN, TEXT);
        let numbered = |&(name, kind, binding, address, size): &TestSymbol| {
            let section = if address == 0 { 0 } else { TEXT_SECTION };
            (name, kind, binding, section, address, size)
        };
        test_elf::add(&mut file.symbols, self.full.iter().map(numbered));
        test_elf::add(&mut file.dynamic_symbols, self.dynamic.iter().map(numbered));
        // One bucket, which all symbols are in.
        file.hash_bucket_count = 1;
        file.gnu_hash_bucket_count = 1;
        file.gnu_hash_bloom_count = 1;

        let mut section =
            |name, kind, flags, data| test_elf::section(&mut file, name, kind, flags, data).id();
        let loaded = elf::SHF_ALLOC;
        let code = SectionData::Data(vec![0; TEXT_SIZE as usize].into());
        let code = section(
            ".text",
            elf::SHT_PROGBITS,
            loaded | elf::SHF_EXECINSTR,
            code,
        );
        let note = SectionData::Note(self.build_id.as_slice().into());
        let note = section(".note", elf::SHT_NOTE, loaded, note);
        let mut in_memory = vec![note];
        let mut segments = vec![(elf::PT_NOTE, note)];
        let mut linked = Vec::new();
        if !self.dynamic.is_empty() {
            let (name, hash, tag) = match self.gnu_hash {
                true => (".gnu.hash", SectionData::GnuHash, elf::DT_GNU_HASH),
                false => (".hash", SectionData::Hash, elf::DT_HASH),
            };
            linked = vec![
                section(".dynsym", 0, loaded, SectionData::DynamicSymbol),
                section(".dynstr", 0, loaded, SectionData::DynamicString),
                section(name, 0, loaded, hash),
            ];
            let tags = [elf::DT_STRTAB, elf::DT_SYMTAB, elf::DT_STRSZ, tag];
            let table = SectionData::Dynamic(tags.map(|tag| Dynamic::Auto { tag }).to_vec());
            let table = section(".dynamic", elf::SHT_DYNAMIC, loaded, table);
            in_memory.extend(linked.iter().chain([&table]));
            segments.push((elf::PT_DYNAMIC, table));
        }
        if !self.debug_data.is_empty() {
            let packed = SectionData::Data(self.debug_data.as_slice().into());
            section(".gnu_debugdata", elf::SHT_PROGBITS, 0, packed);
        }
        for (name, address, bytes) in &self.others {
            let data = SectionData::Data(bytes.as_slice().into());
            test_elf::section(&mut file, name, elf::SHT_PROGBITS, 0, data).sh_addr = *address;
        }

        file.sections.get_mut(code).sh_addralign = TEXT;
        file.set_section_sizes();
        let headers = file.file_header_size() + 3 * file.class().program_header_size();
        let load = file.segments.add_load_segment(elf::PF_R | elf::PF_X, 8);
        (load.p_filesz, load.p_memsz) = (headers as u64, headers as u64);
        for id in in_memory.into_iter().chain([code]) {
            load.append_section(file.sections.get_mut(id));
        }
        assert_eq!(
            load.p_filesz,
            TEXT + TEXT_SIZE,
            "too many symbols for the first page"
        );
        for (kind, id) in segments {
            let segment = file.segments.add();
            (segment.p_type, segment.p_flags) = (kind, elf::PF_R);
            // Readers of notes use the alignment.
            segment.p_align = if kind == elf::PT_NOTE { 4 } else { 8 };
            segment.append_section(file.sections.get_mut(id));
        }
        for id in linked {
            file.sections.get_mut(id).sh_addr += self.relocated_by;
        }
        let mut bytes = test_elf::finish(file);
        if !self.section_headers {
            // The offset of the section headers; their size and number.
            for place in if self.wide {
                [40..48, 58..64]
            } else {
                [32..36, 46..52]
            } {
                bytes[place].fill(0);
            }
        }
        bytes
    }
}
