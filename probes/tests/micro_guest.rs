//! Probes on a real KVM, over the micro guest: which events there are, in which order, and that
//! nothing stays behind.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use introspect::kernel::symbols::SymbolsBuilder;
use introspect::memory_budget;
use probes::engine::{Engine, EngineLimits, RingSize, Session};
use probes::event::{Event, EventKind};
use probes::kernel_view::KernelView;
use probes::name::ProbePattern;
use probes::provider;
use support::{LIMIT, assert_balanced, drained, enable, hits, micro, ring};

const SLOTS: usize = 1 << 16;
const LEAF: [&str; 2] = ["kprobe::micro_leaf:entry", "kprobe::micro_leaf:return"];

/// Drains the rings while the guest runs.
fn collect<'a>(session: &'a mut Session, events: &'a mut Vec<Event>) -> impl FnMut() + 'a {
    || {
        session.drain(|event| events.push(event));
    }
}

#[test]
fn every_call_is_seen_with_its_argument_and_its_result() {
    const CALLS: u64 = 10_000;
    let Some(mut micro) = micro("calls 10000", 1) else {
        return;
    };
    let before = micro.text_hash();
    let mut session = micro.session(SLOTS, &LEAF);
    assert_ne!(micro.text_hash(), before, "the trap is in memory");
    let mut events = Vec::new();
    micro.run(collect(&mut session, &mut events));
    micro.assert_count(CALLS);

    assert_eq!(events.len() as u64, 2 * CALLS);
    assert!(events.is_sorted_by_key(|event| event.tsc));
    let leaf = micro.address("micro_leaf");
    let return_address = events[1].pc;
    for (number, pair) in events.chunks_exact(2).enumerate() {
        let number = number as u64;
        let [entry, exit] = pair else { panic!("pairs") };
        let found = (
            entry.kind,
            entry.probe,
            entry.pc,
            entry.arguments[0],
            entry.pid,
        );
        assert_eq!(found, (EventKind::Entry, 0, leaf, number, None));
        let found = (exit.kind, exit.probe, exit.pc, exit.arguments.as_slice());
        assert_eq!(
            found,
            (EventKind::Return, 1, return_address, &[number + 1][..])
        );
    }
    let caller = micro.view.kernel.symbols.resolve(return_address);
    assert_eq!(
        caller.map(|(symbol, _)| symbol.name),
        Some("micro_call_loop")
    );

    assert_eq!((hits(&session, 0), hits(&session, 1)), (CALLS, CALLS));
    let stats = session.stats();
    assert_eq!((stats.read, stats.probes.dropped), (2 * CALLS, 0));
    assert_eq!(micro.engine.stats(), probes::engine::EngineStats::default());
    assert_eq!(
        micro.machine.stats().traps,
        2 * CALLS,
        "one trap for each event"
    );
    drop(session);
    micro.assert_untouched(&before);
}

#[test]
fn what_a_small_ring_drops_is_counted_to_the_last_event() {
    const CALLS: u64 = 3_000;
    let Some(mut micro) = micro("calls 3000", 1) else {
        return;
    };
    let mut session = micro.session(256, &LEAF);
    micro.run(|| {});
    assert_eq!((hits(&session, 0), hits(&session, 1)), (CALLS, CALLS));
    session.disable_all();
    let events = drained(&mut session);
    assert_eq!(events.len(), 256);
    let stats = session.stats();
    assert_eq!(stats.read, stats.probes.recorded);
    assert_eq!(stats.read + stats.probes.dropped, 2 * CALLS);
    let last = events.last().map(|event| event.arguments[0]);
    assert_eq!(last, Some(128), "the oldest are kept");
}

#[test]
fn recursion_pairs_each_return_with_its_own_call() {
    const ROUNDS: u64 = 50;
    let Some(mut micro) = micro("nested 50", 1) else {
        return;
    };
    let before = micro.text_hash();
    let probes = [
        "kprobe::micro_outer:entry",
        "kprobe::micro_outer:return",
        "kprobe::micro_recurse:entry",
        "kprobe::micro_recurse:return",
    ];
    let mut session = micro.session(SLOTS, &probes);
    let mut events = Vec::new();
    micro.run(collect(&mut session, &mut events));
    let found: Vec<_> = events.iter().map(|e| (e.probe, e.arguments[0])).collect();
    let mut round = Vec::new();
    round.extend((1..=5).rev().map(|depth| (2, depth)));
    round.extend((1..=5).map(|depth| (3, depth)));
    round.push((1, 5));
    assert_eq!(found.len() as u64, 12 * ROUNDS);
    for (number, found) in found.chunks(12).enumerate() {
        let (first, rest) = found.split_first().unwrap();
        assert_eq!(first.0, 0);
        assert_eq!(rest, round, "round {number}");
    }
    let counts = [0, 1, 2, 3].map(|number| hits(&session, number));
    assert_eq!(counts, [ROUNDS, ROUNDS, 5 * ROUNDS, 5 * ROUNDS]);
    // The innermost call jumps to the address that the others return to.
    let stats = micro.engine.stats();
    assert_eq!((stats.unpaired_returns, stats.lost_returns), (ROUNDS, 0));
    drop(session);
    micro.assert_untouched(&before);
}

#[test]
fn cpus_calling_at_once_are_told_apart_and_merged_in_time_order() {
    const CALLS: u64 = 2_000;
    let Some(mut micro) = micro("smp 2000 2", 2) else {
        return;
    };
    let mut session = micro.session(SLOTS, &LEAF);
    let mut events = Vec::new();
    micro.run(collect(&mut session, &mut events));
    micro.assert_count(2 * CALLS);
    assert!(events.is_sorted_by_key(|event| event.tsc));
    for vcpu in 0..2 {
        let of = |kind| {
            let own = events.iter().filter(|e| e.vcpu == vcpu && e.kind == kind);
            own.map(|e| e.arguments[0]).collect::<Vec<_>>()
        };
        assert_eq!(of(EventKind::Entry), (0..CALLS).collect::<Vec<_>>());
        assert_eq!(of(EventKind::Return), (1..=CALLS).collect::<Vec<_>>());
    }
}

#[test]
fn a_session_can_come_and_go_while_the_guest_runs() {
    let Some(mut micro) = micro("calls 100000000", 1) else {
        return;
    };
    let before = micro.text_hash();
    micro.machine.start();
    for _ in 0..5 {
        let mut session = micro.session(SLOTS, &LEAF);
        // However slow the host is, the probes see enough calls at some time.
        let begin = Instant::now();
        while session.stats().probes.hits < 200 {
            let end = micro.machine.wait(Some(Duration::from_millis(5)));
            assert!(end.is_none(), "{end:?}");
            assert!(begin.elapsed() < LIMIT, "{:?}", session.stats());
        }
        let paused = micro.machine.pause();
        let engine = micro.engine.stats();
        let unfinished = engine.waiting_returns + engine.without_return;
        assert_eq!(
            hits(&session, 0),
            hits(&session, 1) + unfinished,
            "{engine:?}"
        );
        session.disable_all();
        drop(paused);
        assert_eq!(
            micro.engine.stats().waiting_returns,
            0,
            "nobody waits any more"
        );
        let events = drained(&mut session);
        let stats = session.stats();
        assert_balanced(&stats.probes);
        assert_eq!(stats.read, stats.probes.recorded, "{stats:?}");
        let first = events.first().map(|event| event.kind);
        assert_eq!(first, Some(EventKind::Entry), "no return without its call");
        micro.assert_untouched(&before);
    }
    micro.machine.stop();
    assert!(
        !micro.output.text().contains("trap"),
        "{}",
        micro.output.text()
    );
}

#[test]
fn an_unknown_name_gives_those_that_look_like_it() {
    let Some(micro) = micro("calls 1", 1) else {
        return;
    };
    for (pattern, nearest) in [
        ("kprobe::micro_laef:entry", Some("micro_leaf")),
        ("micro_cals", Some("micro_calls")),
        ("kprobe::micro_laef*:entry", None),
    ] {
        let found = provider::kernel_probes(&micro.view, &ProbePattern::parse(pattern).unwrap());
        assert!(found.probes.is_empty(), "{found:?}");
        let first = found.nearest.first().map(String::as_str);
        assert_eq!(first, nearest, "{pattern}");
    }
}

#[test]
fn a_function_that_cannot_be_trapped_is_named_and_the_others_stay() {
    let Some(micro) = micro("calls 1", 1) else {
        return;
    };
    let before = micro.text_hash();
    let mut builder = SymbolsBuilder::default();
    for (name, address) in [
        ("micro_leaf", micro.address("micro_leaf")),
        ("ghost", 0x7f_0000_0000),
    ] {
        builder.push(name.as_bytes(), address, b'T', false).unwrap();
    }
    let view = KernelView::without_types(builder.finish(None), micro.view.kernel.space);
    let engine = Engine::new(
        micro.machine.handle(),
        Arc::new(view),
        &EngineLimits::default(),
    );
    let mut session = engine.session(ring(64)).unwrap();
    let leaf = support::probe(engine.view(), "kprobe::micro_leaf:entry");
    assert_eq!(enable(&mut session, &leaf).unwrap(), 0);
    let armed = micro.text_hash();
    for moment in ["entry", "return", "+3"] {
        let ghost = support::probe(engine.view(), &format!("kprobe::ghost:{moment}"));
        let text = enable(&mut session, &ghost).unwrap_err().to_string();
        assert!(
            text.contains(&format!("ghost:{moment}"))
                && text.contains("0x7f0000000")
                && text.contains("not mapped"),
            "{text}"
        );
        assert_eq!(micro.text_hash(), armed, "{moment}");
    }
    assert!(!session.disable(1), "it has no number");
    drop(session);
    micro.assert_untouched(&before);
}

/// Each ring alone would be permitted. Other tests hold little, and are not to be refused because
/// of this one.
#[test]
fn rings_beyond_what_the_process_holds_for_all_are_refused() {
    let Some(micro) = micro("smp 1 2", 2) else {
        return;
    };
    let words = RingSize::default().words;
    let slots = (memory_budget::LIMIT as usize / words / size_of::<u64>()).next_power_of_two() / 2;
    let engine = Engine::new(
        micro.machine.handle(),
        micro.view.clone(),
        &EngineLimits::default(),
    );
    let refused = engine.session(ring(slots)).err();
    let text = refused.map(|error| error.to_string()).unwrap_or_default();
    assert!(
        text.contains("for rings") && text.contains("end a trace"),
        "{text}"
    );
    engine.session(ring(64)).unwrap();
}
