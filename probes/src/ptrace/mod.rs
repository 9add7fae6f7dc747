//! ptrace(3): the process trace device. What becomes of processes, as records of 28 bytes.
//!
//! The caller owns the machine and the engine, and serves the device's two ports ([`Device`] is both of them). Nothing is asked of the
//! guest: events are seen where its kernel's functions are entered, which are found by their names, and what they concern is read from
//! structures that the kernel's own types describe. What a kernel lacks loses one event, which the configuration tells.
//!
//! * [`record`]: the records. [`Device`]: commands, selection of processes, reading.
//! * `sources`: where each event is seen, a table of functions. `program`: what runs there. `sleeps`: what a task waits for.
//!   `layout`: the structures. `selection`: the tasks that are traced. `recording`: from the hits to the log.
//!
//! Where it differs from Plan 9: the size is 65,536 records until somebody sets it; `trace PID` is the toggle that it was meant to be, and
//! for the first thread of a process it means all of its threads; `trace all` is everybody, idle tasks included, whose number is 0;
//! `ptracectl` tells what was dropped, who is traced and which events this kernel cannot give. Who opens the device is on the host or behind
//! a port, and is never known to be a traced process. With everybody traced, tasks are told of until they have left the CPU for good, which
//! is after their `SDead`.
//!
//! # What is exact
//!
//! Every switch of tasks is seen once, where the kernel's code enters `__switch_to_asm`: with everybody traced there are as many `SRun`
//! and `SEdf` as the guest's `/proc/stat` counts switches (`ctxt`). Page faults are exceptions: what the kernel faults in on behalf of a
//! program without one (`get_user_pages`) counts in its `pgfault` and is none here. The end of an interrupt is told where its beginning was:
//! one that had begun when its task was selected is not told at all.
//!
//! A wake-up is the tracepoint `sched:sched_waking`, in the waker's context, before the task can run. In a kernel without tracepoints it is the
//! entry of `try_to_wake_up` with a task that waits for it. The kernel asks the same under a lock some instructions later: of two
//! wakers at one moment on two CPUs both are told, and a task that began to wait in between is not. A task that is woken while it goes to sleep
//! may show `SReady` before its `SSleep`.

mod control;
mod device;
mod layout;
mod program;
pub mod record;
mod recording;
pub mod render;
mod selection;
mod sleeps;
mod sources;

pub use device::Device;

/// Reads a command of `ptracectl` and does nothing.
///
/// # Errors
/// In Plan 9's words.
#[cfg(feature = "test-utils")]
pub fn read_command(text: &str) -> Result<(), crate::port::PortError> {
    control::parse(text).map(drop)
}
