//! Walks of kernel stacks by unwind information.
#![allow(clippy::unwrap_used)]

use super::code::ModuleCode;
use super::frames::{End, Found, Guess, ReturnTrampoline};
use super::kernel::MAX_KERNEL_FRAMES;
use super::test_kernel::*;
use crate::test_says::assert_says;
use crate::{Gva, PausedMemory};

/// ORC's numbers: bases and types.
const UNDEFINED: u8 = 0;
const PREVIOUS_SP: u8 = 1;
const BP: u8 = 4;
const SP: u8 = 5;
const SP_INDIRECT: u8 = 9;
const CALL: u8 = 0;
const REGISTERS: u8 = 1;
const HARDWARE: u8 = 2;
const END: u8 = 4;

/// Builds a kernel whose functions keep no frame pointer. Each has 16 bytes of locals, where `work`
/// saves RBP.
fn without_frame_pointers() -> TestKernel {
    let mut kernel = TestKernel::new();
    let none = (UNDEFINED, 0);
    for (offset, sp, bp, kind) in [
        (0x000, none, none, CALL),
        (0x100, (SP, 24), none, CALL),
        (0x200, (SP, 24), (PREVIOUS_SP, -16), CALL),
        (0x300, (SP, 24), none, CALL),
        (0x400, (SP, 0), none, REGISTERS),
        (0x500, (SP, 0), none, REGISTERS),
        // The top of the interrupt stack points back at the interrupted stack.
        (0x600, (SP_INDIRECT, 24), none, CALL),
        (0x700, none, none, END),
        (0x800, (SP, 0), none, HARDWARE),
        (0x900, none, none, CALL),
        (0xa00, (SP, 8), none, CALL),
        (0xb00, none, none, END),
    ] {
        kernel.orc(TEXT + offset, sp, bp, kind);
    }
    kernel
}

/// Writes a system call to the task's stack: `work` called by `do_syscall`, called by `entry`, with
/// the registers above. Returns the stack pointer in `__schedule`, which `work` has called.
fn system_call(kernel: &mut TestKernel) -> u64 {
    let sp = ENTRY - 3 * 24;
    kernel.registers(ENTRY, 0x40_1000, 0x33, 0x7ffc_0000, 0xb9);
    kernel.words(sp, &[1, 2, TEXT + 0x250]);
    kernel.words(sp + 24, &[1, 0xabcd, TEXT + 0x350]);
    kernel.words(sp + 48, &[1, 2, TEXT + 0x450]);
    sp
}

#[test]
fn a_sleeping_task_is_followed_to_its_system_call() {
    let mut kernel = without_frame_pointers();
    let sp = system_call(&mut kernel);
    kernel.inactive(sp - 56, 0x77, TEXT + 0x150);
    let unwinder = kernel.unwinder(true);
    let stack = sleeping(&kernel, &unwinder);
    assert_eq!(frames(&stack), SYSTEM_CALL);
    assert_eq!(stack.end, End::UserMode);
    assert!(stack.is_reliable());
    let entry = stack.entry.unwrap();
    assert_eq!(
        (entry.general.rip, entry.general.rsp),
        (0x40_1000, 0x7ffc_0000)
    );
    let scheduler: Vec<bool> = stack
        .frames
        .iter()
        .map(|f| unwinder.is_scheduler(f))
        .collect();
    assert_eq!(scheduler, [true, false, false, false]);
    let paused = PausedMemory::new(&kernel.memory);
    let alone = unwinder.entry_registers(paused.view(kernel.space), Gva(TASK));
    assert_eq!(alone, Ok(Some(entry)));
    // An io_uring worker: the selectors are the process's, the rest was reset.
    kernel.registers(ENTRY, 0, 0x33, 0, 0);
    let paused = PausedMemory::new(&kernel.memory);
    let alone = unwinder.entry_registers(paused.view(kernel.space), Gva(TASK));
    assert_eq!(alone, Ok(None));
}

#[test]
fn kernel_threads_end_at_their_first_function() {
    for (return_address, found, expected) in [
        (
            TEXT + 0x150,
            Found::Return,
            vec![(0x150, Found::Return), (0x750, Found::Return)],
        ),
        // A worker that has not run yet.
        (
            TEXT + 0x700,
            Found::Register,
            vec![(0x700, Found::Register)],
        ),
    ] {
        let mut kernel = without_frame_pointers();
        kernel.words(ENTRY - 24, &[1, 2, TEXT + 0x750]);
        kernel.inactive(ENTRY - 24 - 56, 0, return_address);
        let stack = sleeping(&kernel, &kernel.unwinder(true));
        assert_eq!(frames(&stack), expected, "{found:?}");
        assert_eq!((stack.end, stack.entry), (End::Bottom, None));
        assert!(stack.is_reliable());
    }
}

/// `__schedule` on the stack of a new task, before it returns to the task's first function.
#[test]
fn a_task_that_is_switched_to_for_the_first_time_ends_where_it_starts() {
    let mut kernel = without_frame_pointers();
    let sp = ENTRY - 24;
    kernel.words(sp, &[1, 2, TEXT + 0x700]);
    let stack = running(&kernel, &kernel.unwinder(true), [TEXT + 0x150, sp, 0]);
    let expected = [(0x150, Found::Register), (0x700, Found::Register)];
    assert_eq!(
        (frames(&stack).as_slice(), stack.end),
        (&expected[..], End::Bottom)
    );
    assert!(stack.is_reliable());
}

/// `__switch_to_asm` is on the next task's stack, while the kernel's current task is still the
/// previous one.
#[test]
fn between_two_tasks_the_stack_is_that_of_the_next() {
    let mut kernel = without_frame_pointers();
    let sp = system_call(&mut kernel);
    let before = TASK + 0x200;
    kernel.word(before, IRQ_STACK + 0x4_0000);
    let unwinder = kernel.unwinder(true);
    let mut cpu = kernel.cpu(TEXT + 0x150, sp - 24, 0);
    kernel.words(sp - 24, &[1, 2, TEXT + 0x150]);
    cpu.general.rsi = TASK;
    let paused = PausedMemory::new(&kernel.memory);
    let stack = unwinder.running(paused.view(kernel.space), &cpu, Gva(before));
    let mut expected = SYSTEM_CALL.to_vec();
    expected.insert(0, (0x150, Found::Register));
    assert_eq!((frames(&stack), stack.end), (expected, End::UserMode));
}

/// `work` has called through a pointer, by a thunk.
#[test]
fn a_thunks_first_instructions_are_right_behind_calls() {
    const SECOND: u64 = 0xb20;
    const RETPOLINE: [u8; 6] = [0xe8, 1, 0, 0, 0, 0xcc];
    const LFENCE_AND_JUMP: [u8; 6] = [0x0f, 0xae, 0xe8, 0xff, 0xe3, 0xcc];
    for (code, at, pushed, callers, end) in [
        (RETPOLINE, 0, 0, &[0x250, 0x350, 0x450][..], End::UserMode),
        (RETPOLINE, 6, 8, &[0x250, 0x350, 0x450], End::UserMode),
        (RETPOLINE, 3, 0, &[], End::Bottom),
        (LFENCE_AND_JUMP, 3, 0, &[0x250, 0x350, 0x450], End::UserMode),
        (LFENCE_AND_JUMP, 6, 8, &[], End::Bottom),
    ] {
        let at = SECOND + at;
        let mut kernel = without_frame_pointers();
        kernel.put(TEXT + SECOND, code);
        let sp = system_call(&mut kernel) + 16 - pushed;
        let stack = running(&kernel, &kernel.unwinder(true), [TEXT + at, sp, 0x77]);
        let returns = callers.iter().map(|at| (*at, Found::Return));
        let expected: Vec<_> = std::iter::once((at, Found::Register))
            .chain(returns)
            .collect();
        assert_eq!((frames(&stack), stack.end), (expected, end), "{at:#x}");
    }
}

/// Interrupts the system call in `work` by a device whose handler runs on the CPU's interrupt
/// stack. Returns the handler's stack pointer.
fn interrupted(kernel: &mut TestKernel) -> u64 {
    let sp = system_call(kernel) + 24;
    kernel.registers(sp - 168, TEXT + 0x220, 0x10, sp, 0x1234);
    // The function that switches stacks has a frame of 24 bytes, like the others.
    kernel.words(sp - 168 - 24, &[1, 2, TEXT + 0x550]);
    kernel.word(IRQ_STACK - 8, sp - 168 - 24);
    IRQ_STACK - 8
}

const INTERRUPTED: [(u64, Found); 5] = [
    (0x620, Found::Register),
    (0x550, Found::Return),
    (0x220, Found::Interrupted),
    (0x350, Found::Return),
    (0x450, Found::Return),
];

/// An exception in the program, and one in `work`. Its entry calls `error_entry`, which returns
/// with all registers on the stack. The table is right about the call and wrong about the
/// instruction after it, also if another function returns there.
#[test]
fn registers_that_an_exceptions_entry_had_saved_are_found_right_behind() {
    const PAGE_FAULT: u64 = TEXT + 0x880;
    for (rip, cs, sp, expected, end) in [
        (
            0x40_1000,
            0x33,
            0x7ffc_0000,
            vec![(0x885, Found::Register)],
            End::UserMode,
        ),
        (
            TEXT + 0x220,
            0x10,
            ENTRY - 2 * 24,
            vec![
                (0x885, Found::Register),
                (0x220, Found::Interrupted),
                (0x350, Found::Return),
                (0x450, Found::Return),
            ],
            End::UserMode,
        ),
    ] {
        let mut kernel = without_frame_pointers();
        system_call(&mut kernel);
        let distance = i32::try_from(TEXT + 0xa00 - (PAGE_FAULT + 5)).unwrap();
        kernel.put(PAGE_FAULT, [0xe8]);
        kernel.put(PAGE_FAULT + 1, distance.to_le_bytes());
        let saved = ENTRY - 2 * 24 - 168;
        kernel.registers(saved, rip, cs, sp, 0x1234);
        // The function is jumped to at the end of `error_entry`, and has its own frame.
        kernel.words(saved - 24, &[1, 2, PAGE_FAULT + 5]);
        let mut jumped_to = expected.clone();
        jumped_to[0].1 = Found::Return;
        jumped_to.insert(0, (0x120, Found::Register));
        let unwinder = kernel.unwinder(true);
        for (at, sp, expected) in [
            (PAGE_FAULT + 5, saved, expected),
            (TEXT + 0x120, saved - 24, jumped_to),
        ] {
            let stack = running(&kernel, &unwinder, [at, sp, 0]);
            assert_eq!((frames(&stack), stack.end), (expected, end));
            assert!(stack.is_reliable() && stack.entry.is_some());
        }
    }
}

#[test]
fn a_running_task_is_followed_across_the_stacks_of_its_cpu() {
    let mut kernel = without_frame_pointers();
    let sp = interrupted(&mut kernel);
    let unwinder = kernel.unwinder(true);
    let stack = running(&kernel, &unwinder, [TEXT + 0x620, sp, 0]);
    assert_eq!(frames(&stack), INTERRUPTED);
    assert_eq!(stack.end, End::UserMode);
    assert!(stack.is_reliable() && stack.entry.is_some());
    for most in [0, 1, 3] {
        let paused = PausedMemory::new(&kernel.memory);
        let (view, cpu) = (paused.view(kernel.space), kernel.cpu(TEXT + 0x620, sp, 0));
        let stack = unwinder.running_at_most(view, &cpu, Gva(TASK), most);
        assert_eq!(
            (frames(&stack), stack.end),
            (INTERRUPTED[..most].to_vec(), End::TooLong)
        );
    }
    // The handler is interrupted by an exception with its own stack.
    let frame = [TEXT + 0x620, 0x10, 0x2, sp, 0x18];
    kernel.words(NMI_STACK - 40, &frame);
    let stack = running(&kernel, &unwinder, [TEXT + 0x820, NMI_STACK - 40, 0]);
    let mut expected = vec![(0x820, Found::Register), (0x620, Found::Interrupted)];
    expected.extend(&INTERRUPTED[1..]);
    assert_eq!(frames(&stack), expected);
    assert!(stack.is_reliable());
}

#[test]
fn a_cpu_in_user_mode_has_no_kernel_stack() {
    let kernel = without_frame_pointers();
    let paused = PausedMemory::new(&kernel.memory);
    let mut cpu = kernel.cpu(0x40_1000, 0x7ffc_0000, 0);
    cpu.cs = 0x33;
    let stack = kernel
        .unwinder(true)
        .running(paused.view(kernel.space), &cpu, Gva(TASK));
    assert_eq!((stack.frames.len(), stack.end), (0, End::UserMode));
    assert_eq!(stack.entry.unwrap().general, cpu.general);
}

#[test]
fn modules_bring_their_unwind_information_and_generated_code_makes_unreliable() {
    let mut kernel = without_frame_pointers();
    let sp = system_call(&mut kernel);
    kernel.word(sp + 16, MODULE + 0x50);
    // Generated code must keep a frame pointer.
    kernel.inactive(sp - 56, sp + 32, TEXT + 0x150);
    let mut unwinder = kernel.unwinder(true);
    let stack = sleeping(&kernel, &unwinder);
    let reliable: Vec<bool> = stack.frames.iter().map(|frame| frame.reliable).collect();
    assert_eq!(stack.frames[1].address, Gva(MODULE + 0x50));
    assert_eq!(reliable, [true, false, false, false]);
    let found: Vec<Found> = stack.frames.iter().map(|frame| frame.found).collect();
    let guess = Found::Guess(Guess::FramePointer);
    assert_eq!(found, [Found::Return, Found::Return, guess, Found::Return]);
    assert_eq!(stack.end, End::UserMode);
    assert!(!stack.is_reliable());
    let text = MODULE..MODULE + 0x100;
    unwinder.set_modules(vec![ModuleCode {
        text: vec![text],
        orc: None,
    }]);
    let stack = sleeping(&kernel, &unwinder);
    assert_eq!(stack.frames.len(), 2);
    assert_eq!(
        stack.end,
        End::NoUnwindInfo {
            address: Gva(MODULE + 0x4f)
        }
    );
}

#[test]
fn replaced_return_addresses_are_looked_up() {
    let trampoline = TEXT + 0x900;
    for (place, expected) in [(true, Some(TEXT + 0x250)), (false, None)] {
        let mut kernel = without_frame_pointers();
        let sp = system_call(&mut kernel);
        kernel.word(sp + 16, trampoline);
        let node = TASK + 0x80;
        kernel.word(TASK + 24, node);
        kernel.words(
            node,
            &[0, TEXT + 0x250, if place { sp + 16 } else { 0x1000 }],
        );
        kernel.inactive(sp - 56, 0, TEXT + 0x150);
        let stack = sleeping(&kernel, &kernel.unwinder(true));
        let frame = stack.frames[1];
        assert_eq!(frame.trampoline, Some(ReturnTrampoline::Rethook));
        match expected {
            Some(_) => assert_eq!(
                (frames(&stack), stack.is_reliable()),
                (SYSTEM_CALL.to_vec(), true)
            ),
            None => {
                assert_eq!((frame.address, frame.reliable), (Gva(trampoline), false));
                assert_eq!(
                    stack.end,
                    End::NoUnwindInfo {
                        address: Gva(trampoline)
                    }
                );
            }
        }
    }
}

/// A function without unwind information, with words on its stack that look like return addresses.
#[test]
fn the_caller_of_a_function_without_unwind_information_is_the_one_that_calls_it() {
    let mut kernel = without_frame_pointers();
    system_call(&mut kernel);
    let sp = ENTRY - 24 - 32;
    kernel.words(sp, &[9, TEXT + 0x250, 8, TEXT + 0x350]);
    let unwinder = kernel.unwinder(true);
    let at = [TEXT + 0x20, sp, 0];
    let stack = running(&kernel, &unwinder, at);
    let address = Gva(TEXT + 0x20);
    let first = (0x20, Found::Register);
    assert_eq!(
        (frames(&stack), stack.end),
        (vec![first], End::NoUnwindInfo { address })
    );
    kernel.put(TEXT + 0x34b, [0xe8]);
    kernel.put(TEXT + 0x34c, (-0x350_i32).to_le_bytes());
    let stack = running(&kernel, &unwinder, at);
    let called = (0x350, Found::Guess(Guess::Caller));
    let expected = vec![first, called, (0x450, Found::Return)];
    assert_eq!((frames(&stack), stack.end), (expected, End::UserMode));
    assert!(!stack.is_reliable());
}

#[test]
fn damaged_stacks_end_with_what_is_wrong() {
    type Damage = fn(&mut TestKernel, u64);
    let off_stack = |at| End::OffStack { pointer: Gva(at) };
    let (not_code, no_info) = (Gva(0x1234), Gva(TEXT + 0x50));
    let not_mapped = Gva(0xffff_c900_0070_1030);
    let end_of_stack: Damage = |kernel, sp| {
        for at in (sp..TASK_STACK).step_by(8) {
            kernel.word(at, TEXT + 0x250);
        }
    };
    let unmapped: Damage = |kernel, _| {
        kernel.word(TASK, 0xffff_c900_0070_0000);
        kernel.word(TASK + 16, 0xffff_c900_0070_1000);
    };
    let returns_to_no_code: Damage = |kernel, sp| kernel.word(sp + 40, 0x1234);
    let not_to_be_unwound: Damage = |kernel, sp| kernel.word(sp + 40, TEXT + 0x50);
    let no_stack: Damage = |kernel, _| kernel.word(TASK, 0);
    let wild_stack: Damage = |kernel, _| kernel.word(TASK, 0xffff_8880_0000_0001);
    let pointer_on_no_stack: Damage = |kernel, _| kernel.word(TASK + 16, 0x1000);
    let cases = [
        (returns_to_no_code, 2, End::NotCode { address: not_code }),
        (not_to_be_unwound, 3, End::NoUnwindInfo { address: no_info }),
        (no_stack, 0, End::NoStack),
        (wild_stack, 0, off_stack(0xffff_8880_0000_0001)),
        (unmapped, 0, End::NotPresent { gva: not_mapped }),
        (pointer_on_no_stack, 0, off_stack(0x1000)),
        (end_of_stack, 11, off_stack(TASK_STACK + 16)),
    ];
    for (damage, count, end) in cases {
        let mut kernel = without_frame_pointers();
        let sp = system_call(&mut kernel);
        kernel.inactive(sp - 56, 0, TEXT + 0x150);
        damage(&mut kernel, sp);
        let stack = sleeping(&kernel, &kernel.unwinder(true));
        assert_eq!((stack.frames.len(), stack.end), (count, end));
        assert!(!stack.is_reliable());
    }
}

#[test]
fn tables_that_lead_in_circles_end() {
    for (sp, bp, expected) in [
        ((SP, 0), (UNDEFINED, 0), "not further out"),
        ((SP, -64), (UNDEFINED, 0), "not further out"),
        ((BP, 16), (PREVIOUS_SP, -16), "not further out"),
        ((15, 0), (UNDEFINED, 0), "damaged or of an unknown kind"),
        ((SP, 24), (SP_INDIRECT, 0), "damaged or of an unknown kind"),
        ((6, 24), (UNDEFINED, 0), "needs DWARF register 10"),
    ] {
        let mut kernel = TestKernel::new();
        kernel.orc(TEXT, sp, bp, CALL);
        for at in (TASK_STACK - 0x1000..TASK_STACK).step_by(8) {
            kernel.word(at, TEXT + 0x250);
        }
        let bp_at = TASK_STACK - 0x800;
        kernel.word(bp_at, bp_at);
        kernel.inactive(TASK_STACK - 0x600, bp_at, TEXT + 0x150);
        let stack = sleeping(&kernel, &kernel.unwinder(true));
        let end = stack.end.to_string();
        assert_says(&end, expected);
        assert!(stack.frames.len() <= 3);
    }
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(300))]

    /// A walk ends within its bounds, whatever the table and the stacks hold.
    #[test]
    fn hostile_tables_and_stacks_end(
        records in proptest::collection::vec((0u8..10, -64i16..64, 0u8..10, -64i16..64, 0u8..8), 10),
        words in proptest::collection::vec((0u8..4, 0u64..0x1000), 300),
        orc in proptest::bool::ANY,
    ) {
        let mut kernel = TestKernel::new();
        for (index, (sp, sp_offset, bp, bp_offset, kind)) in (0u64..).zip(records) {
            kernel.orc(TEXT + index * 0x100, (sp, sp_offset & !7), (bp, bp_offset & !7), kind);
        }
        for (index, (choice, value)) in (0u64..).zip(words) {
            let word = match choice {
                0 => TEXT + value,
                1 => TASK_STACK - 0x1000 + (value & !7),
                2 => IRQ_STACK - 0x1000 + value,
                _ => (TASK_STACK - 0x1000 + (value & !7)) | 1,
            };
            kernel.word(TASK_STACK - 300 * 8 + index * 8, word);
            kernel.word(IRQ_STACK - 300 * 8 + index * 8, word);
        }
        kernel.word(TASK + 16, TASK_STACK - 300 * 8);
        let unwinder = kernel.unwinder(orc);
        proptest::prop_assert!(sleeping(&kernel, &unwinder).frames.len() <= MAX_KERNEL_FRAMES);
        let at = [TEXT + 0x620, IRQ_STACK - 300 * 8, IRQ_STACK - 290 * 8];
        let stack = running(&kernel, &unwinder, at);
        proptest::prop_assert!(stack.frames.len() <= MAX_KERNEL_FRAMES);
        proptest::prop_assert_eq!(stack.frames[0].address, Gva(TEXT + 0x620));
    }
}
