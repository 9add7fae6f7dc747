//! Snapshots of maps that a script has printed, kept until the rings' reader gets there.
//!
//! Printing is an event like any other: it is in order with earlier and later output, and shows the
//! map at that time.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::maps::MapSnapshot;

/// The greatest number of waiting snapshots. A script that prints more without being read loses
/// that output, which is counted.
const MOST: usize = 256;

/// Snapshots by number. The lock is held while one is added or removed, but not while it is made.
/// That may take long, and other vCPUs' prints and the reader would wait.
#[derive(Default)]
pub(crate) struct Snapshots {
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    next: i64,
    by_number: HashMap<i64, MapSnapshot>,
}

impl Snapshots {
    /// Keeps the result of `make`. Returns its number, or `None` if too many wait.
    pub(crate) fn put(&self, make: impl FnOnce() -> MapSnapshot) -> Option<i64> {
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

    /// Removes a snapshot and returns it.
    pub(crate) fn take(&self, number: i64) -> Option<MapSnapshot> {
        self.lock().by_number.remove(&number)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
