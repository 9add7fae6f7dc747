//! Processes that a filter follows: those it names, and all that they make.
//!
//! The engine tells of every process that is made and that ends, on the vCPU's thread where it happens; the hit path asks.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError, RwLock};

/// Most processes that are followed at a time: a guest that makes more loses those.
const MOST: usize = 1 << 16;

/// The processes of one filter.
#[derive(Debug, Clone, Default)]
pub(crate) struct Followed(Arc<RwLock<HashSet<u32>>>);

impl Followed {
    pub(crate) fn new(pids: impl IntoIterator<Item = u32>) -> Self {
        Self(Arc::new(RwLock::new(pids.into_iter().collect())))
    }

    /// Whether a filter still asks.
    pub(crate) fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(crate) fn contains(&self, pid: u32) -> bool {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(&pid)
    }

    /// `child` was made by `parent`.
    pub(crate) fn made(&self, parent: u32, child: u32) {
        if !self.contains(parent) {
            return;
        }
        let mut pids = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if pids.len() < MOST {
            pids.insert(child);
        }
    }

    /// `pid` has ended: another process may get its number.
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
