//! A ring of records from one vCPU's thread to one reader. No locks, no allocation, no waiting on either side.
//!
//! A record is a run of words that means something to whoever writes and reads it; it is of any length up to
//! the size of the ring's slots, and carries the time of the [`Visit`] that pushed it.
//!
//! The caller sees to it that one thread at a time pushes, in one visit at a time, and one thread at a time pops: two
//! pushers would mix up each other's records (never memory). A full ring drops the *new* record and counts it; every
//! push is either popped later, still queued, or counted as dropped: `pushed + dropped` = attempts,
//! `pushed - read` = queued.
//!
//! A visit tells the reader from which time on records may still come: what [`crate::merge`] orders
//! several rings by.
//!
//! # Memory orderings
//!
//! Two counters hand the slots to and fro. The pusher stores `pushed` with Release when a slot is full, the reader
//! loads it with Acquire before it looks into the slot; the reader stores `read` with Release when it has copied a
//! slot, the pusher loads it with Acquire before it overwrites the slot. So the words themselves may be Relaxed. Each
//! side loads its own counter Relaxed: nobody else writes it.
//!
//! `visiting_since` and the clock are two places that two threads look at in opposite orders: the pusher stores the one
//! and then reads the other, the reader reads the other and then loads the one. Release and Acquire let the
//! pusher's clock be read before its store shows (a store buffer does just that): the reader would find the ring idle
//! at a time later than that of a record to come. A sequentially consistent fence between the two, on both sides, rules
//! that out: one of the fences is first. If it is the pusher's, the reader sees the store; else the pusher
//! reads a clock not before the reader's. Fences and not SeqCst accesses, as those order no clock that is no atomic
//! variable, and the model checker knows them as Acquire and Release only.
//! The end of a visit is a Release store, its load an Acquire: who sees the ring idle sees what was pushed before.
//!
//! `loom_model.rs` checks this against the orders that the memory model permits, but for the way of `read`, which its
//! checker cannot show.

use crate::sync::{AtomicU64, Ordering, fence};

#[cfg(all(test, loom))]
mod loom_model;
#[cfg(all(test, not(loom)))]
mod tests;

/// Most slots of a ring.
pub const MAX_SLOTS: usize = 1 << 24;
/// Most words of a slot: 8 KiB.
pub const MAX_SLOT_WORDS: usize = 1024;
/// Most memory of a ring, in bytes, with [`SLOT_OVERHEAD_WORDS`] for each slot: 1 GiB.
pub const MAX_RING_BYTES: usize = 1 << 30;
/// Words that a slot takes besides those of its record: the record's length and its time.
pub const SLOT_OVERHEAD_WORDS: usize = 2;

const WORD_BYTES: usize = size_of::<u64>();

/// Nobody is at work on the ring.
const IDLE: u64 = u64::MAX;

/// A ring of this size cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingSizeError {
    /// The number of slots.
    #[error("a ring of {slots} slots: give a power of two from 1 to {MAX_SLOTS}")]
    Slots {
        /// What was asked for.
        slots: usize,
    },
    /// The size of a slot.
    #[error("a ring with slots of {words} words: give 1 to {MAX_SLOT_WORDS}")]
    Words {
        /// What was asked for.
        words: usize,
    },
    /// Both together.
    #[error(
        "a ring of {slots} slots of {words} words takes {bytes} bytes, more than {MAX_RING_BYTES}: give fewer or smaller slots"
    )]
    Memory {
        /// What was asked for.
        slots: usize,
        /// What was asked for.
        words: usize,
        /// What that takes.
        bytes: usize,
    },
}

/// What a ring has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingStats {
    /// Records that found room.
    pub pushed: u64,
    /// Records that did not.
    pub dropped: u64,
    /// Records popped.
    pub read: u64,
}

/// On a cache line of its own, so that the two sides do not slow each other down.
#[derive(Debug)]
#[repr(align(64))]
struct Pusher {
    /// Records pushed so far. Written by the pusher, after the slot.
    pushed: AtomicU64,
    /// Written by the pusher.
    dropped: AtomicU64,
    /// A time before that of every record to come from the visit in progress, or [`IDLE`]. Written by the pusher.
    visiting_since: AtomicU64,
}

#[derive(Debug)]
#[repr(align(64))]
struct Popper {
    /// Records popped so far. Written by the reader, after it has copied the slot.
    read: AtomicU64,
}

/// One slot. Belongs to the pusher until `pushed` has gone past it, then to the reader until `read` has.
#[derive(Debug, Clone, Copy)]
struct Slot<'a> {
    length: &'a AtomicU64,
    time: &'a AtomicU64,
    words: &'a [AtomicU64],
}

/// The ring.
#[derive(Debug)]
pub struct Ring {
    /// Slots one after the other: length, time, words.
    memory: Box<[AtomicU64]>,
    slots: u64,
    slot_words: usize,
    pusher: Pusher,
    popper: Popper,
}

impl Ring {
    /// An empty ring of `slots` slots, each for a record of up to `words` words.
    ///
    /// # Errors
    /// If `slots` is no power of two up to [`MAX_SLOTS`], `words` is not from 1 to [`MAX_SLOT_WORDS`], or both
    /// together take more than [`MAX_RING_BYTES`].
    pub fn new(slots: usize, words: usize) -> Result<Self, RingSizeError> {
        if !slots.is_power_of_two() || slots > MAX_SLOTS {
            return Err(RingSizeError::Slots { slots });
        }
        if !(1..=MAX_SLOT_WORDS).contains(&words) {
            return Err(RingSizeError::Words { words });
        }
        // Both are bounded: no overflow.
        let total = slots * (words + SLOT_OVERHEAD_WORDS);
        let bytes = total * WORD_BYTES;
        if bytes > MAX_RING_BYTES {
            return Err(RingSizeError::Memory {
                slots,
                words,
                bytes,
            });
        }
        Ok(Self {
            memory: (0..total).map(|_| AtomicU64::new(0)).collect(),
            slots: slots as u64,
            slot_words: words,
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

    /// Most words of a record.
    #[must_use]
    pub fn slot_words(&self) -> usize {
        self.slot_words
    }

    /// Starts work that may push records, on the pusher's thread. `clock` is the one that orders records.
    pub fn visit(&self, clock: impl Fn() -> u64) -> Visit<'_> {
        // Release: a reader that sees this visit sees what earlier ones have pushed.
        self.pusher
            .visiting_since
            .store(clock().min(IDLE - 1), Ordering::Release);
        // The records' time is read after that store shows. A reader that still finds the ring idle has read its own
        // clock before, so what this visit pushes is not older than that. Pairs with the fence in `horizon`.
        fence(Ordering::SeqCst);
        Visit {
            ring: self,
            tsc: clock(),
        }
    }

    /// No record that is not in the ring yet will be older than this: `now`, or the start of the visit in
    /// progress. `now` must have been read before the call.
    pub(crate) fn horizon(&self, now: u64) -> u64 {
        // `now` was read before the load. Pairs with the fence in `visit`.
        fence(Ordering::SeqCst);
        self.pusher.visiting_since.load(Ordering::Acquire).min(now)
    }

    #[inline(always)]
    fn push_with(&self, time: u64, fill: impl FnOnce(&mut SlotWriter<'_>)) -> bool {
        let pushed = self.pusher.pushed.load(Ordering::Relaxed);
        // Acquire: the reader has done with the slot that is about to be overwritten.
        let read = self.popper.read.load(Ordering::Acquire);
        let free = pushed.wrapping_sub(read) < self.slots;
        let Some(slot) = self.slot(pushed).filter(|_| free) else {
            return self.count_drop();
        };
        let mut writer = SlotWriter {
            words: slot.words,
            length: 0,
            given_up: false,
        };
        fill(&mut writer);
        if writer.given_up {
            return self.count_drop();
        }
        slot.length.store(writer.length as u64, Ordering::Relaxed);
        slot.time.store(time, Ordering::Relaxed);
        // Release: who sees the count sees the slot.
        self.pusher
            .pushed
            .store(pushed.wrapping_add(1), Ordering::Release);
        true
    }

    /// As [`push_with`](Self::push_with), of a record that is known whole; `None`, and nothing done, if no slot is large enough.
    #[inline(always)]
    fn push_both<const A: usize, const B: usize>(
        &self,
        time: u64,
        first: &[u64; A],
        second: &[u64; B],
    ) -> Option<bool> {
        if self.slot_words < A + B {
            return None;
        }
        let pushed = self.pusher.pushed.load(Ordering::Relaxed);
        // Acquire: the reader has done with the slot that is about to be overwritten.
        let read = self.popper.read.load(Ordering::Acquire);
        let start = self.start(pushed);
        if pushed.wrapping_sub(read) < self.slots
            && let Some([length, stamp, words @ ..]) = self.memory.get(start..)
            && let Some((head, rest)) = words.split_first_chunk::<A>()
            && let Some(rest) = rest.first_chunk::<B>()
        {
            for (place, word) in head.iter().zip(first) {
                place.store(*word, Ordering::Relaxed);
            }
            for (place, word) in rest.iter().zip(second) {
                place.store(*word, Ordering::Relaxed);
            }
            length.store((A + B) as u64, Ordering::Relaxed);
            stamp.store(time, Ordering::Relaxed);
            // Release: who sees the count sees the slot.
            self.pusher
                .pushed
                .store(pushed.wrapping_add(1), Ordering::Release);
            return Some(true);
        }
        Some(self.count_drop())
    }

    #[cold]
    fn count_drop(&self) -> bool {
        self.pusher.dropped.fetch_add(1, Ordering::Relaxed);
        false
    }

    /// The slot of the oldest record, and that record's number.
    fn oldest(&self) -> Option<(u64, Slot<'_>)> {
        let read = self.popper.read.load(Ordering::Relaxed);
        // Acquire: the slot shows as it was when it was counted.
        if self.pusher.pushed.load(Ordering::Acquire) == read {
            return None;
        }
        Some((read, self.slot(read)?))
    }

    /// The time of the oldest record, which stays in the ring. On the reader's thread.
    #[must_use]
    pub fn peek_time(&self) -> Option<u64> {
        let (_, slot) = self.oldest()?;
        Some(slot.time.load(Ordering::Relaxed))
    }

    /// Takes the oldest record: `record` becomes its words. Gives its time; `None`, and `record` as it was, if the
    /// ring is empty. On the reader's thread.
    pub fn pop(&self, record: &mut Vec<u64>) -> Option<u64> {
        let (read, slot) = self.oldest()?;
        let length = slot.length.load(Ordering::Relaxed) as usize;
        let time = slot.time.load(Ordering::Relaxed);
        record.clear();
        record.extend(
            slot.words
                .iter()
                .take(length)
                .map(|word| word.load(Ordering::Relaxed)),
        );
        // Release: the slot has been copied before the pusher may overwrite it.
        self.popper
            .read
            .store(read.wrapping_add(1), Ordering::Release);
        Some(time)
    }

    /// The counts so far; exact once the pusher rests.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        // First what was read, with Acquire: of that, everything shows as pushed.
        RingStats {
            read: self.popper.read.load(Ordering::Acquire),
            pushed: self.pusher.pushed.load(Ordering::Acquire),
            dropped: self.pusher.dropped.load(Ordering::Relaxed),
        }
    }

    /// Where the slot of the record with this number begins.
    fn start(&self, number: u64) -> usize {
        let stride = self.slot_words + SLOT_OVERHEAD_WORDS;
        (number & (self.slots - 1)) as usize * stride
    }

    /// The slot of the record with this number.
    fn slot(&self, number: u64) -> Option<Slot<'_>> {
        let stride = self.slot_words + SLOT_OVERHEAD_WORDS;
        let start = self.start(number);
        match self.memory.get(start..start + stride)? {
            [length, time, words @ ..] => Some(Slot {
                length,
                time,
                words,
            }),
            _ => None,
        }
    }
}

/// Work of the pusher: all records of one hit carry one time.
#[derive(Debug)]
pub struct Visit<'a> {
    ring: &'a Ring,
    tsc: u64,
}

impl Visit<'_> {
    /// The time of the visit's records.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        self.tsc
    }

    /// Adds a record, with the visit's time; `false` if the ring is full, which is counted.
    ///
    /// A record longer than [`Ring::slot_words`] is a mistake of the caller; it is dropped and counted too.
    pub fn push(&self, record: &[u64]) -> bool {
        debug_assert!(
            record.len() <= self.ring.slot_words,
            "a record of {} words for slots of {}",
            record.len(),
            self.ring.slot_words
        );
        self.push_with(|writer| {
            if writer.push_words(record) < record.len() {
                writer.give_up();
            }
        })
    }

    /// Adds the record of `first` and `second`, as [`push`](Self::push) does; `None`, and nothing done, if it does not fit into a slot.
    #[inline(always)]
    pub(crate) fn push_both<const A: usize, const B: usize>(
        &self,
        first: &[u64; A],
        second: &[u64; B],
    ) -> Option<bool> {
        self.ring.push_both(self.tsc, first, second)
    }

    /// Adds the record that `fill` writes, word by word and straight into its slot, with the visit's time; `false` if
    /// the ring is full (`fill` is not called then) or `fill` gave up. Both are counted as dropped.
    #[inline]
    pub fn push_with(&self, fill: impl FnOnce(&mut SlotWriter<'_>)) -> bool {
        self.ring.push_with(self.tsc, fill)
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        // Release: a reader that sees the visit ended sees what it has pushed.
        self.ring
            .pusher
            .visiting_since
            .store(IDLE, Ordering::Release);
    }
}

/// Where a record is written before it counts: a slot that the reader does not look into yet.
#[derive(Debug)]
pub struct SlotWriter<'a> {
    words: &'a [AtomicU64],
    /// Words written. At most `words.len()`.
    length: usize,
    given_up: bool,
}

impl SlotWriter<'_> {
    /// Adds a word to the record; `false` if the slot has no room for it, and the record stays as it is.
    #[must_use = "a word that does not fit is not in the record"]
    pub fn push_word(&mut self, word: u64) -> bool {
        let Some(place) = self.words.get(self.length) else {
            return false;
        };
        place.store(word, Ordering::Relaxed);
        self.length += 1;
        true
    }

    /// Adds all of `words` to the record, or nothing if the slot has no room for them; whether it had.
    #[inline]
    #[must_use = "words that do not fit are not in the record"]
    pub fn push_all<const N: usize>(&mut self, words: &[u64; N]) -> bool {
        let room = self.words.get(self.length..).unwrap_or_default();
        let Some(places) = room.first_chunk::<N>() else {
            return false;
        };
        for (place, word) in places.iter().zip(words) {
            place.store(*word, Ordering::Relaxed);
        }
        self.length += N;
        true
    }

    /// Adds as many of `words`, from the first on, as the slot has room for; gives how many.
    #[inline]
    pub fn push_words(&mut self, words: &[u64]) -> usize {
        let room = self.words.get(self.length..).unwrap_or_default();
        for (place, word) in room.iter().zip(words) {
            place.store(*word, Ordering::Relaxed);
        }
        let written = room.len().min(words.len());
        self.length += written;
        written
    }

    /// Replaces word `index` of those written so far; `false` if there is none.
    pub fn set(&mut self, index: usize, word: u64) -> bool {
        let written = self.words.get(..self.length).unwrap_or_default();
        let Some(place) = written.get(index) else {
            return false;
        };
        place.store(word, Ordering::Relaxed);
        true
    }

    /// Words written so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing has been written yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Words that still fit.
    #[must_use]
    pub fn room(&self) -> usize {
        self.words.len() - self.length
    }

    /// The record cannot be completed: it will not be pushed, but counted as dropped.
    pub fn give_up(&mut self) {
        self.given_up = true;
    }
}
