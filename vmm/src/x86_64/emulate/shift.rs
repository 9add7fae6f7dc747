//! Shifts and rotates by an immediate or CL.
//!
//! A count of zero changes no flag. For counts above one the manuals leave OF undefined. It then
//! follows the result as for a count of one, like on CPUs. AF, always undefined, keeps its value.

use iced_x86::{Instruction, Mnemonic};

use super::cpu::{Cpu, has_general_operands};
use super::flags::{AF, CF, OF, STATUS, mask, of_result, sign_bit, sign_extend, when};
use super::{EmulateError, Handler};

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    if !has_general_operands(insn) {
        return None;
    }
    let handler: Handler = match insn.mnemonic() {
        Mnemonic::Shl | Mnemonic::Sal => |cpu| shift(cpu, shl),
        Mnemonic::Shr => |cpu| shift(cpu, shr),
        Mnemonic::Sar => |cpu| shift(cpu, sar),
        Mnemonic::Rol => |cpu| rotate(cpu, rol),
        Mnemonic::Ror => |cpu| rotate(cpu, ror),
        Mnemonic::Rcl => |cpu| rotate(cpu, rcl),
        Mnemonic::Rcr => |cpu| rotate(cpu, rcr),
        Mnemonic::Shld => |cpu| double_shift(cpu, true),
        Mnemonic::Shrd => |cpu| double_shift(cpu, false),
        _ => return None,
    };
    Some(handler)
}

/// Returns the count that a CPU uses: the low 5 bits, or 6 for 64-bit operands.
fn count(cpu: &mut Cpu<'_>, operand: u32) -> Result<u32, EmulateError> {
    let mask = if cpu.size(0) == 8 { 63 } else { 31 };
    Ok((cpu.operand(operand)? & mask) as u32)
}

fn shift(
    cpu: &mut Cpu<'_>,
    compute: fn(usize, u64, u32) -> (u64, u64),
) -> Result<(), EmulateError> {
    let (size, value, count) = (cpu.size(0), cpu.operand(0)?, count(cpu, 1)?);
    if count == 0 {
        return cpu.update_operand(0, value, value);
    }
    let (result, flags) = compute(size, value, count);
    cpu.update_operand(0, value, result)?;
    cpu.set_flags(STATUS & !AF, flags | of_result(size, result));
    Ok(())
}

/// Executes a rotate. `compute` gets the value, the count (1 to 63) and CF.
fn rotate(
    cpu: &mut Cpu<'_>,
    compute: fn(usize, u64, u32, bool) -> (u64, u64),
) -> Result<(), EmulateError> {
    let (size, value, count) = (cpu.size(0), cpu.operand(0)?, count(cpu, 1)?);
    if count == 0 {
        return cpu.update_operand(0, value, value);
    }
    let (result, flags) = compute(size, value, count, cpu.flag(CF));
    cpu.update_operand(0, value, result)?;
    cpu.set_flags(CF | OF, flags);
    Ok(())
}

fn bits(size: usize) -> u32 {
    (size as u32) * 8
}

/// Returns CF and OF of shifts and rotates to the left. OF: the sign has changed in the last step.
fn left_flags(size: usize, result: u64, carry: bool) -> u64 {
    when(CF, carry) | when(OF, carry != (result & sign_bit(size) != 0))
}

/// Returns CF and OF of SHR and of rotates to the right. OF: the top two bits differ.
fn right_flags(size: usize, result: u64, carry: bool) -> u64 {
    when(CF, carry) | when(OF, (result ^ (result << 1)) & sign_bit(size) != 0)
}

fn shl(size: usize, value: u64, count: u32) -> (u64, u64) {
    let wide = u128::from(value) << count;
    let result = wide as u64 & mask(size);
    let carry = wide >> bits(size) & 1 != 0;
    (result, left_flags(size, result, carry))
}

fn shr(size: usize, value: u64, count: u32) -> (u64, u64) {
    let result = value >> count;
    let carry = value >> (count - 1) & 1 != 0;
    (result, right_flags(size, result, carry))
}

fn sar(size: usize, value: u64, count: u32) -> (u64, u64) {
    let value = sign_extend(size, value);
    let carry = value >> (count - 1) & 1 != 0;
    ((value >> count) as u64 & mask(size), when(CF, carry))
}

fn rol(size: usize, value: u64, count: u32, _: bool) -> (u64, u64) {
    let count = count % bits(size);
    let result = (value << count | (u128::from(value) >> (bits(size) - count)) as u64) & mask(size);
    let carry = result & 1 != 0;
    (result, left_flags(size, result, carry))
}

fn ror(size: usize, value: u64, count: u32, _: bool) -> (u64, u64) {
    let count = count % bits(size);
    let result = (value >> count | (u128::from(value) << (bits(size) - count)) as u64) & mask(size);
    let carry = result & sign_bit(size) != 0;
    (result, right_flags(size, result, carry))
}

/// Rotates `value` with `carry` above it, a number of `size * 8 + 1` bits, to the left.
fn through_carry(size: usize, value: u64, count: u32, carry: bool) -> (u64, bool) {
    let width = bits(size) + 1;
    let wide = u128::from(value) | u128::from(carry) << bits(size);
    let count = count % width;
    let rotated = wide << count | wide >> (width - count);
    (rotated as u64 & mask(size), rotated >> bits(size) & 1 != 0)
}

fn rcl(size: usize, value: u64, count: u32, carry: bool) -> (u64, u64) {
    let (result, carry) = through_carry(size, value, count, carry);
    (result, left_flags(size, result, carry))
}

fn rcr(size: usize, value: u64, count: u32, carry: bool) -> (u64, u64) {
    let width = bits(size) + 1;
    let (result, carry) = through_carry(size, value, width - count % width, carry);
    (result, right_flags(size, result, carry))
}

/// Executes SHLD and SHRD. The bits that are shifted in are operand 1's.
fn double_shift(cpu: &mut Cpu<'_>, left: bool) -> Result<(), EmulateError> {
    let (size, value, filler, count) = (
        cpu.size(0),
        cpu.operand(0)?,
        cpu.operand(1)?,
        count(cpu, 2)?,
    );
    let bits = bits(size);
    if count == 0 {
        return cpu.update_operand(0, value, value);
    }
    if count > bits {
        return Err(cpu.unsupported("result is undefined for a count above the operand size"));
    }
    let (value_wide, filler_wide) = (u128::from(value), u128::from(filler));
    let (result, carry) = if left {
        let wide = (value_wide << bits | filler_wide) << count;
        (
            (wide >> bits) as u64 & mask(size),
            value_wide >> (bits - count) & 1 != 0,
        )
    } else {
        let wide = (filler_wide << bits | value_wide) >> count;
        (wide as u64 & mask(size), value_wide >> (count - 1) & 1 != 0)
    };
    cpu.update_operand(0, value, result)?;
    let overflow = (result ^ value) & sign_bit(size) != 0;
    cpu.set_flags(
        STATUS & !AF,
        of_result(size, result) | when(CF, carry) | when(OF, overflow),
    );
    Ok(())
}
