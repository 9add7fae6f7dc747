//! Moves, extensions, conditional moves and no-operations.

use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register};

use super::cpu::{Cpu, has_general_operands};
use super::flags::{self, sign_extend};
use super::{EmulateError, Handler};

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    // An operand of a nop or prefetch is never accessed, so any kind will do.
    match insn.mnemonic() {
        // 0F 0D is the prefetch group: #UD with a register on AMD CPUs.
        Mnemonic::Reservednop
            if is_prefetch_group(insn.code()) && insn.op0_kind() != OpKind::Memory =>
        {
            return None;
        }
        Mnemonic::Nop
        | Mnemonic::Reservednop
        | Mnemonic::Pause
        | Mnemonic::Endbr64
        | Mnemonic::Endbr32
        | Mnemonic::Prefetch
        | Mnemonic::Prefetchw
        | Mnemonic::Prefetchwt1
        | Mnemonic::Prefetchnta
        | Mnemonic::Prefetcht0
        | Mnemonic::Prefetcht1
        | Mnemonic::Prefetcht2
        | Mnemonic::Prefetchit0
        | Mnemonic::Prefetchit1 => return Some(|_| Ok(())),
        Mnemonic::Lfence | Mnemonic::Mfence | Mnemonic::Sfence => return Some(fence),
        Mnemonic::Lea => return Some(lea),
        _ => {}
    }
    if !has_general_operands(insn) {
        return None;
    }
    let handler: Handler = match insn.mnemonic() {
        Mnemonic::Mov | Mnemonic::Movzx | Mnemonic::Movnti => mov,
        Mnemonic::Movsx | Mnemonic::Movsxd => movsx,
        Mnemonic::Cbw => |cpu| extend(cpu, Register::AL, Register::AX),
        Mnemonic::Cwde => |cpu| extend(cpu, Register::AX, Register::EAX),
        Mnemonic::Cdqe => |cpu| extend(cpu, Register::EAX, Register::RAX),
        Mnemonic::Cwd => |cpu| spread_sign(cpu, Register::AX, Register::DX),
        Mnemonic::Cdq => |cpu| spread_sign(cpu, Register::EAX, Register::EDX),
        Mnemonic::Cqo => |cpu| spread_sign(cpu, Register::RAX, Register::RDX),
        Mnemonic::Cmova
        | Mnemonic::Cmovae
        | Mnemonic::Cmovb
        | Mnemonic::Cmovbe
        | Mnemonic::Cmove
        | Mnemonic::Cmovg
        | Mnemonic::Cmovge
        | Mnemonic::Cmovl
        | Mnemonic::Cmovle
        | Mnemonic::Cmovne
        | Mnemonic::Cmovno
        | Mnemonic::Cmovnp
        | Mnemonic::Cmovns
        | Mnemonic::Cmovo
        | Mnemonic::Cmovp
        | Mnemonic::Cmovs => cmov,
        Mnemonic::Seta
        | Mnemonic::Setae
        | Mnemonic::Setb
        | Mnemonic::Setbe
        | Mnemonic::Sete
        | Mnemonic::Setg
        | Mnemonic::Setge
        | Mnemonic::Setl
        | Mnemonic::Setle
        | Mnemonic::Setne
        | Mnemonic::Setno
        | Mnemonic::Setnp
        | Mnemonic::Setns
        | Mnemonic::Seto
        | Mnemonic::Setp
        | Mnemonic::Sets => set,
        _ => return None,
    };
    Some(handler)
}

fn is_prefetch_group(code: Code) -> bool {
    matches!(
        code,
        Code::Reservednop_rm16_r16_0F0D
            | Code::Reservednop_rm32_r32_0F0D
            | Code::Reservednop_rm64_r64_0F0D
    )
}

fn fence(_: &mut Cpu<'_>) -> Result<(), EmulateError> {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    Ok(())
}

fn mov(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let value = cpu.operand(1)?;
    cpu.set_operand(0, value)
}

fn movsx(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let value = cpu.operand(1)?;
    cpu.set_operand(0, sign_extend(cpu.size(1), value) as u64)
}

fn lea(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let address = cpu.effective_address()?;
    cpu.set_operand(0, address)
}

fn extend(cpu: &mut Cpu<'_>, from: Register, to: Register) -> Result<(), EmulateError> {
    let value = sign_extend(from.size(), cpu.register(from)?);
    cpu.set_register(to, value as u64)
}

fn spread_sign(cpu: &mut Cpu<'_>, from: Register, to: Register) -> Result<(), EmulateError> {
    let value = sign_extend(from.size(), cpu.register(from)?);
    cpu.set_register(to, (value >> 63) as u64)
}

/// Executes CMOVcc. It reads its source, and clears the upper half of a 32-bit destination, whether
/// or not the condition holds.
fn cmov(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let (old, new) = (cpu.operand(0)?, cpu.operand(1)?);
    let moves = flags::condition(cpu.insn.condition_code(), cpu.regs.rflags);
    cpu.set_operand(0, if moves { new } else { old })
}

fn set(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let holds = flags::condition(cpu.insn.condition_code(), cpu.regs.rflags);
    cpu.set_operand(0, holds.into())
}
