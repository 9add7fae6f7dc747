//! Telling why a run ended, with symbols where the kernel is known.

use introspect::Gva;
use introspect::kernel::symbols::Symbols;
use introspect::x86_64::virtual_memory::{read_c_string, read_u64};
use vmm::memory::GuestRam;
use vmm::{RunEnd, VcpuRegisters};

use crate::guest_kernel::symbolize;
use crate::report::{Failure, say};

/// Longest panic message taken from the guest.
const LONGEST_MESSAGE: usize = 256;

/// Reports the end of a run. A guest that ended by its own will, or because it was asked to, is no failure.
///
/// # Errors
/// If the guest crashed or the host failed.
pub fn report(end: &RunEnd, symbols: Option<&Symbols>, ram: &GuestRam) -> Result<(), Failure> {
    if end.is_orderly() {
        say(end);
        return Ok(());
    }
    if let Some(registers) = registers(end) {
        show(registers, symbols);
    }
    Err(Failure::new(message(end, symbols, ram)))
}

/// The registers of a crash, as far as they were kept.
pub fn registers(end: &RunEnd) -> Option<&VcpuRegisters> {
    match end {
        RunEnd::Panic(panic) => Some(&panic.registers),
        RunEnd::TripleFault { registers, .. } => Some(registers),
        _ => None,
    }
}

/// What has happened, with its place.
pub fn message(end: &RunEnd, symbols: Option<&Symbols>, ram: &GuestRam) -> String {
    match end {
        RunEnd::Panic(panic) => {
            let registers = &panic.registers;
            let space = registers.address_space();
            let mut message = format!("{end}");
            let mut buffer = [0; LONGEST_MESSAGE];
            if let Ok(format) = read_c_string(ram, space, Gva(registers.regs.rdi), &mut buffer) {
                let text = String::from_utf8_lossy(format.bytes).into_owned();
                message += &format!(": {}", text.trim_end().escape_debug());
            }
            if let Ok(caller) = read_u64(ram, space, Gva(registers.regs.rsp)) {
                // The call itself: what follows a call that never returns may be another function.
                let call = caller.wrapping_sub(1);
                message += &format!(", called from {}", symbolize(symbols, call));
            }
            message
        }
        RunEnd::TripleFault { registers, .. } => {
            format!("{end} at {}", symbolize(symbols, registers.regs.rip))
        }
        RunEnd::UnknownInstruction { address, .. } => {
            format!("{end} in {}", symbolize(symbols, address.0))
        }
        _ => end.to_string(),
    }
}

fn show(registers: &VcpuRegisters, symbols: Option<&Symbols>) {
    say(format_args!(
        "rip is {}",
        symbolize(symbols, registers.regs.rip)
    ));
    for line in registers.to_string().lines() {
        say(line);
    }
}
