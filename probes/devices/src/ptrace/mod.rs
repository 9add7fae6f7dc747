//! ptrace(3), the process trace device: the states of processes, as records of 28 bytes.
//!
//! The caller owns the machine and the engine, and serves the device's two ports ([`Device`] is
//! both of them). The guest needs no support. Events are seen where its kernel's functions are
//! entered, which are found by name. Their details are read from structures that the kernel's own
//! types describe. If a kernel lacks something, one event is lost, and the configuration reports
//! it.
//!
//! * [`record`]: the records. [`Device`]: commands, selection of processes, reading.
//! * `sources`: the table of functions where events are seen. `program`: the code that runs there.
//!   `sleeps`: the reasons for sleeps. `layout`: the structures. `selection`: the tasks that are
//!   traced. `recording`: from the hits to the log.
//!
//! Differences from Plan 9: the size is 65,536 records until it is set. `trace PID` is the toggle
//! that it was meant to be, and for the first thread of a process it means all of its threads.
//! `trace all` means all tasks, including the idle tasks, whose number is 0. `ptracectl` reports
//! the number of dropped records, the traced tasks, and the events that this kernel lacks. The
//! device's opener is on the host or behind a port, and never counts as a traced process. With all
//! tasks traced, a task is recorded until it has left the CPU for good, which is after its `SDead`.
//!
//! # What is exact
//!
//! Every switch of tasks is seen once, where the kernel enters `__switch_to_asm`. With all tasks
//! traced, there are as many `SRun` and `SEdf` as the guest's `/proc/stat` counts switches
//! (`ctxt`). Page faults are exceptions: pages that the kernel faults in for a program without one
//! (`get_user_pages`) count in its `pgfault` but are no event here. The end of an interrupt is
//! recorded if its beginning was. An interrupt that had begun when its task was selected is not
//! recorded at all.
//!
//! A wake-up is the tracepoint `sched:sched_waking`, in the waker's context, before the task can
//! run. In a kernel without tracepoints it is the entry of `try_to_wake_up` with a task in one of
//! the given states. The kernel repeats that check under a lock some instructions later. So two
//! simultaneous wakers on two CPUs are both recorded, and a task that began to wait in between is
//! not. A task woken while it goes to sleep may show `SReady` before its `SSleep`.

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

/// Parses a command of `ptracectl` without carrying it out.
///
/// # Errors
/// The command is wrong; the message has Plan 9's words.
#[cfg(feature = "test-utils")]
pub fn read_command(text: &str) -> Result<(), crate::port::PortError> {
    control::parse(text).map(drop)
}
