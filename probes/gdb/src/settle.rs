//! Pauses a guest where the registers of the process are known.
//!
//! In the first instructions of an entry into the kernel and the last of an exit, and while a
//! program is replaced, there are none that a client could take for the program's. A client that
//! is shown a thread without registers goes no further.

use std::thread;
use std::time::Duration;

use vmm::machine::Paused;

use crate::subject::Subject;

/// The number of pauses that are tried. A thread may stay in such a place: it waits for a disk that
/// has the next program.
const MOST_PAUSES: usize = 100;
/// The time for which the guest goes on behind the first pause, and at most. It doubles, so that a
/// guest on a busy host gets on, too.
const FIRST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(50);

/// Lets the guest go on for moments, until the threads that a client is shown first have registers,
/// or enough pauses were tried. Returns the last pause.
pub(crate) fn settle(subject: &dyn Subject, mut hold: Paused) -> Paused {
    let mut between = FIRST;
    for _ in 0..MOST_PAUSES {
        if has_registers(subject) {
            break;
        }
        subject.goes_on();
        drop(hold);
        thread::sleep(between);
        between = LONGEST.min(between * 2);
        hold = subject.guest().machine().pause();
    }
    hold
}

/// Checks whether the registers are known of the first thread and of those that run. A thread that
/// exits needs none.
fn has_registers(subject: &dyn Subject) -> bool {
    let threads = subject.threads().unwrap_or_default();
    let mut shown = threads
        .iter()
        .enumerate()
        .filter(|(at, thread)| *at == 0 || thread.is_running);
    shown.all(|(_, thread)| {
        let registers = subject.registers(thread.number);
        thread.is_exiting || registers.is_ok_and(|registers| registers.saved.is_some())
    })
}
