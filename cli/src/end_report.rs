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
    match end {
        RunEnd::Panic(panic) => {
            let registers = &panic.registers;
            show(registers, symbols);
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
            Err(Failure::new(message))
        }
        RunEnd::TripleFault { registers, .. } => {
            show(registers, symbols);
            let place = symbolize(symbols, registers.regs.rip);
            Err(Failure::new(format_args!("{end} at {place}")))
        }
        RunEnd::UnknownInstruction { address, .. } => {
            let place = symbolize(symbols, address.0);
            Err(Failure::new(format_args!("{end} in {place}")))
        }
        _ => Err(Failure::new(end)),
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
