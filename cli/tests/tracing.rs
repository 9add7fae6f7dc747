//! `trace` and `list` on running machines of the micro guest, as a user types them.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Instant;

use rustix::process::Signal;
use support::{Ended, Running, World, has_kvm};

/// Starts a machine whose guest calls `micro_leaf` until it is stopped.
fn calling(world: &World) -> Running {
    world.start("calls 1000000000", "--serial null")
}

#[test]
fn a_trace_shows_calls_and_takes_its_traps_along() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let machine = calling(&world);
    for (format, expected) in [
        ("events", "-> micro_leaf("),
        ("text", "E "),
        ("json", "\"function\":\"micro_leaf\""),
    ] {
        let line = format!("trace micro_leaf --format {format} -o shown");
        let trace = Running::of(world.command(&line));
        world.wait_for_hits();
        trace.signal(Signal::INT);
        let ended = trace.finish();
        assert_eq!(ended.status, 0, "{ended:?}");
        let shown = std::fs::read_to_string(world.path("shown")).unwrap();
        assert!(shown.contains(expected), "{format}: {ended:?}\n{shown}");
        assert!(ended.stderr.contains(" dropped"), "{ended:?}");
        std::fs::remove_file(world.path("shown")).unwrap();
    }
    assert_eq!(world.traps().len(), 0);
    let full = world.run("trace micro_leaf -o /dev/full");
    assert_eq!(full.status, 1, "{full:?}");
    let last = full.stderr.lines().last().unwrap();
    assert!(
        last.starts_with("exotrace: output /dev/full: No space"),
        "{last}"
    );
    // The machine notices only then that this client has gone.
    world.wait_for_no_traps();
    // The machine's own process does the tracing: its end ends a trace that still runs.
    let trace = Running::of(world.command("trace micro_leaf -o file"));
    world.wait_for_hits();
    assert_eq!(world.run("stop").status, 0);
    let ended = trace.finish();
    assert_eq!(ended.status, 0, "{ended:?}");
    let last = ended.stderr.lines().last().unwrap();
    assert_eq!(last, "exotrace: the machine has ended: stopped");
    assert_eq!(machine.finish().status, 0);
    assert!(std::fs::metadata(world.path("file")).unwrap().len() > 0);
}

/// Returns the first line of a JSON trace, and the times of its events.
fn clock_and_times(trace: &str) -> (serde_json::Value, Vec<u64>) {
    let mut lines = trace
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let clock = lines.next().unwrap();
    assert_eq!(clock["event"], "clock");
    (clock, lines.map(|l| l["tsc"].as_u64().unwrap()).collect())
}

#[test]
fn what_happens_while_traps_are_put_in_is_not_before_the_trace() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    // Of a run: its clock is the one that was reported before the guest ran.
    let ended = world.micro("calls 3", "--trace micro_leaf --format json -o trace");
    assert_eq!(ended.status, 0, "{ended:?}");
    let trace = std::fs::read_to_string(world.path("trace")).unwrap();
    let (clock, times) = clock_and_times(&trace);
    let told = format!("TSC {} is {} ns since 1970", clock["tsc"], clock["unix_ns"]);
    assert!(ended.stderr.contains(&told), "{told}: {ended:?}");
    assert_eq!(times.len(), 6);
    assert!(
        times
            .iter()
            .all(|time| *time > clock["tsc"].as_u64().unwrap())
    );
    // Of a running machine: the first function is called all the time while the others are armed.
    let machine = calling(&world);
    let ended = world.run("trace micro_leaf kprobe:vmlinux:micro_*:entry --for 0.2 --format json");
    assert_eq!(ended.status, 0, "{ended:?}");
    let (clock, times) = clock_and_times(&ended.stdout);
    assert!(
        times
            .iter()
            .all(|time| *time > clock["tsc"].as_u64().unwrap())
    );
    assert_eq!(world.run("stop").status, 0);
    assert_eq!(machine.finish().status, 0);
}

#[test]
fn whatever_ends_the_tracing_command_the_guest_is_clean() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _machine = calling(&world);
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let trace = Running::of(world.command("trace micro_leaf profile:hz:50 -o file"));
        world.wait_for_hits();
        trace.signal(signal);
        let ended = trace.finish();
        if signal != Signal::KILL {
            assert_eq!(ended.status, 0, "{ended:?}");
            assert!(
                ended.stderr.contains("events"),
                "counts are told: {ended:?}"
            );
        }
        world.wait_for_no_traps();
    }
}

#[test]
fn two_traces_at_once_see_the_same_calls() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _machine = calling(&world);
    let line = "trace kprobe:micro_leaf --per-second 10";
    let began = Instant::now();
    let both = [1, 2].map(|_| Running::of(world.command(line)));
    world.wait_until("two traces", || {
        let stat = world.run("stat --json").stdout;
        let stat: serde_json::Value = serde_json::from_str(&stat).unwrap();
        stat["sessions"]
            .as_array()
            .is_some_and(|all| all.len() == 2)
    });
    let before: u64 = world.traps().iter().sum();
    world.wait_for_traps(|hits| hits.iter().sum::<u64>() > before + 1000);
    both.iter().for_each(|trace| trace.signal(Signal::INT));
    for ended in both.map(Running::finish) {
        assert_eq!(ended.status, 0, "{ended:?}");
        assert!(
            ended.stderr.contains("hits were left out by filters"),
            "{ended:?}"
        );
        let lines = ended.stdout.lines().count() as u64;
        let most = 10 * (began.elapsed().as_secs() + 2);
        assert!(
            (1..=most).contains(&lines),
            "{lines} lines: {}",
            ended.stderr
        );
    }
}

#[test]
fn what_cannot_be_traced_is_told_with_names_like_it() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _machine = calling(&world);
    let refused: Vec<(&str, i32, &str)> = vec![
        ("trace micro_laef", 1, "micro_leaf"),
        ("trace kprobe::micro_leaf:0x4000000", 1, "not RAM"),
        ("trace a:b:c:d:e", 1, "5 parts"),
        ("trace syscall:read", 1, "x64_sys_call"),
        (
            "trace uprobe:/bin/sh:main:entry",
            1,
            "page cache cannot be read",
        ),
        ("trace tracepoint:sched:sched_switch", 1, ""),
        ("trace profile:hz:20000", 1, "no probe"),
        ("trace", 2, "required"),
        ("trace micro_leaf -f", 2, "--pid"),
        ("trace micro_leaf --buffer 1000", 1, "power of two"),
        ("trace micro_leaf --stack 500", 2, "500"),
        ("list nothing_like_it", 1, "nothing_like_it"),
    ];
    for (line, status, told) in refused {
        let ended: Ended = world.run(line);
        assert_eq!(ended.status, status, "{line}: {ended:?}");
        assert!(ended.stderr.contains(told), "{line}: {ended:?}");
        assert_eq!(world.traps().len(), 0, "{line}");
    }
}

#[test]
fn probes_are_listed_and_counted() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _machine = calling(&world);
    let listed = world.run("list kprobe:micro_l*:");
    assert_eq!(listed.status, 0, "{listed:?}");
    assert!(
        listed.stdout.contains("kprobe:vmlinux:micro_leaf:entry\n")
            && listed.stdout.contains("kprobe:vmlinux:micro_leaf:return\n"),
        "{listed:?}"
    );
    let counts = world.run("list --count");
    assert!(
        counts.stdout.contains("syscall") && counts.stdout.contains("profile"),
        "{counts:?}"
    );
    let json = world.run("list --json syscall:openat:entry");
    let probe: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(probe["name"], "syscall::openat:entry");
    assert_eq!(probe["arguments"][1], "const char *filename");
}
