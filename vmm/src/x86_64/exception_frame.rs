//! The frame that a CPU in 64-bit mode pushes for an exception.
//!
//! The error code of some exceptions lies below it and is not part of it. Source: Intel SDM volume
//! 3A, "64-Bit Mode Stack Frame".

/// The interrupted registers, from low to high addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExceptionFrame {
    pub(crate) rip: u64,
    pub(crate) cs: u64,
    pub(crate) rflags: u64,
    pub(crate) rsp: u64,
    pub(crate) ss: u64,
}

impl ExceptionFrame {
    /// The size on the stack in bytes.
    pub(crate) const SIZE: usize = 40;

    pub(crate) fn from_bytes(bytes: &[u8; Self::SIZE]) -> Self {
        let word = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[i * 8..i * 8 + 8]);
            u64::from_le_bytes(word)
        };
        Self {
            rip: word(0),
            cs: word(1),
            rflags: word(2),
            rsp: word(3),
            ss: word(4),
        }
    }
}
