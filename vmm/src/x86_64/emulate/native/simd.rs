//! SSE exceptions of an instruction that runs on the host CPU, where they are all masked.
//!
//! A masked exception leaves its flag in MXCSR. By that flag an exception that the guest has
//! unmasked is detected, and the result is discarded. Sources: Intel SDM volume 1, 10.2.3 (MXCSR)
//! and 11.5.2 (SIMD floating-point exception conditions).

/// The exception flags, bits 0 to 5.
const FLAGS: u32 = 0x3f;
/// Invalid operation, denormal operand and division by zero: detected before the computation.
const FOUND_BEFORE: u32 = 0b111;
/// Underflow.
const UNDERFLOW: u32 = 1 << 4;
/// The distance in bits from an exception's flag to its mask bit. The exception is masked if that
/// is set.
const MASK_SHIFT: u32 = 7;
/// The bit that makes tiny results zero.
const FLUSH_TO_ZERO: u32 = 1 << 15;
/// The bits that a guest may choose: exception flags, DAZ, rounding, FZ, and the masks.
const ALLOWED: u32 = 0xffff;

/// The guest's choices about the exceptions of one instruction.
pub(super) struct Exceptions {
    guest: u32,
    unmasked: u32,
}

impl Exceptions {
    /// Reads the guest's MXCSR. Returns `None` if it has bits of unknown meaning.
    pub(super) fn of(guest: u32) -> Option<Self> {
        let unmasked = !(guest >> MASK_SHIFT) & FLAGS;
        (guest & !ALLOWED == 0).then_some(Self { guest, unmasked })
    }

    /// Returns the MXCSR for the host CPU: all exceptions masked, and no flag set that must be seen
    /// to appear.
    pub(super) fn to_run_with(&self) -> u32 {
        if self.unmasked == 0 {
            return self.guest;
        }
        let mut mxcsr = (self.guest | FLAGS << MASK_SHIFT) & !FLAGS;
        if self.unmasked & UNDERFLOW != 0 {
            // A masked underflow is flagged only if it is inexact too. An unmasked one is raised
            // for each tiny result. Such results are flagged when they are flushed, which changes
            // no other.
            mxcsr |= FLUSH_TO_ZERO;
        }
        mxcsr
    }

    /// Returns the guest's MXCSR after the instruction, from the value that the host CPU has left.
    ///
    /// It is an error if the instruction has raised an exception that the guest has unmasked.
    pub(super) fn after(&self, host: u32) -> Result<u32, u32> {
        if self.unmasked == 0 {
            return Ok(host);
        }
        let raised = host & FLAGS;
        if raised & self.unmasked == 0 {
            return Ok(self.guest | raised);
        }
        // If an operand is refused, nothing is computed that could overflow.
        let before = raised & FOUND_BEFORE;
        Err(match before & self.unmasked {
            0 => self.guest | raised,
            _ => self.guest | before,
        })
    }
}
