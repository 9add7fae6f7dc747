//! PUSH, POP, LEAVE, and the flags on the stack.

use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register};

use super::cpu::{Cpu, is_immediate};
use super::flags::{AC, DF, ID, IF, IOPL, NT, STATUS, TF};
use super::{EmulateError, Handler};

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    let general = || match insn.op0_kind() {
        OpKind::Register => insn.op0_register().is_gpr(),
        OpKind::Memory => true,
        kind => is_immediate(kind),
    };
    let handler: Handler = match insn.mnemonic() {
        Mnemonic::Push if general() => push,
        Mnemonic::Pop if general() => pop,
        Mnemonic::Pushf | Mnemonic::Pushfq => pushf,
        Mnemonic::Popf | Mnemonic::Popfq => popf,
        _ if insn.code() == Code::Leaveq => leave,
        _ => return None,
    };
    Some(handler)
}

/// Returns the number of bytes that the instruction pushes or pops: 8, or 2 with an operand-size
/// prefix.
fn width(cpu: &Cpu<'_>) -> usize {
    if cpu.insn.stack_pointer_increment().unsigned_abs() == 2 {
        2
    } else {
        8
    }
}

/// Schedules a push of the low `size` bytes of `value`.
pub(super) fn push_value(cpu: &mut Cpu<'_>, size: usize, value: u64) -> Result<(), EmulateError> {
    cpu.regs.rsp = cpu.regs.rsp.wrapping_sub(size as u64);
    cpu.check_stack(cpu.regs.rsp, size)?;
    cpu.put(cpu.regs.rsp, size, value)
}

/// Pops `size` bytes, zero-extended.
pub(super) fn pop_value(cpu: &mut Cpu<'_>, size: usize) -> Result<u64, EmulateError> {
    cpu.check_stack(cpu.regs.rsp, size)?;
    let value = cpu.load(cpu.regs.rsp, size)?;
    cpu.regs.rsp = cpu.regs.rsp.wrapping_add(size as u64);
    Ok(value)
}

/// Executes PUSH. The operand, RSP included, is read before RSP changes.
fn push(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let size = width(cpu);
    let value = match cpu.insn.op0_kind() {
        OpKind::Register | OpKind::Memory => cpu.operand(0)?,
        _ => cpu.insn.immediate(0),
    };
    push_value(cpu, size, value)
}

/// Executes POP. RSP changes before the destination is written or its address computed.
fn pop(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let size = width(cpu);
    let value = pop_value(cpu, size)?;
    cpu.set_operand(0, value)
}

fn leave(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    cpu.regs.rsp = cpu.regs.rbp;
    let frame = pop_value(cpu, 8)?;
    cpu.set_register(Register::RBP, frame)
}

fn pushf(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    // RF reads as clear, and VM is never set in 64-bit mode.
    let value = cpu.regs.rflags;
    push_value(cpu, width(cpu), value)
}

/// Executes POPF. The flags that it changes depend on privilege (SDM volume 2, POPF, table 4-16).
fn popf(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let size = width(cpu);
    let value = pop_value(cpu, size)?;
    let cpl = cpu.env.cpl()?;
    let mut affected = STATUS | TF | DF | NT;
    if size == 8 {
        affected |= AC | ID;
    }
    if cpl == 0 {
        affected |= IOPL;
    }
    if cpl <= io_privilege(cpu) {
        affected |= IF;
    }
    cpu.set_flags(affected, value);
    Ok(())
}

/// Returns IOPL, the lowest privilege level that may change IF.
pub(super) fn io_privilege(cpu: &Cpu<'_>) -> u8 {
    ((cpu.regs.rflags & IOPL) >> 12) as u8
}
