//! The description of one task.

use super::TaskState;
use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, first_offset, offset};
use crate::kernel::structure::{Structure, StructureError};
use crate::kernel::task::{COMM_LENGTH, name_of};
use crate::{Gva, MemoryView};

/// The flags of `task_struct.flags` (include/linux/sched.h).
const PF_WQ_WORKER: u32 = 0x20;
const PF_KTHREAD: u32 = 0x0020_0000;
/// The static priority of a task with nice 0.
const DEFAULT_PRIORITY: i32 = 120;
/// The end of the priorities of real-time tasks.
const MAX_REAL_TIME_PRIORITY: i32 = 100;
/// `signal_struct.pids` by `enum pid_type`, since Linux 4.19: process, thread group, process group,
/// session.
const PIDS: u64 = 4;
const PROCESS_GROUP: u64 = 2;
const SESSION: u64 = 3;
const NANOSECONDS_PER_TICK: u64 = 10_000_000;

/// A task. Numbers of tasks are those of the initial pid namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskInfo {
    /// The address of the `task_struct`.
    pub address: Gva,
    /// The number of the thread.
    pub pid: i32,
    /// The number of its process: the pid of user programs.
    pub tgid: i32,
    /// The number of the parent process; 0 if it has none.
    pub parent: i32,
    /// The number of the process group; -1 once the task is being removed.
    pub process_group: i32,
    /// The number of the session; -1 once the task is being removed.
    pub session: i32,
    /// The task's state.
    pub state: TaskState,
    /// The name, NUL-padded. It may contain any bytes, because a task sets its own name.
    pub comm: [u8; COMM_LENGTH],
    /// Nanoseconds from the machine's boot to the task's creation, including system sleep.
    pub start_time: u64,
    /// The flags of `task_struct.flags`: PF_….
    pub flags: u32,
    /// The address of the `mm_struct`; none in a kernel thread and in a task that has ended.
    pub mm: Option<Gva>,
    /// The number of threads of its process; 0 once the task is being removed.
    pub threads: i32,
    /// The scheduler's priority minus 100, as in `/proc/PID/stat`: 0 to 39, below 0 for real time.
    pub priority: i32,
    /// The nice value, from -20, the most favourable, to 19.
    pub nice: i32,
    /// The CPU that it runs or last ran on; 0 where the kernel supports only one.
    pub cpu: u32,
    /// Whether it is on a CPU now; unknown where the kernel supports only one CPU.
    pub on_cpu: Option<bool>,
}

impl TaskInfo {
    /// Returns the name without its padding.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        name_of(&self.comm)
    }

    /// Checks whether it is a thread of the kernel itself, without a user program.
    #[must_use]
    pub fn is_kernel_thread(&self) -> bool {
        self.flags & PF_KTHREAD != 0
    }

    /// Returns its program's `mm_struct`. Returns `None` for a thread of the kernel, which may
    /// borrow one, and for a task that has ended.
    #[must_use]
    pub fn user_mm(&self) -> Option<Gva> {
        self.mm.filter(|_| !self.is_kernel_thread())
    }

    /// Checks whether it runs a workqueue's work.
    pub(super) fn is_worker(&self) -> bool {
        self.flags & PF_WQ_WORKER != 0
    }

    /// Returns the start time in ticks of 10 ms, as in `/proc/PID/stat` (`USER_HZ`).
    #[must_use]
    pub fn start_ticks(&self) -> u64 {
        self.start_time / NANOSECONDS_PER_TICK
    }
}

/// The offsets in `task_struct` and the structures that it points to.
#[derive(Debug, Clone)]
pub(super) struct InfoLayout {
    pid: u64,
    tgid: u64,
    comm: u64,
    state: StateWord,
    exit_state: u64,
    flags: u64,
    real_parent: u64,
    start_time: u64,
    mm: u64,
    priority: u64,
    static_priority: u64,
    cpu: Option<u64>,
    on_cpu: Option<u64>,
    signal: u64,
    sighand: u64,
    /// Offsets in `signal_struct`.
    thread_count: u64,
    pids: u64,
    /// Offset in `struct pid` of the number in the initial namespace.
    number: u64,
}

/// The member with the state: `__state` of 4 bytes, or `state` of 8 before Linux 5.14.
#[derive(Debug, Clone, Copy)]
enum StateWord {
    Short(u64),
    Long(u64),
}

impl InfoLayout {
    pub(super) fn new(btf: &Btf) -> Result<Self, LayoutError> {
        let state = offset(btf, "task_struct.__state", 4);
        let numbers = btf.member("pid.numbers")?.byte_offset;
        let start_times = ["task_struct.start_boottime", "task_struct.real_start_time"];
        let cpus = ["task_struct.thread_info.cpu", "task_struct.cpu"];
        Ok(Self {
            pid: offset(btf, "task_struct.pid", 4)?,
            tgid: offset(btf, "task_struct.tgid", 4)?,
            comm: offset(btf, "task_struct.comm", COMM_LENGTH as u64)?,
            state: match state {
                Ok(state) => StateWord::Short(state),
                Err(error) => {
                    StateWord::Long(offset(btf, "task_struct.state", 8).map_err(|_| error)?)
                }
            },
            exit_state: offset(btf, "task_struct.exit_state", 4)?,
            flags: offset(btf, "task_struct.flags", 4)?,
            real_parent: offset(btf, "task_struct.real_parent", 8)?,
            start_time: first_offset(btf, &start_times, 8)?,
            mm: offset(btf, "task_struct.mm", 8)?,
            priority: offset(btf, "task_struct.prio", 4)?,
            static_priority: offset(btf, "task_struct.static_prio", 4)?,
            cpu: first_offset(btf, &cpus, 4).ok(),
            on_cpu: offset(btf, "task_struct.on_cpu", 4).ok(),
            signal: offset(btf, "task_struct.signal", 8)?,
            sighand: offset(btf, "task_struct.sighand", 8)?,
            thread_count: offset(btf, "signal_struct.nr_threads", 4)?,
            pids: offset(btf, "signal_struct.pids", PIDS * 8)?,
            number: numbers.wrapping_add(offset(btf, "upid.nr", 4)?),
        })
    }

    /// Reads the number of a task.
    pub(super) fn pid(&self, task: &Structure<'_>) -> Result<i32, StructureError> {
        task.i32(self.pid)
    }

    /// Returns the `signal_struct` of the task at `address`, which the threads of a process share.
    pub(super) fn signal<'p>(
        &self,
        view: MemoryView<'p>,
        address: Gva,
    ) -> Result<Structure<'p>, StructureError> {
        Structure::at(view, "task_struct", address)?.follow_always(self.signal, "signal_struct")
    }

    /// Reads a task.
    pub(super) fn read(
        &self,
        view: MemoryView<'_>,
        address: Gva,
    ) -> Result<TaskInfo, StructureError> {
        let task = Structure::at(view, "task_struct", address)?;
        let state = match self.state {
            StateWord::Short(offset) => task.u32(offset)?,
            // No state has a bit above the 16th.
            StateWord::Long(offset) => (task.u64(offset)? & u64::from(u32::MAX)) as u32,
        };
        let mut info = TaskInfo {
            address,
            pid: task.i32(self.pid)?,
            tgid: task.i32(self.tgid)?,
            parent: 0,
            process_group: -1,
            session: -1,
            state: TaskState::new(state, task.u32(self.exit_state)?),
            comm: task.array(self.comm)?,
            start_time: task.u64(self.start_time)?,
            flags: task.u32(self.flags)?,
            mm: task.pointer(self.mm)?,
            threads: 0,
            priority: task
                .i32(self.priority)?
                .wrapping_sub(MAX_REAL_TIME_PRIORITY),
            nice: task
                .i32(self.static_priority)?
                .wrapping_sub(DEFAULT_PRIORITY),
            cpu: self
                .cpu
                .map(|cpu| task.u32(cpu))
                .transpose()?
                .unwrap_or_default(),
            on_cpu: self
                .on_cpu
                .map(|on_cpu| task.u32(on_cpu).map(|value| value != 0))
                .transpose()?,
        };
        // A task that is being removed gives up its handlers first. Then /proc shows no relatives.
        if task.pointer(self.sighand)?.is_some() {
            let signal = task.follow_always(self.signal, "signal_struct")?;
            info.threads = signal.i32(self.thread_count)?;
            info.process_group = self.number_of(&signal, PROCESS_GROUP)?;
            info.session = self.number_of(&signal, SESSION)?;
            if let Some(parent) = task.follow(self.real_parent, "task_struct (real_parent)")? {
                info.parent = parent.i32(self.tgid)?;
            }
        }
        Ok(info)
    }

    /// Reads the number of a process's group or session; 0 if it has none.
    fn number_of(&self, signal: &Structure<'_>, kind: u64) -> Result<i32, StructureError> {
        match signal.follow(self.pids.wrapping_add(8 * kind), "pid")? {
            Some(pid) => pid.i32(self.number),
            None => Ok(0),
        }
    }
}
