//! Exact counts while others come and go: no hit is lost and none is invented, whatever else is
//! probed meanwhile.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use probes::engine::{Capture, Engine, Filter, Session};
use probes::kernel_view::KernelView;
use probes::probe::Probe;
use support::{Micro, Random, assert_balanced, enable, hits, micro, ring};

const LEAF: [&str; 2] = ["kprobe::micro_leaf:entry", "kprobe::micro_leaf:return"];
/// The probes of the other sessions: the same function, an instruction inside it and the one it
/// returns to, other functions. Offsets are in bytes from the functions' starts, whose instructions
/// are in guest/src/micro/calls.rs.
const OTHERS: [&str; 8] = [
    "kprobe::micro_leaf:entry",
    "kprobe::micro_leaf:return",
    "kprobe::micro_leaf:+4",
    "kprobe::micro_call_loop:+13",
    "kprobe::micro_call_loop:entry",
    "kprobe::micro_call_loop:return",
    "kprobe::micro_calls:return",
    "kprobe::micro_smp:entry",
];
/// The number of sessions that are kept for a check while the guest is paused.
const KEPT: usize = 500;

/// Creates and drops sessions until `stop` is set. Returns their number, and those whose counts are
/// checked.
fn come_and_go(engine: &Engine, view: &KernelView, stop: &AtomicBool) -> (usize, Vec<Session>) {
    let probes = OTHERS.map(|pattern| support::probe(view, pattern));
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut rounds, mut kept) = (0, Vec::new());
    while !stop.load(Ordering::Acquire) {
        let mut session = engine.session(ring(64)).unwrap();
        for _ in 0..=random.below(3) {
            let filter = Filter {
                one_in: random.below(3) as u32,
                ..Filter::default()
            };
            let probe = &probes[random.below(probes.len())];
            session.enable(probe, filter, Capture::default()).unwrap();
        }
        std::thread::sleep(Duration::from_micros(random.below(300) as u64));
        session.disable_all();
        if kept.len() < KEPT {
            kept.push(session);
        }
        rounds += 1;
        std::thread::sleep(Duration::from_micros(random.below(2000) as u64));
    }
    (rounds, kept)
}

/// Runs a guest whose `cpus` vCPUs call the function `calls` times each, with others' probes
/// meanwhile.
fn count_exactly(mut micro: Micro, calls: u64, cpus: u64) {
    let before = micro.text_hash();
    // Rings that are sometimes too small.
    let mut session = micro.session(512, &LEAF);
    let (mut entries, mut returns, mut last) = (0, 0, 0);
    let stop = AtomicBool::new(false);
    let (engine, view) = (micro.engine.clone(), micro.view.clone());
    let begin = Instant::now();
    let (rounds, others) = std::thread::scope(|scope| {
        let others = scope.spawn(|| come_and_go(&engine, &view, &stop));
        micro.run(|| {
            session.drain(|event| {
                assert!(event.tsc >= last, "in order");
                last = event.tsc;
                *[&mut entries, &mut returns][event.probe as usize] += 1;
            });
        });
        stop.store(true, Ordering::Release);
        others.join().unwrap()
    });
    let (took, expected) = (begin.elapsed(), calls * cpus);
    eprintln!(
        "{expected} calls in {took:?}; {rounds} other sessions, {:?}, {:?}",
        session.stats(),
        micro.engine.stats()
    );
    micro.assert_count(expected);
    assert_eq!((hits(&session, 0), hits(&session, 1)), (expected, expected));
    let [entry, exit] = [0, 1].map(|number| session.probe_stats(number).unwrap());
    assert_eq!((entries, returns), (entry.recorded, exit.recorded));
    assert_eq!(session.stats().read, entries + returns);
    assert_eq!((entry.filtered, exit.filtered), (0, 0));
    let stats = micro.engine.stats();
    assert_eq!(
        (
            stats.lost_returns,
            stats.waiting_returns,
            stats.without_return
        ),
        (0, 0, 0),
        "{stats:?}"
    );
    assert!(rounds > 10, "{rounds}");
    let mut seen = 0;
    for mut other in others {
        let read = other.drain(|_| {}) as u64;
        let stats = other.stats().probes;
        assert_balanced(&stats);
        assert_eq!(stats.recorded, read, "{stats:?}");
        seen += stats.hits;
    }
    assert!(
        seen > 0,
        "the others have seen nothing in {rounds} sessions"
    );
    drop(session);
    micro.assert_untouched(&before);
}

/// Returns how many calls a test makes: `most`, or fewer in proportion where an exit takes longer
/// than 10 us.
fn affordable(most: u64) -> u64 {
    const EXIT_NS: u64 = 10_000;
    let exit = support::exit_ns().unwrap_or(EXIT_NS).max(EXIT_NS);
    let calls = most * EXIT_NS / exit;
    if calls < most {
        eprintln!("{calls} calls instead of {most}: an exit takes {exit} ns on this host");
    }
    calls
}

#[test]
fn hundreds_of_thousands_of_calls_are_counted_exactly_while_others_come_and_go() {
    let calls = affordable(250_000);
    if let Some(micro) = micro(&format!("calls {calls}"), 1) {
        count_exactly(micro, calls, 1);
    }
}

#[test]
fn calls_on_two_cpus_are_counted_exactly_while_others_come_and_go() {
    let calls = affordable(100_000);
    if let Some(micro) = micro(&format!("smp {calls} 2"), 2) {
        count_exactly(micro, calls, 2);
    }
}

#[test]
fn calls_on_four_cpus_are_counted_exactly_while_others_come_and_go() {
    let calls = affordable(20_000);
    if let Some(micro) = micro(&format!("smp {calls} 4"), 4) {
        count_exactly(micro, calls, 4);
    }
}

/// The rounds of arming and removing.
const ROUNDS: usize = 10_000;

/// Enables and disables probes at random on a guest that calls its nested functions `calls` times,
/// for at most `rounds` rounds and as long as it runs. Returns the rounds and the hits.
fn arm_and_remove(
    mut micro: Micro,
    calls: u64,
    random: &mut Random,
    rounds: usize,
) -> (usize, u64) {
    const PROBES: [&str; 12] = [
        "kprobe::micro_outer:entry",
        "kprobe::micro_outer:return",
        "kprobe::micro_recurse:entry",
        "kprobe::micro_recurse:return",
        "kprobe::micro_recurse:+1",
        "kprobe::micro_recurse:+4",
        "kprobe::micro_recurse:+6",
        "kprobe::micro_recurse:+9",
        "kprobe::micro_recurse:+11",
        "kprobe::micro_recurse:+16",
        "kprobe::micro_outer:+1",
        "kprobe::micro_nested:return",
    ];
    let before = micro.text_hash();
    let probes: Vec<Probe> = PROBES.iter().map(|name| micro.probe(name)).collect();
    let mut sessions: Vec<Session> = (0..4).map(|_| micro.session(64, &[])).collect();
    let mut enabled: Vec<(usize, u32)> = Vec::new();
    micro.machine.start();
    let mut done = 0;
    while done < rounds && micro.machine.wait(Some(Duration::ZERO)).is_none() {
        if enabled.len() < 6 && random.below(2) == 0 || enabled.is_empty() {
            let of = random.below(sessions.len());
            let probe = &probes[random.below(probes.len())];
            enabled.push((of, enable(&mut sessions[of], probe).unwrap()));
        } else {
            let (of, number) = enabled.swap_remove(random.below(enabled.len()));
            assert!(sessions[of].disable(number));
        }
        // Some rounds remove probes at once, others after hits.
        if done % 4 == 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        done += 1;
    }
    let hits = sessions.iter().map(|s| s.stats().probes.hits).sum();
    drop(sessions);
    micro.assert_untouched(&before);
    micro.finish(&mut || {});
    micro.assert_count(5 * calls);
    (done, hits)
}

/// Probes come and go at random on functions that run all the time; the guest counts right and its
/// text is as it was. A host on which the guest is done before the rounds runs further ones, which
/// have more to do.
#[test]
fn ten_thousand_rounds_of_arming_and_removing_leave_a_busy_guest_as_it_was() {
    let mut random = Random(42);
    let (mut calls, mut rounds, mut hits) = (60_000, 0, 0);
    while rounds < ROUNDS {
        let Some(micro) = micro(&format!("nested {calls}"), 1) else {
            return;
        };
        let begin = Instant::now();
        let (done, seen) = arm_and_remove(micro, calls, &mut random, ROUNDS - rounds);
        let took = begin.elapsed();
        eprintln!("{calls} calls: {done} rounds in {took:?}, {seen} hits");
        (rounds, hits) = (rounds + done, hits + seen);
        calls *= 4;
    }
    assert!(hits > 0, "no hit in {rounds} rounds");
}
