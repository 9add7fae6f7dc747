//! Who a `task_struct` is, where a tracepoint's argument points to one.
//!
//! It is read when the event is taken out of its ring, some milliseconds after the hit: a thread that has ended meanwhile, and
//! whose memory was given to another, is then told as the other.

use introspect::kernel::layout::first_offset;
use introspect::{Gva, PausedMemory};

use crate::engine::Engine;

/// Largest number of a thread (`PID_MAX_LIMIT` of Linux).
const MOST_THREADS: u32 = 4 << 20;
/// `task_struct.cpu`, or where it stands when thread_info is part of the task.
const CPU_MEMBERS: [&str; 2] = ["task_struct.thread_info.cpu", "task_struct.cpu"];

/// A thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Thread {
    pub(super) tid: u32,
    pub(super) pid: u32,
    pub(super) cpu: u32,
}

/// Reads threads of one engine's guest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Threads {
    /// Offsets of `pid` and `tgid`.
    ids: Option<(u64, u64)>,
    cpu: Option<u64>,
}

impl Threads {
    pub(super) fn new(engine: &Engine) -> Self {
        let view = engine.view();
        let types = view.btf.as_ref();
        Self {
            ids: view.tasks.map(|tasks| (tasks.pid, tasks.tgid)),
            cpu: types.and_then(|types| first_offset(types, &CPU_MEMBERS, 4).ok()),
        }
    }

    /// The thread of the structure at `address`; zeros for what cannot be read.
    pub(super) fn read(&self, engine: &Engine, address: u64) -> Thread {
        let memory = PausedMemory::new(engine.machine().ram());
        let view = memory.view(engine.view().space);
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
