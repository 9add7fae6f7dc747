//! Conversion of hits' time stamps to the time of day.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the nanoseconds since the beginning of 1970.
#[must_use]
pub fn unix_ns_now() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// One moment on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// The time stamp counter.
    pub tsc: u64,
    /// Nanoseconds since 1970 at the same moment.
    pub unix_ns: u64,
    /// The frequency of the counter in Hz.
    pub hz: u64,
}

impl Clock {
    /// Reads both clocks now; `hz` is the frequency of time stamps.
    #[must_use]
    pub fn now(hz: u64) -> Self {
        let tsc = vmm::host_tsc();
        Self {
            tsc,
            unix_ns: unix_ns_now(),
            hz,
        }
    }

    /// Returns the time of `tsc` in nanoseconds since 1970, limited to 64 bits and at least 0.
    #[must_use]
    pub fn unix_ns(&self, tsc: u64) -> u64 {
        let apart = self.nanoseconds(tsc.abs_diff(self.tsc));
        match tsc >= self.tsc {
            true => self.unix_ns.saturating_add(apart),
            false => self.unix_ns.saturating_sub(apart),
        }
    }

    /// Returns the time that so many ticks take, without a division of 128 bits where the counter
    /// is as fast as real ones.
    fn nanoseconds(&self, ticks: u64) -> u64 {
        const SECOND: u64 = 1_000_000_000;
        let hz = self.hz.max(1);
        let (seconds, rest) = (ticks / hz, ticks % hz);
        let rest = match rest.checked_mul(SECOND) {
            Some(product) => product / hz,
            None => (u128::from(rest) * u128::from(SECOND) / u128::from(hz)) as u64,
        };
        seconds.saturating_mul(SECOND).saturating_add(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stamps_before_and_after_are_moments() {
        let clock = Clock {
            tsc: 5_000,
            unix_ns: 100_000_000_000,
            hz: 1_000,
        };
        for (tsc, milliseconds) in [
            (5_000, 100_000),
            (5_001, 100_001),
            (4_999, 99_999),
            (0, 95_000),
        ] {
            assert_eq!(clock.unix_ns(tsc), milliseconds * 1_000_000);
        }
        let slow = Clock { hz: 1, ..clock };
        assert_eq!(slow.unix_ns(0), 0, "before 1970");
        assert_eq!(slow.unix_ns(u64::MAX), u64::MAX);
        let none = Clock { hz: 0, ..clock };
        assert_eq!(none.unix_ns(5_001), 101_000_000_000);
    }
}
