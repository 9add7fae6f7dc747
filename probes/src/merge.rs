//! Taking events out of several rings in the order of their time stamps.
//!
//! The caller owns the rings and is their only reader. Guaranteed: what one call gives, and what all calls give one
//! after the other, is ascending in time, provided that all rings and `clock` use one clock which never goes
//! back on a thread and agrees between CPUs (the invariant time stamp counter of one machine, to within
//! the few nanoseconds that a processor may read it early). Events of one ring keep their order, also at equal times;
//! rings at equal times go by their position.
//!
//! What a hit that is being recorded right now may still put in between stays in its ring until the next call. Once the
//! pushers rest, one call takes everything.

use crate::event::Event;
use crate::ring::Ring;

/// Appends to `out` all events that no event to come can precede; gives how many.
pub fn drain_in_order(rings: &[Ring], clock: impl Fn() -> u64, out: &mut Vec<Event>) -> usize {
    let before = out.len();
    let now = clock();
    // First the horizon, then the rings: a hit that has ended by the former shows in the latter.
    let horizon = rings
        .iter()
        .map(|ring| ring.horizon(now))
        .min()
        .unwrap_or(now);
    let mut heads: Vec<_> = rings.iter().map(|ring| (ring, ring.peek())).collect();
    loop {
        let ready = heads.iter_mut().filter_map(|(ring, head)| {
            let time = head.map(|event| event.tsc)?;
            (time <= horizon).then_some((time, *ring, head))
        });
        // Of equal times, the first ring's.
        let Some((_, ring, head)) = ready.min_by_key(|(time, ..)| *time) else {
            break;
        };
        out.extend(ring.pop());
        *head = ring.peek();
    }
    out.len() - before
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::event::{EventKind, NO_PROCESS};

    fn event(vcpu: u16) -> Event {
        Event {
            kind: EventKind::Entry,
            vcpu,
            function: 0,
            pc: 0,
            tsc: 0,
            pid: NO_PROCESS,
            arguments: [0; 4],
        }
    }

    fn rings(count: usize, slots: usize) -> Vec<Ring> {
        (0..count).map(|_| Ring::new(slots).unwrap()).collect()
    }

    fn push(rings: &[Ring], vcpu: u16, tsc: u64) {
        rings[usize::from(vcpu)].visit(|| tsc).push(event(vcpu));
    }

    #[test]
    fn rings_come_out_in_time_order() {
        let rings = rings(3, 8);
        for (vcpu, tsc) in [(0, 10), (0, 40), (1, 20), (1, 40), (1, 41), (2, 5)] {
            push(&rings, vcpu, tsc);
        }
        let mut out = Vec::new();
        assert_eq!(drain_in_order(&rings, || 100, &mut out), 6);
        let order: Vec<_> = out.iter().map(|e| (e.vcpu, e.tsc)).collect();
        assert_eq!(order, [(2, 5), (0, 10), (1, 20), (0, 40), (1, 40), (1, 41)]);
    }

    #[test]
    fn what_a_hit_in_progress_may_precede_waits() {
        let rings = rings(2, 8);
        push(&rings, 0, 10);
        push(&rings, 0, 30);
        let visit = rings[1].visit(|| 20);
        let mut out = Vec::new();
        assert_eq!(drain_in_order(&rings, || 100, &mut out), 1);
        visit.push(event(1));
        drop(visit);
        assert_eq!(drain_in_order(&rings, || 100, &mut out), 2);
        let order: Vec<_> = out.iter().map(|e| (e.vcpu, e.tsc)).collect();
        assert_eq!(order, [(0, 10), (1, 20), (0, 30)]);
    }

    #[test]
    fn draining_while_four_threads_push_never_goes_back_in_time() {
        const EACH: u64 = 20_000;
        let rings = rings(4, 1 << 15);
        let clock = AtomicU64::new(1);
        let tick = || clock.fetch_add(1, Ordering::SeqCst);
        let mut out = Vec::new();
        std::thread::scope(|scope| {
            let pushers: Vec<_> = (0..4u16)
                .map(|vcpu| {
                    let ring = &rings[usize::from(vcpu)];
                    scope.spawn(move || {
                        (0..EACH).for_each(|_| assert!(ring.visit(tick).push(event(vcpu))));
                    })
                })
                .collect();
            while !pushers.iter().all(|p| p.is_finished()) {
                drain_in_order(&rings, tick, &mut out);
                std::thread::yield_now();
            }
        });
        drain_in_order(&rings, tick, &mut out);
        assert_eq!(
            out.len() as u64,
            4 * EACH,
            "a rest of pushers leaves nothing behind"
        );
        assert!(out.is_sorted_by_key(|e| e.tsc));
    }
}
