//! All tasks of a running kernel: processes, their threads, and one of them by number or name.
//!
//! The caller keeps the machine paused and passes a view of an address space that maps the kernel.
//! Every process is on the ring that starts at `init_task.tasks`. Every thread is on the ring of
//! its process (`signal_struct.thread_head`). The idle tasks, pid 0, are on neither. A task that
//! cannot be read is left out and reported as an error; the others are still found.

mod info;
mod name;
mod state;
#[cfg(test)]
mod tests;

pub use info::TaskInfo;
pub use state::TaskState;

use info::InfoLayout;
use name::NameLayout;

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::list::{List, ListError, Partial};
use super::structure::{Structure, StructureError};
use super::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The maximum number of tasks that are looked at. `pid_max` is 32768 by default, and 4194304 at
/// most.
const MAX_TASKS: usize = 1 << 18;

/// An error in reading tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TaskListError {
    /// One of the lists is broken.
    #[error(transparent)]
    List(#[from] ListError),
    /// There are more threads than are looked at.
    #[error("the system has more than {MAX_TASKS} threads: the rest is left out")]
    TooMany,
    /// A task, or a structure that describes it, is broken.
    #[error("the task at {task} is left out: {source}")]
    Task {
        /// The address of the `task_struct`.
        task: Gva,
        /// The cause.
        source: StructureError,
    },
}

/// The location of a kernel's tasks and of their descriptions.
#[derive(Debug, Clone)]
pub struct TaskListLayout {
    /// The address of the `list_head` in the first task.
    head: Gva,
    /// Offsets of `task_struct.tasks` and `.thread_node`, and of `signal_struct.thread_head`.
    tasks: u64,
    thread_node: u64,
    thread_head: u64,
    info: InfoLayout,
    name: NameLayout,
}

/// The tasks found, with the first error.
pub type Tasks = Partial<TaskInfo, TaskListError>;

impl TaskListLayout {
    /// Looks up the offsets. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel's types or symbols do not describe them.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        let tasks = offset(btf, "task_struct.tasks", 16)?;
        let first = symbols.address_of("init_task").ok_or(LayoutError::Symbol {
            name: "init_task",
            used_for: "starts the list of its tasks",
        })?;
        Ok(Self {
            head: Gva(first.wrapping_add(tasks)),
            tasks,
            thread_node: offset(btf, "task_struct.thread_node", 16)?,
            thread_head: offset(btf, "signal_struct.thread_head", 16)?,
            info: InfoLayout::new(btf)?,
            name: NameLayout::new(btf),
        })
    }

    /// Reads all processes, each as its first thread, in the order of their creation.
    #[must_use]
    pub fn processes(&self, view: MemoryView<'_>) -> Tasks {
        self.describe(view, self.leaders(view))
    }

    /// Reads the threads of a process, including its first, in the order of their creation.
    #[must_use]
    pub fn threads(&self, view: MemoryView<'_>, process: &TaskInfo) -> Tasks {
        let threads = self.thread_addresses(view, process.address, MAX_TASKS);
        self.describe(view, threads)
    }

    /// Reads all threads of all processes, process by process.
    #[must_use]
    pub fn all_threads(&self, view: MemoryView<'_>) -> Tasks {
        let Partial { items, mut error } = self.leaders(view);
        let mut tasks = Vec::with_capacity(items.len());
        let mut left = MAX_TASKS;
        for leader in items {
            if left == 0 {
                error = error.or(Some(TaskListError::TooMany));
                break;
            }
            let threads = self.thread_addresses(view, leader, left);
            // Unreadable tasks count too, because damaged lists may lead to the same ones
            // repeatedly.
            left = left.saturating_sub(threads.items.len());
            let mut found = self.describe(view, threads);
            tasks.append(&mut found.items);
            error = error.or(found.error);
        }
        Partial {
            items: tasks,
            error,
        }
    }

    /// Finds the process with this number; `None` if there is none.
    ///
    /// # Errors
    /// If it was not found, and not all processes could be looked at.
    pub fn process(
        &self,
        view: MemoryView<'_>,
        pid: i32,
    ) -> Result<Option<TaskInfo>, TaskListError> {
        self.find(view, self.leaders(view), pid)
    }

    /// Finds the process that was created first: the one with pid 1, in a system that has booted.
    ///
    /// # Errors
    /// If it cannot be read, or there is none.
    pub fn first_process(&self, view: MemoryView<'_>) -> Result<TaskInfo, TaskListError> {
        let idle = Gva(self.head.0.wrapping_sub(self.tasks));
        let next = Structure::at(view, "init_task", idle)
            .and_then(|idle| idle.follow_always(self.tasks, "task_struct (init_task.tasks)"))
            .map_err(|source| TaskListError::Task { task: idle, source })?;
        self.task(view, Gva(next.address().0.wrapping_sub(self.tasks)))
    }

    /// Finds the thread with this number; `None` if there is none. The number of a process's first
    /// thread is the process's.
    ///
    /// # Errors
    /// If it was not found, and not all threads could be looked at.
    pub fn thread(
        &self,
        view: MemoryView<'_>,
        pid: i32,
    ) -> Result<Option<TaskInfo>, TaskListError> {
        let leaders = self.leaders(view);
        let mut broken = match self.find(view, leaders.clone(), pid) {
            Ok(Some(found)) => return Ok(Some(found)),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        let mut left = MAX_TASKS;
        for leader in leaders.items {
            if left == 0 {
                broken = broken.or(Some(TaskListError::TooMany));
                break;
            }
            let threads = self.thread_addresses(view, leader, left);
            left = left.saturating_sub(threads.items.len());
            match self.find(view, threads, pid) {
                Ok(Some(found)) => return Ok(Some(found)),
                Ok(None) => {}
                Err(error) => broken = broken.or(Some(error)),
            }
        }
        broken.map_or(Ok(None), Err)
    }

    /// Finds the processes with this name: `task_struct.comm`, or the name that the kernel prints
    /// ([`full_name`](Self::full_name)).
    #[must_use]
    pub fn named(&self, view: MemoryView<'_>, name: &[u8]) -> Tasks {
        let mut processes = self.processes(view);
        processes.items.retain(|task| {
            task.name() == name || self.full_name(view, task).is_ok_and(|full| full == name)
        });
        processes
    }

    /// Reads the task whose `task_struct` is at `address`.
    ///
    /// # Errors
    /// If the task or a structure that it points to cannot be read.
    pub fn task(&self, view: MemoryView<'_>, address: Gva) -> Result<TaskInfo, TaskListError> {
        let read = self.info.read(view, address);
        read.map_err(|source| TaskListError::Task {
            task: address,
            source,
        })
    }

    /// Reads the name that `/proc/PID/stat` and ps(1) show, at most 63 bytes. For a kernel thread
    /// it may be longer than the 15 bytes of [`TaskInfo::comm`]. A workqueue's thread adds its
    /// current work.
    ///
    /// # Errors
    /// If the structure with the longer name cannot be read.
    pub fn full_name(
        &self,
        view: MemoryView<'_>,
        task: &TaskInfo,
    ) -> Result<Vec<u8>, StructureError> {
        self.name.read(view, task)
    }

    /// Returns the addresses of the first threads of all processes.
    fn leaders(&self, view: MemoryView<'_>) -> Partial<Gva, TaskListError> {
        let list = List {
            name: "init_task.tasks",
            head: self.head,
            member: self.tasks,
            limit: MAX_TASKS,
        };
        addresses(list.walk(view))
    }

    /// Returns the addresses of the threads of the process of the task at `leader`.
    fn thread_addresses(
        &self,
        view: MemoryView<'_>,
        leader: Gva,
        limit: usize,
    ) -> Partial<Gva, TaskListError> {
        match self.info.signal(view, leader) {
            Ok(signal) => {
                let list = List {
                    name: "signal_struct.thread_head",
                    head: signal.member(self.thread_head),
                    member: self.thread_node,
                    limit,
                };
                addresses(list.walk(view))
            }
            Err(source) => Partial {
                items: Vec::new(),
                error: Some(TaskListError::Task {
                    task: leader,
                    source,
                }),
            },
        }
    }

    /// Reads the tasks of a walk.
    fn describe(&self, view: MemoryView<'_>, found: Partial<Gva, TaskListError>) -> Tasks {
        found.read_each(|address| self.task(view, address))
    }

    /// Finds the task of a walk with this number.
    fn find(
        &self,
        view: MemoryView<'_>,
        found: Partial<Gva, TaskListError>,
        pid: i32,
    ) -> Result<Option<TaskInfo>, TaskListError> {
        let mut broken = found.error;
        for task in found.items {
            let number = Structure::at(view, "task_struct", task).and_then(|it| self.info.pid(&it));
            match number {
                Ok(number) if number == pid => return self.task(view, task).map(Some),
                Ok(_) => {}
                Err(source) => broken = broken.or(Some(TaskListError::Task { task, source })),
            }
        }
        broken.map_or(Ok(None), Err)
    }
}

fn addresses(walk: Partial<Gva, ListError>) -> Partial<Gva, TaskListError> {
    Partial {
        items: walk.items,
        error: walk.error.map(TaskListError::List),
    }
}
