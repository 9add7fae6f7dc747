//! Single flags, HLT, the FS and GS base, XGETBV.

use iced_x86::{Instruction, Mnemonic, Register};

use super::cpu::Cpu;
use super::environment::{ControlRegister, Segment};
use super::flags::{AC, AF, CF, DF, IF, PF, SF, TF, ZF};
use super::stack::io_privilege;
use super::{EmulateError, Handler, vector};

const CR4_FSGSBASE: u64 = 1 << 16;
const CR4_OSXSAVE: u64 = 1 << 18;

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    let handler: Handler = match insn.mnemonic() {
        Mnemonic::Clc => |cpu| set(cpu, CF, 0),
        Mnemonic::Stc => |cpu| set(cpu, CF, CF),
        Mnemonic::Cmc => |cpu| set(cpu, CF, !cpu.regs.rflags),
        Mnemonic::Cld => |cpu| set(cpu, DF, 0),
        Mnemonic::Std => |cpu| set(cpu, DF, DF),
        Mnemonic::Lahf => lahf,
        Mnemonic::Sahf => |cpu| set(cpu, CF | PF | AF | ZF | SF, cpu.regs.rax >> 8),
        Mnemonic::Clac => |cpu| access_check(cpu, 0),
        Mnemonic::Stac => |cpu| access_check(cpu, AC),
        Mnemonic::Cli => cli,
        Mnemonic::Sti => sti,
        Mnemonic::Hlt => hlt,
        Mnemonic::Rdfsbase => |cpu| read_base(cpu, Segment::Fs),
        Mnemonic::Rdgsbase => |cpu| read_base(cpu, Segment::Gs),
        Mnemonic::Wrfsbase => |cpu| write_base(cpu, Segment::Fs),
        Mnemonic::Wrgsbase => |cpu| write_base(cpu, Segment::Gs),
        Mnemonic::Xgetbv => xgetbv,
        _ => return None,
    };
    Some(handler)
}

fn set(cpu: &mut Cpu<'_>, affected: u64, value: u64) -> Result<(), EmulateError> {
    cpu.set_flags(affected, value);
    Ok(())
}

fn lahf(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    // Bit 1 reads as one.
    let value = cpu.regs.rflags & (CF | PF | AF | ZF | SF) | 2;
    cpu.set_register(Register::AH, value)
}

/// Executes CLAC and STAC, for the kernel alone.
fn access_check(cpu: &mut Cpu<'_>, value: u64) -> Result<(), EmulateError> {
    if cpu.env.cpl()? != 0 {
        return Err(cpu.exception(vector::INVALID_OPCODE));
    }
    set(cpu, AC, value)
}

fn check_io_privilege(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    if cpu.env.cpl()? > io_privilege(cpu) {
        return Err(cpu.exception(vector::GENERAL_PROTECTION));
    }
    Ok(())
}

fn cli(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    check_io_privilege(cpu)?;
    set(cpu, IF, 0)
}

/// Executes STI. Interrupts come one instruction later, so that `sti; hlt` cannot miss one.
fn sti(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    check_io_privilege(cpu)?;
    if !cpu.flag(IF) {
        cpu.put_interrupt_shadow()?;
    }
    set(cpu, IF, IF)
}

/// Executes HLT, for the kernel alone.
///
/// Stepped by KVM it may leave the vCPU halted in the handler of the interrupt that ended the halt.
fn hlt(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    if cpu.env.cpl()? != 0 {
        return Err(cpu.exception(vector::GENERAL_PROTECTION));
    }
    if cpu.regs.rflags & TF != 0 {
        return Err(cpu.unsupported("it would wait, and #DB is to follow it"));
    }
    cpu.put_halt()
}

fn check_cr4(cpu: &mut Cpu<'_>, bit: u64) -> Result<(), EmulateError> {
    if cpu.env.control_register(ControlRegister::Cr4)? & bit == 0 {
        return Err(cpu.exception(vector::INVALID_OPCODE));
    }
    Ok(())
}

fn read_base(cpu: &mut Cpu<'_>, segment: Segment) -> Result<(), EmulateError> {
    check_cr4(cpu, CR4_FSGSBASE)?;
    let base = cpu.env.segment_base(segment)?;
    cpu.set_operand(0, base)
}

fn write_base(cpu: &mut Cpu<'_>, segment: Segment) -> Result<(), EmulateError> {
    check_cr4(cpu, CR4_FSGSBASE)?;
    let base = cpu.operand(0)?;
    cpu.put_segment_base(segment, base)
}

fn xgetbv(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    check_cr4(cpu, CR4_OSXSAVE)?;
    if cpu.regs.rcx & 0xffff_ffff != 0 {
        return Err(cpu.unsupported("only register 0 is known"));
    }
    let value = cpu.env.control_register(ControlRegister::Xcr0)?;
    cpu.regs.rax = value & 0xffff_ffff;
    cpu.regs.rdx = value >> 32;
    Ok(())
}
