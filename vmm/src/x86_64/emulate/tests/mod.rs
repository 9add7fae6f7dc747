//! A vCPU made of plain memory, and the tests that run on it.
#![allow(clippy::unwrap_used)]

mod builder;
mod differential;
mod refusals;
mod simd;
mod table;

use std::io;

use kvm_bindings::kvm_regs;

use super::{
    ControlRegister, EmulateError, Environment, FxState, MemoryFault, Segment, StateError, decode,
    execute,
};

/// Where the instruction stands.
const IP: u64 = 0x40_0000;
/// First address of the memory that can be read and written, two pages.
const MEMORY: u64 = 0x1000;
/// Bytes of memory; a page follows that can only be read, and then nothing.
const WRITABLE: usize = 0x2000;
const READABLE: usize = 0x3000;

/// Memory and state of a kernel-mode vCPU.
#[derive(Clone, PartialEq, Debug)]
struct Machine {
    memory: Vec<u8>,
    fs: u64,
    gs: u64,
    fx: FxState,
    cpl: u8,
    cr0: u64,
    cr4: u64,
    shadow: bool,
    halted: bool,
    /// How many exchanges fail, as if another CPU had been faster.
    races: usize,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            memory: vec![0; READABLE],
            fs: 0,
            gs: 0,
            fx: FxState::default(),
            cpl: 0,
            // PG, WP, NE, MP, PE
            cr0: 0x8001_0023,
            // OSXSAVE, FSGSBASE, OSFXSR, PAE
            cr4: 0x5_0220,
            shadow: false,
            halted: false,
            races: 0,
        }
    }
}

impl Machine {
    fn bytes(
        &mut self,
        address: u64,
        length: usize,
        write: bool,
    ) -> Result<&mut [u8], MemoryFault> {
        let end = if write { WRITABLE } else { READABLE };
        let start = usize::try_from(address.wrapping_sub(MEMORY)).unwrap();
        match start.checked_add(length) {
            Some(stop) if stop <= end => Ok(&mut self.memory[start..stop]),
            _ => Err(MemoryFault { address, write }),
        }
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
            // another CPU counts up
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
            ControlRegister::Xcr0 => Err(StateError {
                action: "read XCR0",
                source: io::Error::from(io::ErrorKind::Unsupported),
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

/// Registers with RIP at [`IP`], RSP in memory and only the fixed flag set.
fn registers() -> kvm_regs {
    kvm_regs {
        rip: IP,
        rsp: MEMORY + 0x800,
        rflags: 2,
        ..Default::default()
    }
}

/// Decodes and executes, and checks on an error that nothing changed.
fn run(bytes: &[u8], regs: &mut kvm_regs, machine: &mut Machine) -> Result<(), EmulateError> {
    let instruction = decode(bytes, regs.rip).unwrap();
    let before = (*regs, machine.clone());
    let result = execute(&instruction, regs, machine);
    if result.is_err() {
        machine.races = before.1.races;
        assert_eq!(
            *regs, before.0,
            "`{instruction}` failed and changed registers"
        );
        assert_eq!(
            machine.memory, before.1.memory,
            "`{instruction}` failed and changed memory"
        );
        assert_eq!(
            machine.fx, before.1.fx,
            "`{instruction}` failed and changed the FPU state"
        );
        assert_eq!(
            (machine.fs, machine.gs, machine.shadow, machine.halted),
            (before.1.fs, before.1.gs, before.1.shadow, before.1.halted)
        );
    }
    result
}

/// `"48 89 e5"` as bytes.
fn hex(text: &str) -> Vec<u8> {
    text.split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}
