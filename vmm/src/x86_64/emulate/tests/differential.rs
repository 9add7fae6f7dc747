//! The interpreter against the host CPU: the same instruction on the same registers, flags and
//! memory.

use iced_x86::{Code, Mnemonic, OpKind};
use proptest::prelude::*;

use super::super::cpu::{Commit, Cpu, slot};
use super::super::flags;
use super::super::test_utils::builder::{Choices, build, general_registers};
use super::super::test_utils::oracle::{interpreted, on_the_host, reaches_far, undefined_flags};
use super::*;

/// Returns numbers at which arithmetic changes its behaviour, and others.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u64>(), prop::sample::select(&EDGES), 0..70u64]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Runs every opcode in every case, with the case's operands.
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
            if reaches_far(&insn) {
                // Covered by the table.
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

            let lockable = in_memory && insn.op0_kind() == OpKind::Memory && code.op_code().can_use_lock_prefix();
            insn.set_has_lock_prefix(lockable && lock);
            let mut cpu = Cpu::new(&insn, regs, &mut machine);
            match handler(&mut cpu) {
                Ok(()) => {}
                // The CPU would raise it too.
                Err(EmulateError::Exception { vector: 0, .. }) => continue,
                // SHLD and SHRD by more than the operand's bits.
                Err(EmulateError::Unsupported { .. }) if matches!(insn.mnemonic(), Mnemonic::Shld | Mnemonic::Shrd) => continue,
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            }
            let mut ours = cpu.regs;
            prop_assert!(matches!(cpu.commit().unwrap(), Commit::Done));

            let Some((mut theirs, their_machine)) = on_the_host(&insn, &before.0, &before.1) else { continue };
            // Vendors and generations differ in these.
            ours.rflags &= !undefined_flags(&insn);
            theirs.rflags &= !undefined_flags(&insn);
            prop_assert_eq!(ours, theirs, "{} ({:?}) on {:?}, memory {:x?}", insn, code, before.0, memory);
            prop_assert!(machine == their_machine, "`{}` ({:?}) leaves other memory", insn, code);
            compared += 1;
        }
        prop_assert!(compared > 300, "only {} opcodes were compared", compared);
    }
}
