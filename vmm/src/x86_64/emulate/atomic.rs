//! Exchanges: XCHG, XADD, CMPXCHG, CMPXCHG8B, CMPXCHG16B.

use iced_x86::{Instruction, Mnemonic, OpKind, Register};

use super::cpu::{Cpu, has_general_operands};
use super::flags::{self, STATUS, ZF, when};
use super::{EmulateError, Handler, vector};

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    let handler: Handler = match insn.mnemonic() {
        Mnemonic::Cmpxchg8b => |cpu| cmpxchg_wide(cpu, 4),
        Mnemonic::Cmpxchg16b => |cpu| cmpxchg_wide(cpu, 8),
        _ if !has_general_operands(insn) => return None,
        Mnemonic::Xchg => xchg,
        Mnemonic::Xadd => xadd,
        Mnemonic::Cmpxchg => cmpxchg,
        _ => return None,
    };
    Some(handler)
}

/// Executes XCHG, which is atomic with memory, with and without LOCK.
fn xchg(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let (old, new) = (cpu.operand(0)?, cpu.operand(1)?);
    if cpu.insn.op0_kind() == OpKind::Memory {
        let address = cpu.address()?;
        cpu.put_exchange(address, cpu.size(0), old.into(), new.into())?;
    } else {
        cpu.set_operand(0, new)?;
    }
    cpu.set_operand(1, old)
}

/// Executes XADD.
///
/// The address is computed, and the sum written, after the source register. Both operands may be
/// the same register, but the memory operand's address uses the registers from before.
fn xadd(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let (old, addend) = (cpu.operand(0)?, cpu.operand(1)?);
    let (sum, flags) = flags::add(cpu.size(0), old, addend, false);
    if cpu.insn.op_kind(0) == OpKind::Memory {
        cpu.update_operand(0, old, sum)?;
        cpu.set_operand(1, old)?;
    } else {
        cpu.set_operand(1, old)?;
        cpu.set_operand(0, sum)?;
    }
    cpu.set_flags(STATUS, flags);
    Ok(())
}

/// Executes CMPXCHG.
///
/// If the comparison fails, memory is written with its old value, but a register stays, upper half
/// included.
fn cmpxchg(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let size = cpu.size(0);
    let accumulator = match size {
        1 => Register::AL,
        2 => Register::AX,
        4 => Register::EAX,
        _ => Register::RAX,
    };
    let (expected, old, new) = (cpu.register(accumulator)?, cpu.operand(0)?, cpu.operand(1)?);
    let (_, flags) = flags::subtract(size, expected, old, false);
    if expected == old {
        cpu.update_operand(0, old, new)?;
    } else {
        if cpu.insn.op_kind(0) == OpKind::Memory {
            cpu.update_operand(0, old, old)?;
        }
        cpu.set_register(accumulator, old)?;
    }
    cpu.set_flags(STATUS, flags);
    Ok(())
}

/// Executes CMPXCHG8B (`half` 4) and CMPXCHG16B (`half` 8, aligned). DX:AX is compared, and CX:BX
/// stored. Only ZF changes.
fn cmpxchg_wide(cpu: &mut Cpu<'_>, half: usize) -> Result<(), EmulateError> {
    let size = 2 * half;
    let address = cpu.address()?;
    if half == 8 && !address.is_multiple_of(16) {
        return Err(cpu.exception(vector::GENERAL_PROTECTION));
    }
    let mut bytes = [0; 16];
    cpu.load_bytes(address, bytes.get_mut(..size).unwrap_or_default())?;
    let old = u128::from_le_bytes(bytes);
    let pair = |low: u64, high: u64| {
        let mask = flags::mask(half);
        u128::from(low & mask) | u128::from(high & mask) << (half * 8)
    };
    let equal = old == pair(cpu.regs.rax, cpu.regs.rdx);
    let new = if equal {
        pair(cpu.regs.rbx, cpu.regs.rcx)
    } else {
        old
    };
    if cpu.insn.has_lock_prefix() {
        cpu.put_exchange(address, size, old, new)?;
    } else {
        cpu.put_bytes(address, new.to_le_bytes()[..size].to_vec())?;
    }
    if !equal {
        cpu.regs.rax = old as u64 & flags::mask(half);
        cpu.regs.rdx = (old >> (half * 8)) as u64 & flags::mask(half);
    }
    cpu.set_flags(ZF, when(ZF, equal));
    Ok(())
}
