//! The programs that measure: each round has the measured code between two reads of the time-stamp
//! counter.
//!
//! The kernel-mode ones are called with RDI = COUNT and leave it in `micro_count`, as all programs
//! do. Those of user mode are entered as `user` describes. Each round leaves its ticks, 32 bits, in
//! `micro_samples`, in slot n modulo the capacity for round n. So the newest rounds are kept.
//! `uloop` and `sysloop` leave the ticks of the whole loop, 64 bits, in `micro_elapsed`.
//!
//! All rounds differ only in the measured code: the ticks of `tempty` and `tuempty` are the
//! overhead in those of the others. The counter is read without a fence, which an interpreting host
//! may lack; the measured code costs more than the CPU could reorder.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::asm::{AssembleError, Assembler, Code};
use super::calls::leaf;
use super::layout::{SAMPLES, SAMPLES_CAPACITY, USER_MMIO, data};
use super::programs::UNUSED_PORT;

/// The functions with a frame between the program `tnested` and the leaf that it times: with both,
/// the leaf's stack has 20 entries.
const FRAMES: i32 = 18;
/// The rounds of the inner loop of `uloop`, of 4 instructions each.
const UNIT_ROUNDS: u32 = 250;

/// The kernel functions that only time the user function beside them as a whole.
const WHOLES: [(&str, &str); 2] = [
    ("micro_timed_user_loop", "micro_user_loop"),
    ("micro_timed_syscalls", "micro_user_syscalls"),
];

/// Assembles the kernel's part.
pub fn assemble(asm: &mut Assembler, user_code: &Code) -> Result<(), AssembleError> {
    program(asm, "micro_timed_empty", |_| Ok(()))?;
    program(asm, "micro_timed_out", |a| a.out(dx, al))?;
    let micro_leaf = asm.label("micro_leaf");
    program(asm, "micro_timed_calls", |a| a.call(micro_leaf))?;
    nop_leaf(asm, "micro_timed_nop_leaf")?;
    let nops = asm.label("micro_timed_nop_leaf");
    program(asm, "micro_timed_nops", |a| a.call(nops))?;
    stepped(asm)?;
    nested(asm)?;
    for (name, target) in WHOLES {
        whole(asm, name, user_code.address(target)?)?;
    }
    Ok(())
}

/// Assembles the user page's part.
pub fn assemble_user(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_user_timed_leaf")?;
    leaf(&mut asm.code)?;
    let timed_leaf = asm.label("micro_user_timed_leaf");
    user_program(asm, "micro_user_timed_empty", |_| Ok(()))?;
    user_program(asm, "micro_user_timed_calls", |a| a.call(timed_leaf))?;
    nop_leaf(asm, "micro_user_timed_nop_leaf")?;
    let nops = asm.label("micro_user_timed_nop_leaf");
    user_program(asm, "micro_user_timed_nops", |a| a.call(nops))?;
    user_program(asm, "micro_user_timed_mmio", |a| a.mov(dword_ptr(r8), ebx))?;
    user_loop(asm)
}

/// Assembles RDI rounds around `measured`, with RBX counting up from 0. `measured` finds the unused
/// port in DX and may use RAX, RCX, RDX.
fn rounds(
    a: &mut CodeAssembler,
    measured: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(r12, rdi)?;
    a.xor(ebx, ebx)?;
    a.set_label(&mut again)?;
    a.rdtsc()?;
    a.mov(esi, eax)?;
    a.mov(edx, UNUSED_PORT)?;
    measured(a)?;
    // First, so that the instruction after a call is one that a host can emulate under a trap.
    a.mov(ecx, ebx)?;
    a.rdtsc()?;
    a.sub(eax, esi)?;
    a.and(ecx, SAMPLES_CAPACITY as i32 - 1)?;
    a.mov(dword_ptr(rcx * 4 + SAMPLES), eax)?;
    a.inc(rbx)?;
    a.cmp(rbx, r12)?;
    a.jb(again)
}

/// Assembles a kernel-mode program of such rounds.
fn program(
    asm: &mut Assembler,
    name: &'static str,
    measured: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Result<(), IcedError> {
    asm.function(name)?;
    let a = &mut asm.code;
    rounds(a, measured)?;
    a.mov(qword_ptr(data::COUNT), rbx)?;
    a.ret()
}

/// Assembles a user-mode program of such rounds; `measured` also finds memory without RAM at R8.
fn user_program(
    asm: &mut Assembler,
    name: &'static str,
    measured: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Result<(), IcedError> {
    asm.function(name)?;
    let exit = asm.label("micro_user_exit");
    let a = &mut asm.code;
    a.mov(r8, USER_MMIO)?;
    rounds(a, measured)?;
    a.mov(rdi, rbx)?;
    a.jmp(exit)
}

/// Assembles a leaf whose first instruction changes nothing: a trap on it need only move RIP by one
/// byte.
fn nop_leaf(asm: &mut Assembler, name: &'static str) -> Result<(), IcedError> {
    asm.function(name)?;
    asm.code.nop()?;
    asm.code.ret()
}

/// Assembles a leaf that starts with an instruction which only the guest's own CPU executes: a host
/// single-steps it.
fn stepped(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_timed_step_leaf")?;
    asm.code.mov(rax, cr3)?;
    asm.code.ret()?;
    let step_leaf = asm.label("micro_timed_step_leaf");
    program(asm, "micro_timed_step", |a| a.call(step_leaf))
}

/// Assembles a call of the leaf below [`FRAMES`] frames. The chain of frame pointers ends with 0.
fn nested(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_timed_deep_leaf")?;
    leaf(&mut asm.code)?;
    let deep_leaf = asm.label("micro_timed_deep_leaf");

    asm.function("micro_timed_descend")?;
    let descend = asm.label("micro_timed_descend");
    let a = &mut asm.code;
    let mut bottom = a.create_label();
    let mut up = a.create_label();
    a.push(rbp)?;
    a.mov(rbp, rsp)?;
    a.dec(r9d)?;
    a.jz(bottom)?;
    a.call(descend)?;
    a.jmp(up)?;
    a.set_label(&mut bottom)?;
    rounds(a, |a| a.call(deep_leaf))?;
    a.set_label(&mut up)?;
    a.pop(rbp)?;
    a.ret()?;

    asm.function("micro_timed_nested")?;
    let a = &mut asm.code;
    a.xor(ebp, ebp)?;
    a.mov(r9d, FRAMES)?;
    a.call(descend)?;
    a.mov(qword_ptr(data::COUNT), rbx)?;
    a.ret()
}

/// Assembles code that times user code at `target` with RDI as it is, from its entry to its end.
fn whole(asm: &mut Assembler, name: &'static str, target: u64) -> Result<(), IcedError> {
    asm.function(name)?;
    let enter = asm.label("micro_enter_user");
    let a = &mut asm.code;
    let now = |a: &mut CodeAssembler| {
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.or(rax, rdx)
    };
    now(a)?;
    a.mov(qword_ptr(data::ELAPSED), rax)?;
    a.mov(esi, target as u32)?;
    a.call(enter)?;
    now(a)?;
    a.sub(rax, qword_ptr(data::ELAPSED))?;
    a.mov(qword_ptr(data::ELAPSED), rax)?;
    a.ret()
}

/// Assembles COUNT times 1000 instructions on registers.
fn user_loop(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_user_loop")?;
    let exit = asm.label("micro_user_exit");
    let a = &mut asm.code;
    let mut again = a.create_label();
    let mut unit = a.create_label();
    a.mov(rbx, rdi)?;
    a.set_label(&mut again)?;
    a.mov(ecx, UNIT_ROUNDS)?;
    a.set_label(&mut unit)?;
    a.add(rax, rcx)?;
    a.xor(rdx, rax)?;
    a.dec(ecx)?;
    a.jnz(unit)?;
    a.dec(rbx)?;
    a.jnz(again)?;
    a.jmp(exit)
}
