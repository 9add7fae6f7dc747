//! Maps as they were when a script printed them, until whoever reads the rings gets there.
//!
//! Printing is an event like any other: it has its place among what was printed before and after, and shows the map as it was then.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::maps::MapSnapshot;

/// Snapshots that wait at a time. A script that prints more without being read loses what it prints, and that is counted.
const MOST: usize = 256;

/// Snapshots by number. The lock is held while one is put in or taken out, not while it is made: that may take long, and whoever prints
/// another map or reads would wait.
#[derive(Default)]
pub(super) struct Snapshots {
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    next: i64,
    by_number: HashMap<i64, MapSnapshot>,
}

impl Snapshots {
    /// Keeps what `make` gives; its number, or `None` if too many wait.
    pub(super) fn put(&self, make: impl FnOnce() -> MapSnapshot) -> Option<i64> {
        if self.lock().by_number.len() >= MOST {
            return None;
        }
        let made = make();
        let mut waiting = self.lock();
        if waiting.by_number.len() >= MOST {
            return None;
        }
        let number = waiting.next;
        waiting.next += 1;
        waiting.by_number.insert(number, made);
        Some(number)
    }

    /// Gives one back, once.
    pub(super) fn take(&self, number: i64) -> Option<MapSnapshot> {
        self.lock().by_number.remove(&number)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
