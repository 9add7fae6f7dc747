//! Walks of a process's stacks, over hand-made unwind information.
#![allow(clippy::unwrap_used)]

use object::elf::PT_GNU_EH_FRAME;

use super::frames::{End, Found, Guess, SavedRegisters, Stack};
use super::user::{DEFAULT_FRAMES, MappedObject, MissingBytes, ObjectBytes, UserUnwinder};
use crate::test_memory::{Flags, TestMemory};
use crate::user::file_bytes::{FileMapping, MappedBytes};
use crate::user::load_base::LoadBase;
use crate::user::object_file::ObjectFile;
use crate::x86_64::{AddressSpace, GeneralRegisters};
use crate::{Gva, MemoryView, PausedMemory};

/// The address at which the object is mapped. It is linked at 0x1000 and has a page each of
/// headers, code and unwind information.
const BASE: u64 = 0x7f00_0000_0000;
const LINKED: u64 = 0x1000;
const SIZE: u64 = 0x3000;
const CODE: u64 = BASE + 0x1000;
const FRAMES: u64 = 0x3000;
const STACK: u64 = 0x7ffc_0000_0000;
const PLAIN_CODE: u64 = 0x40_0000;

/// Functions by offset in the code, 0x100 bytes each, with these records in turn. The caller's
/// stack is at 24 bytes; the same through RBP; through an expression that reads memory. Then the
/// outermost; a signal handler's return; by R10; with the return address in R11. The last goes
/// through an expression of very many operations that change nothing.
const PLAIN: u64 = 0;
const BY_RBP: u64 = 0x100;
const BY_EXPRESSION: u64 = 0x200;
const OUTERMOST: u64 = 0x300;
const SIGNAL: u64 = 0x400;
const BY_R10: u64 = 0x500;
const RETURNS_BY_R11: u64 = 0x600;
const LONG_EXPRESSION: u64 = 0x700;
const UNKNOWN: u64 = 0x800;

fn record(content: &[u8]) -> Vec<u8> {
    let mut content = content.to_vec();
    content.resize(content.len().next_multiple_of(8) + 4, 0);
    [&(content.len() as u32).to_le_bytes()[..], &content].concat()
}

/// Builds sections `.eh_frame` at [`FRAMES`] and `.eh_frame_hdr` 0x800 after it.
fn unwind_information() -> Vec<u8> {
    // Version 1 with self-relative 32-bit pointers and units 1 and -8. RIP is 16, at RSP + 8 - 8 at
    // the start.
    let common = |augmentation: &[u8]| {
        let head = [
            &[0, 0, 0, 0, 1][..],
            augmentation,
            &[0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1],
        ];
        record(&head.concat())
    };
    let mut section = common(b"zR");
    let signal_at = section.len();
    section.extend(common(b"zRS"));
    let mut table = Vec::new();
    // def_cfa_expression: 298 bytes, RSP + 24, then no operation.
    let mut long = vec![0x0f, 0xaa, 0x02, 0x77, 24];
    long.resize(3 + 298, 0x96);
    for (start, common_at, instructions) in [
        (PLAIN, 0, &[0x0e, 24][..]),
        // def_cfa RBP + 16; RBP at -16.
        (BY_RBP, 0, &[0x0c, 6, 16, 0x86, 2]),
        // def_cfa_expression: RBP - 8, deref; RBP at -16 of that.
        (BY_EXPRESSION, 0, &[0x0f, 3, 0x76, 0x78, 0x06, 0x86, 2]),
        // undefined RIP.
        (OUTERMOST, 0, &[0x07, 16]),
        // def_cfa_expression: RSP + 64, deref. RIP and RBP by expressions: RSP + 72, and + 80. RSP
        // is the frame address.
        (
            SIGNAL,
            signal_at,
            &[
                0x0f, 4, 0x77, 0xc0, 0, 0x06, 0x10, 16, 3, 0x77, 0xc8, 0, 0x10, 6, 3, 0x77, 0xd0, 0,
            ],
        ),
        (BY_R10, 0, &[0x0c, 10, 8]),
        (RETURNS_BY_R11, 0, &[0x0e, 24, 0x09, 16, 11]),
        (LONG_EXPRESSION, 0, &long),
    ] {
        let at = section.len();
        let code = (LINKED + 0x1000 + start) as u32;
        let mut content = Vec::from(((at + 4 - common_at) as u32).to_le_bytes());
        content.extend(
            code.wrapping_sub((FRAMES as usize + at + 8) as u32)
                .to_le_bytes(),
        );
        content.extend(0x100u32.to_le_bytes());
        content.push(0);
        content.extend(instructions);
        section.extend(record(&content));
        table.push((code, FRAMES as u32 + at as u32));
    }
    assert!(section.len() < 0x800);
    section.resize(0x800, 0);
    let header = FRAMES as u32 + 0x800;
    section.extend([1, 0x1b, 0x03, 0x3b]);
    section.extend([0; 4]);
    section.extend((table.len() as u32).to_le_bytes());
    for word in table.iter().flat_map(|(start, record)| [start, record]) {
        section.extend(word.wrapping_sub(header).to_le_bytes());
    }
    section
}

/// The object's bytes, as mapped by the process.
struct Mapped<'p>(MemoryView<'p>);

impl ObjectBytes for Mapped<'_> {
    fn read(&self, address: u64, buf: &mut [u8]) -> Result<(), MissingBytes> {
        let read = self.0.read(Gva(address.wrapping_add(BASE - LINKED)), buf);
        read.map_err(|_| MissingBytes { address })
    }
}

struct Process {
    memory: TestMemory,
    space: AddressSpace,
}

impl Process {
    fn new() -> Self {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        for (gva, gpa) in [
            (BASE, 0x18_0000),
            (CODE, 0x18_1000),
            (BASE + 0x2000, 0x18_2000),
            (STACK, 0x19_0000),
            (STACK + 0x1000, 0x19_1000),
            (PLAIN_CODE, 0x1a_0000),
        ] {
            memory.map(space, gva, gpa, 4096, Flags::default().user());
        }
        // The ELF headers with two program headers: the loaded segment and the unwind information.
        memory.write(0x18_0000, b"\x7fELF\x02\x01\x01");
        memory.write(0x18_0010, &[3, 0, 62, 0]);
        memory.write(0x18_0020, &64u64.to_le_bytes());
        memory.write(0x18_0036, &[56, 0, 2, 0]);
        memory.write(0x18_0040, &1u32.to_le_bytes());
        memory.write(0x18_0050, &LINKED.to_le_bytes());
        memory.write(0x18_0060, &SIZE.to_le_bytes());
        memory.write(0x18_0078, &0x6474_e550u32.to_le_bytes());
        memory.write(0x18_0088, &(FRAMES + 0x800).to_le_bytes());
        memory.write(0x18_2000, &unwind_information());
        Self { memory, space }
    }

    /// Writes words from an offset in the stack on.
    fn stack(&mut self, at: u64, words: &[u64]) {
        for (index, word) in (0u64..).zip(words) {
            self.memory
                .write(0x19_0000 + at + index * 8, &word.to_le_bytes());
        }
    }

    fn walk_with(
        &self,
        change: impl Fn(&mut MappedObject<'_>),
        rip: u64,
        sp: u64,
        rbp: u64,
        most: usize,
    ) -> Stack {
        let paused = PausedMemory::new(&self.memory);
        let view = paused.view(self.space);
        let mapping = FileMapping {
            start: Gva(BASE),
            end: Gva(BASE + SIZE),
            file_offset: 0,
            executable: true,
        };
        let bytes = MappedBytes::new(view, SIZE, vec![mapping]);
        let file = ObjectFile::parse(&bytes).unwrap();
        let segments = file.segments();
        let header = segments.iter().find(|s| s.kind == PT_GNU_EH_FRAME);
        let base = LoadBase::find(segments, &mapping, mapping.start).unwrap();
        let mut object = MappedObject {
            text: CODE..CODE + 0x1000,
            bias: base.bias(),
            eh_frame_hdr: header.map(|segment| segment.address),
            eh_frame: None,
            bytes: Box::new(Mapped(view)),
        };
        assert_eq!(
            (object.bias, object.eh_frame_hdr),
            (BASE - LINKED, Some(FRAMES + 0x800))
        );
        change(&mut object);
        let other_code = [
            PLAIN_CODE..PLAIN_CODE + 0x800,
            PLAIN_CODE + 0x800..PLAIN_CODE + 0x1000,
        ];
        let mut unwinder = UserUnwinder::new(vec![object], other_code.to_vec());
        let registers = SavedRegisters {
            general: GeneralRegisters {
                rip,
                rsp: STACK + sp,
                rbp,
                ..GeneralRegisters::default()
            },
            cs: 0x33,
            orig_rax: 0,
        };
        let stack = unwinder.walk(view, &registers, most);
        assert_eq!(
            unwinder.walk(view, &registers, most),
            stack,
            "the rules kept are the same"
        );
        stack
    }

    fn walk(&self, rip: u64, sp: u64, rbp: u64) -> Stack {
        self.walk_with(|_| {}, rip, sp, rbp, DEFAULT_FRAMES)
    }
}

fn addresses(stack: &Stack) -> Vec<(u64, Found)> {
    let frames = stack.frames.iter();
    frames.map(|frame| (frame.address.0, frame.found)).collect()
}

/// Writes the stack of a plain function, called by one with RBP, by one with an expression, by one
/// that nothing calls.
fn calls(process: &mut Process) -> (u64, u64) {
    process.stack(0x100, &[1, 2, CODE + BY_RBP + 0x10]);
    process.stack(0x140, &[STACK + 0x188, CODE + BY_EXPRESSION + 0x10]);
    // The frame address is stored below the address in RBP.
    process.stack(0x180, &[STACK + 0x1a0, 0, 0, CODE + OUTERMOST]);
    process.stack(0x190, &[0x99, CODE + OUTERMOST + 0x10]);
    (0x100, STACK + 0x140)
}

const CALLS: [(u64, Found); 4] = [
    (CODE + PLAIN + 0x10, Found::Register),
    (CODE + BY_RBP + 0x10, Found::Return),
    (CODE + BY_EXPRESSION + 0x10, Found::Return),
    (CODE + OUTERMOST + 0x10, Found::Return),
];

#[test]
fn unwind_information_leads_to_the_outermost_function() {
    let mut process = Process::new();
    let (sp, rbp) = calls(&mut process);
    let by_table = process.walk(CODE + PLAIN + 0x10, sp, rbp);
    assert_eq!(
        (addresses(&by_table), by_table.end),
        (CALLS.to_vec(), End::Bottom)
    );
    assert!(by_table.is_reliable());
    // Without the search table, the section is searched.
    let search = |object: &mut MappedObject<'_>| {
        object.eh_frame_hdr = None;
        object.eh_frame = Some(FRAMES..FRAMES + 0x800);
    };
    let by_section = process.walk_with(search, CODE + PLAIN + 0x10, sp, rbp, DEFAULT_FRAMES);
    assert_eq!(by_section, by_table);
    let cut = process.walk_with(|_| {}, CODE + PLAIN + 0x10, sp, rbp, 2);
    assert_eq!(
        (addresses(&cut), cut.end),
        (CALLS[..2].to_vec(), End::TooLong)
    );
}

#[test]
fn a_missing_page_ends_the_stack_with_a_mark() {
    for (what, missing, count, end) in [
        ("a stack page", STACK, 1, STACK + 0x110),
        ("the unwind information", BASE + 0x2000, 1, BASE + 0x2800),
    ] {
        let mut process = Process::new();
        let (sp, rbp) = calls(&mut process);
        process.memory.restrict(process.space, missing, 1, 1, 0);
        let stack = process.walk(CODE + PLAIN + 0x10, sp, rbp);
        assert_eq!(
            (stack.frames.len(), stack.end),
            (count, End::NotPresent { gva: Gva(end) }),
            "{what}"
        );
        assert!(!stack.is_reliable());
    }
}

#[test]
fn signal_handlers_lead_to_what_they_interrupted() {
    let mut process = Process::new();
    let (sp, rbp) = calls(&mut process);
    // The handler's return address is the first byte of its return code. Its stack is another one.
    process.stack(0x1100, &[1, 2, CODE + SIGNAL]);
    process.stack(0x1100 + 24 + 64, &[STACK + sp, CODE + PLAIN + 0x10, rbp]);
    // The record of this function starts at the function. In a program it would start one byte
    // before.
    let stack = process.walk(CODE + SIGNAL, 0x1100 + 24, 0);
    let mut expected = vec![
        (CODE + SIGNAL, Found::Interrupted),
        (CODE + PLAIN + 0x10, Found::Interrupted),
    ];
    expected.extend(&CALLS[1..]);
    assert_eq!((addresses(&stack), stack.end), (expected, End::Bottom));
    // Without a description, the code itself is recognized: `mov $15,%eax; syscall`.
    process
        .memory
        .write(0x1a_0010, &[0xb8, 15, 0, 0, 0, 0x0f, 0x05]);
    process.stack(0x1100, &[1, 2, PLAIN_CODE + 0x10]);
    let context = 0x1100 + 24 + 40;
    process.stack(context + 10 * 8, &[rbp]);
    process.stack(context + 15 * 8, &[STACK + sp, CODE + PLAIN + 0x10]);
    let stack = process.walk(CODE + PLAIN + 0x20, 0x1100, 0);
    let mut expected = vec![
        (CODE + PLAIN + 0x20, Found::Register),
        (PLAIN_CODE + 0x10, Found::Interrupted),
        (CODE + PLAIN + 0x10, Found::Interrupted),
    ];
    expected.extend(&CALLS[1..]);
    assert_eq!((addresses(&stack), stack.end), (expected, End::Bottom));
    assert!(stack.is_reliable());
}

#[test]
fn code_without_unwind_information_is_left_by_a_marked_guess() {
    let mut process = Process::new();
    let guess = Found::Guess(Guess::FramePointer);
    process.stack(0x200, &[STACK + 0x240, PLAIN_CODE + 0x20]);
    process.stack(0x240, &[0, PLAIN_CODE + 0x30]);
    let stack = process.walk(PLAIN_CODE + 0x10, 0x1f0, STACK + 0x200);
    let expected = [
        (PLAIN_CODE + 0x10, Found::Register),
        (PLAIN_CODE + 0x20, guess),
        (PLAIN_CODE + 0x30, guess),
    ];
    assert_eq!(
        (addresses(&stack), stack.end),
        (expected.to_vec(), End::Bottom)
    );
    let reliable: Vec<bool> = stack.frames.iter().map(|frame| frame.reliable).collect();
    assert_eq!(reliable, [true, false, false]);
    assert!(!stack.is_reliable());
    for (what, rbp, words) in [
        ("RBP is no pointer into the stack", 0x1234, [0, 0]),
        (
            "RBP is below the stack pointer",
            STACK + 0x1e0,
            [0, PLAIN_CODE + 0x20],
        ),
        ("RBP is far away", STACK + (9 << 20), [0, 0]),
        ("no code is returned to", STACK + 0x200, [0, 0x1234]),
        ("nothing is returned to", STACK + 0x200, [0, 0]),
        ("RBP is null at once", 0, [0, 0]),
    ] {
        let mut process = Process::new();
        process.stack(0x200, &words);
        let stack = process.walk(PLAIN_CODE + 0x10, 0x1f0, rbp);
        let none = |end| matches!(end, End::NoUnwindInfo { .. });
        assert!(
            stack.frames.len() == 1 && none(stack.end),
            "{what}: {}",
            stack.end
        );
    }
}

#[test]
fn what_cannot_be_followed_is_named() {
    let mut process = Process::new();
    process.stack(0x100, &[1, 2, 0x1234, 1, 2, 0, CODE + BY_R10 + 0x10]);
    process.stack(0x138, &[1, 2, CODE + RETURNS_BY_R11 + 0x10]);
    for (rip, sp, frames, end) in [
        (0x1234, 0x100, 0, "return address 0x1234 is not in code"),
        (
            CODE + PLAIN,
            0x100,
            1,
            "return address 0x1234 is not in code",
        ),
        (
            CODE + UNKNOWN,
            0x100,
            1,
            "no unwind information for 0x7f0000001800",
        ),
        (CODE + PLAIN, 0x118, 1, "outermost frame"),
        (CODE + PLAIN, 0x120, 2, "needs DWARF register 10"),
        (CODE + PLAIN, 0x138, 2, "needs DWARF register 16"),
        (
            CODE + LONG_EXPRESSION,
            0x100,
            1,
            "the unwind information for 0x7f0000001700 is damaged",
        ),
        // The first frame has all registers: R10 is 0.
        (CODE + BY_R10, 0x100, 1, "0x0 is not in memory"),
    ] {
        let stack = process.walk(rip, sp, 0);
        let text = stack.end.to_string();
        assert!(
            stack.frames.len() == frames && text.contains(end),
            "{rip:#x}: {} {text}",
            stack.frames.len()
        );
    }
    process.stack(0x100, &[0; 64]);
    let circle: Vec<u64> = (0..400).map(|_| CODE + PLAIN + 0x10).collect();
    process.stack(0, &circle);
    let stack = process.walk(CODE + PLAIN, 0, 0);
    assert_eq!(
        (stack.frames.len(), stack.end),
        (DEFAULT_FRAMES, End::TooLong)
    );
}

/// An object with these bytes at address 0, followed by zeros.
struct Padded(Vec<u8>);

impl ObjectBytes for Padded {
    fn read(&self, address: u64, buf: &mut [u8]) -> Result<(), MissingBytes> {
        buf.fill(0);
        let from = self.0.get(usize::try_from(address).unwrap()..);
        for (to, from) in buf.iter_mut().zip(from.unwrap_or_default()) {
            *to = *from;
        }
        Ok(())
    }
}

/// Programs determine the size of their sections and the number of mapped objects that have one.
#[test]
fn sections_without_a_search_table_are_read_within_bounds() {
    // A shared record of version 1, no augmentation, units 1 and -8, and a function with an
    // absolute address.
    let common = record(&[0, 0, 0, 0, 1, 0, 1, 0x78, 16]);
    let back = (common.len() as u32 + 4).to_le_bytes();
    let pair = [common, record(&[&back[..], &[0; 16]].concat())].concat();
    let cases = [
        ("a large one", 0, 40 << 20, false),
        ("too much together", 0, 40 << 20, true),
        ("what is left", 0, 1 << 20, false),
        ("few shared records", 10, 10 * pair.len() as u64, false),
        (
            "as many as functions",
            20_000,
            20_000 * pair.len() as u64,
            true,
        ),
    ];
    let text = |index: u64| CODE + index * 0x1000..CODE + (index + 1) * 0x1000;
    let objects = (0..).zip(&cases).map(|(index, (_, pairs, length, _))| {
        let bytes = Box::new(Padded(pair.repeat(*pairs)));
        MappedObject {
            text: text(index),
            bias: text(index).start,
            eh_frame_hdr: None,
            eh_frame: Some(0..*length),
            bytes,
        }
    });
    let mut unwinder = UserUnwinder::new(objects.collect(), Vec::new());
    let process = Process::new();
    let paused = PausedMemory::new(&process.memory);
    for (index, (what, _, _, refused)) in (0..).zip(cases) {
        let registers = SavedRegisters {
            general: GeneralRegisters {
                rip: text(index).start + 0x800,
                rsp: STACK,
                ..GeneralRegisters::default()
            },
            cs: 0x33,
            orig_rax: 0,
        };
        let stack = unwinder.walk(paused.view(process.space), &registers, 8);
        let address = Gva(text(index).start + 0x800);
        let expected = match refused {
            true => End::BadUnwindInfo { address },
            false => End::NoUnwindInfo { address },
        };
        assert_eq!(stack.end, expected, "{what}");
    }
}

#[test]
fn thirty_two_bit_programs_are_not_read() {
    let process = Process::new();
    let paused = PausedMemory::new(&process.memory);
    let registers = SavedRegisters {
        general: GeneralRegisters::default(),
        cs: 0x23,
        orig_rax: 0,
    };
    let stack =
        UserUnwinder::new(Vec::new(), Vec::new()).walk(paused.view(process.space), &registers, 8);
    assert_eq!((stack.frames.len(), stack.end), (0, End::ThirtyTwoBit));
}

#[test]
fn damaged_unwind_information_ends_the_stack() {
    let good = unwind_information();
    // With any one byte of the section or the header changed in some ways, nothing panics and every
    // walk ends.
    for (at, byte) in good.iter().enumerate() {
        for change in [0xff, 0x80, 0x01] {
            let mut process = Process::new();
            let (sp, rbp) = calls(&mut process);
            process
                .memory
                .write(0x18_2000 + at as u64, &[byte ^ change]);
            let stack = process.walk(CODE + PLAIN + 0x10, sp, rbp);
            assert!(stack.frames.len() <= DEFAULT_FRAMES);
            let same = addresses(&stack) == CALLS && stack.end == End::Bottom;
            let elsewhere = stack.frames.iter().all(|frame| frame.address.0 > CODE);
            assert!(same || elsewhere, "byte {at:#x}: {:?}", stack.frames);
        }
    }
    for (what, header) in [
        ("another version", [2, 0x1b, 0x03, 0x3b]),
        ("no table", [1, 0x1b, 0xff, 0xff]),
        ("a pointer of 64 bits", [1, 0x1c, 0x03, 0x3b]),
    ] {
        let mut process = Process::new();
        let (sp, rbp) = calls(&mut process);
        process.memory.write(0x18_2800, &header);
        let stack = process.walk(CODE + PLAIN + 0x10, sp, rbp);
        let address = Gva(CODE + PLAIN + 0x10);
        assert_eq!(
            (stack.frames.len(), stack.end),
            (1, End::BadUnwindInfo { address }),
            "{what}"
        );
    }
}
