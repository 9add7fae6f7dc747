//! Fuzzes one instruction, of any bytes or any opcode, on any registers, flags, memory, x87 and SSE
//! state, in kernel or user mode.
//!
//! If the instruction only computes, the host's CPU runs it too, and registers, flags and memory
//! are compared. For all others: an error leaves everything as it was. Success continues behind the
//! instruction unless that is a branch, leaves read-only memory alone, and cannot change the
//! kernel's flags from a program. An instruction as a trap prepares it does the same as in the
//! emulator. A relocated instruction does the same as the one at the other address.
#![no_main]

use hostile::{Input, limit_memory};
use iced_x86::{Code, FlowControl, Instruction, OpKind};
use kvm_bindings::kvm_regs;
use libfuzzer_sys::fuzz_target;
use vmm::emulate::test_utils::builder::{Choices, IP, build};
use vmm::emulate::test_utils::oracle::{on_the_host, undefined_flags};
use vmm::emulate::test_utils::{EDGES, Machine, moved, prepared};
use vmm::emulate::{EmulateError, decode, execute, is_supported, vector};

/// The flags that arithmetic sets.
const STATUS: u64 = 0x8d5;
/// The flags that a program cannot change: IOPL, VM, VIF and VIP, and IF unless IOPL is 3.
const OF_THE_KERNEL: u64 = 0x1a_3000;
const IF: u64 = 1 << 9;
const IOPL: u64 = 3 << 12;
const RF: u64 = 1 << 16;
const FIXED: u64 = 2;
/// The exception status flags, in MXCSR's first byte.
const EXCEPTIONS: u8 = 0x3f;
/// The offset of MXCSR in the FXSAVE area.
const MXCSR: std::ops::Range<usize> = 24..28;

/// Returns a number that is meaningful more often than not.
fn number(input: &mut Input<'_>) -> u64 {
    let kind: u8 = input.value();
    match kind % 4 {
        0 => Machine::MEMORY + u64::from(input.value::<u16>()) % (Machine::READABLE as u64 + 64),
        1 => EDGES[usize::from(kind / 4) % EDGES.len()],
        2 => i64::from(input.value::<i8>()).cast_unsigned(),
        _ => input.value(),
    }
}

fn registers(input: &mut Input<'_>) -> kvm_regs {
    let mut regs = kvm_regs::default();
    for register in [
        &mut regs.rax,
        &mut regs.rcx,
        &mut regs.rdx,
        &mut regs.rbx,
        &mut regs.rsp,
        &mut regs.rbp,
        &mut regs.rsi,
        &mut regs.rdi,
        &mut regs.r8,
        &mut regs.r9,
        &mut regs.r10,
        &mut regs.r11,
        &mut regs.r12,
        &mut regs.r13,
        &mut regs.r14,
        &mut regs.r15,
    ] {
        *register = number(input);
    }
    regs.rflags = u64::from(input.value::<u32>()) & 0x3f_ffff | FIXED;
    regs
}

/// Returns a vCPU. The last numbers of the input, repeated, fill its memory.
fn machine(input: &mut Input<'_>) -> Machine {
    let which: u8 = input.value();
    let mut machine = Machine {
        cpl: if which & 1 == 0 { 3 } else { 0 },
        ..Machine::default()
    };
    if which & 2 != 0 {
        machine.cr0 = u64::from(input.value::<u32>());
        machine.cr4 = u64::from(input.value::<u32>());
        machine.xcr0 = (which & 4 != 0).then_some(1);
    }
    if which & 8 != 0 {
        machine.fs = number(input);
        machine.gs = number(input);
    }
    if which & 16 != 0 {
        machine.races = usize::from(input.value::<u16>()) % 1100;
    }
    if which & 32 != 0 {
        for byte in &mut machine.fx.0[160..416] {
            *byte = input.value();
        }
    }
    if which & 64 != 0 {
        // Any control words, with the MXCSR's unknown bits rarely.
        let start: [u8; 8] = input.value();
        machine.fx.0[..8].copy_from_slice(&start);
        let mxcsr = u32::from(input.value::<u16>()) | u32::from(which & 128) << 10;
        machine.fx.0[MXCSR].copy_from_slice(&mxcsr.to_le_bytes());
    }
    let pattern: [u8; 16] = input.value();
    for (byte, value) in machine.memory.iter_mut().zip(pattern.iter().cycle()) {
        *byte = *value;
    }
    machine
}

/// Returns the instruction, and its bytes if they are the input's own.
fn instruction<'i>(input: &mut Input<'i>) -> Option<(Instruction, Option<&'i [u8]>)> {
    let which: u16 = input.value();
    if which & 1 != 0 {
        let length = usize::from(which >> 1) % 16;
        let bytes = input.bytes(length);
        return Some((decode(bytes, IP).ok()?, Some(bytes)));
    }
    let code = usize::from(which >> 1) % Code::values().len();
    let choices: [u8; 8] = input.value();
    let lock = choices[7] & 1 != 0;
    let code = Code::values().nth(code)?;
    let mut insn = build(code, &Choices(&choices))?;
    if lock && insn.op_count() > 0 && insn.op0_kind() == OpKind::Memory {
        insn.set_has_lock_prefix(insn.op_code().can_use_lock_prefix());
    }
    Some((insn, None))
}

fn check_moved(insn: &Instruction, bytes: &[u8], ip: u64) {
    if let Some(there) = moved(insn, ip) {
        let decoded = decode(bytes, ip).expect("it was decoded elsewhere");
        assert!(there.eq_all_bits(&decoded), "{insn} at {ip:#x}");
    }
}

fn check_error(insn: &Instruction, error: &EmulateError, before: &Machine, mut after: Machine) {
    // Races are other CPUs' work.
    let raced = before.races > 0;
    after.races = before.races;
    if raced {
        after.memory.clone_from(&before.memory);
    }
    // MXCSR has the cause of #XM, or of #UD if the kernel has not enabled #XM (CR4.OSXMMEXCPT).
    let simd = [vector::SIMD_FLOATING_POINT, vector::INVALID_OPCODE];
    if matches!(error, EmulateError::Exception { vector, .. } if simd.contains(vector)) {
        let flags = &mut after.fx.0[MXCSR.start];
        *flags = *flags & !EXCEPTIONS | before.fx.0[MXCSR.start] & EXCEPTIONS;
    }
    assert!(after == *before, "`{insn}` failed and changed something");
}

/// The most bytes allocated at once.
const MEMORY_LIMIT: usize = 64 << 20;

fuzz_target!(|bytes: &[u8]| {
    limit_memory(MEMORY_LIMIT);
    let mut input = Input::new(bytes);
    let Some((insn, bytes)) = instruction(&mut input) else {
        return;
    };
    let before = machine(&mut input);
    let mut regs = registers(&mut input);
    regs.rip = IP;
    let old = regs;
    let mut after = before.clone();
    if let Some(bytes) = bytes {
        check_moved(&insn, bytes, number(&mut input));
    }
    let supported = is_supported(&insn);
    match execute(&insn, &mut regs, &mut after) {
        Err(error) => {
            assert_eq!(regs, old, "`{insn}` failed and changed registers");
            check_error(&insn, &error, &before, after);
            return;
        }
        Ok(()) => assert!(supported, "`{insn}` was executed all the same"),
    }
    assert_eq!(regs.rflags & (RF | FIXED), FIXED, "{insn}");
    if insn.flow_control() == FlowControl::Next {
        assert_eq!(regs.rip, insn.next_ip(), "{insn}");
    }
    if before.cpl == 3 {
        let interrupts = if old.rflags & IOPL == IOPL { 0 } else { IF };
        let changed = (regs.rflags ^ old.rflags) & (OF_THE_KERNEL | interrupts);
        assert_eq!(changed, 0, "`{insn}` changed the kernel's flags");
    }
    let (kept, found) = (&before.memory, &after.memory);
    assert_eq!(kept[before.writable..], found[before.writable..], "{insn}");
    if before.races > 0 {
        return;
    }
    if let Some(quick) = prepared(&insn, &old, &before) {
        assert!(quick == (regs, after), "{insn} prepared, on {old:x?}");
        return;
    }
    let Some((mut theirs, their_machine)) = on_the_host(&insn, &old, &before) else {
        return;
    };
    let defined = STATUS & !undefined_flags(&insn);
    let outside = (theirs.rflags ^ regs.rflags) & defined;
    assert_eq!(outside, 0, "{insn}: flags on {old:x?}");
    (theirs.rip, theirs.rflags) = (regs.rip, regs.rflags);
    assert_eq!(regs, theirs, "{insn} on {old:x?}");
    assert!(
        their_machine.memory == after.memory,
        "{insn}: memory on {old:x?}"
    );
});
