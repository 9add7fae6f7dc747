//! Text on the serial port, and the end of the run.
//!
//! Output is one `out` a byte, without polling the line status: the port is a device of the host
//! and always ready.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

use super::asm::Assembler;
use super::strings::Text;

/// The first serial port (8250): its data register. The line status is at +5.
pub const SERIAL: i32 = 0x3f8;
/// The keyboard controller's command port.
const KEYBOARD: i32 = 0x64;
/// The keyboard controller's command "pulse the reset line".
const PULSE_RESET: i32 = 0xfe;

/// Assembles all of this file. Every function clobbers RAX, RCX, RDX, RSI and RDI.
pub fn assemble(asm: &mut Assembler) -> Result<(), IcedError> {
    print(asm)?;
    print_decimal(asm)?;
    print_hex(asm)?;
    reset(asm)
}

/// Assembles `micro_print`: prints RCX bytes at RSI; none if RCX is 0.
fn print(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_print")?;
    let a = &mut asm.code;
    let mut again = a.create_label();
    let mut done = a.create_label();
    a.mov(edx, SERIAL)?;
    a.test(rcx, rcx)?;
    a.jz(done)?;
    a.set_label(&mut again)?;
    a.lodsb()?;
    a.out(dx, al)?;
    a.dec(rcx)?;
    a.jnz(again)?;
    a.set_label(&mut done)?;
    a.ret()
}

/// Assembles code that prints one piece of text; `print` is the label of `micro_print`.
pub fn print_text(a: &mut CodeAssembler, print: CodeLabel, text: Text) -> Result<(), IcedError> {
    let (address, length) = text.place();
    a.mov(esi, address as i32)?;
    a.mov(ecx, length as i32)?;
    a.call(print)
}

/// Assembles `micro_print_decimal`: prints RAX, unsigned.
fn print_decimal(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_print_decimal")?;
    let a = &mut asm.code;
    let mut divide = a.create_label();
    let mut emit = a.create_label();
    a.xor(esi, esi)?;
    a.mov(ecx, 10)?;
    a.set_label(&mut divide)?;
    a.xor(edx, edx)?;
    a.div(rcx)?;
    a.push(rdx)?;
    a.inc(esi)?;
    a.test(rax, rax)?;
    a.jnz(divide)?;
    a.mov(edx, SERIAL)?;
    a.set_label(&mut emit)?;
    a.pop(rax)?;
    a.add(eax, i32::from(b'0'))?;
    a.out(dx, al)?;
    a.dec(esi)?;
    a.jnz(emit)?;
    a.ret()
}

/// Assembles `micro_print_hex`: prints RDI as 16 digits.
fn print_hex(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_print_hex")?;
    let a = &mut asm.code;
    let mut again = a.create_label();
    let mut digit = a.create_label();
    a.mov(edx, SERIAL)?;
    a.mov(ecx, 16)?;
    a.set_label(&mut again)?;
    a.rol(rdi, 4)?;
    a.mov(eax, edi)?;
    a.and(eax, 15)?;
    a.add(eax, i32::from(b'0'))?;
    a.cmp(eax, i32::from(b'9'))?;
    a.jbe(digit)?;
    a.add(eax, i32::from(b'a') - i32::from(b'9') - 1)?;
    a.set_label(&mut digit)?;
    a.out(dx, al)?;
    a.dec(ecx)?;
    a.jnz(again)?;
    a.ret()
}

/// Assembles `micro_reset`: requests a reset from the keyboard controller. Does not return; halts
/// if there is no reset.
fn reset(asm: &mut Assembler) -> Result<(), IcedError> {
    asm.function("micro_reset")?;
    let a = &mut asm.code;
    let mut halt = a.create_label();
    a.mov(eax, PULSE_RESET)?;
    a.out(KEYBOARD, al)?;
    a.cli()?;
    a.set_label(&mut halt)?;
    a.hlt()?;
    a.jmp(halt)
}
