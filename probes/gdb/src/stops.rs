//! Hits that hold the machine until the debugger has reported them.
//!
//! A hit's program runs on the thread of a vCPU, which parks before its instruction. There is at
//! most one hit a vCPU, so the queue is bounded. Each has its hold: the machine goes on when the
//! last one is dropped.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use gdbstub::target::ext::breakpoints::WatchKind;
use parking_lot::Mutex;
use probes::engine::{HitOutcome, ProbeHit, Program};
use vmm::machine::Paused;

use crate::conditions::{self, Scene};
use crate::registers::general_in_order;
use crate::subject::NumberOfHit;

/// The cause of a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A breakpoint of the client.
    Breakpoint,
    /// The return of a function that the client has called.
    Returned,
    /// The end of a step.
    Step,
    /// A signal is about to be delivered.
    Signal,
    /// A signal is sent to the thread for a fault of its own.
    Fault,
    /// The kernel gives up.
    Panic,
    /// A thread begins to exit.
    Exit,
    /// A thread has made another one, or a process: `argument` is its `task_struct`.
    Child,
    /// A child for which a thread waited has a program of its own, or has ended.
    ChildLeft,
    /// A thread returns from the system call that has given it a new program, or has failed.
    Program,
    /// A thread has accessed watched memory: a piece that begins at `address`.
    Watch { address: u64, kind: WatchKind },
    /// A thread enters a system call, or returns from it.
    SystemCall { number: u32, returns: bool },
}

/// A hit that waits to be reported.
#[derive(Debug)]
pub(crate) struct Stop {
    pub(crate) cause: Cause,
    /// The number of the thread.
    pub(crate) thread: i32,
    /// The address of the instruction, of the program or the kernel.
    pub(crate) address: u64,
    /// The first argument of the kernel's function or tracepoint; of a fault, the signal.
    pub(crate) argument: u64,
    /// The result of the system call, at its return.
    pub(crate) returned: Option<u64>,
    /// Keeps the machine paused.
    pub(crate) hold: Option<Paused>,
}

#[derive(Debug, Default)]
struct Waiting {
    stops: VecDeque<Stop>,
    is_closed: bool,
}

/// The hits that wait, oldest first. There are none once it is closed.
#[derive(Debug, Default)]
pub(crate) struct Stops {
    waiting: Mutex<Waiting>,
    /// The thread that alone may go on, or 0.
    alone: AtomicI32,
}

impl Stops {
    /// Returns the oldest hit.
    pub(crate) fn next(&self) -> Option<Stop> {
        self.waiting.lock().stops.pop_front()
    }

    /// Lets one thread alone pass the process's breakpoints, or all. The others stay at those, and
    /// at the ends of steps, that they reach.
    pub(crate) fn let_alone(&self, thread: Option<i32>) {
        self.alone
            .store(thread.unwrap_or_default(), Ordering::SeqCst);
    }

    /// Forgets all hits and lets the machine go on. Hits from now on do not hold it: a vCPU may
    /// still be on its way to one.
    pub(crate) fn close(&self) {
        let mut waiting = self.waiting.lock();
        waiting.is_closed = true;
        let stops = std::mem::take(&mut waiting.stops);
        drop(waiting);
        // Dropped without the lock, which the vCPU threads take.
        drop(stops);
    }

    /// Adds the hit that `make` holds the machine at. Returns whether it did.
    fn add(&self, make: impl FnOnce() -> Stop) -> bool {
        let mut waiting = self.waiting.lock();
        if !waiting.is_closed {
            waiting.stops.push_back(make());
        }
        !waiting.is_closed
    }
}

/// The conditions of a breakpoint, which its client may change while it is armed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conditions(Arc<Mutex<Vec<Vec<u8>>>>);

impl Conditions {
    pub(crate) fn set(&self, conditions: Vec<Vec<u8>>) {
        *self.0.lock() = conditions;
    }
}

/// The registers in the order of the target description, and the memory of a hit.
struct HitScene<'h, 'p>(&'h ProbeHit<'p>);

impl Scene for HitScene<'_, '_> {
    fn register(&self, number: u16) -> Option<u64> {
        let mut general = *self.0.registers();
        general_in_order(&mut general)
            .get(usize::from(number))
            .map(|register| **register)
    }

    fn read(&self, address: u64, buf: &mut [u8]) -> bool {
        self.0.read(address, buf)
    }
}

/// The program of all probes of a debugger: it holds the machine.
pub(crate) struct Holder {
    pub(crate) cause: Cause,
    pub(crate) conditions: Conditions,
    pub(crate) number: NumberOfHit,
    pub(crate) stops: Arc<Stops>,
}

impl Holder {
    /// Returns the argument by which the stop is judged.
    fn argument(&self, hit: &ProbeHit<'_>) -> u64 {
        let first = hit.arguments().first().copied().unwrap_or_default();
        if self.cause != Cause::Fault {
            return first;
        }
        // The first member of `struct kernel_siginfo` (include/linux/signal_types.h): si_signo.
        let mut number = [0; 4];
        match hit.read(first, &mut number) {
            true => u64::from(u32::from_le_bytes(number)),
            false => 0,
        }
    }
}

impl Program for Holder {
    fn run(&self, hit: &ProbeHit<'_>) -> HitOutcome {
        let Some(thread) = self.number.of(hit.thread(), hit.vcpu()) else {
            return HitOutcome::Filtered;
        };
        if !conditions::stops(&self.conditions.0.lock(), &HitScene(hit)) {
            return HitOutcome::Filtered;
        }
        let alone = self.stops.alone.load(Ordering::SeqCst);
        let stays = matches!(self.cause, Cause::Breakpoint | Cause::Step) && alone != 0;
        if stays && thread != alone {
            hit.retry();
            return HitOutcome::Filtered;
        }
        if stays && self.cause == Cause::Breakpoint {
            return HitOutcome::Filtered;
        }
        let added = self.stops.add(|| Stop {
            cause: self.cause,
            thread,
            address: hit.registers().rip,
            argument: self.argument(hit),
            returned: hit.returned(),
            hold: hit.hold_here(),
        });
        if !added {
            return HitOutcome::Filtered;
        }
        hit.wake();
        HitOutcome::Accepted
    }

    fn may_hold(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop(thread: i32) -> Stop {
        Stop {
            cause: Cause::Breakpoint,
            thread,
            address: 0,
            argument: 0,
            returned: None,
            hold: None,
        }
    }

    #[test]
    fn hits_come_in_order_and_none_once_nobody_reports_them() {
        let stops = Stops::default();
        assert!(stops.add(|| stop(1)) && stops.add(|| stop(2)));
        assert_eq!(stops.next().map(|stop| stop.thread), Some(1));
        stops.close();
        assert!(stops.next().is_none());
        assert!(!stops.add(|| panic!("a hit holds the machine for nobody")));
    }
}
