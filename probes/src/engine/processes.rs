//! Processes that a filter follows: those it names, and all their descendants.
//!
//! The engine reports the start and end of every process, on the vCPU's thread where it happens.
//! The hit path reads the set.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError, RwLock};

/// The most processes followed at a time. Further ones are not followed.
const MOST: usize = 1 << 16;

/// The set of processes of one filter.
#[derive(Debug, Clone, Default)]
pub(crate) struct Followed(Arc<RwLock<HashSet<u32>>>);

impl Followed {
    pub(crate) fn new(pids: impl IntoIterator<Item = u32>) -> Self {
        Self(Arc::new(RwLock::new(pids.into_iter().collect())))
    }

    /// Checks whether a filter still uses the set.
    pub(crate) fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(crate) fn contains(&self, pid: u32) -> bool {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(&pid)
    }

    /// Adds `child` if its `parent` is followed.
    pub(crate) fn made(&self, parent: u32, child: u32) {
        if !self.contains(parent) {
            return;
        }
        let mut pids = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if pids.len() < MOST {
            pids.insert(child);
        }
    }

    /// Removes `pid`, which has ended: another process may get its number.
    pub(crate) fn ended(&self, pid: u32) {
        if self.contains(pid) {
            let mut pids = self.0.write().unwrap_or_else(PoisonError::into_inner);
            pids.remove(&pid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_and_their_children_are_followed_until_they_end() {
        let followed = Followed::new([10]);
        followed.made(10, 11);
        followed.made(11, 12);
        followed.made(20, 21);
        assert!([10, 11, 12].iter().all(|pid| followed.contains(*pid)));
        assert!(!followed.contains(21));
        followed.ended(11);
        followed.made(11, 13);
        assert!(!followed.contains(11) && !followed.contains(13) && followed.contains(12));
    }
}
