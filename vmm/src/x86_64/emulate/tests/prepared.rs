//! Prepared instructions against the emulator, which is itself compared with the CPU.

use iced_x86::{Code, Instruction};
use proptest::prelude::*;

use super::super::cpu::slot;
use super::super::test_utils::builder::{Choices, build, general_registers};
use super::super::test_utils::prepared;
use super::super::{Prepared, flags, moved};
use super::*;

/// Returns registers and memory after the emulator has executed the instruction at the RIP of
/// `regs`.
fn emulated(insn: &Instruction, regs: &kvm_regs, machine: &Machine) -> Option<(kvm_regs, Machine)> {
    let (mut regs, mut machine) = (*regs, machine.clone());
    let insn = moved(insn, regs.rip)?;
    execute(&insn, &mut regs, &mut machine).ok()?;
    Some((regs, machine))
}

#[test]
fn what_functions_begin_with_is_prepared() {
    for (bytes, is_prepared) in [
        ("90", true),                          // nop
        ("0f 1f 44 00 00", true),              // nop dword [rax+rax]
        ("f3 0f 1e fa", true),                 // endbr64
        ("55", true),                          // push rbp
        ("41 57", true),                       // push r15
        ("54", true),                          // push rsp
        ("48 89 e5", true),                    // mov rbp,rsp
        ("89 d9", true),                       // mov ecx,ebx
        ("31 c0", true),                       // xor eax,eax
        ("48 83 ec 18", true),                 // sub rsp,18h
        ("85 c0", true),                       // test eax,eax
        ("48 3d 00 f0 ff ff", true),           // cmp rax,-1000h
        ("b8 f4 ff ff ff", true),              // mov eax,-12
        ("48 c7 c0 f4 ff ff ff", true),        // mov rax,-12
        ("48 8d 44 37 01", true),              // lea rax,[rdi+rsi+1]
        ("eb fe", true),                       // jmp to itself
        ("e9 00 10 00 00", true),              // jmp further
        ("66 55", false),                      // push bp
        ("50 c3", true),                       // push rax (and what follows)
        ("f0 01 08", false),                   // lock add [rax],ecx
        ("65 48 8b 04 25 28 00 00 00", false), // mov rax,gs:[28h]
        ("48 8d 05 00 10 00 00", false),       // lea rax,[rip+1000h]
        ("0f 05", false),                      // syscall
        ("ff e0", false),                      // jmp rax
        ("88 c8", false),                      // mov al,cl
    ] {
        let insn = decode(&hex(bytes), IP).unwrap();
        assert_eq!(Prepared::of(&insn).is_some(), is_prepared, "{insn}");
        let machine = Machine::default();
        // At the address it was decoded for, and elsewhere.
        for rip in [IP, IP + 0x1235, 0xffff_ffff_8100_0000] {
            for rsp in [MEMORY + 0x800, MEMORY + 0x804, MEMORY, 1 << 47, 4] {
                let regs = kvm_regs {
                    rip,
                    rsp,
                    rflags: 2 | flags::RF,
                    ..registers()
                };
                if let Some(ours) = prepared(&insn, &regs, &machine) {
                    let theirs = emulated(&insn, &regs, &machine);
                    assert!(
                        Some(&ours) == theirs.as_ref(),
                        "{insn} at {rip:#x}, rsp {rsp:#x}: {ours:x?}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_not_plain_is_left_to_the_emulator() {
    let machine = Machine::default();
    let push = decode(&hex("55"), IP).unwrap();
    let refused = |insn: &Instruction, regs: kvm_regs| prepared(insn, &regs, &machine).is_none();
    assert!(!refused(&push, registers()));
    for rsp in [MEMORY + 0x804, MEMORY, 1 << 47, (1 << 47) + 8] {
        assert!(refused(&push, kvm_regs { rsp, ..registers() }), "{rsp:#x}");
    }
    let stepping = kvm_regs {
        rflags: 2 | flags::TF,
        ..registers()
    };
    assert!(refused(&push, stepping), "RFLAGS.TF");
    let jump = decode(&hex("e9 00 00 00 10"), IP).unwrap();
    let rip = (1 << 47) - 0x1000;
    assert!(
        refused(&jump, kvm_regs { rip, ..registers() }),
        "no canonical target"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Tests every prepared opcode, with any operands.
    #[test]
    fn prepared_instructions_do_what_the_emulator_does(
        choices in prop::collection::vec(any::<u8>(), 8),
        values in prop::array::uniform15(prop_oneof![any::<u64>(), prop::sample::select(&EDGES), 0..70u64]),
        rflags in any::<u64>(),
    ) {
        let mut compared = 0;
        for code in Code::values().filter(|code| code.op_code().mode64()) {
            let Some(insn) = build(code, &Choices(&choices)) else { continue };
            let mut regs = registers();
            for (register, value) in general_registers().zip(values) {
                *slot(&mut regs, register).unwrap() = value;
            }
            regs.rsp = MEMORY + 0x800;
            regs.rflags |= rflags & flags::STATUS;
            let machine = Machine::default();
            let Some(ours) = prepared(&insn, &regs, &machine) else { continue };
            let theirs = emulated(&insn, &regs, &machine);
            prop_assert!(Some(&ours) == theirs.as_ref(), "{} ({:?}) on {:x?}: {:x?}", insn, code, regs, ours.0);
            compared += 1;
        }
        prop_assert!(compared > 20, "only {} opcodes were compared", compared);
    }
}
