//! Single bits, bit scans and counts, byte order.

use iced_x86::{Instruction, Mnemonic, OpKind};

use super::cpu::{Cpu, has_general_operands, has_short_address};
use super::flags::{CF, STATUS, ZF, mask, sign_extend, when};
use super::{EmulateError, Handler};

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    if !has_general_operands(insn) {
        return None;
    }
    let handler: Handler = match insn.mnemonic() {
        Mnemonic::Bt => |cpu| bit(cpu, |value, _| value),
        Mnemonic::Bts => |cpu| bit(cpu, |value, bit| value | bit),
        Mnemonic::Btr => |cpu| bit(cpu, |value, bit| value & !bit),
        Mnemonic::Btc => |cpu| bit(cpu, |value, bit| value ^ bit),
        Mnemonic::Bsf => |cpu| scan(cpu, |value| value.trailing_zeros()),
        Mnemonic::Bsr => |cpu| scan(cpu, |value| 63 - value.leading_zeros()),
        Mnemonic::Tzcnt => |cpu| {
            zeros(cpu, |size, value| {
                value.trailing_zeros().min(size as u32 * 8)
            })
        },
        Mnemonic::Lzcnt => |cpu| {
            zeros(cpu, |size, value| {
                value.leading_zeros() - (64 - size as u32 * 8)
            })
        },
        Mnemonic::Popcnt => popcnt,
        // For an operand of two bytes the result is undefined.
        Mnemonic::Bswap if insn.op0_register().size() != 2 => bswap,
        _ => return None,
    };
    Some(handler)
}

/// Executes BT, BTS, BTR and BTC. A register offset into memory selects any operand-sized unit
/// around the address.
fn bit(cpu: &mut Cpu<'_>, change: fn(u64, u64) -> u64) -> Result<(), EmulateError> {
    let size = cpu.size(0);
    let bits = size as u64 * 8;
    let offset = cpu.operand(1)?;
    let selected = 1u64 << (offset % bits);
    if cpu.insn.op_kind(0) != OpKind::Memory {
        let value = cpu.operand(0)?;
        if cpu.insn.mnemonic() != Mnemonic::Bt {
            cpu.set_operand(0, change(value, selected))?;
        }
        cpu.set_flags(CF, when(CF, value & selected != 0));
        return Ok(());
    }
    let mut address = cpu.address()?;
    if cpu.insn.op_kind(1) == OpKind::Register {
        if has_short_address(cpu.insn) {
            return Err(cpu.unsupported("bit offset with an address-size prefix"));
        }
        let unit = sign_extend(size, offset).div_euclid(bits as i64);
        address = address.wrapping_add_signed(unit.wrapping_mul(size as i64));
    }
    let value = cpu.load(address, size)?;
    let changed = change(value, selected);
    if cpu.insn.has_lock_prefix() {
        cpu.put_exchange(address, size, value.into(), changed.into())?;
    } else if cpu.insn.mnemonic() != Mnemonic::Bt {
        cpu.put(address, size, changed)?;
    }
    cpu.set_flags(CF, when(CF, value & selected != 0));
    Ok(())
}

/// Executes BSF and BSR. For zero the destination stays (AMD documents it, Intel CPUs do it).
fn scan(cpu: &mut Cpu<'_>, find: fn(u64) -> u32) -> Result<(), EmulateError> {
    let value = cpu.operand(1)?;
    if value != 0 {
        cpu.set_operand(0, find(value).into())?;
    }
    cpu.set_flags(ZF, when(ZF, value == 0));
    Ok(())
}

fn zeros(cpu: &mut Cpu<'_>, count: fn(usize, u64) -> u32) -> Result<(), EmulateError> {
    let value = cpu.operand(1)?;
    let result = count(cpu.size(0), value);
    cpu.set_operand(0, result.into())?;
    cpu.set_flags(CF | ZF, when(CF, value == 0) | when(ZF, result == 0));
    Ok(())
}

fn popcnt(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let value = cpu.operand(1)?;
    cpu.set_operand(0, value.count_ones().into())?;
    cpu.set_flags(STATUS, when(ZF, value == 0));
    Ok(())
}

fn bswap(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let size = cpu.size(0);
    let swapped = cpu.operand(0)?.swap_bytes() >> (64 - size * 8);
    cpu.set_operand(0, swapped & mask(size))
}
