//! Walks one kernel stack by frame pointers, in a kernel whose functions all keep them. That is
//! `CONFIG_UNWINDER_FRAME_POINTER`, as in arch/x86/kernel/unwind_frame.c. A function may be
//! interrupted before it has set up its frame, or after it has released it. Its code then shows
//! where its return address is, so that no caller is missed.
//!
//! RBP points at the caller's RBP, and the return address is above it. Kernel entries by interrupts
//! and exceptions leave a pointer to the saved registers instead, marked by bit 0.

use super::code::{Frameless, Prologue};
use super::frames::{End, Found, Guess, SavedRegisters};
use super::kernel::{MAX_KERNEL_FRAMES, Walk};
use crate::kernel::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The size in bytes of a saved RBP and a return address.
const FRAME: u64 = 16;
/// The bit of a frame pointer that marks a pointer to saved registers.
const REGISTERS: u64 = 1;

/// Checks whether most of these functions set up a frame pointer.
pub(super) fn are_kept(view: MemoryView<'_>, symbols: &Symbols, functions: &[&str]) -> bool {
    let code = functions.iter().filter_map(|name| {
        let mut code = [0; Prologue::LONGEST];
        view.read(Gva(symbols.address_of(name)?), &mut code).ok()?;
        Some(Prologue::of(&code).push.is_some())
    });
    let code: Vec<bool> = code.collect();
    let kept = code.iter().filter(|kept| **kept).count();
    kept * 2 > code.len()
}

/// Adds the caller of the function that runs at `ip`, if RBP does not point at that function's
/// frame.
pub(super) fn leave_frameless(walk: &mut Walk<'_, '_>, ip: u64, sp: u64) -> Result<(), End> {
    match walk.code().frameless(walk.view, ip) {
        Some(Frameless::At(offset)) => {
            walk.push_return(sp.wrapping_add(offset), Found::Return)?;
        }
        Some(Frameless::Perhaps) => {
            let Ok(value) = walk.read_stack(sp) else {
                return Ok(());
            };
            if walk.code().at(value).is_some() && walk.code().follows_call(walk.view, value) {
                walk.push(value, Found::Guess(Guess::TopOfStack))?;
            }
        }
        None => {}
    }
    Ok(())
}

/// Adds the frames that follow from RBP.
pub(super) fn walk(walk: &mut Walk<'_, '_>, bp: u64) -> Result<End, End> {
    let mut bp = bp;
    // The stack of the previous frame, and the end of that frame.
    let mut inside = (None, 0);
    for _ in 0..MAX_KERNEL_FRAMES {
        let (at, length) = match bp & REGISTERS {
            0 => (bp, FRAME),
            _ => (bp & !REGISTERS, SavedRegisters::SIZE),
        };
        walk.stacks.enter(at, length)?;
        if walk.stacks.current() == inside.0 && at < inside.1 {
            return Err(End::NotOutwards { pointer: Gva(at) });
        }
        inside = (walk.stacks.current(), at.saturating_add(length));
        if at != bp {
            let saved = walk.read_registers(at)?;
            let general = saved.general;
            if general.rip == 0 && at == walk.entry_at && !saved.are_of_entry() {
                // A thread without a user program that has not run yet: its registers were never
                // filled in.
                return Ok(End::Bottom);
            }
            if saved.in_user_mode() {
                walk.entry = Some(saved);
                return Ok(End::UserMode);
            }
            walk.push(general.rip, Found::Interrupted)?;
            leave_frameless(walk, general.rip, general.rsp)?;
            bp = general.rbp;
            continue;
        }
        walk.push_return(bp.wrapping_add(8), Found::Return)?;
        if is_last(walk, bp) {
            let saved = walk.read_registers(walk.entry_at)?;
            walk.entry = saved.are_of_entry().then_some(saved);
            return Ok(match walk.entry {
                Some(_) => End::UserMode,
                None => End::Bottom,
            });
        }
        bp = walk.read_stack(bp)?;
    }
    Ok(End::TooLong)
}

/// Checks whether the frame is that of the function which the entry code called. Such a frame ends
/// at the registers of the entry. It ends one word before if the function aligned its stack and
/// pushed its return address again.
fn is_last(walk: &mut Walk<'_, '_>, bp: u64) -> bool {
    let last = walk.entry_at.wrapping_sub(FRAME);
    let word = |walk: &mut Walk<'_, '_>, at: u64| walk.view.u64(Gva(at)).ok();
    let aligned = last.wrapping_sub(8);
    bp == last
        || (bp == aligned
            && word(walk, aligned.wrapping_add(8)) == word(walk, last.wrapping_add(8)))
}
