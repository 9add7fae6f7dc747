//! The time that a run's end waits for the readers of its output.
//!
//! A run that has ended by itself waits until its readers have everything: a pager may take its
//! time. From the first signal or stop on, a reader that reads nothing for a second is abandoned.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The time that a reader may read nothing once the run is to end.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// The interval of checks whether the run is to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The state of this process, which has one run.
static HURRIED: AtomicBool = AtomicBool::new(false);

/// Notes a request to end the run.
pub fn hurry() {
    HURRIED.store(true, Ordering::SeqCst);
}

/// Waits until a reader has everything, and returns whether it has. `is_done` waits for that no
/// longer than its argument. `taken` returns the amount that the reader has read until now.
pub fn wait(mut is_done: impl FnMut(Duration) -> bool, taken: impl Fn() -> u64) -> bool {
    let mut last = (taken(), Instant::now());
    loop {
        if is_done(LOOK_INTERVAL) {
            return true;
        }
        let now = taken();
        if now != last.0 || !HURRIED.load(Ordering::SeqCst) {
            last = (now, Instant::now());
        } else if last.1.elapsed() >= LAST_WORDS {
            return false;
        }
    }
}
