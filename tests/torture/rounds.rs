//! Probes that are armed and removed at random places.

use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::{Value, json};

use crate::phase::Crowd;

/// The name of the figure of rounds.
pub const FIGURE: &str = "rounds";
/// The most probes that one round arms by name.
const MOST: usize = 24;
/// The longest time that probes stay armed, and the longest until the next round. Guests are paused
/// while probes are armed, and must make progress.
const LONGEST: Duration = Duration::from_millis(50);
/// The patterns of many probes, and sites that the guest's programs change, move or trace
/// themselves.
const PATTERNS: [&str; 16] = [
    "kprobe:vfs_*:entry",
    "kprobe:vfs_*:return",
    "kprobe:do_sys_*:entry",
    "kprobe:*_page_*:entry",
    "tracepoint:sched:*",
    "syscall:*:entry",
    "syscall:*:return",
    "uprobe:/bin/selfmod:*:entry",
    "uprobe:/bin/twins:changing:entry",
    "uprobe:/tmp/twins:*",
    "uprobe:/bin/moves:far:entry",
    "uprobe:/bin/moves:near:entry",
    "uprobe:/bin/alarms:counted:entry",
    "uprobe:/bin/alarms:counted:return",
    "uprobe:/bin/states:*:entry",
    "uprobe:/bin/forks:*:return",
];

/// Arms and removes probes until the phase ends.
///
/// # Panics
/// If the machine does not answer.
pub fn run(crowd: &Crowd<'_>, mut random: Rng) {
    let control = crowd.guest.control();
    let listed = control.ask(&json!({"command": "list", "pattern": ""}));
    let listed = listed.unwrap_or_else(|e| panic!("list: {e}"));
    let listed = listed["probes"].as_array().cloned().unwrap_or_default();
    let names: Vec<String> = listed
        .iter()
        .filter_map(|probe| Some(probe["name"].as_str()?.to_owned()))
        .collect();
    assert!(names.len() > 1000, "{} probes", names.len());
    let mut took = Duration::ZERO;
    while crowd.goes_on() {
        crowd.pace(FIGURE);
        // If arming takes long, the guest runs as long again: else it makes next to no progress.
        thread::sleep(LONGEST.mul_f64(random.f64()) + took.saturating_sub(LONGEST));
        let probes = choose(&names, &mut random);
        let request = request(&mut random);
        let began = Instant::now();
        let trace = control.trace(&probes, &request);
        let trace = trace.unwrap_or_else(|e| panic!("no answer to a trace of {probes:?}: {e}"));
        took = began.elapsed();
        crowd.count(FIGURE, 1);
        let Ok(trace) = trace else {
            crowd.count("rounds refused", 1);
            continue;
        };
        let armed = trace.begin["probes"].as_array().map_or(0, Vec::len);
        crowd.count("probes armed", armed as u64);
        if random.bool() {
            thread::sleep(LONGEST.mul_f64(random.f64()));
        }
        // The other half of the clients disconnects without a request.
        if random.bool() {
            let end = trace.end();
            let end = end.unwrap_or_else(|e| panic!("a trace of {probes:?} did not end: {e}"));
            assert_eq!(end["machine"], Value::Null, "{end}");
            let hits: u64 = end["hits"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_u64)
                .sum();
            crowd.count("hits of rounds", hits);
        }
    }
}

fn choose(names: &[String], random: &mut Rng) -> Vec<String> {
    let mut probes = Vec::new();
    if random.u8(..4) == 0 {
        probes.extend(random.choice(PATTERNS).map(str::to_owned));
    }
    for _ in 0..random.usize(1..=MOST) {
        probes.extend(random.choice(names).cloned());
    }
    probes
}

fn request(random: &mut Rng) -> Value {
    match random.u8(..6) {
        0 => json!({"kernel_stack": 16, "user_stack": 8}),
        1 => json!({"comms": ["busybox"]}),
        2 => json!({"pids": [1], "follow": true}),
        3 => json!({"one_in": 3}),
        _ => json!({}),
    }
}
