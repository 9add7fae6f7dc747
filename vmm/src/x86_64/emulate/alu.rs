//! Additions, subtractions and bitwise operations on registers and memory.

use iced_x86::{Instruction, Mnemonic};

use super::cpu::{Cpu, has_general_operands};
use super::{EmulateError, Handler, flags};

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    if !has_general_operands(insn) {
        return None;
    }
    let handler: Handler = match insn.mnemonic() {
        Mnemonic::Add => |cpu| binary(cpu, |size, a, b, _| flags::add(size, a, b, false)),
        Mnemonic::Adc => |cpu| binary(cpu, flags::add),
        Mnemonic::Sub => |cpu| binary(cpu, |size, a, b, _| flags::subtract(size, a, b, false)),
        Mnemonic::Sbb => |cpu| binary(cpu, flags::subtract),
        Mnemonic::And => |cpu| binary(cpu, |size, a, b, _| bitwise(size, a & b)),
        Mnemonic::Or => |cpu| binary(cpu, |size, a, b, _| bitwise(size, a | b)),
        Mnemonic::Xor => |cpu| binary(cpu, |size, a, b, _| bitwise(size, a ^ b)),
        Mnemonic::Cmp => |cpu| compare(cpu, |size, a, b| flags::subtract(size, a, b, false).1),
        Mnemonic::Test => |cpu| compare(cpu, |size, a, b| bitwise(size, a & b).1),
        Mnemonic::Inc => |cpu| unary(cpu, !flags::CF, |size, a| flags::add(size, a, 1, false)),
        Mnemonic::Dec => |cpu| {
            unary(cpu, !flags::CF, |size, a| {
                flags::subtract(size, a, 1, false)
            })
        },
        Mnemonic::Neg => |cpu| unary(cpu, u64::MAX, |size, a| flags::subtract(size, 0, a, false)),
        Mnemonic::Not => |cpu| unary(cpu, 0, |size, a| (!a & flags::mask(size), 0)),
        _ => return None,
    };
    Some(handler)
}

/// Returns a bitwise result and its flags. CF and OF are clear. AF is undefined, and clear on Intel
/// and AMD CPUs.
fn bitwise(size: usize, result: u64) -> (u64, u64) {
    (result, flags::of_result(size, result))
}

fn binary(
    cpu: &mut Cpu<'_>,
    compute: fn(usize, u64, u64, bool) -> (u64, u64),
) -> Result<(), EmulateError> {
    let (a, b) = (cpu.operand(0)?, cpu.operand(1)?);
    let (result, flags) = compute(cpu.size(0), a, b, cpu.flag(flags::CF));
    cpu.update_operand(0, a, result)?;
    cpu.set_flags(flags::STATUS, flags);
    Ok(())
}

fn compare(cpu: &mut Cpu<'_>, compute: fn(usize, u64, u64) -> u64) -> Result<(), EmulateError> {
    let (a, b) = (cpu.operand(0)?, cpu.operand(1)?);
    let flags = compute(cpu.size(0), a, b);
    cpu.set_flags(flags::STATUS, flags);
    Ok(())
}

fn unary(
    cpu: &mut Cpu<'_>,
    affected: u64,
    compute: fn(usize, u64) -> (u64, u64),
) -> Result<(), EmulateError> {
    let a = cpu.operand(0)?;
    let (result, flags) = compute(cpu.size(0), a);
    cpu.update_operand(0, a, result)?;
    cpu.set_flags(flags::STATUS & affected, flags);
    Ok(())
}
