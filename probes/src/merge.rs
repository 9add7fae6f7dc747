//! Drains records from several rings in the order of their time stamps.
//!
//! The caller owns the rings and is their only reader. Within one call and across calls, records
//! are in ascending order of time. This requires that all rings and `clock` use one clock, which
//! never goes back on a thread and agrees between CPUs. The invariant time stamp counter of one
//! machine does so, to within the few nanoseconds that a processor may read it early. Records of
//! one ring keep their order, also at equal times. At equal times, rings are ordered by position.
//!
//! Records that a hit in progress may still precede stay in their rings until the next call. When
//! the pushers are idle, one call drains everything.

use std::borrow::Borrow;

use crate::ring::Ring;

/// Drains all records that no later record can precede. Returns their number.
///
/// `each` is called with the position of a record's ring in `rings`, the record's time, and its
/// words.
pub fn drain_in_order<R: Borrow<Ring>>(
    rings: &[R],
    clock: impl Fn() -> u64,
    mut each: impl FnMut(usize, u64, &[u64]),
) -> usize {
    let now = clock();
    // The horizon is read before the rings: a hit that has ended by then is visible in its ring.
    let horizon = rings
        .iter()
        .map(|ring| ring.borrow().horizon(now))
        .min()
        .unwrap_or(now);
    let mut heads: Vec<(usize, &Ring, Option<u64>)> = rings
        .iter()
        .map(Borrow::borrow)
        .enumerate()
        .map(|(position, ring)| (position, ring, ring.peek_time()))
        .collect();
    let mut record = Vec::new();
    let mut taken = 0;
    loop {
        let ready = heads.iter_mut().filter_map(|(position, ring, head)| {
            let time = (*head)?;
            (time <= horizon).then_some((time, *position, *ring, head))
        });
        // Of equal times, the first ring's.
        let Some((_, position, ring, head)) = ready.min_by_key(|(time, ..)| *time) else {
            break;
        };
        if let Some(time) = ring.pop(&mut record) {
            each(position, time, &record);
            taken += 1;
        }
        *head = ring.peek_time();
    }
    taken
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn rings(count: usize, slots: usize) -> Vec<Ring> {
        (0..count).map(|_| Ring::new(slots, 1).unwrap()).collect()
    }

    fn push(rings: &[Ring], ring: usize, time: u64) {
        assert!(rings[ring].visit(|| time).push(&[time + ring as u64]));
    }

    /// Returns the rings and times of the records drained at time 100.
    fn drained(rings: &[Ring]) -> Vec<(usize, u64)> {
        let mut out = Vec::new();
        let taken = drain_in_order(
            rings,
            || 100,
            |ring, time, words| {
                assert_eq!(words, [time + ring as u64]);
                out.push((ring, time));
            },
        );
        assert_eq!(taken, out.len());
        out
    }

    #[test]
    fn rings_come_out_in_time_order() {
        let rings = rings(3, 8);
        for (ring, time) in [(0, 10), (0, 40), (1, 20), (1, 40), (1, 41), (2, 5)] {
            push(&rings, ring, time);
        }
        assert_eq!(
            drained(&rings),
            [(2, 5), (0, 10), (1, 20), (0, 40), (1, 40), (1, 41)]
        );
    }

    #[test]
    fn what_a_hit_in_progress_may_precede_waits() {
        let rings = rings(2, 8);
        push(&rings, 0, 10);
        push(&rings, 0, 30);
        let visit = rings[1].visit(|| 20);
        assert_eq!(drained(&rings), [(0, 10)]);
        visit.push(&[21]);
        drop(visit);
        assert_eq!(drained(&rings), [(1, 20), (0, 30)]);
    }

    #[test]
    fn records_of_a_time_to_come_wait() {
        let rings = rings(1, 8);
        push(&rings, 0, 100);
        push(&rings, 0, 101);
        assert_eq!(drained(&rings), [(0, 100)]);
        assert_eq!(drained(&rings), []);
    }

    #[test]
    fn rings_may_be_borrowed_or_shared() {
        let ring = std::sync::Arc::new(Ring::new(2, 1).unwrap());
        ring.visit(|| 1).push(&[7]);
        ring.visit(|| 2).push(&[8]);
        let mut out = Vec::new();
        drain_in_order(&[&*ring], || 1, |_, _, words| out.extend_from_slice(words));
        drain_in_order(&[ring], || 2, |_, _, words| out.extend_from_slice(words));
        assert_eq!(out, [7, 8]);
    }

    #[test]
    fn draining_while_four_threads_push_never_goes_back_in_time() {
        const EACH: u64 = 20_000;
        let rings = rings(4, 1 << 15);
        let clock = AtomicU64::new(1);
        let tick = || clock.fetch_add(1, Ordering::SeqCst);
        let mut times = Vec::new();
        let mut each = |ring: usize, time, words: &[u64]| {
            assert_eq!(words, [ring as u64]);
            times.push(time);
        };
        std::thread::scope(|scope| {
            let pushers: Vec<_> = (0..)
                .zip(&rings)
                .map(|(number, ring)| {
                    scope.spawn(move || {
                        (0..EACH).for_each(|_| assert!(ring.visit(tick).push(&[number])));
                    })
                })
                .collect();
            while !pushers.iter().all(|p| p.is_finished()) {
                drain_in_order(&rings, tick, &mut each);
                std::thread::yield_now();
            }
        });
        drain_in_order(&rings, tick, &mut each);
        assert_eq!(
            times.len() as u64,
            4 * EACH,
            "a rest of pushers leaves nothing behind"
        );
        assert!(times.is_sorted());
    }
}

#[cfg(all(test, loom))]
mod loom_model {
    //! Tests of draining under every order of events that the memory model permits: run with `--cfg
    //! loom`.
    #![allow(clippy::unwrap_used)]

    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::{AtomicU64, Ordering};

    /// Holds a record of time 1 in one ring from the start. A call may take it when the clock has
    /// reached 1. A hit on the other ring must not come after it with time 0.
    #[test]
    fn draining_while_a_hit_is_recorded_never_goes_back_in_time() {
        loom::model(|| {
            let rings = Arc::new([(); 2].map(|()| Ring::new(2, 1).unwrap()));
            rings[1].visit(|| 1).push(&[]);
            let clock = Arc::new(AtomicU64::new(0));
            let pusher = thread::spawn({
                let (rings, clock) = (Arc::clone(&rings), Arc::clone(&clock));
                move || {
                    assert!(rings[0].visit(|| clock.load(Ordering::Relaxed)).push(&[]));
                }
            });
            let drain = |rings: &[Ring], clock: &AtomicU64| {
                let mut times = Vec::new();
                let clock = || clock.load(Ordering::Relaxed);
                drain_in_order(rings, clock, |_, time, _| times.push(time));
                times
            };
            let reader = thread::spawn({
                let (rings, clock) = (Arc::clone(&rings), Arc::clone(&clock));
                move || drain(&rings[..], &clock)
            });
            clock.store(1, Ordering::Relaxed);
            pusher.join().unwrap();
            let mut times = reader.join().unwrap();
            times.extend(drain(&rings[..], &clock));
            assert_eq!(times.len(), 2);
            assert!(times.is_sorted(), "{times:?}");
        });
    }
}
