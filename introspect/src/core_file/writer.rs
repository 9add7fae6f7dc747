//! Writes core files that [`super::CoreFile`], crash and drgn read.

use std::io::{self, Write};

use object::build::elf::{Builder, Header};
use object::elf::{self, NoteHeader64};
use object::pod::bytes_of;
use object::{Endianness, LittleEndian, U32};

use crate::Gpa;
use crate::x86_64::CpuState;

use super::{BASE, CONTROL, CPU_NOTE, CPU_VERSION, CS, FS, GS, IDT, REGISTERS};

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
    if ranges.len() >= MAX_HEADERS {
        let text = format!(
            "{} ranges of memory are more than a core file holds",
            ranges.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let mut file = Builder::new(Endianness::Little, true);
    let header = file.file_header_size();
    file.header = Header {
        e_type: elf::ET_CORE,
        e_machine: elf::EM_X86_64,
        e_phoff: header as u64,
        ..Header::default()
    };
    let mut offset = header + file.class().program_header_size() * (ranges.len() + 1);
    let mut segment = |kind, address, length: usize| {
        let segment = file.segments.add();
        segment.p_type = kind;
        segment.p_flags = elf::PF_R;
        segment.p_offset = offset as u64;
        segment.p_paddr = address;
        segment.p_filesz = length as u64;
        segment.p_memsz = length as u64;
        offset += length;
    };
    segment(elf::PT_NOTE, 0, cpus.len() * (NOTE_HEADER + CPU));
    for (address, bytes) in &ranges {
        segment(elf::PT_LOAD, address.0, bytes.len());
    }
    let mut head = Vec::new();
    file.write(&mut head).map_err(io::Error::other)?;
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

fn word(value: u32) -> U32<LittleEndian> {
    U32::new(LittleEndian, value)
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
    for (index, value) in cpu.general.words().into_iter().enumerate() {
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
