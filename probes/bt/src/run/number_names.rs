//! Names of numbers: errors, signals and system calls of Linux on x86-64.

use std::io;

use probes::syscall_table;

use crate::program::NumberText;

/// The signals from 1 on (signal(7), x86-64).
const SIGNALS: [&str; 31] = [
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];
/// The first and last real-time signal.
const REAL_TIME: std::ops::RangeInclusive<i64> = 32..=64;

/// Returns the name of a number. A number without one is shown as such.
pub(super) fn name_of(kind: NumberText, number: i64) -> String {
    let found = match kind {
        NumberText::Error => Some(error(number)),
        NumberText::Signal => signal(number),
        NumberText::SystemCall => u64::try_from(number)
            .ok()
            .and_then(syscall_table::by_number)
            .map(|call| call.name.to_owned()),
    };
    found.unwrap_or_else(|| number.to_string())
}

/// Returns the text of strerror(3). The kernel returns errors as negative numbers.
fn error(number: i64) -> String {
    let number = i32::try_from(number.unsigned_abs()).unwrap_or(i32::MAX);
    let text = io::Error::from_raw_os_error(number).to_string();
    let end = text.rfind(" (os error ").unwrap_or(text.len());
    text.get(..end).unwrap_or_default().to_owned()
}

fn signal(number: i64) -> Option<String> {
    if REAL_TIME.contains(&number) {
        return Some(match number - REAL_TIME.start() {
            0 => "SIGRTMIN".to_owned(),
            above => format!("SIGRTMIN+{above}"),
        });
    }
    let at = usize::try_from(number.checked_sub(1)?).ok()?;
    SIGNALS.get(at).map(|name| (*name).to_owned())
}
