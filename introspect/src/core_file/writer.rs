//! Writes core files that [`super::CoreFile`], crash and drgn read.

use std::io::{self, Write};

use crate::Gpa;
use crate::x86_64::CpuState;

use super::{BASE, CONTROL, CPU_NOTE, CPU_VERSION, CS, FS, GS, IDT, REGISTERS};

/// Bytes of the file header, of a program header, and of a note's header with the name.
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const NOTE_HEADER: usize = 12 + 8;
/// Bytes of one CPU (`QEMUCPUState`).
const CPU: usize = CONTROL + 6 * 8;
/// Most program headers: a larger number does not fit the file header (`PN_XNUM`, elf(5)).
const MAX_HEADERS: usize = 0xfffe;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;

/// Writes CPUs and ranges of guest-physical memory. The ranges must be disjoint; their order is kept.
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
    head.extend(b"\x7fELF\x02\x01\x01");
    head.resize(16, 0);
    for half in [4u16, 62] {
        head.extend(half.to_le_bytes());
    }
    head.extend(1u32.to_le_bytes());
    // Entry, program headers, section headers.
    for word in [0, HEADER as u64, 0] {
        head.extend(word.to_le_bytes());
    }
    head.extend(0u32.to_le_bytes());
    for half in [HEADER as u16, PROGRAM_HEADER as u16, count, 64, 0, 0] {
        head.extend(half.to_le_bytes());
    }
    program_header(&mut head, PT_NOTE, notes, 0, notes_length);
    let mut offset = notes + notes_length;
    for (address, bytes) in &ranges {
        program_header(&mut head, PT_LOAD, offset, address.0, bytes.len());
        offset += bytes.len();
    }
    for cpu in cpus {
        for word in [CPU_NOTE.len() as u32 + 1, CPU as u32, 0] {
            head.extend(word.to_le_bytes());
        }
        head.extend(CPU_NOTE);
        head.resize(head.len() + 8 - CPU_NOTE.len(), 0);
        head.extend(cpu_note(cpu));
    }
    out.write_all(&head)?;
    for (_, bytes) in ranges {
        out.write_all(bytes)?;
    }
    out.flush()
}

fn program_header(out: &mut Vec<u8>, kind: u32, offset: usize, address: u64, length: usize) {
    const READABLE: u32 = 4;
    for word in [kind, READABLE] {
        out.extend(word.to_le_bytes());
    }
    let (offset, length) = (offset as u64, length as u64);
    // File offset, virtual and physical address, bytes in file and memory, alignment.
    for word in [offset, 0, address, length, length, 0] {
        out.extend(word.to_le_bytes());
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
