//! SSE exceptions of an instruction that runs on the host CPU, where they are all masked.
//!
//! A masked exception leaves its flag in MXCSR. One that the guest has unmasked is known by that, and its result is
//! thrown away. Sources: Intel SDM volume 1, 10.2.3 (MXCSR) and 11.5.2 (SIMD floating-point exception conditions).

/// The exception flags, bits 0 to 5.
const FLAGS: u32 = 0x3f;
/// Invalid operation, denormal operand, division by zero: found before anything is computed.
const FOUND_BEFORE: u32 = 0b111;
/// Underflow.
const UNDERFLOW: u32 = 1 << 4;
/// An exception is masked where its bit is set, so many bits above its flag.
const MASK_SHIFT: u32 = 7;
/// Tiny results become zero.
const FLUSH_TO_ZERO: u32 = 1 << 15;
/// Bits that a guest may choose: exception flags, DAZ, rounding, FZ, and the masks.
const ALLOWED: u32 = 0xffff;

/// What a guest wants of the exceptions of one instruction.
pub(super) struct Exceptions {
    guest: u32,
    unmasked: u32,
}

impl Exceptions {
    /// Reads the guest's MXCSR; `None` if it has bits whose meaning is not known.
    pub(super) fn of(guest: u32) -> Option<Self> {
        let unmasked = !(guest >> MASK_SHIFT) & FLAGS;
        (guest & !ALLOWED == 0).then_some(Self { guest, unmasked })
    }

    /// Returns the MXCSR for the host CPU: all masked, and no flag set whose coming must be seen.
    pub(super) fn to_run_with(&self) -> u32 {
        if self.unmasked == 0 {
            return self.guest;
        }
        let mut mxcsr = (self.guest | FLAGS << MASK_SHIFT) & !FLAGS;
        if self.unmasked & UNDERFLOW != 0 {
            // A masked underflow is flagged only if it is inexact too, an unmasked one is raised for each tiny result.
            // Such results are flagged when they are flushed, which changes no other.
            mxcsr |= FLUSH_TO_ZERO;
        }
        mxcsr
    }

    /// Returns the guest's MXCSR after the instruction, given what the host CPU has left: as an error if it has raised
    /// an exception that the guest has unmasked.
    pub(super) fn after(&self, host: u32) -> Result<u32, u32> {
        if self.unmasked == 0 {
            return Ok(host);
        }
        let raised = host & FLAGS;
        if raised & self.unmasked == 0 {
            return Ok(self.guest | raised);
        }
        // Where an operand is refused nothing is computed that could overflow.
        let before = raised & FOUND_BEFORE;
        Err(match before & self.unmasked {
            0 => self.guest | raised,
            _ => self.guest | before,
        })
    }
}
