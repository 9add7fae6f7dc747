//! The tasks that are traced. Commands change them, and so do the guest's forks and exits. Every
//! hit looks them up without waiting.
//!
//! A task is known by the address of its `task_struct`. Another task may get that address later, so
//! number and start are compared, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vmm::sharded_map::ShardedMap;

use super::layout::Identity;

/// The greatest number of tasks traced one by one. Children beyond it are not traced.
pub(super) const MOST: usize = 1 << 16;

/// The selected tasks.
#[derive(Default)]
pub(super) struct Selection {
    /// Whether all tasks are traced, regardless of the selection.
    all: AtomicBool,
    /// The selected tasks, by address.
    tasks: ShardedMap<Identity>,
    /// The number of children not selected because there were too many.
    refused: AtomicU64,
}

impl Selection {
    /// Checks whether all tasks are traced.
    pub(super) fn all(&self) -> bool {
        self.all.load(Ordering::Relaxed)
    }

    /// Traces all tasks, or only the selected ones.
    pub(super) fn set_all(&self, all: bool) {
        self.all.store(all, Ordering::Relaxed);
    }

    /// Returns the identity of the task selected at this address.
    pub(super) fn get(&self, task: u64) -> Option<Identity> {
        self.tasks.with(task, |identity| **identity)
    }

    /// Selects a task. Returns `false` if there are too many.
    pub(super) fn insert(&self, task: u64, identity: Identity) -> bool {
        let has_room = self.len() < MOST || self.tasks.contains(task);
        match has_room {
            true => drop(self.tasks.insert(task, Arc::new(identity))),
            false => drop(self.refused.fetch_add(1, Ordering::Relaxed)),
        }
        has_room
    }

    /// Removes a task from the selection.
    pub(super) fn remove(&self, task: u64) {
        // Most tasks that end were never selected, and a change has to wait for its turn.
        if self.tasks.contains(task) {
            self.tasks.remove(task);
        }
    }

    /// Removes all tasks that were selected one by one.
    pub(super) fn clear(&self) {
        for task in self.tasks.keys() {
            self.tasks.remove(task);
        }
    }

    /// Returns the number of tasks selected one by one.
    pub(super) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the numbers of the tasks selected one by one, ascending.
    pub(super) fn pids(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = self.tasks.values().iter().map(|task| task.pid).collect();
        pids.sort_unstable();
        pids
    }

    /// Returns the number of children not selected because there were too many.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_selected_one_by_one_up_to_a_limit() {
        let selection = Selection::default();
        let of = |pid| Identity { pid, start: 7 };
        assert!(selection.len() == 0 && !selection.all());
        for task in 0..MOST as u64 {
            assert!(selection.insert(task * 64, of(MOST as u32 - task as u32)));
        }
        assert!(!selection.insert(1, of(1)), "too many");
        assert!(selection.insert(64, of(5)), "one that is known");
        assert_eq!((selection.refused(), selection.get(64)), (1, Some(of(5))));
        assert!(selection.pids().is_sorted());
        (0..MOST as u64).for_each(|task| selection.remove(task * 64));
        assert_eq!(selection.len(), 0);
    }
}
