//! x87 and SSE state: FWAIT, FNINIT, FNCLEX, MXCSR, FXSAVE64 and FXRSTOR64.

use iced_x86::{Instruction, Mnemonic};

use super::cpu::Cpu;
use super::environment::{ControlRegister, FxState};
use super::{EmulateError, Handler, vector};

const CR0_MP: u64 = 1 << 1;
const CR0_EM: u64 = 1 << 2;
const CR0_TS: u64 = 1 << 3;
const CR4_OSFXSR: u64 = 1 << 9;
const CR4_OSXMMEXCPT: u64 = 1 << 10;
/// The exception summary of the x87 status word: an unmasked exception is pending.
const FSW_ES: u16 = 1 << 7;
/// The MXCSR bits that exist if FXSAVE does not say (SDM volume 1, 11.6.6).
const MXCSR_MASK_DEFAULT: u32 = 0xffbf;

pub(super) fn handler(insn: &Instruction) -> Option<Handler> {
    let handler: Handler = match insn.mnemonic() {
        Mnemonic::Wait => fwait,
        Mnemonic::Fninit => fninit,
        Mnemonic::Fnclex => fnclex,
        Mnemonic::Ldmxcsr => ldmxcsr,
        Mnemonic::Stmxcsr => stmxcsr,
        Mnemonic::Fxsave64 => fxsave64,
        Mnemonic::Fxrstor64 => fxrstor64,
        _ => return None,
    };
    Some(handler)
}

fn check_x87(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    if cpu.env.control_register(ControlRegister::Cr0)? & (CR0_EM | CR0_TS) != 0 {
        return Err(cpu.exception(vector::DEVICE_NOT_AVAILABLE));
    }
    Ok(())
}

/// Checks that SSE instructions are on (SDM volume 3, table 2-3).
pub(super) fn check_sse(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let cr0 = cpu.env.control_register(ControlRegister::Cr0)?;
    let cr4 = cpu.env.control_register(ControlRegister::Cr4)?;
    if cr0 & CR0_EM != 0 || cr4 & CR4_OSFXSR == 0 {
        return Err(cpu.exception(vector::INVALID_OPCODE));
    }
    if cr0 & CR0_TS != 0 {
        return Err(cpu.exception(vector::DEVICE_NOT_AVAILABLE));
    }
    Ok(())
}

/// Returns the exception that an unmasked SSE exception raises. It is #XM if the guest's system is
/// ready for that.
pub(super) fn simd_vector(cpu: &mut Cpu<'_>) -> Result<u8, EmulateError> {
    let cr4 = cpu.env.control_register(ControlRegister::Cr4)?;
    Ok(match cr4 & CR4_OSXMMEXCPT {
        0 => vector::INVALID_OPCODE,
        _ => vector::SIMD_FLOATING_POINT,
    })
}

fn fwait(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let cr0 = cpu.env.control_register(ControlRegister::Cr0)?;
    if cr0 & CR0_MP != 0 && cr0 & CR0_TS != 0 {
        return Err(cpu.exception(vector::DEVICE_NOT_AVAILABLE));
    }
    if cpu.env.fx_state()?.u16(FxState::FSW) & FSW_ES != 0 {
        return Err(cpu.exception(vector::X87_FLOATING_POINT));
    }
    Ok(())
}

/// Executes FNINIT.
///
/// Data registers keep their bits but count as empty. The pointers and the last opcode are cleared.
fn fninit(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    check_x87(cpu)?;
    let mut state = Box::new(cpu.env.fx_state()?);
    state.0[..FxState::MXCSR].fill(0);
    state.set_u16(FxState::FCW, 0x37f);
    cpu.put_fx(state)
}

/// Executes FNCLEX. It clears the exception flags, the stack fault, the summary and the busy bit.
fn fnclex(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    check_x87(cpu)?;
    let mut state = Box::new(cpu.env.fx_state()?);
    let status = state.u16(FxState::FSW) & 0x7f00;
    state.set_u16(FxState::FSW, status);
    cpu.put_fx(state)
}

fn mxcsr_mask(state: &FxState) -> u32 {
    match state.u32(FxState::MXCSR_MASK) {
        0 => MXCSR_MASK_DEFAULT,
        mask => mask,
    }
}

fn ldmxcsr(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    check_sse(cpu)?;
    let value = cpu.operand(0)? as u32;
    let mut state = Box::new(cpu.env.fx_state()?);
    if value & !mxcsr_mask(&state) != 0 {
        return Err(cpu.exception(vector::GENERAL_PROTECTION));
    }
    state.set_u32(FxState::MXCSR, value);
    cpu.put_fx(state)
}

fn stmxcsr(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    check_sse(cpu)?;
    let value = cpu.env.fx_state()?.mxcsr();
    cpu.set_operand(0, value.into())
}

/// Returns the address of the 512-byte area, aligned.
fn area(cpu: &mut Cpu<'_>) -> Result<u64, EmulateError> {
    check_x87(cpu)?;
    if cpu.env.control_register(ControlRegister::Cr4)? & CR4_OSFXSR == 0 {
        return Err(cpu.unsupported("CR4.OSFXSR is clear: x87 state alone"));
    }
    let address = cpu.address()?;
    if !address.is_multiple_of(16) {
        return Err(cpu.exception(vector::GENERAL_PROTECTION));
    }
    Ok(address)
}

fn fxsave64(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let address = area(cpu)?;
    let state = cpu.env.fx_state()?;
    // XMM15 ends at 416. The rest is reserved, and CPUs leave it alone.
    cpu.put_bytes(address, state.0[..FxState::XMM.end].to_vec())
}

fn fxrstor64(cpu: &mut Cpu<'_>) -> Result<(), EmulateError> {
    let address = area(cpu)?;
    let mut state = Box::new(cpu.env.fx_state()?);
    let mask = state.u32(FxState::MXCSR_MASK);
    let mut area = [0; 512];
    cpu.load_bytes(address, &mut area)?;
    state.0[..FxState::XMM.end].copy_from_slice(&area[..FxState::XMM.end]);
    // MXCSR_MASK describes the CPU, so it is not loaded.
    state.set_u32(FxState::MXCSR_MASK, mask);
    if state.mxcsr() & !mxcsr_mask(&state) != 0 {
        return Err(cpu.exception(vector::GENERAL_PROTECTION));
    }
    cpu.put_fx(state)
}
