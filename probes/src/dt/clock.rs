//! From the time stamps of events to the time of day.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// One moment on both clocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    tsc: u64,
    unix: Duration,
    hz: u64,
}

impl Clock {
    /// The clocks now; `hz` are the ticks of time stamps in a second.
    pub(super) fn now(hz: u64) -> Self {
        Self {
            tsc: vmm::host_tsc(),
            unix: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
            hz: hz.max(1),
        }
    }

    /// Time since 1970 at a time stamp.
    pub(super) fn time(&self, tsc: u64) -> Duration {
        let span = |ticks: u64| {
            let nanoseconds = u128::from(ticks) * 1_000_000_000 / u128::from(self.hz);
            Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
        };
        match tsc.checked_sub(self.tsc) {
            Some(after) => self.unix.saturating_add(span(after)),
            None => self.unix.saturating_sub(span(self.tsc - tsc)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stamps_before_and_after_are_moments() {
        let clock = Clock {
            tsc: 5_000,
            unix: Duration::from_secs(100),
            hz: 1_000,
        };
        for (tsc, expected) in [
            (5_000, 100_000),
            (5_001, 100_001),
            (4_999, 99_999),
            (0, 95_000),
        ] {
            assert_eq!(clock.time(tsc), Duration::from_millis(expected));
        }
        let far = Clock { hz: 1, ..clock };
        assert_eq!(
            far.time(u64::MAX).as_secs(),
            100 + u64::MAX / 1_000_000_000,
            "as far as a clock goes"
        );
    }
}
