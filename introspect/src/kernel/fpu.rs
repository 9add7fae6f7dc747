//! The registers of floating point and vectors of a task, where the kernel keeps them while the
//! task does not run (`struct fpu`, arch/x86/include/asm/fpu/types.h).

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::structure::{Structure, StructureError};
use crate::bytes::u64_at;
use crate::{Gva, MemoryView};

/// The size in bytes of the registers as FXSAVE stores them (Intel SDM volume 1, section 10.5.1).
pub const FXSAVE: usize = 512;
/// The bit of `thread_info.flags` of a task whose registers are in memory alone, though it runs in
/// the kernel (`TIF_NEED_FPU_LOAD`, arch/x86/include/asm/thread_info.h).
const NEED_LOAD: u64 = 1 << 14;
/// The bits of the header's first word for the parts that are not in their initial state.
const X87: u64 = 1;
const SSE: u64 = 2;
/// The initial values of the control words.
const INITIAL_CONTROL: u16 = 0x37f;
const INITIAL_MXCSR: u32 = 0x1f80;
/// The part of FXSAVE that belongs to SSE: MXCSR and the registers.
const MXCSR: usize = 24;
const XMM: usize = 160;

/// The location of `struct fpu`'s registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In the task, since Linux 5.16 behind a pointer: its offset in the task, and the registers'
    /// offset in `fpstate`.
    Pointer { pointer: u64, registers: u64 },
    /// In the task itself.
    Embedded { registers: u64 },
}

/// The location of a task's registers of floating point and vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FpuLayout {
    place: Place,
    /// Offset in `task_struct`.
    flags: u64,
}

impl FpuLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        let flags = offset(btf, "task_struct.thread_info.flags", 8)?;
        let place = match offset(btf, "task_struct.thread.fpu.fpstate", 8) {
            Ok(pointer) => Place::Pointer {
                pointer,
                registers: btf.member("fpstate.regs")?.byte_offset,
            },
            // Since Linux 6.16 the structure follows the task's.
            Err(_) => match offset(btf, "fpu.fpstate", 8) {
                Ok(pointer) => Place::Pointer {
                    pointer: btf
                        .size_of("task_struct")
                        .unwrap_or_default()
                        .wrapping_add(pointer),
                    registers: btf.member("fpstate.regs")?.byte_offset,
                },
                Err(_) => Place::Embedded {
                    registers: btf.member("task_struct.thread.fpu.state")?.byte_offset,
                },
            },
        };
        Ok(Self { place, flags })
    }

    /// Checks whether the registers of a task that a CPU runs are in memory, not in the CPU.
    ///
    /// # Errors
    /// If the task cannot be read.
    pub fn is_in_memory(&self, view: MemoryView<'_>, task: Gva) -> Result<bool, StructureError> {
        let flags = Structure::at(view, "task_struct", task)?.u64(self.flags)?;
        Ok(flags & NEED_LOAD != 0)
    }

    /// Reads the registers of a task from memory, as FXSAVE stores them.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn saved(&self, view: MemoryView<'_>, task: Gva) -> Result<[u8; FXSAVE], StructureError> {
        let task = Structure::at(view, "task_struct", task)?;
        let state = match self.place {
            Place::Pointer { pointer, registers } => {
                let state = task.follow_always(pointer, "fpstate")?;
                state.member(registers)
            }
            Place::Embedded { registers } => task.member(registers),
        };
        let state = Structure::at(view, "fpregs_state", state)?;
        let mut area: [u8; FXSAVE] = state.array(0)?;
        let header: [u8; 16] = state.array(FXSAVE as u64)?;
        let word = |at| u64_at(&header, at).unwrap_or_default();
        // A kernel that uses FXSAVE writes no header.
        if (word(0), word(8)) != (0, 0) {
            initial_parts(&mut area, word(0));
        }
        Ok(area)
    }
}

/// Sets the parts that the CPU did not store to their initial values.
fn initial_parts(area: &mut [u8; FXSAVE], stored: u64) {
    let mut put = |from: usize, to: usize, bytes: &[u8]| {
        let places = area.iter_mut().take(to).skip(from);
        places
            .zip(bytes.iter().chain(std::iter::repeat(&0)))
            .for_each(|(place, byte)| *place = *byte);
    };
    if stored & X87 == 0 {
        put(0, MXCSR, &INITIAL_CONTROL.to_le_bytes());
        put(MXCSR + 8, XMM, &[]);
    }
    if stored & SSE == 0 {
        put(XMM, FXSAVE, &[]);
        put(MXCSR, MXCSR + 4, &INITIAL_MXCSR.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_was_not_stored_has_its_initial_values() {
        for (stored, control, mxcsr, x87, xmm) in [
            (3, 0xffff, 0xffff_ffff, 0xff, 0xff),
            (X87, 0xffff, INITIAL_MXCSR, 0xff, 0),
            (SSE, INITIAL_CONTROL, 0xffff_ffff, 0, 0xff),
            (0x204, INITIAL_CONTROL, INITIAL_MXCSR, 0, 0),
        ] {
            let mut area = [0xff; FXSAVE];
            initial_parts(&mut area, stored);
            let found = (
                u16::from_le_bytes([area[0], area[1]]),
                u32::from_le_bytes([area[24], area[25], area[26], area[27]]),
                area[40],
                area[200],
            );
            assert_eq!(found, (control, mxcsr, x87, xmm), "{stored:#x}");
        }
    }
}
