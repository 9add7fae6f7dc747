//! Multiplications and divisions.
//!
//! Of the flags, MUL and IMUL define CF and OF only, divisions none. The others keep their value.

use iced_x86::{Instruction, Mnemonic, Register};

use super::cpu::{Cpu, has_general_operands};
use super::flags::{CF, OF, mask, sign_extend, when};
use super::{EmulateError, Handler, vector};

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    if !has_general_operands(insn) {
        return None;
    }
    let handler: Handler = match (insn.mnemonic(), insn.op_count()) {
        (Mnemonic::Mul, 1) => mul,
        (Mnemonic::Imul, 1) => imul_wide,
        (Mnemonic::Imul, 2) => |cpu| imul(cpu, 0, 1),
        (Mnemonic::Imul, 3) => |cpu| imul(cpu, 1, 2),
        (Mnemonic::Div, 1) => div,
        (Mnemonic::Idiv, 1) => idiv,
        _ => return None,
    };
    Some(handler)
}

/// Returns the registers that hold the low and high half of a double-width number.
fn halves(size: usize) -> (Register, Register) {
    match size {
        1 => (Register::AL, Register::AH),
        2 => (Register::AX, Register::DX),
        4 => (Register::EAX, Register::EDX),
        _ => (Register::RAX, Register::RDX),
    }
}

fn set_halves(cpu: &mut Cpu<'_>, size: usize, low: u64, high: u64) -> Result<(), EmulateError> {
    let (low_register, high_register) = halves(size);
    cpu.set_register(low_register, low)?;
    cpu.set_register(high_register, high)
}

fn mul(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let size = cpu.size(0);
    let product = u128::from(cpu.register(halves(size).0)?) * u128::from(cpu.operand(0)?);
    let high = (product >> (size * 8)) as u64;
    set_halves(cpu, size, product as u64, high)?;
    cpu.set_flags(CF | OF, when(CF | OF, high != 0));
    Ok(())
}

fn signed(size: usize, value: u64) -> i128 {
    i128::from(sign_extend(size, value))
}

/// Returns CF and OF, set if the low half alone differs from the product.
fn overflow(size: usize, product: i128) -> u64 {
    when(CF | OF, product != signed(size, product as u64))
}

fn imul_wide(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let size = cpu.size(0);
    let product = signed(size, cpu.register(halves(size).0)?) * signed(size, cpu.operand(0)?);
    set_halves(cpu, size, product as u64, (product >> (size * 8)) as u64)?;
    cpu.set_flags(CF | OF, overflow(size, product));
    Ok(())
}

fn imul(cpu: &mut Cpu<'_>, a: u32, b: u32) -> Result<(), EmulateError> {
    let size = cpu.size(0);
    let product = signed(size, cpu.operand(a)?) * signed(size, cpu.operand(b)?);
    cpu.set_operand(0, product as u64 & mask(size))?;
    cpu.set_flags(CF | OF, overflow(size, product));
    Ok(())
}

/// Returns the double-width dividend, zero-extended.
fn dividend(cpu: &Cpu<'_>, size: usize) -> Result<u128, EmulateError> {
    let (low, high) = halves(size);
    Ok(u128::from(cpu.register(low)?) | u128::from(cpu.register(high)?) << (size * 8))
}

fn div(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let size = cpu.size(0);
    let (dividend, divisor) = (dividend(cpu, size)?, u128::from(cpu.operand(0)?));
    let (Some(quotient), Some(remainder)) =
        (dividend.checked_div(divisor), dividend.checked_rem(divisor))
    else {
        return Err(cpu.exception(vector::DIVIDE_ERROR));
    };
    if quotient > u128::from(mask(size)) {
        return Err(cpu.exception(vector::DIVIDE_ERROR));
    }
    set_halves(cpu, size, quotient as u64, remainder as u64)
}

fn idiv(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let size = cpu.size(0);
    let unused = 128 - size as u32 * 16;
    let dividend = (dividend(cpu, size)? << unused) as i128 >> unused;
    let divisor = signed(size, cpu.operand(0)?);
    let (Some(quotient), Some(remainder)) =
        (dividend.checked_div(divisor), dividend.checked_rem(divisor))
    else {
        return Err(cpu.exception(vector::DIVIDE_ERROR));
    };
    if quotient != signed(size, quotient as u64) {
        return Err(cpu.exception(vector::DIVIDE_ERROR));
    }
    set_halves(cpu, size, quotient as u64, remainder as u64)
}
