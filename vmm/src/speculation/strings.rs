//! String instructions on a path: MOVS and STOS, also repeated. Kernels copy and clear memory with
//! them.
//!
//! The emulator has none of them, because a displaced instruction must happen as a whole. Here the
//! stores are buffered, so all repetitions happen in one step.
//!
//! Source: Intel SDM volume 2, MOVS, STOS and REP.

use iced_x86::{Instruction, Mnemonic, Register};
use kvm_bindings::kvm_regs;

use super::buffer::StoreBuffer;
use crate::x86_64::emulate::{Environment, MemoryFault};
use crate::x86_64::rflags;

/// The maximum number of bytes that one instruction moves.
const MOST_BYTES: u64 = 1 << 14;

/// Executes `instruction` if it is MOVS or STOS, upwards in memory and with 64-bit addresses.
/// Returns the number of its repetitions, or `None` if it is something else.
///
/// # Errors
/// If memory is not there, or the instruction moves more than [`MOST_BYTES`].
pub(super) fn execute(
    instruction: &Instruction,
    regs: &mut kvm_regs,
    buffer: &mut StoreBuffer<'_>,
) -> Result<Option<usize>, MemoryFault> {
    let (size, moves) = match instruction.mnemonic() {
        Mnemonic::Movsb => (1, true),
        Mnemonic::Movsw => (2, true),
        // Also the mnemonic of an SSE2 instruction, which has no such operand.
        Mnemonic::Movsd if is_string(instruction) => (4, true),
        Mnemonic::Movsq => (8, true),
        Mnemonic::Stosb => (1, false),
        Mnemonic::Stosw => (2, false),
        Mnemonic::Stosd => (4, false),
        Mnemonic::Stosq => (8, false),
        _ => return Ok(None),
    };
    let is_usual = is_string(instruction)
        && instruction.segment_prefix() == Register::None
        && regs.rflags & rflags::DF == 0;
    if !is_usual {
        return Ok(None);
    }
    let repeated = instruction.has_rep_prefix() || instruction.has_repne_prefix();
    let mut left = if repeated { regs.rcx } else { 1 };
    if left.saturating_mul(size) > MOST_BYTES {
        return Err(MemoryFault {
            address: regs.rdi,
            write: true,
        });
    }
    let count = left as usize;
    let mut element = regs.rax.to_le_bytes();
    while left > 0 {
        let element = element.get_mut(..size as usize).unwrap_or_default();
        if moves {
            buffer.read(regs.rsi, element)?;
            regs.rsi = regs.rsi.wrapping_add(size);
        }
        buffer.write(regs.rdi, element)?;
        regs.rdi = regs.rdi.wrapping_add(size);
        left -= 1;
    }
    if repeated {
        regs.rcx = 0;
    }
    regs.rip = instruction.next_ip();
    Ok(Some(count))
}

/// Checks whether an instruction works on strings at 64-bit addresses.
fn is_string(instruction: &Instruction) -> bool {
    use iced_x86::OpKind::{MemoryESRDI, MemorySegRSI};
    instruction.op0_kind() == MemoryESRDI
        && matches!(
            instruction.op1_kind(),
            MemorySegRSI | iced_x86::OpKind::Register
        )
}
