//! Executes one 64-bit-mode instruction of a vCPU in the host, on the vCPU's registers and memory.
//!
//! Two callers need it. A trap byte stands over the first byte of an instruction and stays there: the displaced
//! instruction is executed here. And a KVM that interprets guest code itself reports instructions that it lacks
//! (`KVM_INTERNAL_ERROR_EMULATION`): they are completed here.
//!
//! The caller owns the vCPU: it stands still while [`execute`] runs, it is in 64-bit mode (CS.L set), and its RIP is
//! the instruction's. The caller also owns translation, permissions and atomicity of memory ([`Environment`]) and
//! decides what an exception or a refused instruction means: inject it, or step the original instruction.
//!
//! What this gives: either the whole instruction happened (registers, flags, memory, RIP), or an error came back and
//! nothing changed. Every instruction has at most one effect outside the general registers; it is kept back until all
//! that can fail was done (`Cpu::commit`).
//!
//! What it does not do: raise exceptions, repeat string instructions, change control registers, MSRs or segments
//! other than the FS and GS base, x87 arithmetic, AVX. [`is_supported`] tells before arming. Arm only what it accepts.
//! Flags which the manuals leave undefined after an instruction keep their value unless all CPUs agree on another.
//!
//! Sources: Intel SDM volume 2 and AMD APM volume 3, instruction pages; SDM volume 1, 10.5 (FXSAVE area).

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

/// Exception vectors that [`EmulateError::Exception`] may carry (SDM volume 3, table 7-1).
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

/// How often a locked instruction is tried again after another CPU changed its memory in between.
const EXCHANGE_ATTEMPTS: usize = 1000;

/// Why bytes are no instruction that could be emulated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The instruction goes on after the last byte given.
    #[error(
        "{ip:#x}: the instruction needs more than the {available} bytes given; give at least 15"
    )]
    Truncated {
        /// Linear address of the first byte.
        ip: u64,
        /// Number of bytes given.
        available: usize,
    },
    /// No CPU executes these bytes.
    #[error("{ip:#x}: bytes {bytes:02x?} are no 64-bit instruction")]
    Invalid {
        /// Linear address of the first byte.
        ip: u64,
        /// The bytes given, at most 15.
        bytes: Vec<u8>,
    },
    /// Intel and AMD CPUs read these bytes differently (operand-size prefix on a near branch).
    #[error("{ip:#x}: bytes {bytes:02x?} mean different instructions on Intel and AMD CPUs")]
    VendorDependent {
        /// Linear address of the first byte.
        ip: u64,
        /// The bytes given, at most 15.
        bytes: Vec<u8>,
    },
}

/// Why an instruction was not executed. Nothing has changed, not a register nor a byte of memory; but MXCSR holds the
/// flags of the exceptions for which #XM is raised, or #UD where the guest has not asked for #XM (CR4.OSXMMEXCPT).
#[derive(Debug, thiserror::Error)]
pub enum EmulateError {
    /// Outside the emulated set, or in a state that the emulator refuses. Step the original instruction instead.
    #[error("{ip:#x}: `{instruction}` is not emulated: {reason}")]
    Unsupported {
        /// Linear address of the instruction.
        ip: u64,
        /// The instruction as text, Intel syntax.
        instruction: String,
        /// Which property of it, or of the vCPU, is the obstacle.
        reason: &'static str,
    },
    /// Memory could not be accessed; a CPU would raise #PF.
    #[error(transparent)]
    Fault(#[from] MemoryFault),
    /// A CPU would raise this exception instead of completing the instruction.
    #[error("{ip:#x}: `{instruction}` raises exception {vector}")]
    Exception {
        /// Linear address of the instruction.
        ip: u64,
        /// The instruction as text, Intel syntax.
        instruction: String,
        /// The exception, one of [`vector`]; its error code, if it has one, is 0.
        vector: u8,
    },
    /// The instruction was decoded for another address than the vCPU's.
    #[error(
        "the instruction was decoded for {decoded:#x}, but RIP is {rip:#x}; set RIP first, or decode again"
    )]
    WrongAddress {
        /// Address the instruction was decoded for.
        decoded: u64,
        /// The vCPU's RIP.
        rip: u64,
    },
    /// Other CPUs changed the memory of a locked instruction at every attempt. Run the vCPU again to try again.
    #[error(
        "{ip:#x}: {address:#x} was changed by other CPUs {EXCHANGE_ATTEMPTS} times; run the vCPU again"
    )]
    Contended {
        /// Linear address of the instruction.
        ip: u64,
        /// Linear address of its memory operand.
        address: u64,
    },
    /// vCPU state outside the general registers could not be read or written.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Executes one kind of instruction on a working copy of the registers.
type Handler = fn(&mut Cpu<'_>) -> Result<(), EmulateError>;

/// `instruction` as it would be decoded at linear address `ip`, without decoding it at each hit of a program's text, which is
/// mapped anywhere. `None` where more of it depends on its address.
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

/// Decodes the instruction at the start of `bytes`, which stand at linear address `ip` in 64-bit mode.
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
            // the decoder names unassigned hint opcodes only when asked; all CPUs take them for nops
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

/// Whether [`execute`] knows this instruction on this host. It may still refuse it in an unusual vCPU state
/// (shadow stacks, unknown bits in MXCSR).
#[must_use]
pub fn is_supported(instruction: &Instruction) -> bool {
    interpreter(instruction).is_some() || native::is_supported(instruction)
}

/// Executes `instruction` on `regs` and `env`. RIP is then the next instruction's, or the branch target; RFLAGS.RF is
/// clear, as after every completed instruction.
///
/// Where RFLAGS.TF was set before, a CPU takes #DB after the instruction: the caller raises it.
///
/// # Errors
/// See [`EmulateError`]; nothing has changed then, but for flags in MXCSR.
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

/// The code that executes `instruction` without the host CPU's help; [`native::run`] takes what is left. Tried in the
/// order of how often functions start with such an instruction.
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
