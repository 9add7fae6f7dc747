//! Wakes the thread that drains a session when there is something for it to do.
//!
//! The drainer waits in two steps. For [`PACE`] only [`Doorbell::ring`] wakes it, so that records
//! that follow each other quickly are drained together. Then it announces its wait, looks at the
//! rings once more, and sleeps until a hit finds the announcement. An idle session costs neither
//! side anything, and a hit costs a load.
//!
//! # Memory orderings
//!
//! The drainer stores `awaited` and then looks at the rings; a hit pushes its record and then loads
//! `awaited`. A sequentially consistent fence between the two accesses, on both sides, ensures that
//! one of them sees the other. `loom_model` checks this.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::ring::awaited::Awaited;

/// The time between two drains while records keep coming. A ring holds some ten times as many as
/// the fastest guest makes in this time.
pub(crate) const PACE: Duration = Duration::from_millis(5);
/// The time after which a wait ends in any case: an output without room is then tried again.
pub const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// The doorbell of one draining thread.
#[derive(Debug)]
pub(crate) struct Doorbell {
    event: OwnedFd,
    awaited: Awaited,
}

/// The reason for the end of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Woken {
    /// There may be something to drain, or the time is up.
    Drain,
    /// The client's stream is in the state that was waited for.
    Stream,
}

/// A client's stream that ends a wait. Its data stay unread.
#[derive(Debug, Clone, Copy)]
pub struct WatchedStream<'f> {
    stream: BorrowedFd<'f>,
    events: PollFlags,
}

impl<'f> WatchedStream<'f> {
    /// Returns a stream that ends the wait when its other side is closed.
    pub fn until_closed(stream: &'f impl AsFd) -> Self {
        Self {
            stream: stream.as_fd(),
            events: PollFlags::RDHUP,
        }
    }

    /// Returns a stream that ends the wait when its other side sends anything or is closed.
    pub fn until_request(stream: &'f impl AsFd) -> Self {
        Self {
            stream: stream.as_fd(),
            events: PollFlags::RDHUP | PollFlags::IN,
        }
    }
}

impl Doorbell {
    /// Makes a doorbell.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            awaited: Awaited::default(),
        })
    }

    /// Wakes the drainer. Never waits.
    pub(crate) fn ring(&self) {
        // It fails only if the counter is full, and then the drainer is woken already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Wakes the drainer if it has found the rings empty. Call it after a push.
    #[inline]
    pub(crate) fn ring_if_awaited(&self) {
        if self.awaited.is_set() {
            self.ring_once();
        }
    }

    #[cold]
    fn ring_once(&self) {
        if self.awaited.clear() {
            self.ring();
        }
    }

    /// Waits until there may be something to drain or `client` ends the wait, at most `limit`.
    pub(crate) fn wait(
        &self,
        is_empty: impl Fn() -> bool,
        client: Option<WatchedStream<'_>>,
        limit: Duration,
    ) -> Woken {
        if let Some(woken) = self.sleep(client, PACE.min(limit)) {
            return woken;
        }
        self.awaited.set();
        let rest = limit.saturating_sub(PACE);
        let woken = is_empty().then(|| self.sleep(client, rest)).flatten();
        self.awaited.clear();
        woken.unwrap_or(Woken::Drain)
    }

    /// Sleeps until the bell is rung or the client ends it. Returns `None` when the time is up.
    fn sleep(&self, client: Option<WatchedStream<'_>>, limit: Duration) -> Option<Woken> {
        let bell = PollFd::from_borrowed_fd(self.event.as_fd(), PollFlags::IN);
        // Without a client the bell is named twice, which does no harm.
        let client = client.map_or_else(
            || PollFd::from_borrowed_fd(self.event.as_fd(), PollFlags::empty()),
            |client| PollFd::from_borrowed_fd(client.stream, client.events),
        );
        let mut watched = [bell, client];
        // No limit is that long.
        let limit = Timespec::try_from(limit).unwrap_or_default();
        // An interrupted wait is a short one.
        let _ = poll(&mut watched, Some(&limit));
        let [bell, client] = watched;
        if !client.revents().is_empty() {
            return Some(Woken::Stream);
        }
        let mut count = [0; 8];
        let rung = bell.revents().contains(PollFlags::IN);
        (rung && rustix::io::read(&self.event, &mut count).is_ok()).then_some(Woken::Drain)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;
    use crate::ring::Ring;

    /// Far beyond what a test may take: a wait that ends by it is a failure.
    const NEVER: Duration = Duration::from_secs(600);

    #[test]
    fn a_record_wakes_a_drainer_that_found_nothing() {
        let bell = Arc::new(Doorbell::new().unwrap());
        let ring = Arc::new(Ring::new(2, 1).unwrap());
        let (asked, is_asked) = channel();
        let drainer = std::thread::spawn({
            let (bell, ring) = (bell.clone(), ring.clone());
            move || {
                let is_empty = || {
                    asked.send(()).unwrap();
                    ring.peek_time().is_none()
                };
                bell.wait(is_empty, None, NEVER)
            }
        });
        is_asked.recv().unwrap();
        assert!(ring.visit(|| 1).push(&[7]));
        bell.ring_if_awaited();
        assert_eq!(drainer.join().unwrap(), Woken::Drain);
    }

    #[test]
    fn what_was_recorded_before_the_wait_ends_it() {
        let bell = Doorbell::new().unwrap();
        assert_eq!(bell.wait(|| false, None, NEVER), Woken::Drain);
    }

    #[test]
    fn a_client_that_closes_its_side_wakes_and_one_that_sends_if_asked_for() {
        let bell = Doorbell::new().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        rustix::io::write(&theirs, b"garbage").unwrap();
        let closed = Some(WatchedStream::until_closed(&ours));
        let wait = |limit| bell.wait(|| true, closed, limit);
        assert_eq!(wait(Duration::from_millis(20)), Woken::Drain);
        let request = Some(WatchedStream::until_request(&ours));
        assert_eq!(bell.wait(|| true, request, NEVER), Woken::Stream);
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(wait(NEVER), Woken::Stream);
    }

    #[test]
    fn each_ring_ends_one_wait() {
        let bell = Doorbell::new().unwrap();
        bell.ring();
        bell.ring();
        assert_eq!(bell.wait(|| true, None, NEVER), Woken::Drain);
        let began = Instant::now();
        let limit = Duration::from_millis(20);
        assert_eq!(bell.wait(|| true, None, limit), Woken::Drain);
        assert!(began.elapsed() >= limit, "rung once more");
    }
}
