//! Reads thread, process and CPU of a `task_struct` to which a tracepoint's argument points.
//!
//! It is read when the event is drained, some milliseconds after the hit. If the thread has ended
//! meanwhile and its memory was reused, the new owner's numbers are reported.

use introspect::kernel::layout::first_offset;
use introspect::{Gva, PausedMemory};

use probes::engine::Engine;

/// The largest number of a thread (`PID_MAX_LIMIT` of Linux).
const MOST_THREADS: u32 = 4 << 20;
/// The paths of the CPU's number: with thread_info as a part of the task, or without.
const CPU_MEMBERS: [&str; 2] = ["task_struct.thread_info.cpu", "task_struct.cpu"];

/// A thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Thread {
    pub(super) tid: u32,
    pub(super) pid: u32,
    pub(super) cpu: u32,
}

/// A reader of threads in one engine's guest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Threads {
    /// The offsets of `pid` and `tgid`.
    ids: Option<(u64, u64)>,
    cpu: Option<u64>,
}

impl Threads {
    pub(super) fn new(engine: &Engine) -> Self {
        let view = engine.view();
        let types = view.kernel.btf();
        Self {
            ids: view
                .tasks
                .as_ref()
                .ok()
                .map(|tasks| (tasks.pid, tasks.tgid)),
            cpu: types.and_then(|types| first_offset(types, &CPU_MEMBERS, 4).ok()),
        }
    }

    /// Reads the thread of the structure at `address`. Unreadable numbers are 0.
    pub(super) fn read(&self, engine: &Engine, address: u64) -> Thread {
        let memory = PausedMemory::new(engine.machine().ram());
        let view = memory.view(engine.view().kernel.space);
        let number = |offset: u64| {
            let read = view.u32(Gva(address.wrapping_add(offset)));
            read.ok().filter(|number| *number <= MOST_THREADS)
        };
        let of = |offset: Option<u64>| offset.and_then(number).unwrap_or_default();
        Thread {
            tid: of(self.ids.map(|(pid, _)| pid)),
            pid: of(self.ids.map(|(_, tgid)| tgid)),
            cpu: of(self.cpu),
        }
    }
}
