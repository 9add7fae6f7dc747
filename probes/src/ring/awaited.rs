//! The announcement by which a reader that found its rings empty asks to be woken.
//!
//! The reader sets it and then looks at the rings. The pusher pushes and then looks at it. Each has
//! a sequentially consistent fence in between, so one of them sees the other.

use crate::sync::{AtomicU64, Ordering, fence};

/// The announcement.
#[derive(Debug)]
pub(crate) struct Awaited(AtomicU64);

impl Default for Awaited {
    fn default() -> Self {
        Self(AtomicU64::new(0))
    }
}

impl Awaited {
    /// Sets the announcement. The reader looks at the rings after that.
    pub(crate) fn set(&self) {
        self.0.store(1, Ordering::Relaxed);
        // The store precedes what is read from the rings. Pairs with the fence in `is_set`.
        fence(Ordering::SeqCst);
    }

    /// Takes the announcement back, and returns whether it was set.
    pub(crate) fn clear(&self) -> bool {
        self.0.swap(0, Ordering::Relaxed) != 0
    }

    /// Checks whether the reader waits. The pusher asks after it has pushed.
    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        // The push precedes the load. Pairs with the fence in `set`.
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) != 0
    }
}
