//! Processes, and what each is made of.

use super::{PausedSystem, Unavailable};
use crate::Gva;
use crate::kernel::files::{FilesError, OpenFile};
use crate::kernel::list::Partial;
use crate::kernel::path::PathRef;
use crate::kernel::process::{ProcessError, ProcessText};
use crate::kernel::task_list::{TaskInfo, TaskListError, Tasks};

/// Number of the process whose root directory paths are told from.
const INIT: i32 = 1;

/// The program a process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Its arguments; see [`crate::kernel::process::ProcessLayout::command_line`].
    pub arguments: ProcessText,
    /// Path of its file, as the kernel prints it; none if it has no file.
    pub path: Option<Vec<u8>>,
}

impl PausedSystem<'_> {
    /// All processes.
    ///
    /// # Errors
    /// If the kernel does not tell of any.
    pub fn processes(&self) -> Result<Tasks, Unavailable> {
        let tasks = self.system.tasks.as_ref().map_err(Unavailable::clone)?;
        Ok(tasks.processes(self.view))
    }

    /// All threads of all processes.
    ///
    /// # Errors
    /// If the kernel does not tell of any.
    pub fn threads(&self) -> Result<Tasks, Unavailable> {
        let tasks = self.system.tasks.as_ref().map_err(Unavailable::clone)?;
        Ok(tasks.all_threads(self.view))
    }

    /// The threads of a process.
    ///
    /// # Errors
    /// If the kernel does not tell of any.
    pub fn threads_of(&self, process: &TaskInfo) -> Result<Tasks, Unavailable> {
        let tasks = self.system.tasks.as_ref().map_err(Unavailable::clone)?;
        Ok(tasks.threads(self.view, process))
    }

    /// The process with this number.
    ///
    /// # Errors
    /// The inner one if it was not found and not all processes could be looked at; the outer one if the kernel does not
    /// tell of any.
    pub fn process(
        &self,
        pid: i32,
    ) -> Result<Result<Option<TaskInfo>, TaskListError>, Unavailable> {
        let tasks = self.system.tasks.as_ref().map_err(Unavailable::clone)?;
        Ok(tasks.process(self.view, pid))
    }

    /// The thread with this number, of whichever process.
    ///
    /// # Errors
    /// The inner one if it was not found and not all threads could be looked at; the outer one if the kernel does not
    /// tell of any.
    pub fn thread(&self, pid: i32) -> Result<Result<Option<TaskInfo>, TaskListError>, Unavailable> {
        let tasks = self.system.tasks.as_ref().map_err(Unavailable::clone)?;
        Ok(tasks.thread(self.view, pid))
    }

    /// The name of a task as `/proc/PID/stat` and ps(1) show it; its comm where that cannot be read.
    #[must_use]
    pub fn name(&self, task: &TaskInfo) -> Vec<u8> {
        let full = self.system.tasks.as_ref().ok();
        full.and_then(|tasks| tasks.full_name(self.view, task).ok())
            .unwrap_or_else(|| task.name().to_vec())
    }

    /// What a process runs, with at most `most` bytes of its arguments; `None` for one without memory: a thread of the
    /// kernel's, or one that has ended.
    ///
    /// # Errors
    /// The inner one if a structure is broken; the outer one if the kernel does not tell.
    pub fn program(
        &self,
        task: &TaskInfo,
        most: usize,
    ) -> Result<Option<Result<Program, ProcessError>>, Unavailable> {
        let layout = self.system.processes.as_ref().map_err(Unavailable::clone)?;
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

    /// The open files of a process.
    ///
    /// # Errors
    /// If the kernel does not tell of any.
    pub fn open_files(
        &self,
        task: &TaskInfo,
    ) -> Result<Partial<OpenFile, FilesError>, Unavailable> {
        let layout = self.system.files.as_ref().map_err(Unavailable::clone)?;
        Ok(layout.open_files(self.view, task.address))
    }

    /// The path of a `struct file`, as the kernel prints it; where it cannot be told, the reason in brackets.
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

    /// The root directory of the first process; `None`, the top of its mounts, if that cannot be told.
    fn root(&self) -> Option<PathRef> {
        let tasks = self.system.tasks.as_ref().ok()?;
        let layout = self.system.processes.as_ref().ok()?;
        // It is the first of the list. Where a damaged list starts otherwise it is not searched for: this is asked for
        // each path, and a list may be as long as the guest likes.
        let first = tasks.first_process(self.view).ok()?;
        let init = Some(first).filter(|first| first.pid == INIT)?;
        layout.root(self.view, init.address).ok()?
    }
}
