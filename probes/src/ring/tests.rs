//! Tests of one ring from its users' view.
#![allow(clippy::unwrap_used)]

use super::*;

/// Returns a record of 0 to 7 words, each of which contains its number.
fn record(number: u64) -> Vec<u64> {
    (0..number % 8).map(|word| number << 8 | word).collect()
}

fn popped(ring: &Ring) -> Vec<(u64, Vec<u64>)> {
    let mut words = Vec::new();
    std::iter::from_fn(|| ring.pop(&mut words).map(|time| (time, words.clone()))).collect()
}

#[test]
fn sizes_are_powers_of_two_and_bounded() {
    use RingSizeError::*;
    for (slots, words, expected) in [
        (1, 1, None),
        (2, 1, None),
        (1024, MAX_SLOT_WORDS, None),
        (0, 8, Some(Slots { slots: 0 })),
        (3, 8, Some(Slots { slots: 3 })),
        (
            MAX_SLOTS * 2,
            1,
            Some(Slots {
                slots: MAX_SLOTS * 2,
            }),
        ),
        (8, 0, Some(Words { words: 0 })),
        (8, 1025, Some(Words { words: 1025 })),
        (
            MAX_SLOTS,
            7,
            Some(Memory {
                slots: MAX_SLOTS,
                words: 7,
                bytes: MAX_SLOTS * 9 * 8,
            }),
        ),
    ] {
        let made = Ring::new(slots, words);
        assert_eq!(made.as_ref().err(), expected.as_ref(), "{slots} x {words}");
        if let Ok(ring) = made {
            assert_eq!(ring.slot_words(), words);
        }
    }
    let told = Ring::new(1000, 8).unwrap_err().to_string();
    assert!(told.contains("1000"), "{told}");
}

#[test]
fn records_keep_their_length_words_and_time() {
    let ring = Ring::new(8, 7).unwrap();
    for number in 0..8 {
        assert!(ring.visit(|| 100 + number).push(&record(number)));
    }
    assert_eq!(ring.peek_time(), Some(100));
    let expected: Vec<_> = (0..8).map(|n| (100 + n, record(n))).collect();
    assert_eq!(popped(&ring), expected);
    assert_eq!(ring.peek_time(), None);
}

#[test]
fn an_empty_ring_leaves_the_readers_buffer_alone() {
    let mut words = vec![1, 2];
    assert_eq!(Ring::new(1, 1).unwrap().pop(&mut words), None);
    assert_eq!(words, [1, 2]);
}

#[test]
fn a_full_ring_keeps_the_old_and_counts_the_new() {
    let ring = Ring::new(4, 7).unwrap();
    let push = |n| ring.visit(|| n).push(&record(n));
    let pushed: Vec<bool> = (0..6).map(push).collect();
    assert_eq!(pushed, [true, true, true, true, false, false]);
    assert_eq!(ring.pop(&mut Vec::new()), Some(0));
    assert!(push(6), "there is room again");
    let stats = |read| RingStats {
        pushed: 5,
        dropped: 2,
        read,
    };
    assert_eq!(ring.stats(), stats(1));
    assert_eq!(popped(&ring), [1, 2, 3, 6].map(|n| (n, record(n))));
    assert_eq!(ring.stats(), stats(5));
}

#[test]
fn a_record_is_written_in_place() {
    let ring = Ring::new(4, 3).unwrap();
    let visit = ring.visit(|| 9);
    assert!(visit.push_with(|slot| {
        assert_eq!((slot.len(), slot.room(), slot.is_empty()), (0, 3, true));
        assert!(!slot.set(0, 1), "nothing there to replace");
        assert!([0, 7, 8].into_iter().all(|word| slot.push_word(word)));
        assert!(!slot.push_word(9), "a slot has three words");
        assert!(slot.set(0, slot.len() as u64));
        assert!(!slot.set(3, 1));
        assert_eq!((slot.len(), slot.room(), slot.is_empty()), (3, 0, false));
    }));
    assert!(visit.push_with(|_| ()), "a record may be empty");
    assert_eq!(popped(&ring), [(9, vec![3, 7, 8]), (9, vec![])]);
}

#[test]
fn a_record_given_up_is_counted_and_leaves_no_trace() {
    let ring = Ring::new(2, 2).unwrap();
    let visit = ring.visit(|| 1);
    assert!(!visit.push_with(|slot| {
        assert!(slot.push_word(5));
        slot.give_up();
    }));
    assert_eq!(ring.peek_time(), None);
    assert!(visit.push(&[6]));
    assert_eq!(popped(&ring), [(1, vec![6])]);
    let (pushed, dropped, read) = (1, 1, 1);
    assert_eq!(
        ring.stats(),
        RingStats {
            pushed,
            dropped,
            read
        }
    );
}

#[test]
fn a_full_ring_is_not_written_to() {
    let ring = Ring::new(1, 1).unwrap();
    let visit = ring.visit(|| 1);
    assert!(visit.push(&[1]));
    assert!(!visit.push_with(|_| panic!("called without a slot")));
}

#[test]
#[cfg_attr(
    debug_assertions,
    should_panic(expected = "a record of 3 words for slots of 2")
)]
fn a_record_too_long_is_dropped_whole() {
    let ring = Ring::new(2, 2).unwrap();
    assert!(!ring.visit(|| 1).push(&[1, 2, 3]));
    assert_eq!(ring.peek_time(), None);
    assert_eq!(ring.stats().dropped, 1);
}

#[test]
fn the_horizon_is_now_unless_a_hit_is_being_recorded() {
    let ring = Ring::new(4, 1).unwrap();
    assert_eq!(ring.horizon(100), 100);
    let visit = ring.visit(|| 60);
    assert_eq!(ring.horizon(100), 60);
    drop(visit);
    assert_eq!(ring.horizon(100), 100);
}

/// Pushes as fast as possible into a small ring while another thread reads: no record is torn,
/// reordered or unaccounted for.
#[test]
fn every_attempt_is_read_or_counted_as_dropped() {
    const ATTEMPTS: u64 = 300_000;
    let ring = Ring::new(64, 7).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let (accepted, seen) = std::thread::scope(|scope| {
        let pusher = scope.spawn(|| {
            let accepted = (0..ATTEMPTS)
                .filter(|n| ring.visit(|| *n).push(&record(*n)))
                .count();
            done.store(true, Ordering::Release);
            accepted as u64
        });
        let (mut seen, mut next, mut words) = (0, 0, Vec::new());
        loop {
            let last = done.load(Ordering::Acquire);
            while let Some(number) = ring.pop(&mut words) {
                assert!(number >= next, "{number} after {next}");
                assert_eq!(words, record(number));
                next = number + 1;
                seen += 1;
            }
            if last {
                break;
            }
        }
        (pusher.join().unwrap(), seen)
    });
    let stats = ring.stats();
    assert_eq!(seen, accepted);
    assert_eq!((stats.read, stats.pushed), (seen, seen));
    assert_eq!(stats.read + stats.dropped, ATTEMPTS);
}

#[test]
fn a_whole_record_is_as_one_that_is_pushed_or_left_to_the_caller() {
    for (words, fits) in [(2, false), (3, true), (4, true)] {
        let ring = Ring::new(2, words).unwrap();
        let pushed = [1, 2, 3].map(|time| ring.visit(|| time).push_both(&[time, 8], &[9]));
        let expected = [Some(true), Some(true), Some(false)];
        assert_eq!(pushed, expected.map(|done| done.filter(|_| fits)));
        let records = [1, 2].map(|time| (time, vec![time, 8, 9]));
        assert_eq!(
            popped(&ring),
            records.get(..if fits { 2 } else { 0 }).unwrap()
        );
        assert_eq!(ring.stats().dropped, u64::from(fits));
    }
}
