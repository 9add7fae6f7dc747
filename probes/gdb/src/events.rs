//! Signals, exits, children and new programs of the process, seen where the kernel delivers, begins
//! and makes them; and panics of the kernel.
//!
//! A kernel without the tracepoint of signals shows those of faults alone: it runs a process
//! through all others without a stop.

use gdbstub::common::Signal;
use iced_x86::{Decoder, DecoderOptions, FlowControl};
use probes::name::ProbePattern;
use probes::probe::Probe;
use probes::provider;

use crate::breakpoints::Breakpoints;
use crate::fork_exec::EventFeatures;
use crate::stops::Cause;
use crate::subject::{DebugError, Subject};

/// The tracepoint of get_signal(), where a signal is taken from those that wait.
const DELIVERED: &str = "tracepoint:signal:signal_deliver";
/// The function that sends a thread the signal for a fault of its own.
const FAULTED: &str = "kprobe:force_sig_info_to_task:entry";
/// The function by which a thread ends.
const EXITS: &str = "kprobe:do_exit:entry";
/// The function that lets a new task run, called by the one that has made it (kernel/sched/core.c).
const CHILDREN: &str = "kprobe:wake_up_new_task:entry";
/// The returns of the system calls that make a process run another program.
const PROGRAMS: &str = "syscall:execve*:return";
/// The function by which the kernel gives up.
const PANICS: &str = "panic";
/// The bytes of its first instructions.
const PANIC_CODE: usize = 64;
/// GDB's numbers of Linux's signals 1 to 31 (include/gdb/signals.def of GDB).
const SIGNALS: [u8; 31] = [
    1, 2, 3, 4, 5, 6, 10, 8, 9, 30, 11, 31, 13, 14, 15, 143, 20, 19, 17, 18, 21, 22, 16, 24, 25,
    26, 27, 28, 23, 32, 12,
];
/// GDB's number of a signal that it does not know.
const UNKNOWN: u8 = 143;
/// The first real-time signals of Linux and GDB's numbers of them: 32 has one of its own, 33 to 63
/// follow each other, and so do those from 64.
const REAL_TIME: [(u64, u8); 3] = [(64, 78), (33, 45), (32, 77)];

/// Stops the process at its signals and at the exit of its threads. Returns one sentence for each
/// event that cannot be seen.
///
/// # Errors
/// If a trap cannot be armed.
pub(crate) fn watch(
    subject: &dyn Subject,
    breakpoints: &mut Breakpoints,
) -> Result<Vec<String>, DebugError> {
    let mut unseen = Vec::new();
    let mut hold = |place, cause| -> Result<bool, DebugError> {
        let probes = find(subject, place);
        for probe in &probes {
            breakpoints.hold_at(subject, probe, None, cause)?;
        }
        Ok(!probes.is_empty())
    };
    if !hold(DELIVERED, Cause::Signal)? {
        unseen.push(match hold(FAULTED, Cause::Fault)? {
            true => "only the signals of faults are seen: the guest's kernel has no tracepoint signal:signal_deliver",
            false => "no signal is seen: the guest's kernel has no tracepoint signal:signal_deliver",
        });
    }
    if !hold(EXITS, Cause::Exit)? {
        unseen.push("the process's end is not seen: the guest's kernel has no function do_exit");
    }
    Ok(unseen.into_iter().map(str::to_owned).collect())
}

/// Stops the process at these forks and execs. Returns those that can be seen.
///
/// # Errors
/// If a trap cannot be armed.
pub(crate) fn watch_forks_and_execs(
    subject: &dyn Subject,
    breakpoints: &mut Breakpoints,
    wanted: EventFeatures,
) -> Result<EventFeatures, DebugError> {
    let mut hold = |is_wanted: bool, place, cause| -> Result<bool, DebugError> {
        let probes = match is_wanted {
            true => find(subject, place),
            false => Vec::new(),
        };
        for probe in &probes {
            breakpoints.hold_at(subject, probe, None, cause)?;
        }
        Ok(!probes.is_empty())
    };
    Ok(EventFeatures {
        forks: hold(wanted.forks, CHILDREN, Cause::Child)?,
        execs: hold(wanted.execs, PROGRAMS, Cause::Program)?,
    })
}

/// Stops the kernel where it gives up. Returns one sentence if that cannot be seen.
///
/// The machine's own trap is at one of the first instructions of the function, so that of the
/// debugger is at the first other one.
pub(crate) fn watch_kernel(
    subject: &dyn Subject,
    breakpoints: &mut Breakpoints,
) -> Result<Vec<String>, DebugError> {
    let start = subject.guest().view().kernel.symbols.address_of(PANICS);
    let mut code = [0; PANIC_CODE];
    let read = match start {
        Some(start) => subject.read(0, start, &mut code)?,
        None => 0,
    };
    let code = code.get(..read).unwrap_or_default();
    let decoder = Decoder::with_ip(64, code, start.unwrap_or_default(), DecoderOptions::NONE);
    let straight = decoder
        .into_iter()
        .take_while(|instruction| instruction.flow_control() == FlowControl::Next);
    for instruction in straight {
        let probe = subject.probe_at(instruction.ip())?;
        let held = probe.map(|probe| breakpoints.hold_at(subject, &probe, None, Cause::Panic));
        if let Some(Ok(_)) = held {
            return Ok(Vec::new());
        }
    }
    let unseen = "a panic does not stop the kernel: it has no function panic() that can be trapped";
    Ok(vec![unseen.to_owned()])
}

/// Returns the probes of a place in the kernel, or none.
fn find(subject: &dyn Subject, place: &str) -> Vec<Probe> {
    let pattern = ProbePattern::parse(place).ok();
    let probes = pattern.map(|pattern| provider::find(subject.guest(), &pattern));
    probes.and_then(Result::ok).unwrap_or_default()
}

/// Returns GDB's number of a signal of Linux.
pub(crate) fn signal(number: u64) -> Signal {
    let usual = number
        .checked_sub(1)
        .and_then(|at| usize::try_from(at).ok());
    let usual = usual.and_then(|at| SIGNALS.get(at)).copied();
    let real_time = || {
        let (first, from) = REAL_TIME.iter().find(|(first, _)| number >= *first)?;
        let behind = u8::try_from(number.checked_sub(*first)?).ok()?;
        from.checked_add(behind)
    };
    Signal(usual.or_else(real_time).unwrap_or(UNKNOWN))
}

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Exited(u8),
    Killed(Signal),
}

/// Returns the end that the argument of do_exit() stands for (wait(2)).
pub(crate) fn ending(code: u64) -> Ending {
    match code & 0x7f {
        0 => Ending::Exited((code >> 8) as u8),
        number => Ending::Killed(signal(number)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_and_ends_have_the_clients_numbers() {
        for (linux, expected) in [
            (1, Signal::SIGHUP),
            (5, Signal::SIGTRAP),
            (7, Signal::SIGBUS),
            (8, Signal::SIGFPE),
            (10, Signal::SIGUSR1),
            (11, Signal::SIGSEGV),
            (12, Signal::SIGUSR2),
            (17, Signal::SIGCHLD),
            (18, Signal::SIGCONT),
            (19, Signal::SIGSTOP),
            (23, Signal::SIGURG),
            (29, Signal::SIGIO),
            (31, Signal::SIGSYS),
            (32, Signal::SIG32),
            (33, Signal::SIG33),
            (63, Signal::SIG63),
            (64, Signal::SIG64),
            (0, Signal(UNKNOWN)),
            (u64::MAX, Signal(UNKNOWN)),
        ] {
            assert_eq!(signal(linux), expected, "{linux}");
        }
        for (code, expected) in [
            (0, Ending::Exited(0)),
            (3 << 8, Ending::Exited(3)),
            (11, Ending::Killed(Signal::SIGSEGV)),
            (0x80 | 6, Ending::Killed(Signal::SIGABRT)),
        ] {
            assert_eq!(ending(code), expected, "{code:#x}");
        }
    }
}
