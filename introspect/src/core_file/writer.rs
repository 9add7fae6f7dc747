//! Writes core files that [`super::CoreFile`], crash and drgn read.

use std::io::{self, Write};

use object::elf::{self, FileHeader64, NoteHeader64, ProgramHeader64};
use object::pod::bytes_of;
use object::{LittleEndian, U16, U32, U64};

use crate::Gpa;
use crate::x86_64::CpuState;

use super::{BASE, CONTROL, CPU_NOTE, CPU_VERSION, CS, FS, GS, IDT, REGISTERS};

const HEADER: usize = size_of::<FileHeader64<LittleEndian>>();
const PROGRAM_HEADER: usize = size_of::<ProgramHeader64<LittleEndian>>();
/// The size in bytes of the padded name of a CPU's note.
const NAME: usize = 8;
const NOTE_HEADER: usize = size_of::<NoteHeader64<LittleEndian>>() + NAME;
/// The size in bytes of one CPU (`QEMUCPUState`).
const CPU: usize = CONTROL + 6 * 8;
/// The maximum number of program headers. A larger number does not fit the file header (elf(5)).
const MAX_HEADERS: usize = elf::PN_XNUM as usize - 1;

/// Writes CPUs and ranges of guest-physical memory. The ranges must be disjoint; their order is
/// kept.
///
/// # Errors
/// If writing fails, or there are more than 65533 ranges.
pub fn write_core<'a>(
    out: &mut impl Write,
    cpus: &[CpuState],
    ranges: impl IntoIterator<Item = (Gpa, &'a [u8])>,
) -> io::Result<()> {
    let ranges: Vec<_> = ranges.into_iter().collect();
    let headers = ranges.len() + 1;
    let count = u16::try_from(headers)
        .ok()
        .filter(|_| headers <= MAX_HEADERS)
        .ok_or_else(|| {
            let text = format!(
                "{} ranges of memory are more than a core file holds",
                ranges.len()
            );
            io::Error::new(io::ErrorKind::InvalidInput, text)
        })?;
    let notes = HEADER + PROGRAM_HEADER * headers;
    let notes_length = cpus.len() * (NOTE_HEADER + CPU);
    let mut head = Vec::with_capacity(notes + notes_length);
    head.extend(bytes_of(&file_header(count)));
    let mut segment = |kind, offset, address, length| {
        head.extend(bytes_of(&program_header(kind, offset, address, length)));
    };
    segment(elf::PT_NOTE, notes, 0, notes_length);
    let mut offset = notes + notes_length;
    for (address, bytes) in &ranges {
        segment(elf::PT_LOAD, offset, address.0, bytes.len());
        offset += bytes.len();
    }
    for cpu in cpus {
        head.extend(bytes_of(&NoteHeader64 {
            n_namesz: word(CPU_NOTE.len() as u32 + 1),
            n_descsz: word(CPU as u32),
            n_type: word(0),
        }));
        head.extend(CPU_NOTE);
        head.resize(head.len() + NAME - CPU_NOTE.len(), 0);
        head.extend(cpu_note(cpu));
    }
    out.write_all(&head)?;
    for (_, bytes) in ranges {
        out.write_all(bytes)?;
    }
    out.flush()
}

fn half(value: u16) -> U16<LittleEndian> {
    U16::new(LittleEndian, value)
}

fn word(value: u32) -> U32<LittleEndian> {
    U32::new(LittleEndian, value)
}

fn long(value: u64) -> U64<LittleEndian> {
    U64::new(LittleEndian, value)
}

fn file_header(program_headers: u16) -> FileHeader64<LittleEndian> {
    FileHeader64 {
        e_ident: elf::Ident {
            magic: elf::ELFMAG,
            class: elf::ELFCLASS64,
            data: elf::ELFDATA2LSB,
            version: elf::EV_CURRENT,
            os_abi: elf::ELFOSABI_NONE,
            abi_version: 0,
            padding: [0; 7],
        },
        e_type: half(elf::ET_CORE),
        e_machine: half(elf::EM_X86_64),
        e_version: word(elf::EV_CURRENT.into()),
        e_entry: long(0),
        e_phoff: long(HEADER as u64),
        e_shoff: long(0),
        e_flags: word(0),
        e_ehsize: half(HEADER as u16),
        e_phentsize: half(PROGRAM_HEADER as u16),
        e_phnum: half(program_headers),
        e_shentsize: half(size_of::<elf::SectionHeader64<LittleEndian>>() as u16),
        e_shnum: half(0),
        e_shstrndx: half(0),
    }
}

fn program_header(
    kind: u32,
    offset: usize,
    address: u64,
    length: usize,
) -> ProgramHeader64<LittleEndian> {
    ProgramHeader64 {
        p_type: word(kind),
        p_flags: word(elf::PF_R),
        p_offset: long(offset as u64),
        p_vaddr: long(0),
        p_paddr: long(address),
        p_filesz: long(length as u64),
        p_memsz: long(length as u64),
        p_align: long(0),
    }
}

fn cpu_note(cpu: &CpuState) -> [u8; CPU] {
    let mut note = [0; CPU];
    let mut put = |offset: usize, bytes: &[u8]| {
        if let Some(place) = note.get_mut(offset..offset + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(0, &CPU_VERSION.to_le_bytes());
    put(4, &(CPU as u32).to_le_bytes());
    let g = &cpu.general;
    for (index, value) in [
        g.rax, g.rbx, g.rcx, g.rdx, g.rsi, g.rdi, g.rsp, g.rbp, g.r8, g.r9, g.r10, g.r11, g.r12,
        g.r13, g.r14, g.r15, g.rip, g.rflags,
    ]
    .into_iter()
    .enumerate()
    {
        put(REGISTERS + 8 * index, &value.to_le_bytes());
    }
    put(CS, &u32::from(cpu.cs).to_le_bytes());
    for (segment, base) in [(FS, cpu.fs_base), (GS, cpu.gs_base), (IDT, cpu.idt_base)] {
        put(segment + BASE, &base.to_le_bytes());
    }
    for (index, value) in [(3, cpu.cr3), (4, cpu.cr4), (5, cpu.swapped_gs_base)] {
        put(CONTROL + 8 * index, &value.to_le_bytes());
    }
    note
}
