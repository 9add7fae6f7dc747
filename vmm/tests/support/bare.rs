//! Kernels of a few instructions, for cases that the micro guest does not cover.
//!
//! They start at 0x100000 by the 64-bit boot protocol: flat memory mapped to itself, a stack, no
//! descriptor table for interrupts.

use std::path::Path;

use iced_x86::code_asm::CodeAssembler;
use vmm::boot::KernelFile;

/// The address of the first instruction.
pub const START: u64 = 0x10_0000;
/// The size of the one segment in bytes.
const ROOM: usize = 0x3000;

/// Returns an executable ELF of the code that `write` assembles.
pub fn kernel(write: impl FnOnce(&mut CodeAssembler)) -> KernelFile {
    let mut assembler = CodeAssembler::new(64).unwrap();
    write(&mut assembler);
    let code = assembler.assemble(START).unwrap();
    KernelFile::from_bytes(elf(&code), Path::new("(bare guest)")).unwrap()
}

/// Returns the file: header, one program header, code.
pub fn elf(code: &[u8]) -> Vec<u8> {
    assert!(code.len() <= ROOM);
    let mut file = Vec::new();
    file.extend(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    for half in [2u16, 62] {
        file.extend(half.to_le_bytes());
    }
    file.extend(1u32.to_le_bytes());
    for word in [START, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    // PT_LOAD, read, write, execute
    for word in [1u32, 7] {
        file.extend(word.to_le_bytes());
    }
    for word in [0x1000, START, START, code.len() as u64, ROOM as u64, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.resize(0x1000, 0);
    file.extend(code);
    file
}

/// Ends the run by a reset through the keyboard controller.
pub fn reset(a: &mut CodeAssembler) {
    use iced_x86::code_asm::*;
    a.mov(eax, 0xfe).unwrap();
    a.out(0x64, al).unwrap();
}
