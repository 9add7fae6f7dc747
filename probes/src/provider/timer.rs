//! Timers on the host's clock: `profile` and `interval`. `profile` ticks on every vCPU in any
//! state, even if halted; `interval` on the first only.
//!
//! Rates are given as `profile::hz:97` or `interval::s:1`, in the units hz, s, ms and us. A rate
//! without a unit is in hz, as in dt(4). Only one example of each is listed, since there are too
//! many.

use std::time::Duration;

use crate::name::{ProbeName, ProbePattern, matches_part};
use crate::probe::{Probe, Signature, Target};

/// The provider that ticks on every vCPU.
pub const PROFILE: &str = "profile";
/// The provider that ticks on one vCPU.
pub const INTERVAL: &str = "interval";
/// The largest number of ticks in a second.
pub const FASTEST: u64 = 10_000;
/// The units of rates and periods.
pub const UNITS: [&str; 4] = ["hz", "us", "ms", "s"];

/// Passes the probes that match `pattern` to `each`.
pub fn list(pattern: &ProbePattern, each: &mut dyn FnMut(Probe)) {
    for provider in [PROFILE, INTERVAL] {
        if !pattern.matches_provider(provider) || !matches_part(&pattern.module, "") {
            continue;
        }
        let probe = |unit: &str, rate: u64| {
            period(unit, rate).map(|period| Probe {
                name: ProbeName::new(provider, "", unit, &rate.to_string()),
                signature: Some(Signature::default()),
                target: Target::Timer {
                    period,
                    every_vcpu: provider == PROFILE,
                },
            })
        };
        match (pattern.name.parse(), pattern.function.as_str()) {
            (Ok(rate), "") if pattern.provider == provider => {
                probe("hz", rate).into_iter().for_each(&mut *each);
            }
            (Ok(rate), unit) if UNITS.contains(&unit) => {
                probe(unit, rate).into_iter().for_each(&mut *each);
            }
            _ => {
                let (unit, rate) = if provider == PROFILE {
                    ("hz", 99)
                } else {
                    ("s", 1)
                };
                let listed = matches_part(&pattern.function, unit)
                    && matches_part(&pattern.name, &rate.to_string());
                let example = probe(unit, rate).filter(|_| listed);
                example.into_iter().for_each(&mut *each);
            }
        }
    }
}

/// Returns the time between two ticks; `None` for a rate that is invalid, too fast or too slow. The
/// unit is one of [`UNITS`].
#[must_use]
pub fn period(unit: &str, rate: u64) -> Option<Duration> {
    let period = match unit {
        "hz" => Duration::from_secs(1).checked_div(u32::try_from(rate).ok()?)?,
        "s" => Duration::from_secs(rate),
        "ms" => Duration::from_millis(rate),
        _ => Duration::from_micros(rate),
    };
    let fastest = Duration::from_secs(1) / FASTEST as u32;
    // A hundred years are as good as never, so that is the limit.
    (fastest..=Duration::from_secs(3_155_760_000))
        .contains(&period)
        .then_some(period)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn found(pattern: &str) -> Vec<(String, u128, bool)> {
        let mut found = Vec::new();
        list(&ProbePattern::parse(pattern).unwrap(), &mut |probe| {
            let Target::Timer { period, every_vcpu } = probe.target else {
                panic!("{probe:?}")
            };
            found.push((probe.name.to_string(), period.as_micros(), every_vcpu));
        });
        found
    }

    #[test]
    fn rates_and_periods_become_timers() {
        for (pattern, expected) in [
            ("profile:100", &[("profile::hz:100", 10_000, true)][..]),
            ("profile:hz:100", &[("profile::hz:100", 10_000, true)]),
            ("interval:s:5", &[("interval::s:5", 5_000_000, false)]),
            ("interval::ms:20", &[("interval::ms:20", 20_000, false)]),
            ("interval:us:500", &[("interval::us:500", 500, false)]),
            ("profile:0", &[]),
            ("profile:hz:20000", &[]),
            ("profile:days:1", &[]),
            (
                "*:::",
                &[
                    ("profile::hz:99", 10_101, true),
                    ("interval::s:1", 1_000_000, false),
                ],
            ),
        ] {
            let expected: Vec<_> = expected
                .iter()
                .map(|(name, us, each)| ((*name).to_owned(), *us, *each))
                .collect();
            assert_eq!(found(pattern), expected, "{pattern}");
        }
    }
}
