//! Executes one 64-bit-mode instruction of a vCPU in the host, on the vCPU's registers and memory.
//!
//! It has two callers. A trap stays over the first byte of an instruction, so the displaced
//! instruction is executed here. A KVM that interprets guest code reports instructions that it
//! lacks (`KVM_INTERNAL_ERROR_EMULATION`), which are completed here.
//!
//! The caller owns the vCPU. It must be outside KVM_RUN while [`execute`] runs, in 64-bit mode
//! (CS.L set), with its RIP at the instruction. The caller also owns translation, permissions and
//! atomicity of memory ([`Environment`]). It decides whether to inject an exception, or to step the
//! original instruction.
//!
//! An instruction either happens as a whole (registers, flags, memory, RIP), or returns an error
//! and changes nothing. Its one effect outside the general registers, if any, is held back until
//! nothing can fail any more (`Cpu::commit`).
//!
//! The emulator does not raise exceptions or repeat string instructions. It does not change control
//! registers, MSRs or segments other than the FS and GS base. It has no x87 arithmetic and no AVX.
//! Arm only instructions that [`is_supported`] accepts. Flags that the manuals leave undefined keep
//! their value unless all CPUs agree on another.
//!
//! Sources: Intel SDM volume 2 and AMD APM volume 3, instruction pages. SDM volume 1, 10.5 (FXSAVE
//! area).

mod alu;
mod atomic;
mod bits;
mod control;
mod cpu;
mod data;
mod environment;
mod flags;
mod fpu;
mod multiply;
mod native;
mod prepared;
mod shift;
mod stack;
mod system;
#[cfg(any(test, feature = "test-utils"))]
pub mod test_utils;
#[cfg(test)]
mod tests;

use iced_x86::{Decoder, DecoderError, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
use kvm_bindings::kvm_regs;

use cpu::{Commit, Cpu};
pub use environment::{ControlRegister, Environment, FxState, MemoryFault, Segment, StateError};
pub(crate) use native::prepare as prepare_host_code;
pub(crate) use prepared::Prepared;

/// The exception vectors that [`EmulateError::Exception`] may carry (SDM volume 3, table 7-1).
pub mod vector {
    /// #DE, divide error. No error code.
    pub const DIVIDE_ERROR: u8 = 0;
    /// #UD, invalid opcode. No error code.
    pub const INVALID_OPCODE: u8 = 6;
    /// #NM, device not available. No error code.
    pub const DEVICE_NOT_AVAILABLE: u8 = 7;
    /// #SS, stack fault. Error code 0.
    pub const STACK_FAULT: u8 = 12;
    /// #GP, general protection. Error code 0.
    pub const GENERAL_PROTECTION: u8 = 13;
    /// #MF, x87 floating-point error. No error code.
    pub const X87_FLOATING_POINT: u8 = 16;
    /// #XM, SIMD floating-point exception. No error code.
    pub const SIMD_FLOATING_POINT: u8 = 19;
}

/// The number of attempts of a locked instruction whose memory other CPUs change in between.
const EXCHANGE_ATTEMPTS: usize = 1000;

/// The reason that bytes cannot be decoded for emulation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The instruction goes on after the last given byte.
    #[error(
        "{ip:#x}: the instruction needs more than the {available} bytes given; give at least 15"
    )]
    Truncated {
        /// The linear address of the first byte.
        ip: u64,
        /// The number of given bytes.
        available: usize,
    },
    /// No CPU executes these bytes.
    #[error("{ip:#x}: invalid 64-bit instruction: found bytes {bytes:02x?}")]
    Invalid {
        /// The linear address of the first byte.
        ip: u64,
        /// The given bytes, at most 15.
        bytes: Vec<u8>,
    },
    /// Intel and AMD CPUs decode these bytes differently (operand-size prefix on a near branch).
    #[error("{ip:#x}: bytes {bytes:02x?} mean different instructions on Intel and AMD CPUs")]
    VendorDependent {
        /// The linear address of the first byte.
        ip: u64,
        /// The given bytes, at most 15.
        bytes: Vec<u8>,
    },
}

/// The reason that an instruction was not executed. Nothing has changed, neither a register nor
/// memory.
///
/// MXCSR is the exception: it holds the flags of the exceptions that raise #XM, or #UD if the guest
/// has not asked for #XM (CR4.OSXMMEXCPT).
#[derive(Debug, thiserror::Error)]
pub enum EmulateError {
    /// The instruction is outside the emulated set, or the emulator refuses the state. Step the
    /// original instruction instead.
    #[error("{ip:#x}: `{instruction}` is not emulated: {reason}")]
    Unsupported {
        /// The linear address of the instruction.
        ip: u64,
        /// The instruction as text, Intel syntax.
        instruction: String,
        /// The property of the instruction, or of the vCPU, that prevents emulation.
        reason: &'static str,
    },
    /// Memory could not be accessed. A CPU would raise #PF.
    #[error(transparent)]
    Fault(#[from] MemoryFault),
    /// A CPU would raise this exception instead of completing the instruction.
    #[error("{ip:#x}: `{instruction}` raises exception {vector}")]
    Exception {
        /// The linear address of the instruction.
        ip: u64,
        /// The instruction as text, Intel syntax.
        instruction: String,
        /// The exception, one of [`vector`]. Its error code, if it has one, is 0.
        vector: u8,
    },
    /// The instruction was decoded for an address other than the vCPU's.
    #[error(
        "the instruction was decoded for {decoded:#x}, but RIP is {rip:#x}; set RIP first, or decode again"
    )]
    WrongAddress {
        /// The address that the instruction was decoded for.
        decoded: u64,
        /// The vCPU's RIP.
        rip: u64,
    },
    /// Other CPUs changed the memory of a locked instruction at every attempt. Run the vCPU again
    /// to try again.
    #[error(
        "{ip:#x}: {address:#x} was changed by other CPUs {EXCHANGE_ATTEMPTS} times; run the vCPU again"
    )]
    Contended {
        /// The linear address of the instruction.
        ip: u64,
        /// The linear address of the memory operand.
        address: u64,
    },
    /// State of the vCPU outside the general registers could not be read or written.
    #[error(transparent)]
    State(#[from] StateError),
}

/// A function that executes one kind of instruction on a working copy of the registers.
type Handler = fn(&mut Cpu<'_>) -> Result<(), EmulateError>;

/// Returns `instruction` as it would be decoded at linear address `ip`. `None` if more of it
/// depends on its address.
///
/// A program's text may be mapped at any address. This saves decoding it at each hit.
pub(crate) fn moved(instruction: &Instruction, ip: u64) -> Option<Instruction> {
    let distance = ip.wrapping_sub(instruction.ip());
    let mut moved = *instruction;
    moved.set_ip(ip);
    if instruction.is_ip_rel_memory_operand() {
        if instruction.memory_base() != Register::RIP {
            return None;
        }
        let operand = instruction.ip_rel_memory_address();
        moved.set_memory_displacement64(operand.wrapping_add(distance));
    }
    match instruction.try_op_kind(0) {
        Ok(OpKind::NearBranch64) => {
            let target = instruction.near_branch64();
            moved.set_near_branch64(target.wrapping_add(distance));
        }
        Ok(OpKind::NearBranch16 | OpKind::NearBranch32) => return None,
        _ => {}
    }
    Some(moved)
}

/// Decodes the instruction at the start of `bytes`, located at linear address `ip` in 64-bit mode.
///
/// # Errors
/// If the bytes are too few, no instruction, or different instructions on Intel and on AMD.
pub fn decode(bytes: &[u8], ip: u64) -> Result<Instruction, DecodeError> {
    let shown = || bytes.iter().copied().take(15).collect();
    let with = |options| {
        let mut decoder = Decoder::with_ip(64, bytes, ip, options);
        let instruction = decoder.decode();
        (instruction, decoder.last_error())
    };
    let (instruction, error) = with(DecoderOptions::NONE);
    match error {
        DecoderError::None => {}
        DecoderError::NoMoreBytes if bytes.len() < 15 => {
            return Err(DecodeError::Truncated {
                ip,
                available: bytes.len(),
            });
        }
        _ => {
            // The decoder names unassigned hint opcodes only on request. All CPUs execute them as
            // nops.
            let (hint, error) = with(DecoderOptions::FORCE_RESERVED_NOP);
            if error == DecoderError::None && hint.mnemonic() == Mnemonic::Reservednop {
                return Ok(hint);
            }
            return Err(DecodeError::Invalid { ip, bytes: shown() });
        }
    }
    let (amd, _) = with(DecoderOptions::AMD);
    if amd.code() != instruction.code() || amd.len() != instruction.len() {
        return Err(DecodeError::VendorDependent { ip, bytes: shown() });
    }
    Ok(instruction)
}

/// Checks whether [`execute`] knows this instruction on this host. It may still refuse it in an
/// unusual vCPU state (shadow stacks, unknown bits in MXCSR).
#[must_use]
pub fn is_supported(instruction: &Instruction) -> bool {
    interpreter(instruction).is_some() || native::is_supported(instruction)
}

/// Executes `instruction` on `regs` and `env`.
///
/// RIP is then the next instruction's, or the branch target. RFLAGS.RF is clear, as after every
/// completed instruction.
///
/// If RFLAGS.TF was set before, a CPU takes #DB after the instruction. The caller must raise it.
///
/// # Errors
/// See [`EmulateError`]. Nothing has changed then, except flags in MXCSR.
pub fn execute(
    instruction: &Instruction,
    regs: &mut kvm_regs,
    env: &mut dyn Environment,
) -> Result<(), EmulateError> {
    if instruction.ip() != regs.rip {
        return Err(EmulateError::WrongAddress {
            decoded: instruction.ip(),
            rip: regs.rip,
        });
    }
    let handler = interpreter(instruction).unwrap_or(native::run);
    let mut contended = 0;
    for _ in 0..EXCHANGE_ATTEMPTS {
        let mut cpu = Cpu::new(instruction, *regs, env);
        handler(&mut cpu)?;
        cpu.check_rip()?;
        let next = cpu.regs;
        match cpu.commit()? {
            Commit::Done => {
                *regs = next;
                return Ok(());
            }
            Commit::Raced { address } => contended = address,
        }
    }
    Err(EmulateError::Contended {
        ip: instruction.ip(),
        address: contended,
    })
}

/// Returns the code that executes `instruction` without the host CPU's help. [`native::run`]
/// handles the others.
///
/// The order follows how often functions start with such an instruction.
fn interpreter(instruction: &Instruction) -> Option<Handler> {
    stack::handler(instruction)
        .or_else(|| data::handler(instruction))
        .or_else(|| control::handler(instruction))
        .or_else(|| alu::handler(instruction))
        .or_else(|| shift::handler(instruction))
        .or_else(|| multiply::handler(instruction))
        .or_else(|| bits::handler(instruction))
        .or_else(|| atomic::handler(instruction))
        .or_else(|| system::handler(instruction))
        .or_else(|| fpu::handler(instruction))
}

fn unsupported(instruction: &Instruction, reason: &'static str) -> EmulateError {
    EmulateError::Unsupported {
        ip: instruction.ip(),
        instruction: instruction.to_string(),
        reason,
    }
}
