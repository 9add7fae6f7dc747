//! The command `ps`: each process with its program and its container.
//!
//! Processes usually share control groups, so the path of each group is read once for an answer.
//! The caller bounds the answer by the size of what was described before.

use std::collections::HashMap;

use introspect::Gva;
use introspect::kernel::cgroup::CgroupError;
use introspect::kernel::task_list::TaskInfo;
use introspect::system::PausedSystem;

use super::container::container_name;
use super::{bytes_of, lossy};
use crate::protocol::inspection::Process;

/// The largest number of bytes shown of a process's arguments.
const MOST_ARGUMENTS: usize = 4096;

/// The processes of an answer.
pub(super) struct Descriptions<'l, 's> {
    look: &'l PausedSystem<'s>,
    /// The paths of control groups by the addresses of their nodes.
    groups: HashMap<Gva, Option<String>>,
    /// The number of groups and namespaces that are broken, and the first reason.
    broken: usize,
    reason: Option<String>,
    /// The size of the texts so far, in bytes.
    pub(super) bytes: usize,
}

impl<'l, 's> Descriptions<'l, 's> {
    pub(super) fn new(look: &'l PausedSystem<'s>) -> Self {
        Self {
            look,
            groups: HashMap::new(),
            broken: 0,
            reason: None,
            bytes: 0,
        }
    }

    /// Returns a sentence about the control groups and namespaces that could not be read.
    pub(super) fn lost(self) -> Option<String> {
        let reason = self.reason?;
        Some(format!(
            "{} control groups and namespaces of processes are not known, the first for: {reason}",
            self.broken
        ))
    }

    /// Returns a process; with its program and its container only if `whole`.
    pub(super) fn process(&mut self, task: &TaskInfo, whole: bool) -> Process {
        let look = self.look;
        let program = whole.then(|| look.program(task, MOST_ARGUMENTS).ok().flatten());
        let program = program.flatten().and_then(Result::ok);
        let mut process = Process {
            pid: task.pid,
            tgid: task.tgid,
            ppid: task.parent,
            state: task.state.letter(),
            comm: lossy(&look.name(task)),
            kernel_thread: task.is_kernel_thread(),
            threads: u32::try_from(task.threads).unwrap_or(0),
            start_ns: task.start_time,
            cpu: task.cpu,
            arguments: program
                .iter()
                .flat_map(|program| program.arguments.strings().map(lossy))
                .collect(),
            program: program
                .and_then(|program| program.path)
                .map(|path| lossy(&path)),
            ns_pid: None,
            cgroup: None,
            container: None,
        };
        if whole {
            self.contain(task, &mut process);
        }
        let more = [&process.program, &process.cgroup, &process.container];
        let more = more.into_iter().filter_map(Option::as_deref);
        self.bytes += bytes_of(&process.arguments, more);
        process
    }

    /// Adds the control group and the container.
    fn contain(&mut self, task: &TaskInfo, process: &mut Process) {
        let cgroup = self.cgroup(task);
        process.cgroup = self.noted(cgroup).flatten();
        let pid = self.look.namespace_pid(task).ok();
        let pid = pid.and_then(|pid| self.noted(pid)).flatten();
        process.ns_pid = pid.map(|pid| pid.number);
        if let Some(pid) = pid.filter(|pid| pid.level > 0) {
            let host = self.look.own_host_name(task).ok();
            let host = host.and_then(|host| self.noted(host)).flatten();
            process.container = Some(container_name(
                process.cgroup.as_deref(),
                host.map(|host| lossy(&host)),
                pid.namespace,
            ));
        }
    }

    /// Returns the path of a task's control group.
    fn cgroup(&mut self, task: &TaskInfo) -> Result<Option<String>, CgroupError> {
        let Some(node) = self.look.cgroup_node(task)? else {
            return Ok(None);
        };
        if let Some(path) = self.groups.get(&node) {
            return Ok(path.clone());
        }
        let path = self.look.cgroup_path(node);
        let known = path.as_ref().ok().and_then(Option::as_deref).map(lossy);
        self.groups.insert(node, known.clone());
        path.map(|_| known)
    }

    /// Returns the value, and counts an error.
    fn noted<T, E: std::fmt::Display>(&mut self, found: Result<T, E>) -> Option<T> {
        match found {
            Ok(found) => Some(found),
            Err(error) => {
                self.broken += 1;
                self.reason.get_or_insert_with(|| error.to_string());
                None
            }
        }
    }
}
