//! The user-mode half of the programs: one page of code in ring 3.
//!
//! Each is entered with RDI = COUNT, at least 1, and ends at `micro_user_exit` with its own count
//! in RDI (zero if the kernel counts). None depends on SYSCALL for its end.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::asm::{AssembleError, Assembler, Code};
use super::calls::{call_loop, leaf};
use super::exec;
use super::layout::{HOLES, USER_MMIO, USER_TEXT};
use super::timed;

/// Assembles the user page.
///
/// # Errors
/// Only errors of this file.
pub fn assemble() -> Result<Code, AssembleError> {
    let mut asm = Assembler::new(64)?;
    calls(&mut asm)?;
    counted_by_kernel(&mut asm, "micro_user_syscalls", |a| a.syscall())?;
    counted_by_kernel(&mut asm, "micro_user_int3", |a| a.int3())?;
    counted_by_kernel(&mut asm, "micro_user_ud", |a| a.ud2())?;
    fault(&mut asm)?;
    mmio(&mut asm)?;
    spin(&mut asm)?;
    exec::assemble_user(&mut asm)?;
    timed::assemble_user(&mut asm)?;
    exit(&mut asm)?;
    asm.finish(USER_TEXT)
}

/// Assembles calls of `micro_user_leaf`, the same bytes as `micro_leaf`, COUNT times; counts right
/// answers.
fn calls(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_user_leaf")?;
    leaf(&mut asm.code)?;

    asm.function("micro_user_calls")?;
    let leaf = asm.label("micro_user_leaf");
    let exit = asm.label("micro_user_exit");
    let a = &mut asm.code;
    call_loop(a, leaf)?;
    a.mov(rdi, rbx)?;
    a.jmp(exit)
}

/// Assembles a loop around one trapping instruction. RBX counts down, because SYSCALL uses RCX and
/// R11.
fn counted_by_kernel(
    asm: &mut Assembler,
    name: &'static str,
    trap: fn(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Result<(), IcedError> {
    asm.function(name)?;
    let exit = asm.label("micro_user_exit");
    let a = &mut asm.code;
    let mut again = a.create_label();
    a.mov(rbx, rdi)?;
    a.set_label(&mut again)?;
    trap(a)?;
    a.dec(rbx)?;
    a.jnz(again)?;
    a.xor(edi, edi)?;
    a.jmp(exit)
}

/// Assembles writes to two pages in turn. The kernel maps the one that faulted and unmaps the
/// other, so every write faults once.
fn fault(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_user_fault")?;
    let exit = asm.label("micro_user_exit");
    let a = &mut asm.code;
    let mut again = a.create_label();
    a.mov(rbx, rdi)?;
    a.mov(rdx, HOLES[0])?;
    a.set_label(&mut again)?;
    a.mov(qword_ptr(rdx), rbx)?;
    a.xor(edx, (HOLES[0] ^ HOLES[1]) as u32)?;
    a.dec(rbx)?;
    a.jnz(again)?;
    a.xor(edi, edi)?;
    a.jmp(exit)
}

/// Assembles COUNT writes of 4 bytes to an address without RAM.
fn mmio(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_user_mmio")?;
    let exit = asm.label("micro_user_exit");
    let a = &mut asm.code;
    let mut again = a.create_label();
    a.xor(ebx, ebx)?;
    a.mov(rdx, USER_MMIO)?;
    a.set_label(&mut again)?;
    a.mov(dword_ptr(rdx), ebx)?;
    a.inc(rbx)?;
    a.cmp(rbx, rdi)?;
    a.jb(again)?;
    a.mov(rdi, rbx)?;
    a.jmp(exit)
}

/// Assembles a program that never ends.
fn spin(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_user_spin")?;
    let spin = asm.label("micro_user_spin");
    asm.code.jmp(spin)
}

/// Assembles the way back into the kernel, shared by all: a `ud2` that the kernel recognises by its
/// address.
fn exit(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_user_exit")?;
    asm.code.ud2()
}
