//! The interpreter against the host CPU: the same instruction on the same registers, flags and memory.

use iced_x86::{Code, Instruction, Mnemonic, OpKind, RflagsBits};
use proptest::prelude::*;

use super::super::cpu::{Commit, Cpu, slot};
use super::super::{Handler, alu, atomic, bits, data, flags, multiply, native, shift, system};
use super::builder::{Choices, build, general_registers};
use super::*;

/// Handlers whose instructions the host CPU can run with the registers of a guest.
fn interpreted(insn: &Instruction) -> Option<Handler> {
    if let Mnemonic::Clc | Mnemonic::Stc | Mnemonic::Cmc | Mnemonic::Lahf | Mnemonic::Sahf =
        insn.mnemonic()
    {
        return system::handler(insn);
    }
    [
        alu::handler,
        shift::handler,
        multiply::handler,
        bits::handler,
        atomic::handler,
        data::handler,
    ]
    .into_iter()
    .find_map(|handler| handler(insn))
}

fn undefined_flags(insn: &Instruction) -> u64 {
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

/// OF is defined for rotations by one alone, as the masked count has it: a whole turn through CF, such as nine bits of a byte, leaves the
/// operand as it was, and OF on some CPUs only.
fn undefined_overflow(insn: &Instruction) -> u64 {
    let through_carry = matches!(insn.mnemonic(), Mnemonic::Rcl | Mnemonic::Rcr);
    match through_carry && insn.op1_kind() == OpKind::Immediate8 && insn.immediate8() & 0x1f > 1 {
        true => flags::OF,
        false => 0,
    }
}

/// Registers and memory after the host CPU executed the instruction; `None` if it cannot.
fn on_the_host(
    insn: &Instruction,
    regs: &kvm_regs,
    machine: &Machine,
) -> Option<(kvm_regs, Machine)> {
    let mut machine = machine.clone();
    let mut cpu = Cpu::new(insn, *regs, &mut machine);
    native::oracle(&mut cpu)?.unwrap();
    let regs = cpu.regs;
    assert!(matches!(cpu.commit().unwrap(), Commit::Done));
    Some((regs, machine))
}

/// Numbers at which arithmetic changes its mind, and others.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u64>(), prop::sample::select(&EDGES), 0..70u64]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every opcode in every case, with the case's operands.
    #[test]
    fn the_interpreter_agrees_with_the_cpu(
        choices in prop::collection::vec(any::<u8>(), 8),
        values in prop::array::uniform15(value()),
        memory in prop::array::uniform4(value()),
        rflags in any::<u64>(),
        lock in any::<bool>(),
    ) {
        let mut compared = 0;
        for code in Code::values().filter(|code| code.op_code().mode64()) {
            let Some(mut insn) = build(code, &Choices(&choices)) else { continue };
            let Some(handler) = interpreted(&insn) else { continue };
            let in_memory = (0..insn.op_count()).any(|operand| insn.op_kind(operand) == OpKind::Memory);
            if in_memory && insn.op_count() == 2 && insn.op1_kind() == OpKind::Register
                && matches!(insn.mnemonic(), Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc)
            {
                // may reach far outside the operand: see the table
                continue;
            }
            let mut regs = registers();
            for (register, value) in general_registers().zip(values) {
                *slot(&mut regs, register).unwrap() = value;
            }
            if in_memory {
                regs.rsi = MEMORY + 0x100;
            }
            regs.rflags |= rflags & flags::STATUS;
            let mut machine = Machine::default();
            for (index, value) in memory.iter().enumerate() {
                machine.write(MEMORY + 0x100 + 8 * index as u64, &value.to_le_bytes()).unwrap();
            }
            let before = (regs, machine.clone());

            let unlocked = insn;
            let lockable = in_memory && insn.op0_kind() == OpKind::Memory && code.op_code().can_use_lock_prefix();
            insn.set_has_lock_prefix(lockable && lock);
            let mut cpu = Cpu::new(&insn, regs, &mut machine);
            match handler(&mut cpu) {
                Ok(()) => {}
                // the CPU would raise it too
                Err(EmulateError::Exception { vector: 0, .. }) => continue,
                // SHLD and SHRD by more than the operand's bits
                Err(EmulateError::Unsupported { .. }) if matches!(insn.mnemonic(), Mnemonic::Shld | Mnemonic::Shrd) => continue,
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            }
            let mut ours = cpu.regs;
            prop_assert!(matches!(cpu.commit().unwrap(), Commit::Done));

            let Some((mut theirs, their_machine)) = on_the_host(&unlocked, &before.0, &before.1) else { continue };
            // vendors and generations differ in these
            ours.rflags &= !undefined_flags(&insn);
            theirs.rflags &= !undefined_flags(&insn);
            prop_assert_eq!(ours, theirs, "{} ({:?}) on {:?}, memory {:x?}", insn, code, before.0, memory);
            prop_assert!(machine == their_machine, "`{}` ({:?}) leaves other memory", insn, code);
            compared += 1;
        }
        prop_assert!(compared > 300, "only {} opcodes were compared", compared);
    }
}
