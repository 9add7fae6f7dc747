//! Parses timers of the normal dialect, which may be written in more than one way.

use probes::provider::timer::{FASTEST, INTERVAL, PROFILE, UNITS, period};

use crate::ast::{Iteration, ProbeKind};

/// Checks whether a probe's name has an argument of the script in it: `kprobe:$1`.
pub(crate) fn has_argument(text: &str) -> bool {
    let mut parts = text.split('$').skip(1);
    parts.any(|part| part.starts_with(|first: char| first.is_ascii_digit()))
}

/// Parses `profile:hz:99`, the same with the number alone or with its unit behind it, and
/// bpftrace's short names. The result has the form of the timers' provider. It is `None` if `text`
/// is no timer.
///
/// # Errors
/// A sentence if its unit or its number is wrong.
pub fn timer(text: &str) -> Option<Result<ProbeKind, String>> {
    let (provider, rate) = text.split_once(':')?;
    let long = match provider {
        "p" => PROFILE,
        "i" => INTERVAL,
        _ => [PROFILE, INTERVAL]
            .into_iter()
            .find(|known| *known == provider)?,
    };
    let parts: Vec<&str> = rate.split(':').collect();
    let (unit, number) = match parts.as_slice() {
        [unit, number] => (*unit, *number),
        ["", unit, number] if UNITS.contains(unit) => (*unit, *number),
        [rate] => {
            let number = rate.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let unit = rate.get(number.len()..).unwrap_or_default();
            (if unit.is_empty() { "hz" } else { unit }, number)
        }
        _ => return None,
    };
    Some(
        checked(provider, unit, number)
            .map(|number| ProbeKind::Pattern(format!("{long}:{unit}:{number}"))),
    )
}

/// Returns the probe for `software:EVENT:COUNT`, `hardware:EVENT:COUNT` and `iter:WHAT` of
/// bpftrace. Each event is a hit here, so the count may only be 1. It is `None` if `text` is no
/// such event.
///
/// # Errors
/// A sentence if nothing of a guest has that meaning.
pub fn event(text: &str) -> Option<Result<ProbeKind, String>> {
    let (provider, rest) = text.split_once(':')?;
    let (event, count) = rest.split_once(':').unwrap_or((rest, ""));
    let instead = match (provider, event) {
        ("software" | "s", "page-faults" | "faults") => "kprobe:handle_mm_fault",
        ("software" | "s", "context-switches" | "cs") => "tracepoint:sched:sched_switch",
        ("software" | "s", "cpu-migrations") => "tracepoint:sched:sched_migrate_task",
        ("software" | "s", _) => {
            return Some(Err(format!(
                "no event {event:?} of a guest; known are page-faults, context-switches and cpu-migrations; for time take profile:hz:99"
            )));
        }
        ("iter" | "it", _) => return Some(iteration(rest)),
        ("hardware" | "h", _) => {
            return Some(Err(
                "a guest has no hardware counters; for samples of its work take profile:hz:99"
                    .to_owned(),
            ));
        }
        _ => return None,
    };
    Some(match count {
        "" | "1" => Ok(ProbeKind::Pattern(instead.to_owned())),
        _ => Err(format!(
            "{event} is seen each time: write {provider}:{event}:1, and count in the rule"
        )),
    })
}

/// Returns the iteration over `what`.
///
/// # Errors
/// A sentence if there is none.
fn iteration(what: &str) -> Result<ProbeKind, String> {
    let named = |one: &Iteration| one.name().split_once(':').is_some_and(|(_, of)| of == what);
    let found = Iteration::ALL.into_iter().find(named);
    found.map(ProbeKind::Iteration).ok_or_else(|| {
        let known = Iteration::ALL.map(Iteration::name).join(", ");
        format!("no iteration over {what:?}; known are {known}")
    })
}

/// Returns the number of a timer after a check by `provider`.
fn checked(provider: &str, unit: &str, number: &str) -> Result<u64, String> {
    if !UNITS.contains(&unit) {
        return Err(format!(
            "Invalid unit: {unit}; known are {}, as in {provider}:hz:99",
            UNITS.join(", ")
        ));
    }
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!(
            "Number is invalid: {number}; a timer is written as {provider}:hz:99"
        ));
    }
    match number.parse() {
        Ok(0) => Err("Number is invalid: 0; 1 is the least".to_owned()),
        Ok(value) if period(unit, value).is_some() => Ok(value),
        _ => Err(format!(
            "Number is out of range: {number} {unit}; a timer ticks {FASTEST} times a second at most, and once in 100 years at least"
        )),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn events_are_probes_of_the_guest() {
        for (text, expected) in [
            ("software:faults:1", Some("kprobe:handle_mm_fault")),
            ("s:cs:", Some("tracepoint:sched:sched_switch")),
            (
                "software:cpu-migrations",
                Some("tracepoint:sched:sched_migrate_task"),
            ),
            ("software:page-faults:100", None),
            ("software:cpu-clock:1", None),
            ("hardware:cache-misses:1000", None),
            ("iter:tcp", None),
            ("iter:task:1", None),
        ] {
            let found = event(text).unwrap().ok();
            let expected = expected.map(|text| ProbeKind::Pattern(text.to_owned()));
            assert_eq!(found, expected, "{text}");
        }
        for iteration in Iteration::ALL {
            let found = event(iteration.name()).unwrap();
            assert_eq!(found, Ok(ProbeKind::Iteration(iteration)));
        }
        assert_eq!(event("kprobe:vfs_read"), None);
    }
}
