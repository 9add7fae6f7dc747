//! Reads a guest's memory and CPUs from an ELF core file. QEMU's `dump-guest-memory` writes such
//! files; crash and drgn read them.
//!
//! [`CoreLayout`] has the places in a file, which need not be in memory; [`CoreFile`] has the whole
//! file. Each `PT_LOAD` segment is a range of guest-physical
//! memory at `p_paddr`. A note named `QEMU` holds one CPU (`QEMUCPUState`, target/i386/arch_dump.c
//! of QEMU). The file need not hold all memory: a range that it omits is not RAM.

mod writer;

use std::fmt;
use std::ops::Range;

use object::Endianness;
use object::elf::{self, FileHeader64};
use object::read::ReadRef;
use object::read::elf::{FileHeader, NoteIterator, ProgramHeader};

use crate::bytes::{u32_at, u64_at};
use crate::stack::frames::SavedRegisters;
use crate::x86_64::{CpuState, GeneralRegisters};
use crate::{Gpa, PhysicalMemory, PhysicalReadError};

pub use writer::write_core;

/// The name of a CPU's note.
const CPU_NOTE: &[u8] = b"QEMU";
/// The name of a CPU's note in a dump of a kernel that has crashed (`KEXEC_CORE_NOTE_NAME`).
const CRASH_NOTE: &[u8] = b"CORE";
/// The offset of the registers in it, which are a `pt_regs` and more.
const CRASH_REGISTERS: usize = 112;
/// The number of words of a `pt_regs`.
const PT_REGS_WORDS: usize = 21;
/// The only layout version of a CPU's note.
const CPU_VERSION: u32 = 1;
/// The maximum number of CPUs that are read.
const MAX_CPUS: usize = 4096;
/// Offsets in `QEMUCPUState`. Version and size come first, then 18 registers of 8 bytes and 10
/// segments of 24. Five control registers and IA32_KERNEL_GS_BASE follow.
const REGISTERS: usize = 8;
const SEGMENTS: usize = REGISTERS + 18 * 8;
const CONTROL: usize = SEGMENTS + 10 * SEGMENT;
const SEGMENT: usize = 24;
/// Base within a segment.
const BASE: usize = 16;
/// Segments by number.
const CS: usize = SEGMENTS;
const FS: usize = SEGMENTS + 3 * SEGMENT;
const GS: usize = SEGMENTS + 4 * SEGMENT;
const IDT: usize = SEGMENTS + 9 * SEGMENT;

/// The reason why a file is not a usable core file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CoreFileError {
    /// The file cannot be read as ELF.
    #[error("not an ELF core file: {reason}")]
    NotElf {
        /// The ELF reader's message.
        reason: String,
    },
    /// The file is another kind of ELF file, or for another architecture.
    #[error(
        "invalid ELF file: expected a core file (type 4) for x86-64 (machine 62), found type {found} for machine \
         {machine}"
    )]
    NotCore {
        /// `e_type`.
        found: u16,
        /// `e_machine`.
        machine: u16,
    },
    /// A segment extends past the end of the file.
    #[error("segment {index} ({length:#x} bytes at file offset {offset:#x}) lies outside the file")]
    Truncated {
        /// Number of the program header.
        index: usize,
        /// `p_offset`.
        offset: u64,
        /// `p_filesz`.
        length: u64,
    },
    /// A CPU's note is too short or of another version.
    #[error("the note of CPU {index} has version {version} and {length} bytes, which is unknown")]
    BadCpu {
        /// The number of the note.
        index: usize,
        /// The note's version word.
        version: u32,
        /// The note's length in bytes.
        length: usize,
    },
}

/// The places of memory in a core file, and its CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CoreLayout {
    /// Guest-physical ranges, and the offset in the file of the first byte of each. They ascend by
    /// address, none is empty, and all lie inside the file.
    pub segments: Vec<(Range<u64>, u64)>,
    /// The CPUs, in the order of the file.
    pub cpus: Vec<CpuState>,
    /// The CPUs of a dump that the guest's own kernel has written when it crashed, in its order. Of
    /// these only the general registers and CS are known.
    pub crashed: Vec<CpuState>,
}

/// A core file.
pub struct CoreFile {
    bytes: Vec<u8>,
    layout: CoreLayout,
}

impl fmt::Debug for CoreFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoreFile")
            .field("segments", &self.layout.segments)
            .finish_non_exhaustive()
    }
}

impl CoreLayout {
    /// Reads the headers and notes of a file: its bytes, or a cache over it
    /// ([`object::read::ReadCache`]).
    ///
    /// # Errors
    /// If it is not a core file of an x86-64 machine, or is truncated.
    pub fn read<'data>(data: impl ReadRef<'data>) -> Result<Self, CoreFileError> {
        let header = FileHeader64::<Endianness>::parse(data).map_err(not_elf)?;
        let endian = header.endian().map_err(not_elf)?;
        let (found, machine) = (header.e_type(endian), header.e_machine(endian));
        if (found, machine) != (elf::ET_CORE, elf::EM_X86_64) {
            return Err(CoreFileError::NotCore { found, machine });
        }
        let (mut segments, mut found) = (Vec::new(), Cpus::default());
        let headers = header.program_headers(endian, data).map_err(not_elf)?;
        for (index, segment) in headers.iter().enumerate() {
            match segment.p_type(endian) {
                elf::PT_LOAD => segments.extend(load(data, segment, endian, index)?),
                elf::PT_NOTE => {
                    if let Some(notes) = segment.notes(endian, data).map_err(not_elf)? {
                        take_cpus(notes, endian, &mut found)?;
                    }
                }
                _ => {}
            }
        }
        segments.sort_by_key(|(range, _)| range.start);
        Ok(Self {
            segments: without_overlaps(segments),
            cpus: found.cpus,
            crashed: found.crashed,
        })
    }
}

impl CoreFile {
    /// Reads the headers and notes.
    ///
    /// # Errors
    /// If it is not a core file of an x86-64 machine, or is truncated.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, CoreFileError> {
        let layout = CoreLayout::read(bytes.as_slice())?;
        Ok(Self { bytes, layout })
    }

    /// Returns the CPUs, in the order of the file.
    #[must_use]
    pub fn cpus(&self) -> &[CpuState] {
        &self.layout.cpus
    }

    /// Returns the bytes from `address` to the end of its segment.
    fn from(&self, address: u64) -> Option<&[u8]> {
        let segments = &self.layout.segments;
        let after = segments.partition_point(|(range, _)| range.start <= address);
        let (range, offset) = segments.get(after.checked_sub(1)?)?;
        let within = usize::try_from(address - range.start).ok()?;
        let length = usize::try_from(range.end - range.start).ok()?;
        let offset = usize::try_from(*offset).ok()?;
        self.bytes.get(offset..offset + length)?.get(within..)
    }
}

type Segment = elf::ProgramHeader64<Endianness>;
type Notes<'data> = NoteIterator<'data, FileHeader64<Endianness>>;

/// Returns the range and file offset of a memory segment, or nothing for an empty one.
fn load<'data>(
    data: impl ReadRef<'data>,
    segment: &Segment,
    endian: Endianness,
    index: usize,
) -> Result<Option<(Range<u64>, u64)>, CoreFileError> {
    let (offset, length) = segment.file_range(endian);
    let start = segment.p_paddr(endian);
    let place = || {
        let is_inside = offset.checked_add(length)? <= data.len().ok()?;
        is_inside.then_some((start..start.checked_add(length)?, offset))
    };
    let found = place().ok_or(CoreFileError::Truncated {
        index,
        offset,
        length,
    })?;
    Ok((length != 0).then_some(found))
}

/// Cuts sorted segments where an earlier one has the same memory. A `/proc/vmcore` has the kernel's
/// text twice: by its own addresses, and among all memory.
fn without_overlaps(segments: Vec<(Range<u64>, u64)>) -> Vec<(Range<u64>, u64)> {
    let mut covered = 0;
    let cut = segments.into_iter().filter_map(|(range, offset)| {
        let start = range.start.max(covered);
        covered = covered.max(range.end);
        let offset = offset.checked_add(start - range.start)?;
        (start < range.end).then_some((start..range.end, offset))
    });
    cut.collect()
}

fn not_elf(error: object::Error) -> CoreFileError {
    CoreFileError::NotElf {
        reason: error.to_string(),
    }
}

/// The CPUs in notes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cpus {
    /// Those in QEMU's notes.
    pub cpus: Vec<CpuState>,
    /// Those in notes of a kernel that has crashed, as in [`CoreLayout::crashed`].
    pub crashed: Vec<CpuState>,
}

/// Returns the CPUs in ELF notes, one behind the other, as core files and other dumps have them.
///
/// # Errors
/// If the notes are damaged.
pub fn cpus_of_notes(notes: &[u8]) -> Result<Cpus, CoreFileError> {
    let notes = NoteIterator::new(Endianness::Little, 4, notes).map_err(not_elf)?;
    let mut found = Cpus::default();
    take_cpus(notes, Endianness::Little, &mut found)?;
    Ok(found)
}

fn take_cpus(
    mut notes: Notes<'_>,
    endian: Endianness,
    found: &mut Cpus,
) -> Result<(), CoreFileError> {
    let Cpus { cpus, crashed } = found;
    while let Some(note) = notes.next().map_err(not_elf)? {
        let bytes = note.desc();
        let of_kernel = (note.name(), note.n_type(endian)) == (CRASH_NOTE, elf::NT_PRSTATUS);
        if of_kernel && crashed.len() < MAX_CPUS {
            crashed.extend(crashed_cpu(bytes));
        }
        if note.name() != CPU_NOTE || cpus.len() == MAX_CPUS {
            continue;
        }
        let version = u32_at(bytes, 0).unwrap_or_default();
        let cpu = (version == CPU_VERSION)
            .then(|| cpu_state(bytes))
            .flatten()
            .ok_or(CoreFileError::BadCpu {
                index: cpus.len(),
                version,
                length: bytes.len(),
            })?;
        cpus.push(cpu);
    }
    Ok(())
}

/// Returns the registers in a `struct elf_prstatus` (include/linux/elfcore.h).
fn crashed_cpu(note: &[u8]) -> Option<CpuState> {
    let word = |index: usize| u64_at(note, CRASH_REGISTERS + index * 8);
    let words: Vec<u64> = (0..PT_REGS_WORDS).map(word).collect::<Option<_>>()?;
    let saved = SavedRegisters::of_words(words.as_slice().try_into().ok()?);
    Some(CpuState {
        general: saved.general,
        cs: saved.cs,
        ..CpuState::default()
    })
}

fn cpu_state(note: &[u8]) -> Option<CpuState> {
    let control = |index: usize| u64_at(note, CONTROL + 8 * index);
    let base = |segment: usize| u64_at(note, segment + BASE);
    let mut words = [0; 18];
    for (index, word) in words.iter_mut().enumerate() {
        *word = u64_at(note, REGISTERS + 8 * index)?;
    }
    Some(CpuState {
        general: GeneralRegisters::from_words(words),
        cs: u16::try_from(u32_at(note, CS)? & 0xffff).ok()?,
        gs_base: base(GS)?,
        swapped_gs_base: control(5)?,
        fs_base: base(FS)?,
        idt_base: base(IDT)?,
        cr3: control(3)?,
        cr4: control(4)?,
    })
}

impl PhysicalMemory for CoreFile {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        let length = buf.len();
        let error = PhysicalReadError { address, length };
        let (mut at, mut rest) = (address.0, buf);
        while !rest.is_empty() {
            let bytes = self.from(at).filter(|b| !b.is_empty()).ok_or(error)?;
            let take = bytes.len().min(rest.len());
            let (part, behind) = rest.split_at_mut(take);
            part.copy_from_slice(bytes.get(..take).ok_or(error)?);
            at = at.checked_add(take as u64).ok_or(error)?;
            rest = behind;
        }
        Ok(())
    }

    fn ram(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (range, _) in &self.layout.segments {
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => ranges.push(range.clone()),
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::test_says::assert_says;

    fn cpu(seed: u64) -> CpuState {
        let mut next = seed;
        let mut number = || {
            next += 0x0101_0101;
            next
        };
        CpuState {
            general: GeneralRegisters::from_words(std::array::from_fn(|_| number())),
            cs: 0x33,
            gs_base: number(),
            swapped_gs_base: number(),
            fs_base: number(),
            idt_base: number(),
            cr3: number(),
            cr4: number(),
        }
    }

    fn file(ranges: &[(u64, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        let ranges = ranges
            .iter()
            .map(|(address, bytes)| (Gpa(*address), *bytes));
        write_core(&mut out, &[cpu(1), cpu(2)], ranges).unwrap();
        out
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = file(&[
            (0x3000, b"third"),
            (0x1000, b"first, "),
            (0x1007, b"second"),
            (0x9000, b""),
        ]);
        let core = CoreFile::parse(bytes).unwrap();
        assert_eq!(core.cpus(), [cpu(1), cpu(2)]);
        assert_eq!(core.ram(), [0x1000..0x100d, 0x3000..0x3005]);
        let mut across = [0; 13];
        core.read_physical(Gpa(0x1000), &mut across).unwrap();
        assert_eq!(&across, b"first, second");
        for (address, length) in [
            (0x1000, 14),
            (0xfff, 1),
            (0x3005, 1),
            (u64::MAX, 2),
            (0x9000, 1),
        ] {
            let mut buf = vec![0; length];
            let error = core.read_physical(Gpa(address), &mut buf).unwrap_err();
            assert_eq!((error.address, error.length), (Gpa(address), length));
        }
    }

    #[test]
    fn memory_that_is_there_twice_is_read_once() {
        let bytes = file(&[
            (0x1004, b"ernel"),
            (0x1000, b"the kernel and more"),
            (0x1010, b"ore behind"),
        ]);
        let core = CoreFile::parse(bytes).unwrap();
        let ram = core.ram();
        assert_eq!((ram.len(), ram.first()), (1, Some(&(0x1000..0x101a))));
        let mut all = [0; 26];
        core.read_physical(Gpa(0x1000), &mut all).unwrap();
        assert_eq!(&all, b"the kernel and more behind");
    }

    #[test]
    fn what_is_no_core_file_is_told() {
        let good = file(&[(0x1000, b"bytes")]);
        let with = |offset: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[offset] = byte;
            bytes
        };
        let note = 64 + 2 * 56 + 20;
        for (bytes, part) in [
            (b"#!/bin/sh".to_vec(), "not an ELF core file"),
            (with(16, 2), "type 2 for machine 62"),
            (with(18, 183), "type 4 for machine 183"),
            (good[..good.len() - 1].to_vec(), "segment 1 (0x5 bytes"),
            (with(note, 9), "CPU 0 has version 9 and 440 bytes"),
        ] {
            let error = CoreFile::parse(bytes).err().unwrap().to_string();
            assert_says(&error, part);
        }
    }
}
