//! A minimal ELF64 writer: an executable with a few loadable segments and function symbols.
//!
//! The caller owns addresses and permissions. This writes headers, section table, symbol and string
//! tables, and offsets. It does not write relocations, debug information, or anything but x86-64.
//! The layout is that of elf(5).

use super::asm::Symbol;

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

const EHDR: u64 = 64;
const PHDR: u64 = 56;
const SHDR: u64 = 64;
const SYM: u64 = 24;
const PAGE: u64 = 0x1000;
const ET_EXEC: u16 = 2;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const SHT_PROGBITS: u32 = 1;
const SHT_SYMTAB: u32 = 2;
const SHT_STRTAB: u32 = 3;
/// STB_GLOBAL with STT_OBJECT, and with STT_FUNC.
const GLOBAL_OBJECT: u8 = 0x11;
const GLOBAL_FUNCTION: u8 = 0x12;

/// The bytes of an ELF file.
struct Writer(Vec<u8>);

impl Writer {
    fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }
    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }
    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }
    fn u64s(&mut self, values: &[u64]) {
        for &value in values {
            self.u64(value);
        }
    }
    fn position(&self) -> u64 {
        self.0.len() as u64
    }
    fn align(&mut self, to: u64) {
        let aligned = self.position().next_multiple_of(to);
        self.0.resize(aligned as usize, 0);
    }
}

/// A string table under construction; offset 0 is the empty string.
struct Strings(Vec<u8>);

impl Strings {
    fn new() -> Self {
        Self(vec![0])
    }
    fn add(&mut self, text: &str) -> u32 {
        let offset = self.0.len() as u32;
        self.0.extend(text.bytes());
        self.0.push(0);
        offset
    }
}

/// The fields of a section header that differ between sections.
struct Section {
    name: u32,
    kind: u32,
    flags: u64,
    address: u64,
    offset: u64,
    size: u64,
    link: u32,
    info: u32,
    entry: u64,
}

/// Writes an executable that starts at `entry`. A symbol in a text segment is a function, any other
/// an object.
pub fn write(entry: u64, segments: &[Segment], symbols: &[Symbol]) -> Vec<u8> {
    let mut out = Writer(vec![0; EHDR as usize]);
    let mut names = Strings::new();
    let mut sections = Vec::new();

    let mut offset = (EHDR + PHDR * segments.len() as u64).next_multiple_of(PAGE);
    for segment in segments {
        let (protection, flags) = match segment.kind {
            // PF_R and PF_X; SHF_ALLOC and SHF_EXECINSTR.
            Kind::Text => (5, 6),
            // PF_R and PF_W; SHF_ALLOC and SHF_WRITE.
            Kind::Data => (6, 3),
        };
        let size = segment.bytes.len() as u64;
        out.u32(PT_LOAD);
        out.u32(protection);
        out.u64s(&[
            offset,
            segment.address,
            segment.address,
            size,
            segment.memory,
            PAGE,
        ]);
        sections.push(Section {
            name: names.add(segment.name),
            kind: SHT_PROGBITS,
            flags,
            address: segment.address,
            offset,
            size,
            link: 0,
            info: 0,
            entry: 0,
        });
        offset = (offset + size).next_multiple_of(PAGE);
    }
    for segment in segments {
        out.align(PAGE);
        out.0.extend(&segment.bytes);
    }

    out.align(8);
    let string_index = sections.len() as u32 + 2;
    let (table, strings) = symbol_table(segments, symbols);
    sections.push(Section {
        name: names.add(".symtab"),
        kind: SHT_SYMTAB,
        flags: 0,
        address: 0,
        offset: out.position(),
        size: table.len() as u64,
        link: string_index,
        // The first symbol that is not local.
        info: 1,
        entry: SYM,
    });
    out.0.extend(table);
    let mut string_section = |name: u32, content: &[u8]| {
        sections.push(Section {
            name,
            kind: SHT_STRTAB,
            flags: 0,
            address: 0,
            offset: out.position(),
            size: content.len() as u64,
            link: 0,
            info: 0,
            entry: 0,
        });
        out.0.extend(content);
    };
    string_section(names.add(".strtab"), &strings);
    let name = names.add(".shstrtab");
    string_section(name, &names.0);

    out.align(8);
    let section_headers = out.position();
    out.u64s(&[0; SHDR as usize / 8]);
    for section in &sections {
        out.u32(section.name);
        out.u32(section.kind);
        out.u64s(&[section.flags, section.address, section.offset, section.size]);
        out.u32(section.link);
        out.u32(section.info);
        out.u64s(&[if section.flags == 0 { 1 } else { PAGE }, section.entry]);
    }
    let count = sections.len() as u16 + 1;
    let header = header(entry, segments.len() as u16, section_headers, count);
    for (slot, byte) in out.0.iter_mut().zip(header.0) {
        *slot = byte;
    }
    out.0
}

/// Returns the file header. The last section holds the section names.
fn header(entry: u64, segments: u16, section_headers: u64, sections: u16) -> Writer {
    let mut out = Writer(Vec::new());
    // Magic, 64-bit, little-endian, version 1, System V.
    out.0.extend(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    out.u16(ET_EXEC);
    out.u16(EM_X86_64);
    out.u32(1);
    out.u64s(&[entry, EHDR, section_headers]);
    out.u32(0);
    for value in [
        EHDR as u16,
        PHDR as u16,
        segments,
        SHDR as u16,
        sections,
        sections - 1,
    ] {
        out.u16(value);
    }
    out
}

/// Returns the symbol table and its strings.
fn symbol_table(segments: &[Segment], symbols: &[Symbol]) -> (Vec<u8>, Vec<u8>) {
    let mut table = Writer(vec![0; SYM as usize]);
    let mut strings = Strings::new();
    for symbol in symbols {
        // The segments are the first sections, after the null section 0.
        let home = segments.iter().zip(1_u16..).find(|(segment, _)| {
            (segment.address..segment.address + segment.memory).contains(&symbol.address)
        });
        let Some((segment, section)) = home else {
            continue;
        };
        table.u32(strings.add(symbol.name));
        table.0.push(match segment.kind {
            Kind::Text => GLOBAL_FUNCTION,
            Kind::Data => GLOBAL_OBJECT,
        });
        table.0.push(0);
        table.u16(section);
        table.u64s(&[symbol.address, symbol.size]);
    }
    (table.0, strings.0)
}
