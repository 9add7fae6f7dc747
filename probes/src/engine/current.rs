//! Finds the current task, thread and process of a hit. Each is read at most once a hit, and only
//! when needed.

use std::cell::OnceCell;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::kernel::task::{PerCpu, PreemptCount, TaskLayout};
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gva, PhysicalMemory};
use vmm::StoppedVcpu;

use super::filter::Identity;
use crate::event::COMM_LENGTH;

/// The lookup of the kernel's current task, on every vCPU.
pub(crate) struct Tasks {
    layout: Option<TaskLayout>,
    space: AddressSpace,
    /// The text of the kernel's entries; empty if not known.
    entries: Range<u64>,
    /// One for each vCPU.
    places: Vec<Places>,
    /// Hits at which the current task could not be read.
    pub(crate) unknown: AtomicU64,
}

/// A vCPU's per-CPU base, with the places of its variables.
#[derive(Default)]
struct Places {
    /// The places first found. A booting kernel may still move them.
    first: OnceLock<(Gva, PerCpu)>,
    /// The places found when a task other than the idle one ran on the vCPU. By then the kernel has
    /// moved the variables. The vCPU is not asked for its base any more, which may cost more than
    /// the rest of a hit. If the kernel starts another one, these places do not follow, and neither
    /// do probes.
    settled: OnceLock<(Gva, PerCpu)>,
}

/// The source of a vCPU's per-CPU base.
#[derive(Clone, Copy)]
pub(crate) enum Base<'h> {
    /// The base, or `None` if it is not known.
    Known(Option<Gva>),
    /// The vCPU, which is in kernel mode.
    Of(&'h StoppedVcpu<'h>),
}

/// Returns `base` if it is the kernel's own. In the first instructions of an entry it is the
/// program's, which may have put anything there (WRGSBASE). After that it is the kernel's, which is
/// in the upper half.
fn of_kernel(entries: &Range<u64>, at: u64, base: impl FnOnce() -> Gva) -> Option<Gva> {
    let may_be = !entries.contains(&at);
    may_be.then(base).filter(|base| base.0 >> 63 == 1)
}

impl Tasks {
    /// Creates the lookup. `bases` are the vCPUs' known per-CPU bases, `entries` the text of the
    /// kernel's entries.
    pub(crate) fn new(
        layout: Option<TaskLayout>,
        space: AddressSpace,
        entries: Range<u64>,
        memory: &dyn PhysicalMemory,
        bases: &[Option<Gva>],
    ) -> Self {
        let tasks = Self {
            layout,
            space,
            entries,
            places: bases.iter().map(|_| Places::default()).collect(),
            unknown: AtomicU64::new(0),
        };
        for (vcpu, base) in bases.iter().enumerate() {
            if let Some(base) = base {
                tasks.per_cpu(memory, vcpu, Base::Known(Some(*base)));
            }
        }
        tasks
    }

    /// Returns the per-CPU base of `base`, if it is known.
    fn base_of(&self, base: Base<'_>) -> Option<Gva> {
        match base {
            Base::Known(base) => base,
            Base::Of(cpu) => of_kernel(&self.entries, cpu.regs().rip, || cpu.gs_base()),
        }
    }

    /// Returns a vCPU's per-CPU base with the places of its variables. `base` is read only if they
    /// are not settled.
    fn per_cpu(
        &self,
        memory: &dyn PhysicalMemory,
        vcpu: usize,
        base: Base<'_>,
    ) -> Option<(Gva, PerCpu)> {
        let places = self.places.get(vcpu)?;
        if let Some(settled) = places.settled.get() {
            return Some(*settled);
        }
        match (places.first.get(), self.base_of(base)) {
            (Some(first), None) => Some(*first),
            (Some(first), Some(base)) if first.0 == base => Some(*first),
            (_, Some(base)) => {
                let found = self.layout?.per_cpu(memory, self.space, base).ok()?;
                let _ = places.first.set((base, found));
                Some((base, found))
            }
            (None, None) => None,
        }
    }
}

/// The task of one hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Task {
    /// The address of the `task_struct`; 0 if not known.
    pub(crate) address: u64,
    /// The thread's number, also while it is interrupted; all ones if not known.
    pub(crate) thread: u64,
    /// The process's number, in the same way.
    pub(crate) process: u64,
    /// The numbers that events carry.
    pub(crate) identity: Identity,
}

/// The task if none can be read.
static UNKNOWN: Task = Task {
    address: 0,
    thread: u64::MAX,
    process: u64::MAX,
    identity: Identity {
        pid: None,
        tid: None,
    },
};

/// The lookup of one hit's current task.
pub(crate) struct Current<'h> {
    tasks: &'h Tasks,
    memory: &'h dyn PhysicalMemory,
    vcpu: usize,
    base: Base<'h>,
    found: OnceCell<Task>,
}

impl<'h> Current<'h> {
    pub(crate) fn new(
        tasks: &'h Tasks,
        memory: &'h dyn PhysicalMemory,
        vcpu: usize,
        base: Base<'h>,
    ) -> Self {
        Self {
            tasks,
            memory,
            vcpu,
            base,
            found: OnceCell::new(),
        }
    }

    /// Returns the vCPU's per-CPU base, if the hit has it.
    pub(crate) fn base(&self) -> Option<Gva> {
        if let Base::Known(None) = self.base {
            return None;
        }
        let places = self.tasks.places.get(self.vcpu)?;
        let settled = places.settled.get().map(|(base, _)| *base);
        settled.or_else(|| self.tasks.base_of(self.base))
    }

    /// Returns the task.
    #[inline]
    pub(crate) fn task(&self) -> &Task {
        match self.found.get() {
            Some(task) => task,
            None => self.find(),
        }
    }

    #[inline(never)]
    fn find(&self) -> &Task {
        let Some(layout) = &self.tasks.layout else {
            return &UNKNOWN;
        };
        let task = self.read(layout).unwrap_or_else(|| {
            self.tasks.unknown.fetch_add(1, Ordering::Relaxed);
            UNKNOWN
        });
        // Only this thread sets it.
        let _ = self.found.set(task);
        self.found.get().unwrap_or(&UNKNOWN)
    }

    /// Returns process and thread; in interrupt context neither.
    pub(crate) fn identity(&self) -> Identity {
        self.task().identity
    }

    /// Returns the thread's name; in interrupt context the interrupted one's.
    pub(crate) fn comm(&self) -> Option<[u8; COMM_LENGTH]> {
        let (layout, space) = (self.tasks.layout.as_ref()?, self.tasks.space);
        let task = Gva(self.task().address);
        let places = self.tasks.places.get(self.vcpu)?;
        let settled = places.settled.get();
        let comm =
            settled.and_then(|(_, per_cpu)| layout.current_comm(self.memory, space, per_cpu, task));
        comm.or_else(|| layout.comm(self.memory, space, task).ok())
    }

    #[inline]
    fn read(&self, layout: &TaskLayout) -> Option<Task> {
        let places = self.tasks.places.get(self.vcpu)?;
        match places.settled.get() {
            Some((_, per_cpu)) => Some(self.task_at(layout, per_cpu)?.0),
            None => self.read_unsettled(layout, places),
        }
    }

    /// Returns the task of a vCPU whose per-CPU variables may still be moved.
    #[cold]
    fn read_unsettled(&self, layout: &TaskLayout, places: &Places) -> Option<Task> {
        let place = self.tasks.per_cpu(self.memory, self.vcpu, self.base)?;
        let (base, per_cpu) = &place;
        let (task, is_idle) = self.task_at(layout, per_cpu)?;
        // Only a task other than the idle one, on a vCPU whose own base led to it.
        if !is_idle && self.tasks.base_of(self.base) == Some(*base) {
            let (memory, space) = (self.memory, self.tasks.space);
            let per_cpu = per_cpu.in_direct_map(memory, space, Gva(task.address));
            let _ = places.settled.set((*base, per_cpu));
        }
        Some(task)
    }

    /// Returns the task that per-CPU variables lead to, and whether it is an idle one.
    #[inline]
    fn task_at(&self, layout: &TaskLayout, per_cpu: &PerCpu) -> Option<(Task, bool)> {
        let space = self.tasks.space;
        let task = layout.current_thread_at(self.memory, space, per_cpu).ok()?;
        let nesting = layout.preempt_count(self.memory, per_cpu).ok()?;
        let interrupted = nesting.is_some_and(is_interrupt);
        let number = |id: i32| Some(id.cast_unsigned()).filter(|_| !interrupted);
        let found = Task {
            address: task.task.0,
            thread: u64::from(task.pid.cast_unsigned()),
            process: u64::from(task.tgid.cast_unsigned()),
            identity: Identity {
                pid: number(task.tgid),
                tid: number(task.pid),
            },
        };
        Some((found, task.pid == 0))
    }
}

fn is_interrupt(nesting: PreemptCount) -> bool {
    nesting.in_hard_interrupt() || nesting.in_nmi()
}

#[cfg(test)]
mod tests {
    use introspect::kernel::task::PreemptForm;
    use introspect::test_memory::{Flags, TestMemory};

    use super::*;

    const LAYOUT: TaskLayout = TaskLayout {
        current: 0x10,
        preempt_count: None,
        preempt_form: PreemptForm::Int,
        pid: 0x20,
        tgid: 0x24,
        comm: 0x28,
    };
    const EARLY: u64 = 0xffff_ffff_8200_0000;
    const LATE: u64 = 0xffff_8880_0000_0000;
    const TASKS: u64 = 0xffff_8880_0010_0000;
    const IDLE: u64 = TASKS;
    const WORKER: u64 = TASKS + 0x800;

    #[test]
    fn per_cpu_data_is_followed_until_a_kernel_has_moved_it_and_then_the_vcpu_is_not_asked() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        for (address, page) in [(EARLY, 0x18_0000), (LATE, 0x19_0000), (TASKS, 0x1a_0000)] {
            memory.map(space, address, page, 4096, Flags::default().writable());
        }
        memory.write(
            0x1a_0000 + (WORKER - TASKS) + LAYOUT.pid,
            &41u32.to_le_bytes(),
        );
        memory.write(
            0x1a_0000 + (WORKER - TASKS) + LAYOUT.tgid,
            &40u32.to_le_bytes(),
        );
        for page in [0x18_0000, 0x19_0000] {
            memory.write(page + LAYOUT.current, &IDLE.to_le_bytes());
        }
        let tasks = Tasks::new(Some(LAYOUT), space, 0..0, &memory, &[None]);
        let thread = |memory: &TestMemory, base: Option<u64>| {
            let base = Base::Known(base.map(Gva));
            Current::new(&tasks, memory, 0, base).identity().tid
        };
        assert_eq!(thread(&memory, None), None, "nothing is known yet");
        assert_eq!(thread(&memory, Some(EARLY)), Some(0));
        assert_eq!(thread(&memory, Some(LATE)), Some(0), "idle: not settled");
        memory.write(0x19_0000 + LAYOUT.current, &WORKER.to_le_bytes());
        assert_eq!(thread(&memory, None), Some(0), "the first that was found");
        assert_eq!(thread(&memory, Some(LATE)), Some(41));
        for base in [None, Some(EARLY), Some(LATE)] {
            assert_eq!(thread(&memory, base), Some(41), "{base:x?}");
        }
    }

    #[test]
    fn in_an_entry_the_base_may_be_the_programs() {
        let entries = 0xffff_ffff_8180_0000..0xffff_ffff_8180_2000;
        for (at, base, expected) in [
            (entries.end, LATE, Some(Gva(LATE))),
            (entries.start - 1, LATE, Some(Gva(LATE))),
            (entries.start, LATE, None),
            (entries.end - 1, LATE, None),
            (entries.end, 0x7fff_0000_0000, None),
        ] {
            let found = of_kernel(&entries, at, || Gva(base));
            assert_eq!(found, expected, "{at:#x} {base:#x}");
        }
    }
}
