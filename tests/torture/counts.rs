//! Counts that must be exact under any load: calls of a function and system calls of a program that
//! knows its number of them.

use fastrand::Rng;
use serde_json::{Value, json};
use support::victims::{CALLS, EXACT};

use crate::guest::Shell;
use crate::phase::Crowd;

/// The name of the figure of exact counts.
pub const FIGURE: &str = "exact counts";

/// Counts until the phase ends.
///
/// # Panics
/// If a count is not exact.
pub fn run(crowd: &Crowd<'_>, shell: &mut Shell, mut random: Rng) {
    let control = crowd.guest.control();
    while crowd.goes_on() {
        let number = random.u32(100..1000);
        let (program, probe) = match random.bool() {
            true => (EXACT, format!("uprobe:{EXACT}:counted:entry")),
            false => (CALLS, "syscall:getppid:entry".to_owned()),
        };
        let name = program.rsplit('/').next().unwrap_or(program);
        let trace = control.trace(
            std::slice::from_ref(&probe),
            &json!({"comms": [name], "slots": 4096}),
        );
        let trace = trace.unwrap_or_else(|e| panic!("{probe}: {e}"));
        let trace = trace.unwrap_or_else(|message| panic!("{probe}: {message}"));
        assert_eq!(
            trace.begin["probes"].as_array().map(Vec::len),
            Some(1),
            "{}",
            trace.begin
        );
        let mut stat = None;
        let end = trace.during(|| {
            shell.succeed(&format!("{program} {number} > /dev/null"));
            stat = control.ask(&json!({"command": "stat"})).ok();
        });
        let end = end.unwrap_or_else(|e| panic!("{probe}: {e}"));
        let hits: Vec<_> = end["hits"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_u64)
            .collect();
        assert_eq!(
            hits,
            [u64::from(number)],
            "{probe} of {program}: {end}\n{stat:?}\n{}",
            shell.messages()
        );
        crowd.count(FIGURE, 1);
        crowd.count("calls counted", u64::from(number));
    }
}
