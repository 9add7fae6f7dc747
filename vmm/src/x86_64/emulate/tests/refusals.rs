//! Tests of refusals, and that a refusal changes nothing (`run` checks that).

use proptest::prelude::*;

use super::super::{DecodeError, is_supported, moved};
use super::*;

#[test]
fn instructions_outside_the_set_are_named_before_arming() {
    let cases = [
        ("cc", "int3"),
        ("0f 0d c0", "prefetch of a register"),
        ("0f 0b", "ud2"),
        ("0f 05", "syscall"),
        ("0f 01 f8", "swapgs"),
        ("48 cf", "iretq"),
        ("0f 22 d8", "mov cr3,rax"),
        ("0f 30", "wrmsr"),
        ("0f a2", "cpuid"),
        ("8e d8", "mov ds,eax"),
        ("8c d8", "mov eax,ds"),
        ("ff 2f", "jmp far"),
        ("f3 48 a5", "rep movsq"),
        ("d8 c1", "fadd"),
        ("0f ae 27", "xsave"),
        ("c5 f8 57 c0", "vxorps"),
        ("0f fc c1", "paddb on MMX registers"),
        ("66 0f f7 c1", "maskmovdqu"),
    ];
    for (bytes, text) in cases {
        let instruction = decode(&hex(bytes), IP).unwrap();
        assert!(!is_supported(&instruction), "{text}");
        let error = run(&hex(bytes), &mut registers(), &mut Machine::default()).unwrap_err();
        assert!(
            matches!(error, EmulateError::Unsupported { ip: IP, .. }),
            "{text}: {error}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// Tests any bytes. Prefixes and opcodes that depend on the address are more frequent than by
    /// chance.
    #[test]
    fn an_instruction_that_is_moved_is_the_one_that_is_decoded_there(
        head in prop::sample::select(vec!["", "48", "67", "66", "e8", "e9", "eb", "0f 84", "e3", "48 8d 05", "67 48 8b 05", "ff 25", "c7 f8"]),
        rest in prop::array::uniform15(any::<u8>()),
        from in any::<u64>(),
        to in any::<u64>(),
    ) {
        let bytes: Vec<u8> = hex(head).into_iter().chain(rest).take(15).collect();
        if let Ok(here) = decode(&bytes, from)
            && let Some(moved) = moved(&here, to)
        {
            let there = decode(&bytes, to).unwrap();
            prop_assert!(moved.eq_all_bits(&there), "{here} {from:x}: {moved} {there} {to:x}");
        }
    }
}

#[test]
fn bytes_that_are_no_instruction_are_refused() {
    assert_eq!(
        decode(&hex("48 8b"), IP),
        Err(DecodeError::Truncated {
            ip: IP,
            available: 2
        })
    );
    assert_eq!(
        decode(&[], IP),
        Err(DecodeError::Truncated {
            ip: IP,
            available: 0
        })
    );
    assert_eq!(
        decode(&[6; 16], IP),
        Err(DecodeError::Invalid {
            ip: IP,
            bytes: vec![6; 15]
        })
    );
    // Prefixes alone.
    assert_eq!(
        decode(&[0x66; 16], IP),
        Err(DecodeError::Invalid {
            ip: IP,
            bytes: vec![0x66; 15]
        })
    );
    let prefixed = hex("66 e8 00 00 00 00");
    assert_eq!(
        decode(&prefixed, IP),
        Err(DecodeError::VendorDependent {
            ip: IP,
            bytes: prefixed.clone()
        })
    );
}

/// An instruction in some state: bytes, name, preparation, and the expected exception or fault.
type Case = (
    &'static str,
    &'static str,
    fn(&mut kvm_regs, &mut Machine),
    Expected,
);

enum Expected {
    Exception(u8),
    Fault(u64, bool),
    Unsupported,
}
use Expected::{Exception, Fault, Unsupported};

const STATES: &[Case] = &[
    ("f4", "hlt of a program", |_, m| m.cpl = 3, Exception(13)),
    (
        "50",
        "push below memory",
        |r, _| r.rsp = MEMORY,
        Fault(MEMORY - 8, true),
    ),
    (
        "58",
        "pop above memory",
        |r, _| r.rsp = MEMORY + 0x3000,
        Fault(MEMORY + 0x3000, false),
    ),
    (
        "ff 00",
        "inc read-only",
        |r, _| r.rax = MEMORY + 0x2000,
        Fault(MEMORY + 0x2000, true),
    ),
    (
        "f0 ff 00",
        "lock inc read-only",
        |r, _| r.rax = MEMORY + 0x2000,
        Fault(MEMORY + 0x2000, true),
    ),
    (
        "48 0f b1 08",
        "cmpxchg read-only, different",
        |r, m| (r.rax, m.memory[0x2000]) = (MEMORY + 0x2000, 1),
        Fault(MEMORY + 0x2000, true),
    ),
    (
        "48 0f 44 07",
        "cmove reads also when false",
        |r, _| r.rdi = 8,
        Fault(8, false),
    ),
    (
        "48 8b 00",
        "load, not canonical",
        |r, _| r.rax = 0x8000_0000_0000,
        Exception(13),
    ),
    (
        "48 8b 00",
        "load around the end",
        |r, _| r.rax = u64::MAX - 3,
        Exception(13),
    ),
    (
        "48 8b 04 24",
        "stack load, not canonical",
        |r, _| r.rsp = 1 << 63,
        Exception(12),
    ),
    (
        "50",
        "push, not canonical",
        |r, _| r.rsp = 1 << 63,
        Exception(12),
    ),
    (
        "ff 64 24 08",
        "jmp [rsp+8] to nowhere",
        |_, m| m.memory[0x80f] = 1,
        Exception(13),
    ),
    (
        "48 8b 04 25 f8 ff ff ff",
        "displacement alone, sign-extended",
        |_, _| {},
        Fault(u64::MAX - 7, false),
    ),
    (
        "67 48 8b 04 25 f8 ff ff ff",
        "and with 32-bit addresses",
        |_, _| {},
        Fault(0xffff_fff8, false),
    ),
    (
        "67 48 8b 05 f8 ff ff ff",
        "and EIP-relative",
        |r, _| r.rip = 0,
        Fault(0, false),
    ),
    (
        "ff e0",
        "jmp, not canonical",
        |r, _| r.rax = 1 << 63,
        Exception(13),
    ),
    (
        "ff d0",
        "call, not canonical",
        |r, _| r.rax = 1 << 63,
        Exception(13),
    ),
    (
        "c3",
        "ret, not canonical",
        |_, m| m.memory[0x807] = 1,
        Exception(13),
    ),
    ("f7 f1", "division by zero", |_, _| {}, Exception(0)),
    (
        "f7 f1",
        "quotient too large",
        |r, _| (r.rdx, r.rcx) = (1, 1),
        Exception(0),
    ),
    (
        "48 f7 f9",
        "idiv: the smallest by -1",
        |r, _| (r.rax, r.rdx, r.rcx) = (1 << 63, u64::MAX, u64::MAX),
        Exception(0),
    ),
    (
        "48 0f c7 0f",
        "cmpxchg16b, misaligned",
        |r, _| r.rdi = MEMORY + 8,
        Exception(13),
    ),
    (
        "0f 01 cb",
        "stac in user mode",
        |_, m| m.cpl = 3,
        Exception(6),
    ),
    ("fa", "cli in user mode", |_, m| m.cpl = 3, Exception(13)),
    ("fb", "sti in user mode", |_, m| m.cpl = 3, Exception(13)),
    (
        "f3 48 0f ae d0",
        "wrfsbase, not canonical",
        |r, _| r.rax = 1 << 63,
        Exception(13),
    ),
    (
        "f3 48 0f ae d0",
        "wrfsbase, off",
        |_, m| m.cr4 = 0x220,
        Exception(6),
    ),
    (
        "9b",
        "fwait, exception waits",
        |_, m| m.fx.0[2] = 0x80,
        Exception(16),
    ),
    (
        "9b",
        "fwait, task switched",
        |_, m| m.cr0 |= 8,
        Exception(7),
    ),
    (
        "0f ae 17",
        "ldmxcsr, unknown bits",
        |r, m| (r.rdi, m.memory[2]) = (MEMORY, 1),
        Exception(13),
    ),
    (
        "0f ae 17",
        "ldmxcsr, SSE off",
        |r, m| (r.rdi, m.cr4) = (MEMORY, 0x20),
        Exception(6),
    ),
    (
        "48 0f ae 07",
        "fxsave64, misaligned",
        |r, _| r.rdi = MEMORY + 8,
        Exception(13),
    ),
    (
        "48 0f ae 0f",
        "fxrstor64, bad MXCSR",
        |r, m| (r.rdi, m.memory[27]) = (MEMORY, 1),
        Exception(13),
    ),
    (
        "66 0f fc 07",
        "paddb, misaligned",
        |r, _| r.rdi = MEMORY + 8,
        Exception(13),
    ),
    (
        "66 0f fc c1",
        "paddb, SSE off",
        |_, m| m.cr0 |= 4,
        Exception(6),
    ),
    (
        "66 0f fc c1",
        "paddb, task switched",
        |_, m| m.cr0 |= 8,
        Exception(7),
    ),
    (
        "0f 58 c1",
        "addps, MXCSR with a bit of AMD's",
        |_, m| m.fx.0[26] = 2,
        Unsupported,
    ),
    (
        "0f 11 07",
        "movups to read-only",
        |r, _| r.rdi = MEMORY + 0x1ff8,
        Fault(MEMORY + 0x1ff8, true),
    ),
    (
        "f4",
        "hlt, single-stepping",
        |r, _| r.rflags |= 0x100,
        Unsupported,
    ),
    (
        "c3",
        "ret with shadow stacks",
        |_, m| (m.cpl, m.cr4) = (3, m.cr4 | 1 << 23),
        Unsupported,
    ),
    (
        "0f 01 d0",
        "xgetbv of another register",
        |r, _| r.rcx = 1,
        Unsupported,
    ),
    (
        "67 48 0f a3 0c 25 00 10 00 00",
        "bt [1000h],rcx with 32-bit addresses",
        |_, _| {},
        Unsupported,
    ),
    (
        "66 0f a5 c0",
        "shld of 16 bits by 17",
        |r, _| r.rcx = 17,
        Unsupported,
    ),
];

#[test]
fn exceptions_and_faults_are_told_apart() {
    for (bytes, text, prepare, expected) in STATES {
        let (mut regs, mut machine) = (registers(), Machine::default());
        prepare(&mut regs, &mut machine);
        let error = run(&hex(bytes), &mut regs, &mut machine).unwrap_err();
        let as_expected = match (expected, &error) {
            (Exception(vector), EmulateError::Exception { vector: found, .. }) => vector == found,
            (Fault(address, write), EmulateError::Fault(fault)) => {
                (*address, *write) == (fault.address, fault.write)
            }
            (Unsupported, EmulateError::Unsupported { .. }) => true,
            _ => false,
        };
        assert!(as_expected, "{text}: {error:?}");
    }
}

#[test]
fn an_instruction_decoded_for_elsewhere_is_refused() {
    let instruction = decode(&[0x90], IP + 1).unwrap();
    let error = execute(&instruction, &mut registers(), &mut Machine::default()).unwrap_err();
    assert!(matches!(error, EmulateError::WrongAddress { decoded, rip: IP } if decoded == IP + 1));
}

#[test]
fn endless_contention_ends() {
    let (mut regs, mut machine) = (
        registers(),
        Machine {
            races: usize::MAX,
            ..Machine::default()
        },
    );
    regs.rdi = MEMORY;
    let instruction = decode(&hex("f0 ff 07"), IP).unwrap();
    let error = execute(&instruction, &mut regs, &mut machine).unwrap_err();
    assert!(
        matches!(
            error,
            EmulateError::Contended {
                address: MEMORY,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(regs.rip, IP);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Tests also that a failure changes nothing (`run`), and that execution refuses what
    /// [`is_supported`] refuses.
    #[test]
    fn arbitrary_bytes_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..16),
        two_byte in any::<bool>(),
        values in prop::array::uniform16(any::<u64>()),
        near in any::<u16>(),
        cpl in prop::sample::select(vec![0u8, 3]),
    ) {
        let mut bytes = bytes;
        if two_byte {
            bytes.insert(0, 0x0f);
        }
        let Ok(instruction) = decode(&bytes, IP) else { return Ok(()) };
        // Some registers point into memory.
        let address = |index: usize| {
            if near >> index & 1 != 0 { MEMORY + values[index] % READABLE as u64 } else { values[index] }
        };
        let mut regs = kvm_regs {
            rax: address(0), rbx: address(1), rcx: address(2), rdx: address(3), rsi: address(4), rdi: address(5),
            rsp: address(6), rbp: address(7), r8: address(8), r9: address(9), r10: address(10), r11: address(11),
            r12: address(12), r13: address(13), r14: address(14), r15: address(15),
            rip: IP, rflags: 2 | values[0] & 0xcd5,
        };
        let mut machine = Machine { cpl, ..Machine::default() };
        let result = run(&bytes, &mut regs, &mut machine);
        if !is_supported(&instruction) {
            prop_assert!(matches!(result, Err(EmulateError::Unsupported { .. })), "{:?}", result);
        }
    }
}
