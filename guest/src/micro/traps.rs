//! Trap entries: the targets of the interrupt table's gates.
//!
//! The entries on which a host may set a breakpoint (#DB, #BP, #UD, #PF) start with a 3-byte nop,
//! as Linux's do where SMAP is off. A trap that no program expects is reported on the serial port
//! with vector, RIP, error code and CR2, and ends the run.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::asm::{AssembleError, Assembler, Code};
use super::console::print_text;
use super::layout::{HOLES, LAPIC, data, lapic, vector};
use super::strings::Text;
use super::tables::{HOLE_PRESENT, low_entry};

/// RFLAGS.TF.
const TRAP_FLAG: i32 = 1 << 8;
const DEBUG: u8 = 1;
const BREAKPOINT: u8 = 3;
const INVALID_OPCODE: u8 = 6;
const PAGE_FAULT: u8 = 14;

/// The gates with a handler of their own.
const ENTRIES: [(u8, &str); 6] = [
    (DEBUG, "micro_debug_entry"),
    (BREAKPOINT, "micro_breakpoint_entry"),
    (INVALID_OPCODE, "micro_invalid_opcode_entry"),
    (PAGE_FAULT, "micro_page_fault_entry"),
    (vector::TIMER, "micro_timer_entry"),
    (vector::SPURIOUS, "micro_spurious_entry"),
];

/// Returns whether the CPU pushes an error code for an exception (Intel SDM volume 3, "Exception
/// and interrupt reference").
const fn has_error_code(number: u8) -> bool {
    matches!(number, 8 | 10..=14 | 17 | 21 | 29 | 30)
}

/// Assembles all of this file.
pub fn assemble(asm: &mut Assembler, user: &Code) -> Result<(), AssembleError> {
    stubs(asm)?;
    debug(asm)?;
    breakpoint(asm)?;
    invalid_opcode(asm, user.address("micro_user_exit")?)?;
    page_fault(asm)?;
    timer(asm)?;
    asm.function("micro_spurious_entry")?;
    asm.code.iretq()?;
    asm.function("micro_syscall_entry")?;
    asm.code.inc(qword_ptr(data::COUNT))?;
    asm.code.sysretq()?;
    // Last, so that it is out of a short jump's reach of every stub: all stubs then have one size.
    Ok(report(asm)?)
}

/// The size of one stub in bytes: 2 for a pushed zero or a nop, 5 for the vector, 5 for the jump.
const STUB_SIZE: u64 = 12;

/// Assembles one stub of [`STUB_SIZE`] bytes for each vector: it makes the frames alike and
/// continues in `micro_report`.
fn stubs(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_trap_stubs")?;
    let report = asm.label("micro_report");
    let a = &mut asm.code;
    for number in 0..=u8::MAX {
        if has_error_code(number) {
            a.db(&[0x66, 0x90])?;
        } else {
            a.db(&[0x6a, 0x00])?;
        }
        // A push of a 32-bit immediate, whatever its value, so that all stubs have one size.
        a.db(&[0x68, number, 0, 0, 0])?;
        a.jmp(report)?;
    }
    Ok(())
}

/// Returns the 256 handlers of the finished code, for the interrupt table.
pub fn handlers(code: &Code) -> Result<[u64; 256], AssembleError> {
    let size = code.size("micro_trap_stubs")?;
    if size != 256 * STUB_SIZE {
        return Err(AssembleError::NoRoom {
            part: "a trap stub",
            size: size / 256,
            room: STUB_SIZE,
        });
    }
    let stubs = code.address("micro_trap_stubs")?;
    let mut handlers = [0; 256];
    for (handler, number) in handlers.iter_mut().zip(0_u64..) {
        *handler = stubs + number * STUB_SIZE;
    }
    for (number, name) in ENTRIES {
        handlers[usize::from(number)] = code.address(name)?;
    }
    Ok(handlers)
}

/// Assembles `micro_report`: RSP points at vector, error code, RIP. Ends the run.
fn report(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_report")?;
    let print = asm.label("micro_print");
    let decimal = asm.label("micro_print_decimal");
    let hex = asm.label("micro_print_hex");
    let reset = asm.label("micro_reset");
    let a = &mut asm.code;
    a.cld()?;
    print_text(a, print, Text::Trap)?;
    a.mov(rax, qword_ptr(rsp))?;
    a.call(decimal)?;
    print_text(a, print, Text::At)?;
    a.mov(rdi, qword_ptr(rsp + 16))?;
    a.call(hex)?;
    print_text(a, print, Text::Error)?;
    a.mov(rdi, qword_ptr(rsp + 8))?;
    a.call(hex)?;
    print_text(a, print, Text::Address)?;
    a.mov(rdi, cr2)?;
    a.call(hex)?;
    print_text(a, print, Text::Newline)?;
    a.jmp(reset)
}

/// Assembles the #DB handler: counts, and stops single-stepping.
fn debug(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_debug_entry")?;
    let a = &mut asm.code;
    nop3(a)?;
    a.inc(qword_ptr(data::DEBUG_COUNT))?;
    a.and(qword_ptr(rsp + 16), !TRAP_FLAG)?;
    a.iretq()
}

/// Assembles the #BP handler: counts. RIP is behind the int3 already.
fn breakpoint(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_breakpoint_entry")?;
    let a = &mut asm.code;
    nop3(a)?;
    a.inc(qword_ptr(data::COUNT))?;
    a.iretq()
}

/// Assembles the #UD handler. From user mode, the `ud2` at `exit` ends a user program: adds RDI to
/// the count and returns from `micro_enter_user`. Any other `ud2` from user mode is counted and
/// skipped, and all else is reported.
///
/// The end is a `ud2` because that arrives alike on every KVM; `int n` from user mode does not on a
/// software one.
fn invalid_opcode(asm: &mut Assembler, exit: u64) -> Result<(), IcedError> {
    asm.function("micro_invalid_opcode_entry")?;
    let report = asm.label("micro_report");
    let a = &mut asm.code;
    let mut foreign = a.create_label();
    let mut skip = a.create_label();
    nop3(a)?;
    a.test(dword_ptr(rsp + 8), 3)?;
    a.jz(foreign)?;
    a.push(rax)?;
    a.mov(rax, qword_ptr(rsp + 8))?;
    a.cmp(word_ptr(rax), 0x0b0f)?;
    a.pop(rax)?;
    a.jne(foreign)?;
    a.cmp(qword_ptr(rsp), exit as i32)?;
    a.jne(skip)?;
    a.add(qword_ptr(data::COUNT), rdi)?;
    a.mov(rsp, qword_ptr(data::SAVED_RSP))?;
    a.ret()?;
    a.set_label(&mut skip)?;
    a.add(qword_ptr(rsp), 2)?;
    a.inc(qword_ptr(data::COUNT))?;
    a.iretq()?;
    a.set_label(&mut foreign)?;
    a.push(0)?;
    a.push(i32::from(INVALID_OPCODE))?;
    a.jmp(report)
}

/// Assembles the #PF handler: on one of the two holes, counts, maps it and unmaps the other;
/// anything else is reported.
fn page_fault(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_page_fault_entry")?;
    let report = asm.label("micro_report");
    let a = &mut asm.code;
    let mut second = a.create_label();
    let mut foreign = a.create_label();
    let mut done = a.create_label();
    nop3(a)?;
    a.push(rax)?;
    a.mov(rax, cr2)?;
    a.and(rax, -0x1000)?;
    a.cmp(rax, HOLES[0] as i32)?;
    a.jne(second)?;
    swap_holes(a, HOLES[0], HOLES[1])?;
    a.jmp(done)?;
    a.set_label(&mut second)?;
    a.cmp(rax, HOLES[1] as i32)?;
    a.jne(foreign)?;
    swap_holes(a, HOLES[1], HOLES[0])?;
    a.set_label(&mut done)?;
    a.inc(qword_ptr(data::COUNT))?;
    a.pop(rax)?;
    // The error code.
    a.add(rsp, 8)?;
    a.iretq()?;
    a.set_label(&mut foreign)?;
    a.pop(rax)?;
    a.push(i32::from(PAGE_FAULT))?;
    a.jmp(report)
}

/// Assembles code that maps one page and unmaps the other.
fn swap_holes(a: &mut CodeAssembler, map: u64, unmap: u64) -> Result<(), IcedError> {
    a.mov(qword_ptr(low_entry(map)), (map | HOLE_PRESENT) as i32)?;
    a.mov(qword_ptr(low_entry(unmap)), unmap as i32)?;
    a.invlpg(byte_ptr(unmap))
}

/// Assembles the timer interrupt's handler: counts and signals the end of interrupt to the local
/// APIC.
fn timer(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_timer_entry")?;
    let a = &mut asm.code;
    a.inc(qword_ptr(data::TICKS))?;
    a.push(rax)?;
    a.mov(eax, LAPIC as u32 + lapic::EOI)?;
    a.mov(dword_ptr(rax), 0)?;
    a.pop(rax)?;
    a.iretq()
}

/// Assembles `nop dword ptr [rax]`.
fn nop3(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.db(&[0x0f, 0x1f, 0x00])
}
