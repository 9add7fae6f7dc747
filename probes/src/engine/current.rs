//! Who runs at a hit: task, thread, process and name, read at most once a hit and only when asked for.

use std::cell::OnceCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::kernel::task::{PerCpu, PreemptCount, TaskLayout};
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gva, PhysicalMemory};

use super::filter::Identity;
use crate::event::COMM_LENGTH;

/// How the kernel's current tasks are found, on every vCPU.
pub(crate) struct Tasks {
    layout: Option<TaskLayout>,
    space: AddressSpace,
    /// One per vCPU: its per-CPU base, and where its variables stand. The same for as long as the guest runs.
    per_cpu: Vec<OnceLock<(Gva, PerCpu)>>,
    /// Hits at which the current task could not be read.
    pub(crate) unknown: AtomicU64,
}

impl Tasks {
    /// `bases` are the per-CPU bases of the vCPUs as far as they are known.
    pub(crate) fn new(
        layout: Option<TaskLayout>,
        space: AddressSpace,
        memory: &dyn PhysicalMemory,
        bases: &[Option<Gva>],
    ) -> Self {
        let tasks = Self {
            layout,
            space,
            per_cpu: bases.iter().map(|_| OnceLock::new()).collect(),
            unknown: AtomicU64::new(0),
        };
        for (vcpu, base) in bases.iter().enumerate() {
            if let Some(base) = base {
                tasks.per_cpu(memory, vcpu, Some(*base));
            }
        }
        tasks
    }

    /// Where a vCPU's variables stand. `base` is its per-CPU base if this is known at the hit: in kernel mode.
    fn per_cpu(
        &self,
        memory: &dyn PhysicalMemory,
        vcpu: usize,
        base: Option<Gva>,
    ) -> Option<PerCpu> {
        let known = self.per_cpu.get(vcpu)?;
        match (known.get(), base) {
            (Some((_, per_cpu)), None) => Some(*per_cpu),
            (Some((at, per_cpu)), Some(base)) if *at == base => Some(*per_cpu),
            (_, Some(base)) => {
                let found = self.layout?.per_cpu(memory, self.space, base).ok()?;
                // Kept once: the base changes only when the guest starts another kernel, and is then looked up
                // at every hit.
                let _ = known.set((base, found));
                Some(found)
            }
            (None, None) => None,
        }
    }
}

/// The task of one hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Task {
    /// Address of its `task_struct`, 0 if not known.
    pub(crate) address: u64,
    /// Its thread's number, also while it is interrupted; all ones if not known.
    pub(crate) thread: u64,
    /// The same of its process.
    pub(crate) process: u64,
    /// As events show it.
    pub(crate) identity: Identity,
    comm: Option<[u8; COMM_LENGTH]>,
}

/// Where no task can be read.
const UNKNOWN: Task = Task {
    address: 0,
    thread: u64::MAX,
    process: u64::MAX,
    identity: Identity {
        pid: None,
        tid: None,
    },
    comm: None,
};

/// Looks at the current task of one hit.
pub(crate) struct Current<'h> {
    tasks: &'h Tasks,
    memory: &'h dyn PhysicalMemory,
    vcpu: usize,
    base: Option<Gva>,
    found: OnceCell<Task>,
}

impl<'h> Current<'h> {
    pub(crate) fn new(
        tasks: &'h Tasks,
        memory: &'h dyn PhysicalMemory,
        vcpu: usize,
        base: Option<Gva>,
    ) -> Self {
        Self {
            tasks,
            memory,
            vcpu,
            base,
            found: OnceCell::new(),
        }
    }

    /// The vCPU's per-CPU base, if the hit itself tells.
    pub(crate) fn base(&self) -> Option<Gva> {
        self.base
    }

    /// The task.
    pub(crate) fn task(&self) -> &Task {
        self.found.get_or_init(|| {
            if self.tasks.layout.is_none() {
                return UNKNOWN;
            }
            self.read().unwrap_or_else(|| {
                self.tasks.unknown.fetch_add(1, Ordering::Relaxed);
                UNKNOWN
            })
        })
    }

    /// Process and thread, nobody's in interrupt context.
    pub(crate) fn identity(&self) -> Identity {
        self.task().identity
    }

    /// The thread's name; the interrupted one's in interrupt context.
    pub(crate) fn comm(&self) -> Option<[u8; COMM_LENGTH]> {
        self.task().comm
    }

    fn read(&self) -> Option<Task> {
        let layout = self.tasks.layout?;
        let per_cpu = self.tasks.per_cpu(self.memory, self.vcpu, self.base)?;
        let task = layout
            .current_at(self.memory, self.tasks.space, &per_cpu)
            .ok()?;
        let nesting = layout.preempt_count(self.memory, &per_cpu).ok()?;
        let interrupted = nesting.is_some_and(is_interrupt);
        let number = |id: i32| Some(id.cast_unsigned()).filter(|_| !interrupted);
        Some(Task {
            address: task.address.0,
            thread: u64::from(task.pid.cast_unsigned()),
            process: u64::from(task.tgid.cast_unsigned()),
            identity: Identity {
                pid: number(task.tgid),
                tid: number(task.pid),
            },
            comm: Some(task.comm),
        })
    }
}

fn is_interrupt(nesting: PreemptCount) -> bool {
    nesting.in_hard_interrupt() || nesting.in_nmi()
}
