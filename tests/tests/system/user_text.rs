//! Functions of programs and libraries in a running Linux guest, probed from outside: exact counts
//! by process. The guest's own view of the probes is in `user_text_hidden.rs`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use probes::engine::{Filter, Match, ProbeStats};
use probes::probe::{Probe, Target};
use support::shell::COMMAND_LIMIT;
use support::tracing::{self, SLOTS};
use support::user_guest::{ALLOCS, FOR_EVER, FSLOAD, LIBC, UserGuest};
use support::{host, two_cpus};

/// A command that lets a process go on that waits for a line from `/tmp/go`. It waits until the
/// process and its children, which hold `/tmp/done` open, have ended.
const RELEASE: &str = "(cat /tmp/done & echo > /tmp/go; wait)";
/// The number of calls of a function whose count must be exact.
const MANY: u64 = 20_000;

fn pid_filter(pid: u32, follow: bool) -> Filter {
    Filter {
        pids: Match::In(vec![pid]),
        follow,
        ..Filter::default()
    }
}

#[test]
fn only_the_process_asked_for_is_traced() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&["mkfifo /tmp/go /tmp/done"]);
    guest.spawn_sleeper(&format!("fsload 0 {FOR_EVER}"));
    // The traced one becomes another program with the same number.
    let pid = guest.spawn_sleeper("sh -c 'read line < /tmp/go; exec fsload 6 0' 3> /tmp/done");
    let mut traced = guest.session();
    let filter = pid_filter(pid, false);
    traced.enable(&format!("uprobe:{FSLOAD}:one_round:entry"), &filter);
    traced.enable(&format!("uprobe:{FSLOAD}:one_round:return"), &filter);
    let answer = shell.output(&format!("{RELEASE}; fsload 5 0"));
    assert_eq!(answer, "fsload: 5 rounds");
    assert_eq!(traced.recorded("one_round"), (6, 6));
    let (entries, returns) = (traced.stats(0), traced.stats(1));
    assert_eq!((entries.hits, entries.filtered), (11, 5));
    // Nothing waits for the others' returns.
    assert_eq!((returns.hits, returns.filtered), (6, 0));
    let events = traced.finish();
    assert!(events.iter().all(|event| event.pid == Some(pid)));
    guest.assert_clean(&BTreeSet::new());
}

#[test]
fn children_are_traced_where_the_filter_follows_them() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&["mkfifo /tmp/go /tmp/done"]);
    guest.spawn_sleeper(&format!("fsload 0 {FOR_EVER}"));
    let children = "for i in 1 2 3; do fsload 2 0; syscount 7; done; (fsload 1 0; syscount 5); sh -c \"fsload 3 0; true\"; true";
    let pid = guest.spawn_sleeper(&format!(
        "sh -c 'read line < /tmp/go; {children}' 3> /tmp/done"
    ));
    let getppid = tracing::probe(&guest.view, "syscall::getppid:entry");
    let mut sessions = [true, false].map(|follow| {
        let mut traced = guest.session();
        let filter = pid_filter(pid, follow);
        let filter = Filter {
            comms: Match::In(vec![b"syscount".to_vec(), b"fsload".to_vec()]),
            ..filter
        };
        traced.enable(&format!("uprobe:{FSLOAD}:one_round:entry"), &filter);
        traced.enable(&format!("uprobe:{FSLOAD}:one_round:return"), &filter);
        traced.enable_all(std::slice::from_ref(&getppid), &filter);
        traced
    });
    shell.output(&format!("{RELEASE}; fsload 4 0; syscount 11"));
    for (traced, seen) in sessions.iter().zip([true, false]) {
        let (rounds, calls) = if seen { (10, 26) } else { (0, 0) };
        assert_eq!(traced.recorded("one_round"), (rounds, rounds), "{seen}");
        assert_eq!(traced.stats(0).hits, 14, "{seen}");
        assert_eq!(traced.stats(2).recorded, calls, "{seen}");
    }
    // A later process with one of their numbers is not their child.
    let [following, _] = &mut sessions;
    assert_eq!(shell.output("fsload 2 0"), "fsload: 2 rounds");
    assert_eq!(following.recorded("one_round"), (10, 10));
    let [following, alone] = sessions;
    let events = following.finish();
    let pids: BTreeSet<_> = events.iter().map(|event| event.pid).collect();
    assert_eq!(pids.len(), 3 + 3 + 2 + 1, "{pids:?}");
    assert!(
        !pids.contains(&Some(pid)) && !pids.contains(&None),
        "{pids:?}"
    );
    assert_eq!(alone.finish(), []);
    guest.assert_clean(&BTreeSet::new());
}

#[test]
fn a_page_that_was_not_in_memory_is_traced_from_its_first_instruction_on() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y")]);
    let holder = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    let mut probes = Vec::new();
    for probe in [
        "_start:entry",
        "program:entry",
        "program:return",
        "one_round:entry",
        "one_round:return",
    ] {
        probes.extend(guest.probes(&format!("uprobe:/tmp/y:{probe}")));
    }
    guest.kill(holder);
    let mut traced = guest.session();
    for probe in &mut probes {
        // As for a file whose pages were never read from the disk.
        if let Target::User { text, .. } = &mut probe.target {
            text.physical = None;
            text.code.clear();
        }
    }
    traced.enable_all(&probes, &Filter::default());
    assert_eq!(guest.engine.stats().waiting_pages, 3);
    assert_eq!(guest.user_sites(), BTreeSet::new());
    assert_eq!(shell.output("/tmp/y 5 0"), "fsload: 5 rounds");
    assert_eq!(guest.engine.stats().waiting_pages, 0);
    for (function, calls) in [
        ("_start", (1, 0)),
        ("program", (1, 1)),
        ("one_round", (5, 5)),
    ] {
        assert_eq!(traced.recorded(function), calls, "{function}");
    }
    let sites = guest.user_sites();
    traced.finish();
    guest.assert_clean(&sites);
}

/// Checks `one_round` of allocs, called many times by each of `commands`' processes while another
/// session comes and goes.
fn many_calls(guest: &UserGuest, command: &str, processes: u64) {
    let shell = &guest.shell;
    guest.spawn_sleeper(&format!("allocs 0 {FOR_EVER}"));
    let patterns = ["entry", "return"].map(|moment| format!("uprobe:{ALLOCS}:one_round:{moment}"));
    let probes: Vec<Probe> = patterns
        .iter()
        .flat_map(|pattern| guest.probes(pattern))
        .collect();
    let mut traced = guest.session();
    traced.enable_all(&probes, &Filter::default());
    let done = AtomicBool::new(false);
    let started = Instant::now();
    let others = std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let (mut times, mut hits) = (0, ProbeStats::default());
            while !done.load(Ordering::Relaxed) {
                let mut other = tracing::session(&guest.engine, SLOTS);
                for probe in &probes {
                    tracing::enable(&mut other, probe, &Filter::default());
                }
                std::thread::sleep(Duration::from_millis(50));
                other.disable_all();
                // No earlier hit is still in progress.
                let paused = shell.linux.machine().pause();
                let mut read = 0;
                other.drain(|_| read += 1);
                let stats = other.stats().probes;
                drop(paused);
                assert_eq!(read, stats.recorded, "{stats:?}");
                assert_eq!(stats.hits, stats.recorded + stats.dropped, "{stats:?}");
                times += 1;
                hits += stats;
            }
            (times, hits)
        });
        let started = shell.start(command);
        let answer = started.answer(8 * COMMAND_LIMIT);
        done.store(true, Ordering::Relaxed);
        assert_eq!(
            answer
                .output
                .matches(&format!("allocs: {MANY} rounds"))
                .count() as u64,
            processes,
            "{answer:?}"
        );
        others
            .join()
            .unwrap_or_else(|_| panic!("the other session failed"))
    });
    let calls = MANY * processes;
    println!(
        "{calls} calls in {:?}; others came {} times and saw {:?}",
        started.elapsed(),
        others.0,
        others.1
    );
    assert!(others.0 > 2 && others.1.hits > 0, "{others:?}");
    let engine = guest.engine.stats();
    for number in 0..2 {
        let stats = traced.stats(number);
        assert_eq!(stats.hits, calls, "{stats:?}, {engine:?}");
        assert_eq!(stats.recorded + stats.dropped, stats.hits, "{stats:?}");
    }
    assert_eq!(
        (
            engine.lost_returns,
            engine.without_return,
            engine.waiting_returns,
            engine.unknown_task
        ),
        (0, 0, 0, 0),
        "{engine:?}"
    );
    let recorded = traced.stats(0).recorded + traced.stats(1).recorded;
    traced.session.disable_all();
    let events = tracing::all_events(&mut traced.session);
    assert_eq!(events.len() as u64, recorded);
    drop(traced);
    guest.assert_clean(&BTreeSet::new());
}

#[test]
fn twenty_thousand_calls_are_twenty_thousand_events() {
    let host = host!();
    many_calls(&UserGuest::new(host), &format!("allocs {MANY} 0"), 1);
}

#[test]
fn calls_on_two_cpus_are_all_seen() {
    let host = host!();
    let guest = UserGuest::of(two_cpus::guest(host));
    let command =
        format!("busybox taskset 1 allocs {MANY} 0 & busybox taskset 2 allocs {MANY} 0; wait");
    many_calls(&guest, &command, 2);
}

#[test]
fn what_malloc_gives_is_what_free_gets() {
    const ROUNDS: u64 = 50;
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&["mkfifo /tmp/go /tmp/done"]);
    guest.spawn_sleeper(&format!("allocs 0 {FOR_EVER}"));
    let pid = guest.spawn_sleeper(&format!(
        "sh -c 'read line < /tmp/go; exec allocs {ROUNDS} 0' 3> /tmp/done"
    ));
    let mut traced = guest.session();
    let filter = pid_filter(pid, false);
    let mut number = |what: &str| traced.enable(&format!("uprobe:{LIBC}:{what}"), &filter)[0];
    let [malloc, given, free] = ["malloc:entry", "malloc:return", "free:entry"].map(&mut number);
    shell.output(&format!("{RELEASE}; allocs 9 0"));
    let events = traced.finish();
    assert!(events.iter().all(|event| event.pid == Some(pid)));
    // Other callers' come before and after, not in between.
    let mut sizes = Vec::new();
    for window in events.windows(3) {
        let [entry, result, freed] = window else {
            continue;
        };
        if (entry.probe, result.probe, freed.probe) != (malloc, given, free)
            || entry.arguments[0] != sizes.len() as u64 + 1
        {
            continue;
        }
        assert!(entry.tsc < result.tsc && result.tsc < freed.tsc);
        assert_ne!(result.arguments, [0]);
        assert_eq!(result.arguments[0], freed.arguments[0], "{window:?}");
        sizes.push(entry.arguments[0]);
    }
    assert_eq!(sizes, (1..=ROUNDS).collect::<Vec<_>>(), "{events:?}");
    guest.assert_clean(&BTreeSet::new());
}
