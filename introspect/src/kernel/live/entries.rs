//! The kernel entry points of a CPU.
//!
//! Format of the interrupt descriptor table: Intel SDM volume 3A, section 6.14.1 (64-bit gates).

use crate::kernel::slide::LiveEntries;
use crate::{Gva, MemoryView};

const GATE: u64 = 16;
/// The vectors (Intel SDM volume 3A, table 6-1).
const DIVIDE_ERROR: u64 = 0;
const PAGE_FAULT: u64 = 14;
/// The present bit of a gate: bit 47 of its first 8 bytes.
const PRESENT: u8 = 0x80;

/// Reads the entry points of a CPU with the interrupt descriptor table at `idt_base`. `syscall` is
/// its LSTAR, or 0 if unknown. A gate that is not present or cannot be read counts as none.
#[must_use]
pub fn live_entries(view: MemoryView<'_>, idt_base: u64, syscall: u64) -> LiveEntries {
    LiveEntries {
        syscall,
        page_fault: handler(view, idt_base, PAGE_FAULT).unwrap_or(0),
        divide_error: handler(view, idt_base, DIVIDE_ERROR).unwrap_or(0),
    }
}

fn handler(view: MemoryView<'_>, idt_base: u64, vector: u64) -> Option<u64> {
    let gate = Gva(idt_base.checked_add(vector * GATE)?);
    let [o0, o1, _, _, _, flags, o2, o3, o4, o5, o6, o7, ..] =
        view.array::<{ GATE as usize }>(gate).ok()?;
    (flags & PRESENT != 0).then(|| u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]))
}
