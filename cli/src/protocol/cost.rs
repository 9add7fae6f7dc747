//! The cost of tracing for a guest, and budgets for it: as requests and answers carry them.

use std::fmt;
use std::str::FromStr;

use probes::engine::{self, Share, ShareError};
use serde::{Deserialize, Serialize};

/// The share of each vCPU's time that a trace may cost, such as `5%`. In JSON it is that text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Budget(pub Share);

impl FromStr for Budget {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, ShareError> {
        text.parse().map(Self)
    }
}

impl TryFrom<String> for Budget {
    type Error = ShareError;

    fn try_from(text: String) -> Result<Self, ShareError> {
        text.parse()
    }
}

impl From<Budget> for String {
    fn from(budget: Budget) -> Self {
        budget.0.to_string()
    }
}

/// The cost of a trace, or of all traces, for a guest. Times are in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Cost {
    /// The number of hits.
    pub hits: u64,
    /// The time that all vCPUs have spent at these hits.
    pub ns: u64,
    /// The time of the vCPU that has spent most.
    pub busiest_ns: u64,
    /// The time that has passed.
    pub passed_ns: u64,
}

impl Cost {
    /// Converts a cost in ticks of a clock with `hz` a second.
    pub fn of(cost: engine::Cost, hz: u64) -> Self {
        Self {
            hits: cost.hits,
            ns: nanoseconds(cost.ticks, hz),
            busiest_ns: nanoseconds(cost.busiest, hz),
            passed_ns: nanoseconds(cost.passed, hz),
        }
    }

    /// Returns the cost since an earlier one of the same traces.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            hits: self.hits.saturating_sub(earlier.hits),
            ns: self.ns.saturating_sub(earlier.ns),
            busiest_ns: self.busiest_ns.saturating_sub(earlier.busiest_ns),
            passed_ns: self.passed_ns.saturating_sub(earlier.passed_ns),
        }
    }

    /// Returns the part of its time that the busiest vCPU has spent, in percent.
    pub fn percent(&self) -> f64 {
        percent(self.busiest_ns, self.passed_ns)
    }
}

/// Writes the cost as people read it: `1.8% of the guest's time (0.182 s at 91000 hits)`.
impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = match self.busiest_ns == self.ns {
            true => "the guest's time",
            false => "the busiest vCPU's time",
        };
        let (percent, hits) = (self.percent(), self.hits);
        // A small cost is no cost of nothing.
        let places = if percent < 1.0 { 3 } else { 1 };
        let seconds = seconds(self.ns);
        write!(
            f,
            "{percent:.places$}% of {whose} ({seconds:.3} s at {hits} hits)"
        )
    }
}

/// A probe that a budget has stopped for a part of the time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unwatched {
    /// The probe's name.
    pub probe: String,
    /// The hits that were seen.
    pub seen: u64,
    /// The number of times that it was stopped.
    pub times: u64,
    /// The time for which it was stopped, in nanoseconds.
    pub ns: u64,
    /// The time of the trace in nanoseconds.
    pub passed_ns: u64,
}

impl Unwatched {
    /// Converts what an engine says of the probe `name`. `None` if the probe was never stopped.
    pub fn of(name: &str, seen: u64, unwatched: engine::Unwatched, hz: u64) -> Option<Self> {
        (unwatched.times > 0).then(|| Self {
            probe: name.to_owned(),
            seen,
            times: unwatched.times,
            ns: nanoseconds(unwatched.ticks, hz),
            passed_ns: nanoseconds(unwatched.passed, hz),
        })
    }

    /// Estimates the hits in the whole time, if they came as often while nobody watched. `None` if
    /// it never watched.
    pub fn estimate(&self) -> Option<u64> {
        let watched = self.passed_ns.checked_sub(self.ns).filter(|ns| *ns > 0)?;
        let hits = u128::from(self.seen) * u128::from(self.passed_ns) / u128::from(watched);
        u64::try_from(hits).ok()
    }
}

impl fmt::Display for Unwatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = percent(self.ns, self.passed_ns);
        let (probe, times, seen) = (&self.probe, self.times, self.seen);
        let passed = seconds(self.passed_ns);
        write!(
            f,
            "{probe} was not watched for {part:.1}% of {passed:.1} s, stopped {times} times; {seen} hits were seen"
        )?;
        match self.estimate() {
            Some(estimate) if seen > 0 => write!(f, ", perhaps of {estimate}"),
            _ => Ok(()),
        }
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        whole => 100.0 * part as f64 / whole as f64,
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn nanoseconds(ticks: u64, hz: u64) -> u64 {
    let ns = u128::from(ticks) * 1_000_000_000 / u128::from(hz.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_cost_is_told_in_percent_time_and_hits() {
        let ticks = engine::Cost {
            hits: 91_000,
            ticks: 364_000_000,
            busiest: 364_000_000,
            passed: 20_000_000_000,
        };
        let alone = Cost::of(ticks, 2_000_000_000);
        assert_eq!(
            alone.to_string(),
            "1.8% of the guest's time (0.182 s at 91000 hits)"
        );
        let busiest_ns = 1_000_000;
        let several = Cost {
            busiest_ns,
            ..alone
        };
        assert_eq!(
            several.to_string(),
            "0.010% of the busiest vCPU's time (0.182 s at 91000 hits)"
        );
        assert_eq!(Cost::default().percent(), 0.0);
    }

    #[test]
    fn what_was_not_watched_is_told_with_an_estimate() {
        let whole = engine::Unwatched {
            times: 98,
            ticks: 9_000_000,
            passed: 10_000_000,
        };
        let told = Unwatched::of("kprobe:vmlinux:vfs_read:entry", 120, whole, 1_000_000);
        assert_eq!(
            told.unwrap().to_string(),
            "kprobe:vmlinux:vfs_read:entry was not watched for 90.0% of 10.0 s, stopped 98 times; 120 hits were seen, \
             perhaps of 1200"
        );
        for (unwatched, seen, expected) in [
            (engine::Unwatched { times: 0, ..whole }, 9, None),
            (engine::Unwatched { ticks: 0, ..whole }, 9, Some(Some(9))),
            (
                engine::Unwatched {
                    ticks: 10_000_000,
                    ..whole
                },
                9,
                Some(None),
            ),
        ] {
            let told = Unwatched::of("p", seen, unwatched, 1_000_000);
            assert_eq!(told.map(|told| told.estimate()), expected);
        }
    }

    #[test]
    fn a_budget_is_a_text_in_json() {
        let budget: Budget = serde_json::from_str("\"5%\"").unwrap();
        assert_eq!(serde_json::to_string(&budget).unwrap(), "\"5%\"");
        let wrong = serde_json::from_str::<Budget>("\"0%\"").unwrap_err();
        assert!(
            wrong.to_string().contains("invalid budget \"0%\""),
            "{wrong}"
        );
    }
}
