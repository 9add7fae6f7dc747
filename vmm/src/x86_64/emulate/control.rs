//! Near calls, jumps, loops and returns. Far ones load segments and are not emulated.
//!
//! With shadow stacks on (CR4.CET in user mode), calls and returns are refused, because the shadow
//! stack would get out of step.

use iced_x86::{Code, Instruction, Mnemonic, OpKind};

use super::cpu::Cpu;
use super::environment::ControlRegister;
use super::stack::{pop_value, push_value};
use super::{EmulateError, Handler, flags};

const CR4_CET: u64 = 1 << 23;

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    let handler: Handler = match insn.code() {
        Code::Call_rel32_64 | Code::Call_rm64 => call,
        Code::Jmp_rel8_64 | Code::Jmp_rel32_64 | Code::Jmp_rm64 => jump,
        Code::Retnq | Code::Retnq_imm16 => ret,
        Code::Jrcxz_rel8_64 => |cpu| branch(cpu, |cpu| cpu.regs.rcx == 0),
        Code::Jecxz_rel8_64 => |cpu| branch(cpu, |cpu| cpu.regs.rcx & 0xffff_ffff == 0),
        Code::Loop_rel8_64_RCX | Code::Loope_rel8_64_RCX | Code::Loopne_rel8_64_RCX => repeat,
        _ if insn.is_jcc_short_or_near() && insn.op0_kind() == OpKind::NearBranch64 => |cpu| {
            branch(cpu, |cpu| {
                flags::condition(cpu.insn.condition_code(), cpu.regs.rflags)
            })
        },
        _ => return None,
    };
    Some(handler)
}

fn target(cpu: &mut Cpu<'_>) -> Result<u64, EmulateError> {
    match cpu.insn.op0_kind() {
        OpKind::NearBranch64 => Ok(cpu.insn.near_branch64()),
        _ => cpu.operand(0),
    }
}

fn refuse_shadow_stack(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    if cpu.env.cpl()? == 3 && cpu.env.control_register(ControlRegister::Cr4)? & CR4_CET != 0 {
        return Err(cpu.unsupported("shadow stacks may be on (CR4.CET)"));
    }
    Ok(())
}

fn call(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    refuse_shadow_stack(cpu)?;
    let target = target(cpu)?;
    push_value(cpu, 8, cpu.insn.next_ip())?;
    cpu.regs.rip = target;
    Ok(())
}

fn jump(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    cpu.regs.rip = target(cpu)?;
    Ok(())
}

fn branch(cpu: &mut Cpu<'_>, taken: fn(&Cpu<'_>) -> bool) -> Result<(), EmulateError> {
    if taken(cpu) {
        cpu.regs.rip = cpu.insn.near_branch64();
    }
    Ok(())
}

/// Executes one step of LOOP, LOOPE and LOOPNE. RCX counts down without touching flags.
fn repeat(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    cpu.regs.rcx = cpu.regs.rcx.wrapping_sub(1);
    let equal = cpu.flag(flags::ZF);
    let goes_on = match cpu.insn.mnemonic() {
        Mnemonic::Loope => equal,
        Mnemonic::Loopne => !equal,
        _ => true,
    };
    if goes_on && cpu.regs.rcx != 0 {
        cpu.regs.rip = cpu.insn.near_branch64();
    }
    Ok(())
}

fn ret(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    refuse_shadow_stack(cpu)?;
    cpu.regs.rip = pop_value(cpu, 8)?;
    if cpu.insn.op_count() == 1 {
        cpu.regs.rsp = cpu.regs.rsp.wrapping_add(cpu.insn.immediate(0));
    }
    Ok(())
}
