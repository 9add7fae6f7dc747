//! The result of an instruction on the host's CPU, as the reference for tests of the interpreter.

use iced_x86::{Instruction, Mnemonic, OpKind, RflagsBits};
use kvm_bindings::kvm_regs;

use super::super::cpu::{Commit, Cpu, is_immediate};
use super::super::{Handler, alu, atomic, bits, data, flags, multiply, native, shift, system};
use super::Machine;

/// Returns the interpreter's handler of an instruction that only computes.
///
/// The host's CPU can run it with the registers of a guest, and its memory operand in a buffer.
pub(in super::super) fn interpreted(insn: &Instruction) -> Option<Handler> {
    if let Mnemonic::Clc | Mnemonic::Stc | Mnemonic::Cmc | Mnemonic::Lahf | Mnemonic::Sahf =
        insn.mnemonic()
    {
        return system::handler(insn);
    }
    let handlers = [
        alu::handler,
        shift::handler,
        multiply::handler,
        bits::handler,
        atomic::handler,
        data::handler,
    ];
    handlers.into_iter().find_map(|handler| handler(insn))
}

/// Checks whether the instruction may reach far outside its memory operand, because a bit's number
/// is any number.
pub(in super::super) fn reaches_far(insn: &Instruction) -> bool {
    let of_bits = matches!(
        insn.mnemonic(),
        Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc
    );
    of_bits && insn.op0_kind() == OpKind::Memory && insn.op1_kind() == OpKind::Register
}

/// Checks whether all registers of the instruction are general ones. Segment, control and other
/// registers are the host's own.
fn has_plain_operands(insn: &Instruction) -> bool {
    (0..insn.op_count()).all(|operand| match insn.op_kind(operand) {
        OpKind::Register => insn.op_register(operand).is_gpr(),
        OpKind::Memory => true,
        kind => is_immediate(kind),
    })
}

/// Runs an instruction, not locked, on the host's CPU. Returns registers and memory after it. RIP
/// is unchanged.
///
/// Returns `None` for all but those that compute on general registers, immediates and one memory
/// operand. The emulator must have executed it: if it would raise an exception, the host's CPU
/// raises that in this process.
#[must_use]
pub fn on_the_host(
    insn: &Instruction,
    regs: &kvm_regs,
    machine: &Machine,
) -> Option<(kvm_regs, Machine)> {
    let mut insn = *insn;
    insn.set_has_lock_prefix(false);
    if !has_plain_operands(&insn) || reaches_far(&insn) || interpreted(&insn).is_none() {
        return None;
    }
    let mut machine = machine.clone();
    let mut cpu = Cpu::new(&insn, *regs, &mut machine);
    native::oracle(&mut cpu)?.ok()?;
    let regs = cpu.regs;
    matches!(cpu.commit().ok()?, Commit::Done).then_some((regs, machine))
}

/// Returns the status flags that differ between vendors and generations of CPUs after the
/// instruction.
#[must_use]
pub fn undefined_flags(insn: &Instruction) -> u64 {
    [
        (RflagsBits::CF, flags::CF),
        (RflagsBits::PF, flags::PF),
        (RflagsBits::AF, flags::AF),
        (RflagsBits::ZF, flags::ZF),
        (RflagsBits::SF, flags::SF),
        (RflagsBits::OF, flags::OF),
    ]
    .into_iter()
    .filter(|(bit, _)| insn.rflags_undefined() & bit != 0)
    .fold(0, |all, (_, flag)| all | flag)
        | undefined_overflow(insn)
}

/// Returns OF if the instruction leaves it undefined.
///
/// OF is defined only for rotations by one, after masking the count. A whole turn through CF, such
/// as nine bits of a byte, leaves the operand unchanged, and OF on some CPUs only.
fn undefined_overflow(insn: &Instruction) -> u64 {
    let through_carry = matches!(insn.mnemonic(), Mnemonic::Rcl | Mnemonic::Rcr);
    match through_carry && insn.op1_kind() == OpKind::Immediate8 && insn.immediate8() & 0x1f > 1 {
        true => flags::OF,
        false => 0,
    }
}
