//! The tasks that are traced: changed by commands, and where the guest's tasks fork and exit; asked at every hit, without waiting.
//!
//! A task is known by the address of its `task_struct`. Since another task may get that, its number and start are compared, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vmm::sharded_map::ShardedMap;

use super::layout::Identity;

/// Most tasks that are traced one by one: children that a guest makes beyond are not.
pub(super) const MOST: usize = 1 << 16;

/// The selection.
#[derive(Default)]
pub(super) struct Selection {
    /// Everybody, whatever else is selected.
    all: AtomicBool,
    /// By address.
    tasks: ShardedMap<Identity>,
    /// Children that were not selected, since there were too many.
    refused: AtomicU64,
}

impl Selection {
    /// Whether everybody is traced.
    pub(super) fn all(&self) -> bool {
        self.all.load(Ordering::Relaxed)
    }

    /// Traces everybody, or only who is selected.
    pub(super) fn set_all(&self, all: bool) {
        self.all.store(all, Ordering::Relaxed);
    }

    /// Who was selected at this address.
    pub(super) fn get(&self, task: u64) -> Option<Identity> {
        self.tasks.with(task, |identity| **identity)
    }

    /// Selects a task; `false` if there are too many.
    pub(super) fn insert(&self, task: u64, identity: Identity) -> bool {
        let has_room = self.len() < MOST || self.tasks.contains(task);
        match has_room {
            true => drop(self.tasks.insert(task, Arc::new(identity))),
            false => drop(self.refused.fetch_add(1, Ordering::Relaxed)),
        }
        has_room
    }

    /// A task is selected no more.
    pub(super) fn remove(&self, task: u64) {
        // Most tasks that end were never selected, and a change takes its turn.
        if self.tasks.contains(task) {
            self.tasks.remove(task);
        }
    }

    /// Nobody is selected one by one any more.
    pub(super) fn clear(&self) {
        for task in self.tasks.keys() {
            self.tasks.remove(task);
        }
    }

    /// How many are selected one by one.
    pub(super) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Numbers of the tasks that are selected one by one, ascending.
    pub(super) fn pids(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = self.tasks.values().iter().map(|task| task.pid).collect();
        pids.sort_unstable();
        pids
    }

    /// Children that were not selected, since there were too many.
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
