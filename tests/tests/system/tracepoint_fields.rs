//! The formatted fields of tracepoints agree with the lines of the guest's own trace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use probes::engine::{Filter, HitOutcome, ProbeHit, Program};
use probes::probe::Probe;
use support::host;
use support::scripts::ScriptGuest;
use support::traced::Traced;

/// An event of the guest, the fields compared as a script prints them, and the keys of the guest's
/// line that are compared.
struct Case {
    event: &'static str,
    keys: &'static [&'static str],
    format: &'static str,
    values: &'static str,
}

/// Events of tasks.
const TASKS: &[Case] = &[
    Case {
        event: "sched:sched_switch",
        keys: &[
            "prev_comm",
            "prev_pid",
            "prev_prio",
            "next_comm",
            "next_pid",
            "next_prio",
        ],
        format: "prev_comm=%s prev_pid=%d prev_prio=%d next_comm=%s next_pid=%d next_prio=%d",
        values: "args.prev_comm, args.prev_pid, args.prev_prio, args.next_comm, args.next_pid, args.next_prio",
    },
    Case {
        event: "sched:sched_wakeup",
        keys: &["comm", "pid", "prio", "target_cpu"],
        format: "comm=%s pid=%d prio=%d target_cpu=%03d",
        values: "args.comm, args.pid, args.prio, args.target_cpu",
    },
    Case {
        event: "sched:sched_process_exec",
        keys: &["filename", "pid", "old_pid"],
        format: "filename=%s pid=%d old_pid=%d",
        values: "str(args.filename), args.pid, args.old_pid",
    },
    Case {
        event: "sched:sched_process_fork",
        keys: &["comm", "pid", "child_comm", "child_pid"],
        format: "comm=%s pid=%d child_comm=%s child_pid=%d",
        values: "args.parent_comm, args.parent_pid, args.child_comm, args.child_pid",
    },
    Case {
        event: "sched:sched_process_exit",
        keys: &["comm", "pid", "prio"],
        format: "comm=%s pid=%d prio=%d",
        values: "args.comm, args.pid, args.prio",
    },
    Case {
        event: "signal:signal_generate",
        keys: &["sig", "errno", "code", "comm", "pid", "grp", "res"],
        format: "sig=%d errno=%d code=%d comm=%s pid=%d grp=%d res=%d",
        values: "args.sig, args.errno, args.code, args.comm, args.pid, args.group, args.result",
    },
    Case {
        event: "task:task_newtask",
        keys: &["pid", "comm", "clone_flags", "oom_score_adj"],
        format: "pid=%d comm=%s clone_flags=%lx oom_score_adj=%hd",
        values: "args.pid, args.comm, args.clone_flags, args.oom_score_adj",
    },
    Case {
        event: "task:task_rename",
        keys: &["pid", "oldcomm", "newcomm", "oom_score_adj"],
        format: "pid=%d oldcomm=%s newcomm=%s oom_score_adj=%hd",
        values: "args.pid, args.oldcomm, args.newcomm, args.oom_score_adj",
    },
];
/// Other events. None of them comes with each tick of the guest's timer.
const OTHERS: &[Case] = &[
    Case {
        event: "irq:irq_handler_entry",
        keys: &["irq", "name"],
        format: "irq=%d name=%s",
        values: "args.irq, str(args.name)",
    },
    Case {
        event: "kmem:kmalloc",
        keys: &["bytes_req", "bytes_alloc"],
        format: "bytes_req=%llu bytes_alloc=%llu",
        values: "args.bytes_req, args.bytes_alloc",
    },
];

/// Makes the guest fire the events of tasks, and the others: its console interrupts.
const TASK_WORK: &str = "sh -c 'true | cat; kill -CONT $$'";
const OTHER_WORK: &str = "cat /proc/interrupts; sleep 0.1";

/// Returns the tokens of a line that have one of these keys, in order.
fn tokens(line: &str, keys: &[&str]) -> String {
    let words = line.split_whitespace().filter(|word| {
        let key = word.split_once('=').map(|(key, _)| key);
        key.is_some_and(|key| keys.contains(&key))
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Runs `work` while both the guest and a script trace these events. Compares their lines.
fn compare(traced: &Traced, cases: &[Case], work: &str) {
    let name = |case: &Case| case.event.replace(':', "/");
    let rules = cases.iter().map(|case| {
        let Case {
            event,
            format,
            values,
            ..
        } = case;
        format!(
            "tracepoint:{event} {{ printf(\"{}: {format}\\n\", {values}); }}\n",
            name(case)
        )
    });
    let script = ScriptGuest::from(traced).start(rules.collect::<String>().as_str());
    let all: Vec<String> = cases.iter().map(name).collect();
    traced.tell("echo 0 > tracing_on; echo > trace");
    traced.tell(&format!(
        "for i in {}; do echo 1 > events/$i/enable; done",
        all.join(" ")
    ));
    traced.tell(&format!(
        "echo 1 > tracing_on; {work}; echo 0 > tracing_on; echo 0 > events/enable"
    ));
    let ran = script.finish();
    ran.assert_whole();
    let told = traced.tell("cat trace");
    for case in cases {
        let name = name(case);
        let (_, event) = name.split_once('/').unwrap_or_default();
        let label = format!(" {event}: ");
        let lines = told
            .lines()
            .filter_map(|line| Some(line.split_once(&label)?.1));
        let told: Vec<String> = lines.map(|line| tokens(line, case.keys)).collect();
        let label = format!("{name}: ");
        let lines = ran.out.lines().filter_map(|line| line.strip_prefix(&label));
        let ours: Vec<String> = lines.map(|line| tokens(line, case.keys)).collect();
        println!(
            "{name}: {} of ours, {} of the guest's",
            ours.len(),
            told.len()
        );
        // The script began before the guest's trace, and ends after it.
        let is_there = !told.is_empty() && ours.windows(told.len()).any(|part| part == told);
        assert!(is_there, "{name}: {told:#?} is not in {ours:#?}");
    }
}

#[test]
fn fields_of_tasks_are_those_that_the_guests_own_trace_prints() {
    check(TASKS, TASK_WORK);
}

#[test]
fn fields_of_other_events_are_those_that_the_guests_own_trace_prints() {
    check(OTHERS, OTHER_WORK);
}

fn check(cases: &[Case], work: &str) {
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    compare(&traced, cases, work);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

/// Counts the hits with a record and those without.
#[derive(Default)]
struct Count {
    with: AtomicU64,
    without: AtomicU64,
}

impl Program for Count {
    fn run(&self, hit: &ProbeHit<'_>) -> HitOutcome {
        let count = if hit.has_record() {
            &self.with
        } else {
            &self.without
        };
        count.fetch_add(1, Ordering::Relaxed);
        HitOutcome::Accepted
    }
}

#[test]
fn records_of_all_events_that_fire_can_be_made() {
    let host = host!();
    let traced = Traced::new(host, &[]);
    let all = traced.find("tracepoint:::");
    let (with_fields, without): (Vec<_>, Vec<_>) =
        all.iter().partition(|probe| !probe.fields().is_empty());
    // Those without an event have no fields.
    let without: Vec<&str> = without.iter().map(|probe| &probe.name.name[..]).collect();
    println!(
        "{} of {} tracepoints have fields, but not {without:?}",
        with_fields.len(),
        all.len()
    );
    let of_no_event = |probe: &&Probe| probe.name.function == "none";
    assert_eq!(all.iter().filter(of_no_event).count(), without.len());
    let mut session = traced.empty_session();
    let mut counts = Vec::new();
    for probe in with_fields {
        let count = Arc::new(Count::default());
        // The kernel has no site for some of its tracepoints.
        if session
            .enable_program(probe, Filter::default(), count.clone())
            .is_ok()
        {
            counts.push((probe.name.to_string(), count));
        }
    }
    traced.copy(10);
    drop(session);
    let read = |count: &Count| {
        let [with, without] = [&count.with, &count.without].map(|n| n.load(Ordering::Relaxed));
        (with, without)
    };
    let fired: Vec<_> = counts
        .iter()
        .map(|(name, count)| (&name[..], read(count)))
        .filter(|(_, counts)| *counts != (0, 0))
        .collect();
    println!(
        "{} are armed, hits with and without a record: {fired:?}",
        counts.len()
    );
    let failed: Vec<_> = fired
        .iter()
        .filter(|(_, (_, without))| *without > 0)
        .collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert!(fired.len() > 15, "{fired:?}");
    traced.assert_well();
}
