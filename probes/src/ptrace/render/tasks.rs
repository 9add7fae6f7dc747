//! What is known of each process from its records: its name and its state.

use super::{MAX_TASKS, NO_NAME};
use crate::ptrace::record::{EventType, Record, name_of};
use crate::recent::Recent;

/// What is known of processes.
#[derive(Debug)]
pub(super) struct Tasks {
    seen: Recent<u32, Seen>,
}

/// What is known of one.
#[derive(Debug, Default)]
pub(super) struct Seen {
    name: Option<String>,
    state: Option<EventType>,
}

impl Tasks {
    /// Nothing.
    pub(super) fn new() -> Self {
        Self {
            seen: Recent::new(MAX_TASKS),
        }
    }

    /// What is known of the record's process with this record.
    pub(super) fn record(&mut self, record: &Record) -> &Seen {
        let seen = self.seen.of(record.pid, Seen::default);
        match EventType::of(record.event) {
            Some(EventType::Name) => seen.name = name(record),
            // No Plan 9 says so. It means that a task with a deadline runs.
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
    /// Its name.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// What it does, as ptrace(1) has it: of which nothing has been seen runs.
    pub(super) fn state(&self) -> EventType {
        self.state.unwrap_or(EventType::Run)
    }
}

/// The name that a record of type `Name` tells; `None` if it is empty.
pub(super) fn name(record: &Record) -> Option<String> {
    let name = name_of(record.argument);
    (!name.is_empty()).then(|| String::from_utf8_lossy(&name).into_owned())
}

/// What is written for a name: itself or `_`.
pub(super) fn shown(name: Option<&str>) -> &str {
    name.unwrap_or(NO_NAME)
}
