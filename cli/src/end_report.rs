//! The report on a run's end, with symbols if the kernel is known.

use std::time::Duration;

use introspect::Gva;
use introspect::kernel::symbols::Symbols;
use introspect::x86_64::virtual_memory::{read_c_string, read_u64};
use vmm::machine::PanicReport;
use vmm::snapshot::Checks;
use vmm::{RunEnd, VcpuRegisters};

use crate::guest_kernel::symbolize;
use crate::protocol::end::MachineEnd;
use crate::report::{Failure, printable, say, show};
use crate::vm::Vm;

/// The longest panic message read from the guest, in bytes.
const LONGEST_MESSAGE: usize = 256;
/// Linux's words before the message of a panic.
const PANIC: &str = "Kernel panic - not syncing: ";
/// The words before those where Linux repeats the message at its end.
const ENDS: &str = "[ end ";
/// The number of console lines shown of a crash; more if a panic began before them.
const CONSOLE_LINES: usize = 20;

/// Reports the end of a run. A guest that ended by itself or by request is no failure.
/// `with_console` means that the console's end is not on the screen already.
///
/// # Errors
/// If the guest crashed or the host failed.
pub fn report(
    end: &RunEnd,
    symbols: Option<&Symbols>,
    vm: &Vm,
    with_console: bool,
) -> Result<(), Failure> {
    let checked = vm.checks.as_ref().map(Checks::stats);
    if let Some(stats) = checked.filter(|stats| !stats.damaged.is_empty()) {
        say(format_args!(
            "the guest ran on damaged memory: {} of {} checked pieces of its snapshot differ from the saved ones; see \
             `exotrace snapshot --verify`",
            stats.damaged.len(),
            stats.checked
        ));
    }
    if end.is_orderly() {
        say(end);
        return Ok(());
    }
    if let Some(registers) = registers(end) {
        show_registers(registers, symbols);
    }
    let lines = vm.console.lines();
    if with_console && !lines.is_empty() {
        say("the console's last lines:");
        show_lines(lines.get(first_shown(&lines)..));
    }
    Err(Failure::new(message(end, symbols, vm)))
}

impl MachineEnd {
    /// Returns the end of a machine, if it has ended.
    pub fn of(vm: &Vm, symbols: Option<&Symbols>) -> Option<Self> {
        let end = vm.machine.wait(Some(Duration::ZERO))?;
        Some(Self {
            message: message(&end, symbols, vm),
            is_orderly: end.is_orderly(),
        })
    }

    /// Reports the end in a client.
    ///
    /// # Errors
    /// If the guest crashed or the host failed.
    pub fn report(end: Option<&Self>) -> Result<(), Failure> {
        let Some(Self {
            message,
            is_orderly,
        }) = end
        else {
            return Ok(());
        };
        let told = format!("the machine has ended: {message}");
        match is_orderly {
            true => say(told),
            false => return Err(Failure::new(told)),
        }
        Ok(())
    }
}

/// Returns the first line to show: the one in which a panic begins, or one near the end.
fn first_shown(lines: &[String]) -> usize {
    let panic = lines.iter().rposition(|line| panic_in(line).is_some());
    let last = lines.len().saturating_sub(CONSOLE_LINES);
    panic.map_or(last, |panic| panic.min(last))
}

/// Shows lines of the guest, which are free of cursor movements.
fn show_lines(lines: Option<&[String]>) {
    let lines = lines.unwrap_or_default().iter();
    let text: String = lines.map(|line| format!("  {line}\n")).collect();
    show(text.as_bytes());
}

/// Returns the registers of a crash, as far as they were kept.
pub fn registers(end: &RunEnd) -> Option<&VcpuRegisters> {
    match end {
        RunEnd::Panic(panic) => panic.registers.as_deref(),
        RunEnd::TripleFault { registers, .. } => registers.as_deref(),
        _ => None,
    }
}

/// Describes the end, with its place.
pub fn message(end: &RunEnd, symbols: Option<&Symbols>, vm: &Vm) -> String {
    match end {
        RunEnd::Panic(panic) => {
            let mut message = end.to_string();
            if let Some(text) = panic_text(panic, vm) {
                message += &format!(": {}", printable(text.trim_end()));
            }
            if let Some(call) = panic_call(panic, vm) {
                message += &format!(", called from {}", symbolize(symbols, call));
            }
            message
        }
        RunEnd::TripleFault {
            registers: Some(registers),
            ..
        } => {
            format!("{end} at {}", symbolize(symbols, registers.regs.rip))
        }
        _ => end.to_string(),
    }
}

/// Returns the kernel's message: from its log, else from its console, else its format string.
fn panic_text(panic: &PanicReport, vm: &Vm) -> Option<String> {
    let printed = || printed_text(&vm.console.lines());
    panic.text.clone().or_else(printed).or_else(|| {
        let registers = panic.registers.as_deref()?;
        let mut buffer = [0; LONGEST_MESSAGE];
        let format = read_c_string(
            vm.machine.ram(),
            registers.address_space(),
            Gva(registers.regs.rdi),
            &mut buffer,
        );
        Some(String::from_utf8_lossy(format.ok()?.bytes).into_owned())
    })
}

/// Returns the message of the last panic in lines of a console.
fn printed_text(lines: &[String]) -> Option<String> {
    let mut lines = lines.iter().rev();
    lines.find_map(|line| panic_in(line).map(str::to_owned))
}

/// Returns the message of the panic that begins in a line of a console.
fn panic_in(line: &str) -> Option<&str> {
    let (before, text) = line.split_once(PANIC)?;
    (!before.ends_with(ENDS)).then_some(text)
}

/// Returns the address of the call of `panic`, if its entry was seen.
fn panic_call(panic: &PanicReport, vm: &Vm) -> Option<u64> {
    let registers = panic.registers.as_deref()?;
    let stack = Gva(registers.regs.rsp);
    let caller = read_u64(vm.machine.ram(), registers.address_space(), stack).ok()?;
    // The call itself: the code after a call that never returns may be another function.
    Some(caller.wrapping_sub(1))
}

fn show_registers(registers: &VcpuRegisters, symbols: Option<&Symbols>) {
    say(format_args!(
        "rip is {}",
        symbolize(symbols, registers.regs.rip)
    ));
    for line in registers.to_string().lines() {
        say(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_panic_the_console_is_shown_from_its_first_line() {
        let lines = |before: usize, after: usize| {
            let mut lines = vec!["boots".to_owned(); before];
            lines.push(format!("[    1.2] {PANIC}no root"));
            lines.extend(vec!["[    1.2]  start_kernel+0x1/0x2".to_owned(); after]);
            lines.push(format!("[    1.3] ---[ end {PANIC}no root ]---"));
            lines
        };
        for (before, after, shown) in [(10, 40, 42), (30, 5, CONSOLE_LINES), (3, 2, 7)] {
            let lines = lines(before, after);
            assert_eq!(lines.len() - first_shown(&lines), shown, "{before} {after}");
        }
        let without = vec!["boots".to_owned(); 50];
        assert_eq!(first_shown(&without), 30);
        assert_eq!(first_shown(&[]), 0);
    }

    #[test]
    fn the_message_of_a_panic_is_read_off_the_console() {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        for (console, expected) in [
            ("", None),
            ("Run /init as init process\nreboot: Restarting system", None),
            (
                "[    1.2] Kernel panic - not syncing: VFS: no root\n[    1.3] CPU: 0\n\
                 [    1.4] ---[ end Kernel panic - not syncing: VFS: no root ]---",
                Some("VFS: no root"),
            ),
            (
                "Kernel panic - not syncing: one\nKernel panic - not syncing: two",
                Some("two"),
            ),
        ] {
            let found = printed_text(&lines(console));
            assert_eq!(found.as_deref(), expected, "{console}");
        }
    }
}
