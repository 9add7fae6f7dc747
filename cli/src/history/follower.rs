//! The thread that makes a history's checkpoints, at regular times until the machine ends.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time after which a base without a ring is brought up to date.
pub(super) const REFRESH: Duration = Duration::from_secs(1);

/// A call that is made at regular times. It returns whether it wants to be called again.
pub type Follow = Box<dyn Fn() -> bool + Send>;

/// The thread. It ends when this is dropped.
pub(super) struct Follower {
    signal: Arc<Signal>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Signal {
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Follower {
    /// Starts to call `follow`.
    pub(super) fn start(follow: Follow, every: Duration) -> io::Result<Self> {
        let signal = Arc::<Signal>::default();
        let told = signal.clone();
        let thread = std::thread::Builder::new().name("history".into());
        let thread = thread.spawn(move || {
            let mut next = Instant::now() + every;
            while told.wait_until(next) {
                if !follow() {
                    return;
                }
                // A host that is behind leaves checkpoints out.
                next = (next + every).max(Instant::now());
            }
        })?;
        Ok(Self {
            signal,
            thread: Some(thread),
        })
    }
}

impl Signal {
    /// Waits until `at`. Returns `false` if the thread is to end before.
    fn wait_until(&self, at: Instant) -> bool {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            let left = at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let waited = self.changed.wait_timeout(ended, left);
            ended = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        *self
            .signal
            .ended
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.signal.changed.notify_all();
        if let Some(thread) = self.thread.take()
            // A machine that is dropped by its follower does not wait for it.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            log::error!("the history's thread panicked");
        }
    }
}
