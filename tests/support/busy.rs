//! How long tests keep a guest busy that look for what time alone brings to light.

use std::time::Duration;

/// The environment variable that says how long, in seconds.
const VARIABLE: &str = "EXOTRACE_BUSY_SECONDS";
/// The time without it: enough for some hundred rounds of anything.
const USUAL: u64 = 12;

/// Returns the time for which such a test keeps its guest busy.
///
/// # Panics
/// If the environment has a value that is no number.
pub fn time() -> Duration {
    let seconds = std::env::var(VARIABLE).map_or(USUAL, |value| {
        let seconds = value.parse();
        seconds.unwrap_or_else(|e| panic!("{VARIABLE}={value}: {e}"))
    });
    Duration::from_secs(seconds)
}
