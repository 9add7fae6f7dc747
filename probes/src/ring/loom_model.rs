//! Tests of the ring under the orders of events that the memory model permits. Run them with
//! `RUSTFLAGS="--cfg loom" cargo test --manifest-path probes/loom/Cargo.toml --release`.
//!
//! The pusher is spawned before the reader. To select other orders, the checker looks only at the
//! last access before a store. With the reader first, the pusher's load of its own counter would
//! hide the reader's, and hardly an order would be tried.
//!
//! One property is not shown: the slot is copied before `read` lets the pusher overwrite it. The
//! checker never lets a load see a later store.
#![allow(clippy::unwrap_used)]

use loom::sync::Arc;
use loom::thread;

use super::awaited::Awaited;
use super::*;

/// Returns a record of one or two words, so that a stale length would show.
fn record(number: u64) -> Vec<u64> {
    (0..1 + number % 2).map(|word| 10 * number + word).collect()
}

/// Pops up to `count` records and checks that they are whole.
fn pop(ring: &Ring, count: u64) -> Vec<u64> {
    let mut words = Vec::new();
    let mut next = || {
        let number = ring.pop(&mut words)?;
        assert_eq!(words, record(number));
        Some(number)
    };
    (0..count).filter_map(|_| next()).collect()
}

#[test]
fn nothing_is_torn_reordered_or_unaccounted_for() {
    const ATTEMPTS: u64 = 3;
    loom::model(|| {
        let ring = Arc::new(Ring::new(2, 2).unwrap());
        let pusher = thread::spawn({
            let ring = Arc::clone(&ring);
            let push = move |number| {
                ring.push_with(number, |slot| {
                    assert!(record(number).into_iter().all(|word| slot.push_word(word)));
                })
            };
            move || -> Vec<u64> { (1..=ATTEMPTS).filter(|number| push(*number)).collect() }
        });
        let reader = thread::spawn({
            let ring = Arc::clone(&ring);
            move || pop(&ring, 2)
        });
        let accepted = pusher.join().unwrap();
        let mut seen = reader.join().unwrap();
        seen.extend(pop(&ring, ATTEMPTS));
        assert_eq!(seen, accepted);
        let stats = ring.stats();
        assert_eq!(
            (stats.pushed, stats.read),
            (seen.len() as u64, seen.len() as u64)
        );
        assert_eq!(stats.pushed + stats.dropped, ATTEMPTS);
    });
}

/// Checks that a reader which sleeps is woken: it sees the record, or the pusher its announcement.
#[test]
fn a_reader_that_finds_nothing_is_found_waiting() {
    loom::model(|| {
        let ring = Arc::new(Ring::new(2, 1).unwrap());
        let awaited = Arc::new(Awaited::default());
        let pusher = thread::spawn({
            let (ring, awaited) = (Arc::clone(&ring), Arc::clone(&awaited));
            move || {
                assert!(ring.visit(|| 1).push(&[]));
                awaited.is_set()
            }
        });
        awaited.set();
        let is_seen = ring.peek_time().is_some();
        assert!(pusher.join().unwrap() || is_seen);
    });
}

/// Checks horizons with a clock that is a variable: a third thread advances it and the others only
/// read it. Only the fences order it.
fn no_record_is_older_than_a_horizon_before_it_appeared(visits: usize, preemptions: Option<usize>) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(move || {
        let ring = Arc::new(Ring::new(2, 1).unwrap());
        let clock = Arc::new(AtomicU64::new(0));
        let pusher = thread::spawn({
            let (ring, clock) = (Arc::clone(&ring), Arc::clone(&clock));
            move || {
                for _ in 0..visits {
                    assert!(ring.visit(|| clock.load(Ordering::Relaxed)).push(&[]));
                }
            }
        });
        let reader = thread::spawn({
            let (ring, clock) = (Arc::clone(&ring), Arc::clone(&clock));
            move || {
                let horizon = ring.horizon(clock.load(Ordering::Relaxed));
                while ring.peek_time().is_some_and(|time| time <= horizon) {
                    ring.pop(&mut Vec::new());
                }
                horizon
            }
        });
        clock.store(1, Ordering::Relaxed);
        pusher.join().unwrap();
        let horizon = reader.join().unwrap();
        while let Some(time) = ring.pop(&mut Vec::new()) {
            assert!(time >= horizon, "{time} after a horizon of {horizon}");
        }
    });
}

#[test]
fn no_record_of_one_visit_is_older_than_a_horizon_before_it_appeared() {
    no_record_is_older_than_a_horizon_before_it_appeared(1, None);
}

#[test]
fn no_record_of_two_visits_is_older_than_a_horizon_before_it_appeared() {
    // All orders take minutes. Missing a record for want of an ordering takes a stale load and one
    // preemption.
    no_record_is_older_than_a_horizon_before_it_appeared(2, Some(2));
}
