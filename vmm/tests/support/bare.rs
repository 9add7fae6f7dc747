//! Kernels of a few instructions, for cases that the micro guest does not cover.
//!
//! They start at 0x100000 by the 64-bit boot protocol: flat memory mapped to itself, a stack, no
//! descriptor table for interrupts.

use std::path::Path;

use guest::elf::{Load, program};
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

/// Returns the file.
pub fn elf(code: &[u8]) -> Vec<u8> {
    assert!(code.len() <= ROOM);
    let load = Load {
        offset: 64 + 56,
        address: START,
        size: code.len() as u64,
        memory: ROOM as u64,
    };
    program(START, &[load], code).unwrap()
}

/// Ends the run by a reset through the keyboard controller.
pub fn reset(a: &mut CodeAssembler) {
    use iced_x86::code_asm::*;
    a.mov(eax, 0xfe).unwrap();
    a.out(0x64, al).unwrap();
}
