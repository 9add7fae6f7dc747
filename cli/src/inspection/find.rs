//! The one process that a request names, by pid or by name, or the message that there is none.

use introspect::kernel::task_list::TaskInfo;
use introspect::system::PausedSystem;

use super::lossy;
use crate::protocol::error::{ErrorKind, RequestError};
use crate::protocol::inspection::ProcessName;

/// The largest number of bytes shown of a candidate's arguments.
const MOST_CANDIDATE_ARGUMENTS: usize = 100;
/// The largest number of processes listed where a name fits several.
const MOST_CANDIDATES: usize = 10;

/// Returns the one process of that name or pid.
pub(super) fn find(look: &PausedSystem<'_>, name: &ProcessName) -> Result<TaskInfo, RequestError> {
    let comm = match name {
        ProcessName::Pid(pid) => {
            let found = look.process(*pid)?;
            let found =
                found.map_err(|error| no_one(format!("no process {pid} found: {error}")))?;
            return found.ok_or_else(|| no_process(look, *pid));
        }
        ProcessName::Comm(comm) => comm,
    };
    let tasks = look.processes()?;
    let fitting: Vec<&TaskInfo> = tasks
        .items
        .iter()
        .filter(|task| lossy(task.name()) == *comm || lossy(&look.name(task)) == *comm)
        .collect();
    match (fitting.as_slice(), tasks.error) {
        ([one], _) => Ok(**one),
        ([], Some(error)) => Err(no_one(format!(
            "no process is called {comm:?}, as far as they could be read: {error}"
        ))),
        ([], None) => Err(no_one(format!(
            "the guest has no process called {comm:?}; see ps"
        ))),
        (several, _) => {
            let more = several.len().saturating_sub(MOST_CANDIDATES);
            let mut candidates: Vec<String> = several
                .iter()
                .take(MOST_CANDIDATES)
                .map(|task| candidate(look, task))
                .collect();
            if more > 0 {
                candidates.push(format!("and {more} more"));
            }
            Err(no_one(format!(
                "{} processes are called {comm:?}; name one by its pid: {}",
                several.len(),
                candidates.join(", ")
            )))
        }
    }
}

/// Returns the message that no process has this pid, and names the process whose thread has it.
fn no_process(look: &PausedSystem<'_>, pid: i32) -> RequestError {
    no_one(match look.thread(pid) {
        Ok(Ok(Some(thread))) => format!(
            "{pid} ({}) is a thread of process {}: name that one",
            lossy(thread.name()),
            thread.tgid
        ),
        _ => format!("the guest has no process {pid}; see ps"),
    })
}

fn no_one(why: String) -> RequestError {
    RequestError::new(ErrorKind::NoProcess, why)
}

/// Returns a candidate's line: `17 (sleep 100)`.
fn candidate(look: &PausedSystem<'_>, task: &TaskInfo) -> String {
    let arguments = arguments(look, task);
    match arguments.is_empty() {
        true => task.pid.to_string(),
        false => format!("{} ({})", task.pid, arguments.join(" ")),
    }
}

fn arguments(look: &PausedSystem<'_>, task: &TaskInfo) -> Vec<String> {
    match look.program(task, MOST_CANDIDATE_ARGUMENTS) {
        Ok(Some(Ok(program))) => program.arguments.strings().map(lossy).collect(),
        _ => Vec::new(),
    }
}

/// Returns the reason why a process has no mappings.
pub(super) fn without_memory(task: &TaskInfo) -> RequestError {
    no_one(format!(
        "process {} ({}) has no memory of its own: it {}",
        task.pid,
        lossy(task.name()),
        match task.is_kernel_thread() {
            true => "is a thread of the kernel",
            false => "has ended",
        }
    ))
}
