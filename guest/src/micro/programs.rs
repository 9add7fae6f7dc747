//! The kernel-mode programs, and the table by which the command line selects one.
//!
//! Each is called with RDI = COUNT, at least 1, and returns when it is done, with the result in
//! `micro_count`.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::asm::{AssembleError, Assembler, Code};
use super::calls;
use super::console::SERIAL;
use super::layout::{LAPIC, data, lapic, vector};

/// The names on the command line, and the functions that start the programs.
pub const PROGRAMS: [(&str, &str); 33] = [
    ("calls", "micro_calls"),
    ("nested", "micro_nested"),
    ("out", "micro_out"),
    ("usermmio", "micro_start_user_mmio"),
    ("syscalls", "micro_start_user_syscalls"),
    ("usercalls", "micro_start_user_calls"),
    ("int3k", "micro_int3"),
    ("int3u", "micro_start_user_int3"),
    ("ud", "micro_start_user_ud"),
    ("fault", "micro_start_user_fault"),
    ("spin", "micro_spin"),
    ("uspin", "micro_start_user_spin"),
    ("hlt", "micro_hlt"),
    ("dead", "micro_dead"),
    ("triple", "micro_triple"),
    ("step", "micro_step_loop"),
    ("tick", "micro_tick"),
    ("echo", "micro_echo"),
    ("smp", "micro_smp"),
    ("execk", "micro_exec"),
    ("execu", "micro_start_user_exec"),
    ("tempty", "micro_timed_empty"),
    ("tout", "micro_timed_out"),
    ("tcall", "micro_timed_calls"),
    ("tstep", "micro_timed_step"),
    ("tnop", "micro_timed_nops"),
    ("tunop", "micro_start_user_timed_nops"),
    ("tnested", "micro_timed_nested"),
    ("tuempty", "micro_start_user_timed_empty"),
    ("tucall", "micro_start_user_timed_calls"),
    ("tmmio", "micro_start_user_timed_mmio"),
    ("uloop", "micro_timed_user_loop"),
    ("sysloop", "micro_timed_syscalls"),
];

/// The functions above that only enter the user function beside them.
const USER_STARTS: [(&str, &str); 11] = [
    ("micro_start_user_mmio", "micro_user_mmio"),
    ("micro_start_user_syscalls", "micro_user_syscalls"),
    ("micro_start_user_calls", "micro_user_calls"),
    ("micro_start_user_int3", "micro_user_int3"),
    ("micro_start_user_ud", "micro_user_ud"),
    ("micro_start_user_fault", "micro_user_fault"),
    ("micro_start_user_spin", "micro_user_spin"),
    ("micro_start_user_timed_empty", "micro_user_timed_empty"),
    ("micro_start_user_timed_calls", "micro_user_timed_calls"),
    ("micro_start_user_timed_nops", "micro_user_timed_nops"),
    ("micro_start_user_timed_mmio", "micro_user_timed_mmio"),
];

/// A port that no device of a PC uses.
pub const UNUSED_PORT: i32 = 0x2f0;
/// The depth of the recursion in `nested`.
const DEPTH: i32 = 5;
/// The line status register of the serial port, and its bit "data ready".
const SERIAL_STATUS: i32 = SERIAL + 5;
const DATA_READY: i32 = 1;

/// Assembles all of this file.
pub fn assemble(asm: &mut Assembler, user_code: &Code) -> Result<(), AssembleError> {
    calls(asm)?;
    nested(asm)?;
    out(asm)?;
    int3(asm)?;
    step(asm)?;
    endless(asm)?;
    timer(asm)?;
    echo(asm)?;
    for (name, target) in USER_STARTS {
        let target = user_code.address(target)?;
        asm.function(name)?;
        let enter = asm.label("micro_enter_user");
        asm.code.mov(esi, target as u32)?;
        asm.code.jmp(enter)?;
    }
    Ok(())
}

/// Returns the program table of the data page.
pub fn table(code: &Code) -> Result<Vec<u8>, AssembleError> {
    let mut table = Vec::new();
    for (name, function) in PROGRAMS {
        let mut key = [0; data::KEY_SIZE as usize];
        for (slot, byte) in key.iter_mut().zip(name.bytes()) {
            *slot = byte;
        }
        table.extend(key);
        table.extend(code.address(function)?.to_le_bytes());
    }
    Ok(table)
}

/// Assembles `micro_call_loop`: RDI calls of `micro_leaf`, RAX = right answers. Assembles
/// `micro_calls`: COUNT of them, counted.
fn calls(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_leaf")?;
    calls::leaf(&mut asm.code)?;

    asm.function("micro_call_loop")?;
    let leaf = asm.label("micro_leaf");
    let a = &mut asm.code;
    calls::call_loop(a, leaf)?;
    a.mov(rax, rbx)?;
    a.ret()?;

    asm.function("micro_calls")?;
    let call_loop = asm.label("micro_call_loop");
    let a = &mut asm.code;
    a.call(call_loop)?;
    a.mov(qword_ptr(data::COUNT), rax)?;
    a.ret()
}

/// Assembles `micro_outer`, COUNT times: each enters `micro_recurse` [`DEPTH`] times, and the count
/// is the sum of the depths reached.
fn nested(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_recurse")?;
    let recurse = asm.label("micro_recurse");
    let a = &mut asm.code;
    let mut bottom = a.create_label();
    a.push(rbp)?;
    a.mov(rbp, rsp)?;
    a.xor(eax, eax)?;
    a.dec(rdi)?;
    a.jz(bottom)?;
    a.call(recurse)?;
    a.set_label(&mut bottom)?;
    a.inc(rax)?;
    a.pop(rbp)?;
    a.ret()?;

    asm.function("micro_outer")?;
    let a = &mut asm.code;
    a.push(rbp)?;
    a.mov(rbp, rsp)?;
    a.mov(edi, DEPTH)?;
    a.call(recurse)?;
    a.pop(rbp)?;
    a.ret()?;

    asm.function("micro_nested")?;
    let outer = asm.label("micro_outer");
    let a = &mut asm.code;
    let mut again = a.create_label();
    a.mov(rbx, rdi)?;
    a.set_label(&mut again)?;
    a.call(outer)?;
    a.add(qword_ptr(data::COUNT), rax)?;
    a.dec(rbx)?;
    a.jnz(again)?;
    a.ret()
}

/// Assembles the program that writes COUNT bytes to an unused port.
fn out(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_out")?;
    let a = &mut asm.code;
    let mut again = a.create_label();
    a.mov(rbx, rdi)?;
    a.mov(edx, UNUSED_PORT)?;
    a.set_label(&mut again)?;
    a.out(dx, al)?;
    a.dec(rbx)?;
    a.jnz(again)?;
    a.mov(qword_ptr(data::COUNT), rdi)?;
    a.ret()
}

/// Assembles COUNT int3 instructions of the guest's own, in kernel mode. The trap entry counts.
fn int3(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_int3")?;
    let a = &mut asm.code;
    let mut again = a.create_label();
    a.mov(rbx, rdi)?;
    a.set_label(&mut again)?;
    a.int3()?;
    a.dec(rbx)?;
    a.jnz(again)?;
    a.ret()
}

/// Assembles `micro_step(n)` = n + 1 by a straight line of 24 instructions of many kinds, COUNT
/// times; counts right answers.
fn step(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_step")?;
    let a = &mut asm.code;
    a.push(rbp)?;
    a.mov(rbp, rsp)?;
    a.sub(rsp, 16)?;
    a.mov(qword_ptr(rbp - 8), rdi)?;
    a.mov(rax, qword_ptr(rbp - 8))?;
    a.mov(qword_ptr(data::SCRATCH), rax)?;
    a.xor(ecx, ecx)?;
    a.add(rax, 3)?;
    a.sub(rax, 1)?;
    a.lea(rdx, ptr(rax + rax * 2 + 5))?;
    a.xchg(rax, rdx)?;
    a.sub(rax, 5)?;
    a.sub(rax, rdx)?;
    a.shr(rax, 1)?;
    a.test(rcx, rcx)?;
    a.cmovne(rax, rcx)?;
    a.movzx(ecx, byte_ptr(data::SCRATCH))?;
    a.cmp(ecx, 0x100)?;
    a.sete(dl)?;
    a.movzx(edx, dl)?;
    a.sub(rax, 1)?;
    a.or(rax, rdx)?;
    a.leave()?;
    a.ret()?;

    asm.function("micro_step_loop")?;
    let step = asm.label("micro_step");
    let a = &mut asm.code;
    calls::call_loop(a, step)?;
    a.mov(qword_ptr(data::COUNT), rbx)?;
    a.ret()
}

/// Assembles the programs that do not end by themselves.
fn endless(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_spin")?;
    let spin = asm.label("micro_spin");
    asm.code.jmp(spin)?;

    asm.function("micro_dead")?;
    let dead = asm.label("micro_dead");
    asm.code.cli()?;
    asm.code.hlt()?;
    asm.code.jmp(dead)?;

    // Without gates the #UD cannot be delivered, nor the #GP and the #DF that follow from it.
    asm.function("micro_triple")?;
    asm.code.lidt(ptr(data::NULL_POINTER))?;
    asm.code.ud2()
}

/// Assembles the wait for the local APIC's timer at 100 Hz, if its clock runs at 1 GHz as KVM's
/// does.
fn timer(asm: &mut Assembler) -> Result<(), IcedError> {
    const PERIODIC: i32 = 0x2_0000;
    const DIVIDE_BY_1: i32 = 0xb;
    const PERIOD: i32 = 10_000_000;

    asm.function("micro_start_timer")?;
    let a = &mut asm.code;
    a.mov(eax, LAPIC as u32)?;
    for (register, value) in [
        (
            lapic::SPURIOUS_VECTOR,
            lapic::SOFTWARE_ENABLE | i32::from(vector::SPURIOUS),
        ),
        (lapic::TIMER_DIVIDE, DIVIDE_BY_1),
        (lapic::TIMER_VECTOR, PERIODIC | i32::from(vector::TIMER)),
        (lapic::TIMER_INITIAL_COUNT, PERIOD),
    ] {
        a.mov(dword_ptr(rax + register), value)?;
    }
    a.ret()?;

    asm.function("micro_hlt")?;
    let start = asm.label("micro_start_timer");
    let a = &mut asm.code;
    let mut again = a.create_label();
    a.call(start)?;
    a.sti()?;
    a.set_label(&mut again)?;
    a.hlt()?;
    a.jmp(again)?;

    asm.function("micro_tick")?;
    let a = &mut asm.code;
    let mut check = a.create_label();
    let mut done = a.create_label();
    a.call(start)?;
    a.set_label(&mut check)?;
    a.cli()?;
    a.mov(rax, qword_ptr(data::TICKS))?;
    a.cmp(rax, rdi)?;
    a.jae(done)?;
    // Nothing comes between these two: STI takes effect one instruction later.
    a.sti()?;
    a.hlt()?;
    a.jmp(check)?;
    a.set_label(&mut done)?;
    a.mov(qword_ptr(data::COUNT), rax)?;
    a.ret()
}

/// Assembles the program that prints back every line from the serial port until `quit`, and counts
/// lines. CR and LF both end one.
fn echo(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_echo")?;
    let line = asm.label("micro_echo");
    let print = asm.label("micro_print");
    let a = &mut asm.code;
    let mut poll = a.create_label();
    let mut end = a.create_label();
    let mut back = a.create_label();
    let mut done = a.create_label();
    a.xor(ebx, ebx)?;
    a.set_label(&mut poll)?;
    a.mov(edx, SERIAL_STATUS)?;
    a.in_(al, dx)?;
    a.test(al, DATA_READY)?;
    a.jz(poll)?;
    a.mov(edx, SERIAL)?;
    a.in_(al, dx)?;
    a.cmp(al, i32::from(b'\n'))?;
    a.je(end)?;
    a.cmp(al, i32::from(b'\r'))?;
    a.je(end)?;
    // Room for the newline is kept.
    a.cmp(ebx, data::LINE_SIZE as i32 - 1)?;
    a.jae(poll)?;
    a.mov(byte_ptr(rbx + data::LINE), al)?;
    a.inc(ebx)?;
    a.jmp(poll)?;
    a.set_label(&mut end)?;
    a.cmp(ebx, 4)?;
    a.jne(back)?;
    a.cmp(dword_ptr(data::LINE), i32::from_le_bytes(*b"quit"))?;
    a.je(done)?;
    a.set_label(&mut back)?;
    a.mov(byte_ptr(rbx + data::LINE), i32::from(b'\n'))?;
    a.lea(ecx, ptr(rbx + 1))?;
    a.mov(esi, data::LINE as u32)?;
    a.call(print)?;
    a.inc(qword_ptr(data::COUNT))?;
    a.jmp(line)?;
    a.set_label(&mut done)?;
    a.ret()
}
