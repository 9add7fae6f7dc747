//! Walks of kernel stacks by frame pointers.
#![allow(clippy::unwrap_used)]

use super::frames::{End, Found, Guess};
use super::kernel::MAX_KERNEL_FRAMES;
use super::test_kernel::*;
use crate::Gva;

/// Builds a kernel with frame pointers at the same addresses. Returns the frame pointer in
/// `__schedule`.
fn framed(kernel: &mut TestKernel, user: bool) -> u64 {
    kernel.registers(
        ENTRY,
        0x40_1000,
        if user { 0x33 } else { 0 },
        0x7ffc_0000,
        0xb9,
    );
    let last = ENTRY - 16;
    for (at, bp, return_address) in [
        (last - 80, last - 40, 0x250),
        (last - 40, last, 0x350),
        (last, 0xb9, 0x450),
    ] {
        kernel.words(at, &[bp, TEXT + return_address]);
    }
    last - 80
}

#[test]
fn frame_pointers_lead_to_the_same_frames() {
    for (user, end) in [(true, End::UserMode), (false, End::Bottom)] {
        let mut kernel = TestKernel::new();
        let bp = framed(&mut kernel, user);
        kernel.inactive(bp - 80, bp, TEXT + 0x150);
        let stack = sleeping(&kernel, &kernel.unwinder(false));
        assert_eq!((frames(&stack), stack.end), (SYSTEM_CALL.to_vec(), end));
        assert_eq!(stack.entry.is_some(), user);
        assert!(stack.is_reliable());
    }
    // A kernel thread and an io_uring worker that have not run yet, as `copy_thread` leaves them.
    for cs in [0, 0x33] {
        let mut kernel = TestKernel::new();
        kernel.registers(ENTRY, 0, cs, 0, 0);
        kernel.inactive(ENTRY - 56, ENTRY | 1, TEXT + 0x700);
        let stack = sleeping(&kernel, &kernel.unwinder(false));
        assert_eq!(
            (frames(&stack), stack.end, stack.entry),
            (vec![(0x700, Found::Register)], End::Bottom, None)
        );
    }
}

#[test]
fn frame_pointers_cross_interrupts() {
    let mut kernel = TestKernel::new();
    let bp = framed(&mut kernel, true);
    // `work` was interrupted; the handler's frames are on the interrupt stack.
    let registers = bp - 40 - 168;
    kernel.registers(registers, TEXT + 0x220, 0x10, bp - 40, bp);
    kernel.words(registers - 32, &[registers | 1, TEXT + 0x550]);
    kernel.words(IRQ_STACK - 64, &[registers - 32, TEXT + 0x560]);
    let at = [TEXT + 0x620, IRQ_STACK - 0x100, IRQ_STACK - 64];
    let stack = running(&kernel, &kernel.unwinder(false), at);
    let expected = [
        (0x620, Found::Register),
        (0x560, Found::Return),
        (0x550, Found::Return),
        (0x220, Found::Interrupted),
        (0x250, Found::Return),
        (0x350, Found::Return),
        (0x450, Found::Return),
    ];
    assert_eq!(
        (frames(&stack), stack.end),
        (expected.to_vec(), End::UserMode)
    );
}

#[test]
fn a_function_that_is_just_entered_has_its_caller() {
    let mut kernel = TestKernel::new();
    let bp = framed(&mut kernel, true);
    // `irq_handler` starts with a trap, and then sets up its frame.
    kernel.put(TEXT + 0x600, [0xcc, 0x48, 0x89, 0xe5]);
    kernel.word(bp - 40, TEXT + 0x220);
    kernel.words(bp - 48, &[bp]);
    for (offset, sp) in [(0x600, bp - 40), (0x601, bp - 48)] {
        let stack = running(&kernel, &kernel.unwinder(false), [TEXT + offset, sp, bp]);
        let mut expected = vec![(offset, Found::Register), (0x220, Found::Return)];
        expected.extend(&SYSTEM_CALL[1..]);
        assert_eq!(frames(&stack), expected);
        assert!(stack.is_reliable());
    }
}

/// The function's code sets up no frame. The word at the top of the stack follows a call and may be
/// its caller.
#[test]
fn a_caller_taken_from_the_top_of_the_stack_makes_what_follows_unreliable() {
    let mut kernel = TestKernel::new();
    let bp = framed(&mut kernel, true);
    kernel.put(TEXT + 0x21b, [0xe8]);
    kernel.word(bp - 40, TEXT + 0x220);
    let stack = running(
        &kernel,
        &kernel.unwinder(false),
        [TEXT + 0x620, bp - 40, bp],
    );
    let mut expected = vec![
        (0x620, Found::Register),
        (0x220, Found::Guess(Guess::TopOfStack)),
    ];
    expected.extend(&SYSTEM_CALL[1..]);
    assert_eq!(frames(&stack), expected);
    let reliable: Vec<bool> = stack.frames.iter().map(|frame| frame.reliable).collect();
    assert_eq!(reliable, [true, false, false, false, false]);
}

#[test]
fn frame_pointers_that_lead_in_circles_end() {
    let not_outwards = |at| (at, End::NotOutwards { pointer: Gva(at) });
    let off_stack = |bp, at| (bp, End::OffStack { pointer: Gva(at) });
    for (bp, end) in [
        not_outwards(ENTRY - 0x400),
        not_outwards(ENTRY - 0x500),
        off_stack(0, 0),
        off_stack(u64::MAX, u64::MAX - 1),
        off_stack(0x7ffc_0000, 0x7ffc_0000),
    ] {
        let mut kernel = TestKernel::new();
        kernel.words(ENTRY - 0x400, &[bp, TEXT + 0x250]);
        kernel.inactive(ENTRY - 0x400 - 80, ENTRY - 0x400, TEXT + 0x150);
        let stack = sleeping(&kernel, &kernel.unwinder(false));
        assert_eq!((stack.frames.len(), stack.end), (2, end), "{bp:#x}");
    }
}

#[test]
fn the_smallest_frames_fill_a_stack_up_to_the_registers_of_its_entry() {
    let mut kernel = TestKernel::new();
    let start = TASK_STACK - 0x4000;
    for at in (start + 8..TASK_STACK - 8).step_by(16) {
        kernel.words(at, &[at + 16, TEXT + 0x250]);
    }
    kernel.word(TASK + 16, start);
    let stack = sleeping(&kernel, &kernel.unwinder(false));
    // The frame pointer is the sixth word of the frame that an inactive task leaves.
    let frames = usize::try_from((ENTRY - (start + 40)) / 16).unwrap();
    assert_eq!((stack.frames.len(), stack.end), (frames, End::Bottom));
    assert!(frames <= MAX_KERNEL_FRAMES);
}
