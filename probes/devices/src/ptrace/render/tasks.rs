//! The name and state of each process, as known from its records.

use lru::LruCache;

use super::{MAX_TASKS, NO_NAME};
use crate::ptrace::record::{EventType, Record, name_of};

/// The names and states of processes.
#[derive(Debug)]
pub struct Tasks {
    seen: LruCache<u32, Seen>,
}

/// The name and state of one process.
#[derive(Debug, Default)]
pub struct Seen {
    name: Option<String>,
    state: Option<EventType>,
}

impl Default for Tasks {
    fn default() -> Self {
        Self {
            seen: LruCache::sparse(MAX_TASKS),
        }
    }
}

impl Tasks {
    /// Updates the record's process and returns its name and state.
    pub fn record(&mut self, record: &Record) -> &Seen {
        let seen = self.seen.get_or_insert_mut(record.pid, Seen::default);
        match EventType::of(record.event) {
            Some(EventType::Name) => seen.name = name(record),
            // No Plan 9 records this state. It means that a task with a deadline runs.
            Some(EventType::Edf) => seen.state = Some(EventType::Run),
            Some(
                state @ (EventType::Ready | EventType::Run | EventType::Sleep | EventType::Dead),
            ) => seen.state = Some(state),
            _ => {}
        }
        seen
    }
}

impl Seen {
    /// Returns the process's name.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the process's state, as ptrace(1) has it: a process without a record runs.
    pub(super) fn state(&self) -> EventType {
        self.state.unwrap_or(EventType::Run)
    }
}

/// Returns the name in a record of type `Name`; `None` if it is empty.
pub(super) fn name(record: &Record) -> Option<String> {
    let name = name_of(record.argument);
    (!name.is_empty()).then(|| String::from_utf8_lossy(&name).into_owned())
}

/// Returns the name to write: itself or `_`.
pub(super) fn shown(name: Option<&str>) -> &str {
    name.unwrap_or(NO_NAME)
}
