//! The machine around an emulated instruction, besides the general registers.
//!
//! The implementer owns address translation, access rights (CPL, SMAP, read-only pages), dirty
//! tracking and the atomicity of [`Environment::compare_exchange`]. The emulator uses canonical
//! linear addresses only, and ranges that do not wrap.

use std::io;

/// An access to memory that the vCPU may not make, or that is not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("linear address {address:#x} cannot be {}", if *.write { "written" } else { "read" })]
pub struct MemoryFault {
    /// The linear address of the first byte that failed: CR2 of the #PF.
    pub address: u64,
    /// Whether the access was a write.
    pub write: bool,
}

/// An error of reading or writing a vCPU's state outside the general registers.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} of the vCPU: {source}")]
pub struct StateError {
    /// The failed action: "read the FPU state", "write FS base".
    pub action: &'static str,
    /// The host's error.
    pub source: io::Error,
}

/// The two segments that have a base in 64-bit mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// FS, the user's thread-local data.
    Fs,
    /// GS, the kernel's per-CPU data while in kernel mode.
    Gs,
}

/// The control registers that decide whether an instruction is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlRegister {
    /// CR0: MP, EM, TS.
    Cr0,
    /// CR4: OSFXSR, LA57, FSGSBASE, OSXSAVE, CET.
    Cr4,
    /// XCR0, the XSAVE features that are on.
    Xcr0,
}

/// The x87 and SSE state as `FXSAVE64` stores it (SDM volume 1, table 10-2): 512 bytes, MXCSR at
/// 24, XMM0 at 160.
///
/// KVM returns the same bytes as the first 512 of `KVM_GET_XSAVE`.
#[derive(Clone, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct FxState(pub [u8; 512]);

impl std::fmt::Debug for FxState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FxState(mxcsr {:#x})", self.mxcsr())
    }
}

impl Default for FxState {
    /// Returns the state after reset and `FNINIT`: all x87 registers empty, all exceptions masked.
    fn default() -> Self {
        let mut state = Self([0; 512]);
        state.set_u16(Self::FCW, 0x37f);
        state.set_u32(Self::MXCSR, 0x1f80);
        state.set_u32(Self::MXCSR_MASK, 0xffff);
        state
    }
}

impl FxState {
    pub(super) const FCW: usize = 0;
    pub(super) const FSW: usize = 2;
    pub(super) const MXCSR: usize = 24;
    pub(super) const MXCSR_MASK: usize = 28;
    /// The sixteen XMM registers.
    pub(super) const XMM: std::ops::Range<usize> = 160..416;

    pub(super) fn mxcsr(&self) -> u32 {
        self.u32(Self::MXCSR)
    }

    pub(super) fn u16(&self, at: usize) -> u16 {
        let mut bytes = [0; 2];
        bytes.copy_from_slice(&self.0[at..at + 2]);
        u16::from_le_bytes(bytes)
    }

    pub(super) fn u32(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.0[at..at + 4]);
        u32::from_le_bytes(bytes)
    }

    pub(super) fn set_u16(&mut self, at: usize, value: u16) {
        self.0[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    pub(super) fn set_u32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
}

/// A vCPU's memory and its state outside the general registers.
pub trait Environment {
    /// Fills `buf`, at most 512 bytes, from linear `address`.
    ///
    /// # Errors
    /// If the vCPU may not read all of it at its current privilege.
    fn read(&mut self, address: u64, buf: &mut [u8]) -> Result<(), MemoryFault>;

    /// Writes `data`, at most 512 bytes, to linear `address`.
    ///
    /// If the range crosses a page boundary, both pages are checked before the first byte is
    /// written.
    ///
    /// # Errors
    /// If the vCPU may not write all of it at its current privilege. Nothing was written then.
    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), MemoryFault>;

    /// Writes `new` to linear `address` if it holds `old`, and returns whether it did.
    ///
    /// `old` and `new` have the same length: 1, 2, 4, 8 or 16 bytes. The exchange is atomic towards
    /// other vCPUs if `address` is a multiple of the length. Any other range (a split lock) is the
    /// implementer's choice.
    ///
    /// # Errors
    /// If the vCPU may not write all of it at its current privilege. Nothing was written then.
    fn compare_exchange(
        &mut self,
        address: u64,
        old: &[u8],
        new: &[u8],
    ) -> Result<bool, MemoryFault>;

    /// Does [`Self::compare_exchange`] as a read and a write, between which another vCPU may write.
    ///
    /// It is for split locks, and for memory that nobody else has.
    ///
    /// # Errors
    /// As [`Self::compare_exchange`], and for more than 16 bytes.
    fn exchange_in_two_steps(
        &mut self,
        address: u64,
        old: &[u8],
        new: &[u8],
    ) -> Result<bool, MemoryFault> {
        let mut now = [0; 16];
        let now = now.get_mut(..old.len()).ok_or(MemoryFault {
            address,
            write: true,
        })?;
        self.read(address, now)?;
        if now != old {
            return Ok(false);
        }
        self.write(address, new)?;
        Ok(true)
    }

    /// Returns the base address of a segment. Every access through it calls this, so implementers
    /// should return a copy.
    ///
    /// # Errors
    /// If the vCPU's state cannot be read.
    fn segment_base(&mut self, segment: Segment) -> Result<u64, StateError>;

    /// Sets the base address of a segment. `base` is canonical.
    ///
    /// # Errors
    /// If the vCPU's state cannot be written. The base is unchanged then.
    fn set_segment_base(&mut self, segment: Segment, base: u64) -> Result<(), StateError>;

    /// Returns the x87 and SSE state.
    ///
    /// # Errors
    /// If the vCPU's state cannot be read.
    fn fx_state(&mut self) -> Result<FxState, StateError>;

    /// Replaces the x87 and SSE state.
    ///
    /// Other state components, such as the upper halves of the YMM registers, stay. The x87 and SSE
    /// components count as in use from then on (XSTATE_BV bits 0 and 1).
    ///
    /// # Errors
    /// If the vCPU's state cannot be written. It is unchanged then.
    fn set_fx_state(&mut self, state: &FxState) -> Result<(), StateError>;

    /// Returns the current privilege level: 0 for the kernel, 3 for programs.
    ///
    /// # Errors
    /// If the vCPU's state cannot be read.
    fn cpl(&mut self) -> Result<u8, StateError>;

    /// Returns the value of a control register.
    ///
    /// # Errors
    /// If the vCPU's state cannot be read.
    fn control_register(&mut self, register: ControlRegister) -> Result<u64, StateError>;

    /// Holds interrupts off until the next instruction is done (the shadow of STI;
    /// `interrupt.shadow` of `KVM_SET_VCPU_EVENTS`).
    ///
    /// # Errors
    /// If the vCPU's state cannot be written.
    fn inhibit_interrupts(&mut self) -> Result<(), StateError>;

    /// Halts the vCPU until an interrupt comes, as a completed HLT does (`KVM_MP_STATE_HALTED` of
    /// `KVM_SET_MP_STATE`). Interrupts that an STI before it held off may come.
    ///
    /// # Errors
    /// If the vCPU's state cannot be written.
    fn halt(&mut self) -> Result<(), StateError>;
}
