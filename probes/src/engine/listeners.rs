//! Listeners of a watch: sessions that look at something new in the guest, which is paused for it.
//!
//! A report holds the guest until it is dropped. A listener leaves the list when it is dropped: it
//! must not keep its session's rings until a next report, which may never come.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm::machine::Paused;

use super::session::Waiter;

/// The listeners of a watch. `W` is a listener's selection, `T` a report. Clones are one list.
pub(super) struct Listeners<W, T>(Arc<Mutex<Vec<Listener<W, T>>>>);

/// The sending side of a [`Listening`].
struct Listener<W, T> {
    wanted: W,
    reports: Sender<T>,
    waiter: Arc<Waiter>,
}

/// One of the listeners, until it is dropped.
pub(super) struct Listening<W, T> {
    listeners: Listeners<W, T>,
    reports: Receiver<T>,
    /// The same as the listener's.
    waiter: Arc<Waiter>,
}

impl<W, T> Default for Listeners<W, T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<W, T> Clone for Listeners<W, T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<W, T> Listeners<W, T> {
    fn list(&self) -> MutexGuard<'_, Vec<Listener<W, T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a listener to reports that it has `wanted`, for a session whose drainer waits by
    /// `waiter`.
    pub(super) fn listen(&self, wanted: W, waiter: Waiter) -> Listening<W, T> {
        let (sender, reports) = channel();
        let waiter = Arc::new(waiter);
        self.list().push(Listener {
            wanted,
            reports: sender,
            waiter: waiter.clone(),
        });
        Listening {
            listeners: self.clone(),
            reports,
            waiter,
        }
    }

    /// Sends a report to each listener whose selection `wants` it, and wakes the session. The guest
    /// is paused by `hold` if there is such a listener.
    pub(super) fn report(
        &self,
        wants: impl Fn(&W) -> bool,
        hold: impl FnOnce() -> Paused,
        report: impl Fn(Arc<Paused>) -> T,
    ) {
        let mut list = self.list();
        if !list.iter().any(|listener| wants(&listener.wanted)) {
            return;
        }
        let held = Arc::new(hold());
        list.retain(|listener| {
            if !wants(&listener.wanted) {
                return true;
            }
            let sent = listener.reports.send(report(held.clone()));
            listener.waiter.wake();
            sent.is_ok()
        });
    }
}

impl<W, T> Listening<W, T> {
    /// Returns the next report, if there is one. Never waits.
    pub(super) fn next(&self) -> Option<T> {
        self.reports.try_recv().ok()
    }
}

impl<W, T> Drop for Listening<W, T> {
    fn drop(&mut self) {
        let mut list = self.listeners.list();
        list.retain(|listener| !Arc::ptr_eq(&listener.waiter, &self.waiter));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::doorbell::Doorbell;
    use crate::engine::session::SessionShared;

    #[test]
    fn a_listener_that_has_ended_holds_nothing_of_its_session() {
        let shared = Arc::new(SessionShared {
            rings: Vec::new(),
            skipped_ticks: Arc::default(),
            doorbell: Doorbell::new().unwrap(),
            meters: Box::default(),
        });
        let listeners = Listeners::<[&str; 2], ()>::default();
        let listen = |name| listeners.listen(["kvm", name], Waiter::of(&shared));
        let (others, ended) = (listen("brd"), listen("ext4"));
        for (name, expected) in [("kvm", 2), ("brd", 1), ("ext4", 1), ("kvm_amd", 0)] {
            let list = listeners.list();
            let found = list
                .iter()
                .filter(|listener| listener.wanted.contains(&name));
            assert_eq!(found.count(), expected, "{name}");
        }
        let held = Arc::strong_count(&shared);
        drop(ended);
        assert_eq!(Arc::strong_count(&shared), held - 1);
        assert_eq!(listeners.list().len(), 1);
        drop(others);
        assert_eq!(Arc::strong_count(&shared), 1);
    }
}
