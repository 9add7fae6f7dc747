//! Instructions executed on the host CPU.

use std::collections::HashSet;

use iced_x86::{Code, InstructionInfoFactory, OpAccess, OpKind, Register};

use super::super::cpu::slot;
use super::super::test_utils::builder::{Choices, build, general_registers};
use super::super::{interpreter, is_supported, native};
use super::*;

fn set_xmm(machine: &mut Machine, index: usize, value: u128) {
    machine.fx.0[160 + 16 * index..][..16].copy_from_slice(&value.to_le_bytes());
}

fn xmm(machine: &Machine, index: usize) -> u128 {
    u128::from_le_bytes(machine.fx.0[160 + 16 * index..][..16].try_into().unwrap())
}

fn mxcsr() -> u32 {
    let mut value = 0u32;
    // SAFETY: STMXCSR stores four bytes into `value`, which is borrowed for that.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut value, options(nostack)) };
    value
}

#[test]
fn sse_works_on_the_guests_registers() {
    let (mut regs, mut machine) = (registers(), Machine::default());
    set_xmm(&mut machine, 0, 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
    set_xmm(&mut machine, 9, 0x0101_0101_0101_0101_0101_0101_0101_01ff);
    // paddb xmm0, xmm9
    run(&hex("66 41 0f fc c1"), &mut regs, &mut machine).unwrap();
    assert_eq!(xmm(&machine, 0), 0x0203_0405_0607_0809_0a0b_0c0d_0e0f_100f);
    assert_eq!(
        regs,
        kvm_regs {
            rip: IP + 5,
            ..registers()
        }
    );
}

#[test]
fn memory_operands_go_through_the_environment() {
    let (mut regs, mut machine) = (
        registers(),
        Machine {
            gs: MEMORY,
            ..Machine::default()
        },
    );
    regs.rsp = MEMORY + 0x10;
    regs.rax = 0x1f;
    machine.memory[0x21..0x31].copy_from_slice(&[7; 16]);
    // movups xmm3, gs:[rax+2]; movaps [rsp+0x30], xmm3
    for bytes in ["65 0f 10 58 02", "0f 29 5c 24 30"] {
        run(&hex(bytes), &mut regs, &mut machine).unwrap();
    }
    assert_eq!(machine.memory[0x40..0x50], [7; 16]);
    assert_eq!(machine.memory[0x50..], Machine::default().memory[0x50..]);
    assert_eq!(regs.rsp, MEMORY + 0x10);
    // movq xmm3, [rip-0xe0]: eight bytes from 0x1028, the upper half cleared
    regs.rip = 0x1100;
    run(&hex("f3 0f 7e 1d 20 ff ff ff"), &mut regs, &mut machine).unwrap();
    assert_eq!(xmm(&machine, 3), 0x0707_0707_0707_0707);
}

#[test]
fn exceptions_set_flags_in_the_guest_and_nothing_in_the_host() {
    let (mut regs, mut machine) = (registers(), Machine::default());
    machine.fx.0[0..2].copy_from_slice(&[0, 0]); // all x87 exceptions unmasked, and one pending
    machine.fx.0[2] = 0x81;
    set_xmm(&mut machine, 0, 0x3f80_0000); // 1.0
    let (host, before) = (mxcsr(), machine.clone());
    // divps xmm0, xmm1: 1/0 and 0/0
    run(&hex("0f 5e c1"), &mut regs, &mut machine).unwrap();
    assert_eq!(machine.fx.0[24] & 5, 5, "IE and ZE");
    assert_eq!(mxcsr(), host);
    assert_eq!(xmm(&machine, 0) as u32, 0x7f80_0000, "infinity");
    assert_eq!(machine.fx.0[..24], before.fx.0[..24], "the x87 part stays");
}

/// Tests SSE exceptions that a guest has unmasked, by the rules of Intel SDM volume 1, 11.5.2.
#[test]
fn unmasked_exceptions_are_raised_and_others_are_not() {
    const MASKED: u32 = 0x1f80;
    let unmask = |flags: u32| MASKED & !(flags << 7);
    let one = |value: f32| u128::from(value.to_bits());
    let tiny = one(f32::MIN_POSITIVE);
    // Instruction, MXCSR, XMM0, XMM1. Then MXCSR afterwards, and the result or `None` if #XM is
    // raised.
    type Case = (&'static str, u32, u128, u128, u32, Option<u128>);
    let cases: [Case; 13] = [
        ("movaps xmm0, xmm1", 0, 1, 2, 0, Some(2)),
        ("addss xmm0, xmm1", 0, one(1.0), one(2.0), 0, Some(one(3.0))),
        (
            "addss xmm0, xmm1",
            0x3f,
            one(1.0),
            one(2.0),
            0x3f,
            Some(one(3.0)),
        ),
        // 1/0: alone, with a flag that was set before, and with another exception unmasked.
        (
            "divss xmm0, xmm1",
            unmask(4),
            one(1.0),
            0,
            unmask(4) | 4,
            None,
        ),
        (
            "divss xmm0, xmm1",
            unmask(4) | 1,
            one(1.0),
            0,
            unmask(4) | 5,
            None,
        ),
        (
            "divss xmm0, xmm1",
            unmask(1),
            one(1.0),
            0,
            unmask(1) | 4,
            Some(one(f32::INFINITY)),
        ),
        // 0/0, and 1/3
        ("divss xmm0, xmm1", unmask(1), 0, 0, unmask(1) | 1, None),
        (
            "divss xmm0, xmm1",
            unmask(0x20),
            one(1.0),
            one(3.0),
            unmask(0x20) | 0x20,
            None,
        ),
        (
            "divss xmm0, xmm1",
            unmask(4),
            one(1.0),
            one(3.0),
            unmask(4) | 0x20,
            Some(one(1.0 / 3.0)),
        ),
        // Tiny and exact, which is no underflow if that is masked. With FZ, which has an effect
        // only if it is masked.
        (
            "mulss xmm0, xmm1",
            unmask(0x10),
            tiny,
            one(0.5),
            unmask(0x10) | 0x30,
            None,
        ),
        (
            "mulss xmm0, xmm1",
            unmask(4),
            tiny,
            one(0.5),
            unmask(4),
            Some(one(f32::MIN_POSITIVE / 2.0)),
        ),
        (
            "mulss xmm0, xmm1",
            0x8000 | unmask(4),
            tiny,
            one(0.5),
            0x8000 | unmask(4) | 0x30,
            Some(0),
        ),
        // Too large, which is inexact too
        (
            "mulss xmm0, xmm1",
            unmask(8),
            one(f32::MAX),
            one(2.0),
            unmask(8) | 0x28,
            None,
        ),
    ];
    for (text, before, first, second, after, result) in cases {
        let bytes = match &text[..5] {
            "movap" => "0f 28 c1",
            "addss" => "f3 0f 58 c1",
            "divss" => "f3 0f 5e c1",
            _ => "f3 0f 59 c1",
        };
        let (mut regs, mut machine) = (registers(), Machine::default());
        machine.cr4 |= 1 << 10; // OSXMMEXCPT
        machine.fx.set_u32(FxState::MXCSR, before);
        set_xmm(&mut machine, 0, first);
        set_xmm(&mut machine, 1, second);
        let host = mxcsr();
        let ended = run(&hex(bytes), &mut regs, &mut machine);
        let case = format!("{text} of {first:x} and {second:x} with {before:#x}: {ended:?}");
        match result {
            Some(result) => {
                assert!(ended.is_ok(), "{case}");
                assert_eq!(xmm(&machine, 0), result, "{case}");
            }
            None => {
                let is_raised = matches!(ended, Err(EmulateError::Exception { vector: 19, .. }));
                assert!(is_raised, "{case}");
                assert_eq!((xmm(&machine, 0), regs.rip), (first, IP), "{case}");
            }
        }
        assert_eq!(machine.fx.mxcsr(), after, "{case}");
        assert_eq!(mxcsr(), host, "{case}");
    }
}

#[test]
fn flags_and_general_registers_come_back() {
    let (mut regs, mut machine) = (registers(), Machine::default());
    (regs.rax, regs.rdi, regs.rflags) = (0, MEMORY, 0x246);
    machine.memory[..4].copy_from_slice(&[1, 2, 3, 4]);
    // movbe eax, [rdi]: flags stay
    run(&hex("0f 38 f0 07"), &mut regs, &mut machine).unwrap();
    assert_eq!((regs.rax, regs.rflags), (0x0102_0304, 0x246));
    // crc32 eax, byte [rdi] with the polynomial 0x11edc6f41: crc32c of 01 from 0x01020304
    run(&hex("f2 0f 38 f0 07"), &mut regs, &mut machine).unwrap();
    assert_eq!(regs.rax, u64::from(crc32c(0x0102_0304, 1)));
    // crc32 eax, ah: a high byte together with no REX prefix
    let (before, high) = (regs.rax as u32, (regs.rax >> 8) as u8);
    run(&hex("f2 0f 38 f0 c4"), &mut regs, &mut machine).unwrap();
    assert_eq!(regs.rax, u64::from(crc32c(before, high)));
    // ptest xmm0, xmm0: zero
    run(&hex("66 0f 38 17 c0"), &mut regs, &mut machine).unwrap();
    assert_eq!(regs.rflags, 0x243, "IF stays, ZF and CF are set");
}

fn crc32c(crc: u32, byte: u8) -> u32 {
    (0..8).fold(crc ^ u32::from(byte), |crc, _| {
        crc >> 1 ^ if crc & 1 != 0 { 0x82f6_3b78 } else { 0 }
    })
}

#[test]
fn instructions_that_use_the_stack_pointer_or_hidden_memory_stay_out() {
    for (bytes, text) in [
        ("f2 48 0f 2a c4", "cvtsi2sd xmm0, rsp"),
        ("66 48 0f 6e c4", "movq xmm0, rsp"),
        ("66 0f f7 c1", "maskmovdqu: [rdi]"),
        ("0f 7f 07", "movq [rdi], mm0"),
        ("df 0f", "fisttp"),
        ("c5 fd 6f 07", "vmovdqa ymm"),
        ("0f ae 3f", "clflush"),
    ] {
        assert!(!is_supported(&decode(&hex(bytes), IP).unwrap()), "{text}");
    }
}

/// Tests every opcode on the list, with several operands: only its operands change, in registers
/// and in memory, and the host survives it.
#[test]
fn every_listed_instruction_changes_its_operands_only() {
    let mut mnemonics = HashSet::new();
    let mut factory = InstructionInfoFactory::new();
    for round in 0..6u8 {
        let choices: Vec<u8> = (0..8)
            .map(|index| (round * 8 + index).wrapping_mul(0x9d).wrapping_add(round))
            .collect();
        for code in Code::values().filter(|code| code.op_code().mode64()) {
            let Some(insn) = build(code, &Choices(&choices)) else {
                continue;
            };
            if interpreter(&insn).is_some() || !native::is_supported(&insn) {
                continue;
            }
            mnemonics.insert(insn.mnemonic());
            let in_memory =
                (0..insn.op_count()).any(|operand| insn.op_kind(operand) == OpKind::Memory);
            let (mut regs, mut machine) = (registers(), Machine::default());
            for (index, byte) in machine.memory.iter_mut().enumerate() {
                *byte = (index as u8).wrapping_mul(round * 2 + 1);
            }
            let xmm = machine.memory[..256].to_vec();
            machine.fx.0[FxState::XMM].copy_from_slice(&xmm);
            for (index, register) in general_registers().enumerate() {
                *slot(&mut regs, register).unwrap() =
                    (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            }
            if in_memory {
                regs.rsi = MEMORY + 0x100;
            }
            let (mut regs_before, before) = (regs, machine.clone());
            execute(&insn, &mut regs, &mut machine)
                .unwrap_or_else(|error| panic!("{code:?}: {error}"));

            let info = factory.info(&insn);
            let written = |register: Register| {
                info.used_registers().iter().any(|used| {
                    used.register().full_register() == register.full_register()
                        && used.access() != OpAccess::Read
                })
            };
            for register in general_registers().filter(|&register| !written(register)) {
                assert_eq!(
                    slot(&mut regs, register),
                    slot(&mut regs_before, register),
                    "{insn} changed {register:?}"
                );
            }
            for index in (0..16u32).filter(|&index| !written(Register::XMM0 + index)) {
                let at = 160 + 16 * index as usize;
                assert_eq!(
                    machine.fx.0[at..at + 16],
                    before.fx.0[at..at + 16],
                    "{insn} changed xmm{index}"
                );
            }
            assert_eq!((regs.rsp, regs.rip), (regs_before.rsp, insn.next_ip()));
            let end = 0x100
                + if in_memory {
                    insn.memory_size().size()
                } else {
                    0
                };
            assert_eq!(machine.memory[..0x100], before.memory[..0x100], "{insn}");
            assert_eq!(machine.memory[end..], before.memory[end..], "{insn}");
        }
    }
    assert!(
        mnemonics.len() > 200,
        "only {} kinds of instructions were run",
        mnemonics.len()
    );
}

#[test]
fn fpu_state_is_saved_loaded_and_reset() {
    let (mut regs, mut machine) = (registers(), Machine::default());
    regs.rdi = MEMORY;
    set_xmm(&mut machine, 15, 15);
    machine.fx.0[32] = 0xaa; // a bit pattern in ST0
    machine.fx.0[4] = 0x80; // which is in use
    let before = machine.fx.clone();
    machine.memory[416..512].fill(0x55);
    run(&hex("48 0f ae 07"), &mut regs, &mut machine).unwrap(); // fxsave64 [rdi]
    assert_eq!(machine.memory[..416], before.0[..416]);
    assert_eq!(
        machine.memory[416..512],
        [0x55; 96],
        "what the CPU does not write"
    );

    run(&hex("db e3"), &mut regs, &mut machine).unwrap(); // fninit
    assert_eq!(machine.fx.0[..5], [0x7f, 3, 0, 0, 0]);
    assert_eq!(machine.fx.0[32], 0xaa);
    machine.memory[0x200..0x204].copy_from_slice(&0x9fc0u32.to_le_bytes());
    run(&hex("0f ae 97 00 02 00 00"), &mut regs, &mut machine).unwrap(); // ldmxcsr [rdi+200h]
    assert_eq!(machine.fx.0[24..28], 0x9fc0u32.to_le_bytes());

    run(&hex("48 0f ae 0f"), &mut regs, &mut machine).unwrap(); // fxrstor64 [rdi]
    assert_eq!(machine.fx, before);
}
