//! Support for tests of the emulator, this crate's own and those against a CPU (feature
//! `test-utils`).
//!
//! It has a vCPU made of plain memory, numbers and instructions to try, and the results of the
//! host's CPU.
#![allow(clippy::unwrap_used)]

pub mod builder;
pub mod oracle;

use std::io;

use iced_x86::Instruction;
use kvm_bindings::kvm_regs;

use super::{ControlRegister, Environment, FxState, MemoryFault, Prepared, Segment, StateError};

/// Numbers at which arithmetic changes its behaviour.
pub const EDGES: [u64; 14] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0x8000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    1 << 63,
    u64::MAX >> 1,
    u64::MAX,
];

/// The memory and state of a vCPU, by default one in kernel mode. Addresses are physical, and there
/// is nothing but its memory.
#[derive(Clone, PartialEq, Debug)]
pub struct Machine {
    /// The address of the memory.
    pub base: u64,
    /// The memory, all of which can be read.
    pub memory: Vec<u8>,
    /// The number of bytes at its start that can also be written.
    pub writable: usize,
    /// The base of FS.
    pub fs: u64,
    /// The base of GS.
    pub gs: u64,
    /// The x87 and SSE state.
    pub fx: FxState,
    /// The privilege level.
    pub cpl: u8,
    /// CR0.
    pub cr0: u64,
    /// CR4.
    pub cr4: u64,
    /// XCR0; `None` if it cannot be read.
    pub xcr0: Option<u64>,
    /// Whether interrupts are held off until the next instruction is done.
    pub shadow: bool,
    /// Whether the vCPU waits for an interrupt.
    pub halted: bool,
    /// The number of exchanges that fail, as if another CPU had been faster.
    pub races: usize,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            base: Self::MEMORY,
            memory: vec![0; Self::READABLE],
            writable: Self::WRITABLE,
            fs: 0,
            gs: 0,
            fx: FxState::default(),
            cpl: 0,
            // PG, WP, NE, MP, PE
            cr0: 0x8001_0023,
            // OSXSAVE, FSGSBASE, OSFXSR, PAE
            cr4: 0x5_0220,
            xcr0: None,
            shadow: false,
            halted: false,
            races: 0,
        }
    }
}

impl Machine {
    /// The default address of the memory.
    pub const MEMORY: u64 = 0x1000;
    /// The default size of the memory in bytes, three pages.
    pub const READABLE: usize = 0x3000;
    /// The default number of writable bytes, two pages.
    pub const WRITABLE: usize = 0x2000;

    fn bytes(
        &mut self,
        address: u64,
        length: usize,
        write: bool,
    ) -> Result<&mut [u8], MemoryFault> {
        let end = if write {
            self.writable
        } else {
            self.memory.len()
        };
        let reachable = self.memory.get_mut(..end).unwrap_or_default();
        let start = usize::try_from(address.wrapping_sub(self.base)).unwrap_or(usize::MAX);
        let bytes = reachable.get_mut(start..start.saturating_add(length));
        bytes.ok_or(MemoryFault { address, write })
    }
}

impl Environment for Machine {
    fn read(&mut self, address: u64, buf: &mut [u8]) -> Result<(), MemoryFault> {
        buf.copy_from_slice(self.bytes(address, buf.len(), false)?);
        Ok(())
    }

    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), MemoryFault> {
        self.bytes(address, data.len(), true)?.copy_from_slice(data);
        Ok(())
    }

    fn compare_exchange(
        &mut self,
        address: u64,
        old: &[u8],
        new: &[u8],
    ) -> Result<bool, MemoryFault> {
        let race = self.races > 0;
        self.races = self.races.saturating_sub(1);
        let bytes = self.bytes(address, old.len(), true)?;
        if race {
            // Another CPU counts up.
            bytes[0] = bytes[0].wrapping_add(1);
            return Ok(false);
        }
        assert_eq!(bytes, old, "exchange with a value that was never there");
        bytes.copy_from_slice(new);
        Ok(true)
    }

    fn segment_base(&mut self, segment: Segment) -> Result<u64, StateError> {
        Ok(match segment {
            Segment::Fs => self.fs,
            Segment::Gs => self.gs,
        })
    }

    fn set_segment_base(&mut self, segment: Segment, base: u64) -> Result<(), StateError> {
        match segment {
            Segment::Fs => self.fs = base,
            Segment::Gs => self.gs = base,
        }
        Ok(())
    }

    fn fx_state(&mut self) -> Result<FxState, StateError> {
        Ok(self.fx.clone())
    }

    fn set_fx_state(&mut self, state: &FxState) -> Result<(), StateError> {
        self.fx = state.clone();
        Ok(())
    }

    fn cpl(&mut self) -> Result<u8, StateError> {
        Ok(self.cpl)
    }

    fn control_register(&mut self, register: ControlRegister) -> Result<u64, StateError> {
        match register {
            ControlRegister::Cr0 => Ok(self.cr0),
            ControlRegister::Cr4 => Ok(self.cr4),
            ControlRegister::Xcr0 => self.xcr0.ok_or_else(|| StateError {
                action: "read XCR0",
                source: io::ErrorKind::Unsupported.into(),
            }),
        }
    }

    fn inhibit_interrupts(&mut self) -> Result<(), StateError> {
        self.shadow = true;
        Ok(())
    }

    fn halt(&mut self) -> Result<(), StateError> {
        (self.halted, self.shadow) = (true, false);
        Ok(())
    }
}

/// Runs an instruction as a trap prepares it, at the RIP of `regs`. Returns `None` if it is left to
/// the emulator.
///
/// # Panics
/// If it is left to the emulator and has done something.
#[must_use]
pub fn prepared(
    insn: &Instruction,
    regs: &kvm_regs,
    machine: &Machine,
) -> Option<(kvm_regs, Machine)> {
    let (mut regs, mut machine) = (*regs, machine.clone());
    let before = (regs, machine.clone());
    let store = |at: u64, value: u64| machine.write(at, &value.to_le_bytes()).is_ok();
    if Prepared::of(insn)?.execute(&mut regs, store) {
        return Some((regs, machine));
    }
    assert_eq!(
        (regs, &machine),
        (before.0, &before.1),
        "`{insn}` was refused and did something"
    );
    None
}

/// Returns the instruction as it is at another address.
#[must_use]
pub fn moved(insn: &Instruction, ip: u64) -> Option<Instruction> {
    super::moved(insn, ip)
}
