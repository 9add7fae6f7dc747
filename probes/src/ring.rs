//! A ring of events from one vCPU's thread to one reader. No locks, no allocation, no waiting on either side.
//!
//! The caller sees to it that one thread at a time pushes and one at a time pops: two pushers would mix up
//! each other's events (never memory). A full ring drops the *new* event and counts it; every push is
//! either popped later, still queued, or counted as dropped: `pushed + dropped` = attempts, `pushed - read`
//! = queued.
//!
//! A pusher works inside a [`Visit`], which tells the reader from which time on events may still come: what
//! [`crate::merge`] orders several rings by.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::event::{EVENT_WORDS, Event};

/// Slots of a ring unless told otherwise: 4 MiB.
pub const DEFAULT_SLOTS: usize = 1 << 16;
/// Most slots of a ring: 1 GiB.
pub const MAX_SLOTS: usize = 1 << 24;

/// Nobody is at work on the ring.
const IDLE: u64 = u64::MAX;

/// A ring of this size cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a ring of {slots} slots: give a power of two from 1 to {MAX_SLOTS}")]
pub struct RingSizeError {
    /// What was asked for.
    pub slots: usize,
}

/// What a ring has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingStats {
    /// Events that found room.
    pub pushed: u64,
    /// Events that did not.
    pub dropped: u64,
    /// Events popped.
    pub read: u64,
}

/// On a cache line of its own, so that the two sides do not slow each other down.
#[derive(Debug)]
#[repr(align(64))]
struct Pusher {
    /// Events pushed so far. Written by the pusher, after the slot.
    pushed: AtomicU64,
    /// Written by the pusher.
    dropped: AtomicU64,
    /// A time before that of every event to come from the visit in progress, or [`IDLE`]. Written by the pusher.
    visiting_since: AtomicU64,
}

#[derive(Debug)]
#[repr(align(64))]
struct Popper {
    /// Events popped so far. Written by the reader, after it has copied the slot.
    read: AtomicU64,
}

/// The ring.
#[derive(Debug)]
pub struct Ring {
    words: Box<[AtomicU64]>,
    slots: u64,
    pusher: Pusher,
    popper: Popper,
}

impl Ring {
    /// An empty ring with `slots` slots.
    ///
    /// # Errors
    /// If that is no power of two, or too many.
    pub fn new(slots: usize) -> Result<Self, RingSizeError> {
        if !slots.is_power_of_two() || slots > MAX_SLOTS {
            return Err(RingSizeError { slots });
        }
        Ok(Self {
            words: (0..slots * EVENT_WORDS)
                .map(|_| AtomicU64::new(0))
                .collect(),
            slots: slots as u64,
            pusher: Pusher {
                pushed: AtomicU64::new(0),
                dropped: AtomicU64::new(0),
                visiting_since: AtomicU64::new(IDLE),
            },
            popper: Popper {
                read: AtomicU64::new(0),
            },
        })
    }

    /// Starts work that may push events, on the pusher's thread. `clock` is the one that orders events.
    pub fn visit(&self, clock: impl Fn() -> u64) -> Visit<'_> {
        // The event's time is read after this store. A reader that still finds the ring idle has read its own
        // clock before, so what this visit pushes is not older than that.
        self.pusher
            .visiting_since
            .store(clock().min(IDLE - 1), Ordering::SeqCst);
        Visit {
            ring: self,
            tsc: clock(),
        }
    }

    /// No event that is not in the ring yet will be older than this: `now`, or the start of the visit in
    /// progress. `now` must have been read before the call.
    pub(crate) fn horizon(&self, now: u64) -> u64 {
        self.pusher.visiting_since.load(Ordering::SeqCst).min(now)
    }

    fn push(&self, event: &Event) -> bool {
        let pushed = self.pusher.pushed.load(Ordering::Relaxed);
        let read = self.popper.read.load(Ordering::Acquire);
        if pushed.wrapping_sub(read) >= self.slots {
            self.pusher.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        for (slot, word) in self.slot(pushed).iter().zip(event.to_words()) {
            slot.store(word, Ordering::Relaxed);
        }
        self.pusher
            .pushed
            .store(pushed.wrapping_add(1), Ordering::Release);
        true
    }

    /// The oldest event, left in the ring. On the reader's thread.
    #[must_use]
    pub fn peek(&self) -> Option<Event> {
        let read = self.popper.read.load(Ordering::Relaxed);
        if self.pusher.pushed.load(Ordering::Acquire) == read {
            return None;
        }
        let mut words = [0; EVENT_WORDS];
        for (word, slot) in words.iter_mut().zip(self.slot(read)) {
            *word = slot.load(Ordering::Relaxed);
        }
        Some(Event::from_words(words))
    }

    /// Takes the oldest event. On the reader's thread.
    pub fn pop(&self) -> Option<Event> {
        let event = self.peek()?;
        let read = self.popper.read.load(Ordering::Relaxed);
        self.popper
            .read
            .store(read.wrapping_add(1), Ordering::Release);
        Some(event)
    }

    /// The counts so far; exact once the pusher rests.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        RingStats {
            read: self.popper.read.load(Ordering::Acquire),
            pushed: self.pusher.pushed.load(Ordering::Acquire),
            dropped: self.pusher.dropped.load(Ordering::Relaxed),
        }
    }

    fn slot(&self, number: u64) -> &[AtomicU64] {
        let start = (number & (self.slots - 1)) as usize * EVENT_WORDS;
        self.words
            .get(start..start + EVENT_WORDS)
            .unwrap_or_default()
    }
}

/// Work of the pusher: all events of one hit carry one time.
#[derive(Debug)]
pub struct Visit<'a> {
    ring: &'a Ring,
    tsc: u64,
}

impl Visit<'_> {
    /// The time of the visit's events.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        self.tsc
    }

    /// Adds an event, with the visit's time; `false` if the ring is full, which is counted.
    pub fn push(&self, event: Event) -> bool {
        self.ring.push(&Event {
            tsc: self.tsc,
            ..event
        })
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.ring
            .pusher
            .visiting_since
            .store(IDLE, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::event::EventKind;

    fn event(number: u64) -> Event {
        Event {
            kind: EventKind::Entry,
            vcpu: 0,
            function: number as u32,
            pc: !number,
            tsc: 0,
            pid: number,
            arguments: [number, number + 1, number + 2, number + 3],
        }
    }

    #[test]
    fn sizes_are_powers_of_two() {
        for (slots, good) in [
            (0, false),
            (1, true),
            (2, true),
            (3, false),
            (1024, true),
            (MAX_SLOTS * 2, false),
        ] {
            assert_eq!(Ring::new(slots).is_ok(), good, "{slots}");
        }
        let told = Ring::new(1000).unwrap_err().to_string();
        assert!(told.contains("1000"), "{told}");
    }

    #[test]
    fn a_full_ring_keeps_the_old_and_counts_the_new() {
        let ring = Ring::new(4).unwrap();
        let push = |n| ring.visit(|| n).push(event(n));
        let pushed: Vec<bool> = (0..6).map(push).collect();
        assert_eq!(pushed, [true, true, true, true, false, false]);
        assert_eq!(ring.pop().map(|e| e.pid), Some(0));
        assert!(push(6), "there is room again");
        assert_eq!(
            ring.stats(),
            RingStats {
                pushed: 5,
                dropped: 2,
                read: 1
            }
        );
        let rest: Vec<u64> = std::iter::from_fn(|| ring.pop()).map(|e| e.pid).collect();
        assert_eq!(rest, [1, 2, 3, 6]);
        assert_eq!(
            ring.stats(),
            RingStats {
                pushed: 5,
                dropped: 2,
                read: 5
            }
        );
    }

    #[test]
    fn the_horizon_is_now_unless_a_hit_is_being_recorded() {
        let ring = Ring::new(4).unwrap();
        assert_eq!(ring.horizon(100), 100);
        let visit = ring.visit(|| 60);
        assert_eq!(ring.horizon(100), 60);
        drop(visit);
        assert_eq!(ring.horizon(100), 100);
    }

    /// One thread pushes as fast as it can into a small ring while another reads: nothing is torn,
    /// reordered or unaccounted for.
    #[test]
    fn every_attempt_is_read_or_counted_as_dropped() {
        const ATTEMPTS: u64 = 300_000;
        let ring = Ring::new(64).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        let (accepted, seen) = std::thread::scope(|scope| {
            let pusher = scope.spawn(|| {
                let accepted = (0..ATTEMPTS)
                    .filter(|n| ring.visit(|| *n).push(event(*n)))
                    .count();
                done.store(true, Ordering::Release);
                accepted as u64
            });
            let (mut seen, mut next) = (0, 0);
            loop {
                let last = done.load(Ordering::Acquire);
                while let Some(found) = ring.pop() {
                    assert!(found.pid >= next, "{} after {next}", found.pid);
                    assert_eq!(
                        found,
                        Event {
                            tsc: found.pid,
                            ..event(found.pid)
                        }
                    );
                    next = found.pid + 1;
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
}
