//! The emulator on a vCPU made of plain memory.
#![allow(clippy::unwrap_used)]

mod differential;
mod prepared;
mod refusals;
mod simd;
mod table;

use kvm_bindings::kvm_regs;

use super::test_utils::builder::IP;
use super::test_utils::{EDGES, Machine};
use super::{EmulateError, Environment, FxState, decode, execute};

/// The first address of the memory that can be read and written, two pages.
const MEMORY: u64 = Machine::MEMORY;
/// The size of memory in bytes. The last page can only be read.
const READABLE: usize = Machine::READABLE;

/// Returns registers with RIP at [`IP`], RSP in memory and only the fixed flag set.
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
    if let Err(error) = &result {
        machine.races = before.1.races;
        assert_eq!(
            *regs, before.0,
            "`{instruction}` failed and changed registers"
        );
        assert_eq!(
            machine.memory, before.1.memory,
            "`{instruction}` failed and changed memory"
        );
        let mut fx = machine.fx.clone();
        if matches!(error, EmulateError::Exception { vector: 19, .. }) {
            // #XM reports its reason in MXCSR.
            fx.set_u32(FxState::MXCSR, before.1.fx.mxcsr());
        }
        assert_eq!(
            fx, before.1.fx,
            "`{instruction}` failed and changed the FPU state"
        );
        assert_eq!(
            (machine.fs, machine.gs, machine.shadow, machine.halted),
            (before.1.fs, before.1.gs, before.1.shadow, before.1.halted)
        );
    }
    result
}

/// Parses `"48 89 e5"` to bytes.
fn hex(text: &str) -> Vec<u8> {
    text.split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}
