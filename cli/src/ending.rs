//! How long the end of a run waits for whoever reads its output.
//!
//! A run that has ended by itself waits until its readers have everything: a pager may take its time. From the first
//! signal or stop on, a reader that takes nothing for a second is left behind.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a reader may take nothing once the run is to end.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How soon it is seen that the run is to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Of this process, which has one run.
static HURRIED: AtomicBool = AtomicBool::new(false);

/// Says that the run is to end: somebody has asked for it.
pub fn hurry() {
    HURRIED.store(true, Ordering::SeqCst);
}

/// Waits until a reader has everything; `is_done` waits for that, at most as long as it is given. `taken` tells how much
/// the reader has taken until now. Returns whether it has everything.
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
