//! The processes, and the parts of each.

use super::{PausedSystem, Unavailable, known};
use crate::Gva;
use crate::kernel::files::{FilesError, OpenFile};
use crate::kernel::list::Partial;
use crate::kernel::path::PathRef;
use crate::kernel::process::{ProcessError, ProcessText};
use crate::kernel::task_list::{TaskInfo, TaskListError, Tasks};

/// The number of the process to whose root directory paths are relative.
pub(super) const INIT: i32 = 1;

/// The program of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The arguments; see [`crate::kernel::process::ProcessLayout::command_line`].
    pub arguments: ProcessText,
    /// The path of the file as the kernel prints it, or none without a file.
    pub path: Option<Vec<u8>>,
}

impl PausedSystem<'_> {
    /// Returns all processes.
    ///
    /// # Errors
    /// If the kernel's layout for them is unknown.
    pub fn processes(&self) -> Result<Tasks, Unavailable> {
        let tasks = known(&self.system.tasks)?;
        Ok(tasks.processes(self.view))
    }

    /// Returns all threads of all processes.
    ///
    /// # Errors
    /// If the kernel's layout for them is unknown.
    pub fn threads(&self) -> Result<Tasks, Unavailable> {
        let tasks = known(&self.system.tasks)?;
        Ok(tasks.all_threads(self.view))
    }

    /// Returns the threads of a process.
    ///
    /// # Errors
    /// If the kernel's layout for them is unknown.
    pub fn threads_of(&self, process: &TaskInfo) -> Result<Tasks, Unavailable> {
        let tasks = known(&self.system.tasks)?;
        Ok(tasks.threads(self.view, process))
    }

    /// Finds the process with this number.
    ///
    /// # Errors
    /// The inner one if it was not found and not all processes could be read. The outer one if the
    /// kernel's layout for them is unknown.
    pub fn process(
        &self,
        pid: i32,
    ) -> Result<Result<Option<TaskInfo>, TaskListError>, Unavailable> {
        let tasks = known(&self.system.tasks)?;
        Ok(tasks.process(self.view, pid))
    }

    /// Finds the thread with this number, in any process.
    ///
    /// # Errors
    /// The inner one if it was not found and not all threads could be read. The outer one if the
    /// kernel's layout for them is unknown.
    pub fn thread(&self, pid: i32) -> Result<Result<Option<TaskInfo>, TaskListError>, Unavailable> {
        let tasks = known(&self.system.tasks)?;
        Ok(tasks.thread(self.view, pid))
    }

    /// Returns the name of a task as `/proc/PID/stat` and ps(1) show it, or its comm if that cannot
    /// be read.
    #[must_use]
    pub fn name(&self, task: &TaskInfo) -> Vec<u8> {
        let full = self.system.tasks.as_ref().ok();
        full.and_then(|tasks| tasks.full_name(self.view, task).ok())
            .unwrap_or_else(|| task.name().to_vec())
    }

    /// Returns the program of a process, with at most `most` bytes of its arguments. Returns `None`
    /// for a task without memory: a kernel thread, or one that has ended.
    ///
    /// # Errors
    /// The inner one if a structure is broken. The outer one if the kernel's layout for it is
    /// unknown.
    pub fn program(
        &self,
        task: &TaskInfo,
        most: usize,
    ) -> Result<Option<Result<Program, ProcessError>>, Unavailable> {
        let layout = known(&self.system.processes)?;
        let Some(mm) = task.user_mm() else {
            return Ok(None);
        };
        let read = || {
            let arguments = layout.command_line(self.view, mm, most)?;
            let file = layout.executable(self.view, mm)?;
            Ok(Program {
                arguments,
                path: file.map(|file| self.path_of(file)),
            })
        };
        Ok(Some(read()))
    }

    /// Returns the open files of a process.
    ///
    /// # Errors
    /// If the kernel's layout for them is unknown.
    pub fn open_files(
        &self,
        task: &TaskInfo,
    ) -> Result<Partial<OpenFile, FilesError>, Unavailable> {
        let layout = known(&self.system.files)?;
        Ok(layout.open_files(self.view, task.address))
    }

    /// Returns the path of a `struct file` as the kernel prints it, or the reason in brackets if it
    /// is unknown.
    #[must_use]
    pub fn path_of(&self, file: Gva) -> Vec<u8> {
        let untold = |reason: &dyn std::fmt::Display| format!("[{reason}]").into_bytes();
        let layout = match &self.system.processes {
            Ok(layout) => layout,
            Err(lost) => return untold(lost),
        };
        let paths = layout.paths();
        let told = match paths.opened_at(self.view, file) {
            Ok(place) => place
                .map(|place| paths.text(self.view, place, self.root()))
                .transpose(),
            Err(error) => Err(error.into()),
        };
        match told {
            Ok(Some(path)) => path.printed(),
            Ok(None) => untold(&"no path: the file is not open"),
            Err(error) => untold(&error),
        }
    }

    /// Returns the root directory of the first process, or `None`, the top of its mounts, if it is
    /// unknown.
    fn root(&self) -> Option<PathRef> {
        let tasks = self.system.tasks.as_ref().ok()?;
        let layout = self.system.processes.as_ref().ok()?;
        // It is the first of the list. In a damaged list it is not searched for. Each path needs
        // it, and the guest determines the length of the list.
        let first = tasks.first_process(self.view).ok()?;
        let init = Some(first).filter(|first| first.pid == INIT)?;
        layout.root(self.view, init.address).ok()?
    }
}
