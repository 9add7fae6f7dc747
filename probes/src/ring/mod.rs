//! A ring of records from one vCPU's thread to one reader. It has no locks; neither side allocates
//! or waits.
//!
//! A record is a sequence of words, of any length up to the size of the ring's slots. Writer and
//! reader agree on their meaning. A record carries the time of the [`Visit`] that pushed it.
//!
//! The caller ensures that one thread at a time pushes, in one visit at a time, and that one thread
//! at a time pops. Two pushers would mix up each other's records, but never corrupt memory. A full
//! ring drops the *new* record and counts it. Every push is popped later, still queued, or counted
//! as dropped: `pushed + dropped` = attempts, `pushed - read` = queued.
//!
//! A visit bounds the time of records to come. [`crate::merge`] orders several rings by that.
//!
//! # Memory orderings
//!
//! Two counters pass the slots back and forth. The pusher stores `pushed` with Release when a slot
//! is full, and the reader loads it with Acquire before it reads the slot. The reader stores `read`
//! with Release when it has copied a slot, and the pusher loads it with Acquire before it
//! overwrites the slot. So the words themselves may be Relaxed. Each side loads its own counter
//! Relaxed, because no other thread writes it.
//!
//! `visiting_since` and the clock are accessed in opposite orders: the pusher stores the former and
//! then reads the clock; the reader reads the clock and then loads the former. Release and Acquire
//! permit the pusher's clock to be read before its store is visible, as a store buffer does. The
//! reader would then find the ring idle at a time later than that of a record to come. A
//! sequentially consistent fence between the two accesses, on both sides, rules that out, because
//! one of the fences is first. If it is the pusher's, the reader sees the store. Otherwise the
//! pusher reads a clock not before the reader's. SeqCst accesses would not do, because they do not
//! order a clock that is no atomic variable. Also, the model checker treats them as Acquire and
//! Release only. The end of a visit is a Release store, its load an Acquire: a reader that sees the
//! ring idle sees everything pushed before.
//!
//! `loom_model.rs` checks this against the orders that the memory model permits. The exception is
//! the path of `read`, which its checker cannot show.

use crate::sync::{AtomicU64, Ordering, fence};

pub(crate) mod awaited;
#[cfg(all(test, loom))]
mod loom_model;
#[cfg(all(test, not(loom)))]
mod tests;

/// The largest number of slots in a ring.
pub const MAX_SLOTS: usize = 1 << 24;
/// The largest number of words in a slot: 8 KiB.
pub const MAX_SLOT_WORDS: usize = 1024;
/// The largest memory of a ring, in bytes, with [`SLOT_OVERHEAD_WORDS`] for each slot: 1 GiB.
pub const MAX_RING_BYTES: usize = 1 << 30;
/// The number of words in a slot besides those of its record: the record's length and its time.
pub const SLOT_OVERHEAD_WORDS: usize = 2;

const WORD_BYTES: usize = size_of::<u64>();

/// No visit is in progress.
const IDLE: u64 = u64::MAX;

/// The reason that a ring cannot be created: its size is not permitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingSizeError {
    /// The number of slots is not permitted.
    #[error("a ring of {slots} slots: give a power of two from 1 to {MAX_SLOTS}")]
    Slots {
        /// The number of slots.
        slots: usize,
    },
    /// The size of a slot is not permitted.
    #[error("a ring with slots of {words} words: give 1 to {MAX_SLOT_WORDS}")]
    Words {
        /// The number of words in a slot.
        words: usize,
    },
    /// Both together need too much memory.
    #[error(
        "a ring of {slots} slots of {words} words takes {bytes} bytes, more than {MAX_RING_BYTES}: give fewer or smaller slots"
    )]
    Memory {
        /// The number of slots.
        slots: usize,
        /// The number of words in a slot.
        words: usize,
        /// The size in bytes.
        bytes: usize,
    },
}

/// The counters of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingStats {
    /// Records that were pushed.
    pub pushed: u64,
    /// Records that were dropped because the ring was full.
    pub dropped: u64,
    /// Records that were popped.
    pub read: u64,
}

/// The pusher's counters, on a cache line of their own so that the two sides do not slow each other
/// down.
#[derive(Debug)]
#[repr(align(64))]
struct Pusher {
    /// The number of records pushed so far. Written by the pusher, after the slot.
    pushed: AtomicU64,
    /// The number of records dropped so far. Written by the pusher.
    dropped: AtomicU64,
    /// A time not after that of any record to come from the visit in progress, or [`IDLE`]. Written
    /// by the pusher.
    visiting_since: AtomicU64,
}

#[derive(Debug)]
#[repr(align(64))]
struct Popper {
    /// The number of records popped so far. Written by the reader, after it has copied the slot.
    read: AtomicU64,
}

/// One slot. It belongs to the pusher until `pushed` has passed it, then to the reader until `read`
/// has.
#[derive(Debug, Clone, Copy)]
struct Slot<'a> {
    length: &'a AtomicU64,
    time: &'a AtomicU64,
    words: &'a [AtomicU64],
}

/// A ring of records.
#[derive(Debug)]
pub struct Ring {
    /// The slots in sequence: length, time, words.
    memory: Box<[AtomicU64]>,
    slots: u64,
    slot_words: usize,
    pusher: Pusher,
    popper: Popper,
}

impl Ring {
    /// Creates an empty ring of `slots` slots, each for a record of up to `words` words.
    ///
    /// # Errors
    /// If `slots` is no power of two up to [`MAX_SLOTS`], `words` is not from 1 to
    /// [`MAX_SLOT_WORDS`], or both together take more than [`MAX_RING_BYTES`].
    pub fn new(slots: usize, words: usize) -> Result<Self, RingSizeError> {
        if !slots.is_power_of_two() || slots > MAX_SLOTS {
            return Err(RingSizeError::Slots { slots });
        }
        if !(1..=MAX_SLOT_WORDS).contains(&words) {
            return Err(RingSizeError::Words { words });
        }
        // Both are bounded, so there is no overflow.
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

    /// Returns the largest number of words in a record.
    #[must_use]
    pub fn slot_words(&self) -> usize {
        self.slot_words
    }

    /// Starts a visit, in which records can be pushed, on the pusher's thread. `clock` is the clock
    /// that orders records.
    pub fn visit(&self, clock: impl Fn() -> u64) -> Visit<'_> {
        // Release: a reader that sees this visit sees the records of earlier ones.
        self.pusher
            .visiting_since
            .store(clock().min(IDLE - 1), Ordering::Release);
        // The records' time is read after that store is visible. A reader that still finds the ring
        // idle has read its own clock before. So the records of this visit are not older than that.
        // Pairs with the fence in `horizon`.
        fence(Ordering::SeqCst);
        Visit {
            ring: self,
            tsc: clock(),
        }
    }

    /// Returns a time that no record to come will be older than: `now`, or the start of the visit
    /// in progress. `now` must have been read before the call.
    pub(crate) fn horizon(&self, now: u64) -> u64 {
        // `now` was read before the load. Pairs with the fence in `visit`.
        fence(Ordering::SeqCst);
        self.pusher.visiting_since.load(Ordering::Acquire).min(now)
    }

    #[inline(always)]
    fn push_with(&self, time: u64, fill: impl FnOnce(&mut SlotWriter<'_>)) -> bool {
        let pushed = self.pusher.pushed.load(Ordering::Relaxed);
        // Acquire: the reader has finished with the slot that is about to be overwritten.
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
        // Release: a reader that sees the count sees the slot.
        self.pusher
            .pushed
            .store(pushed.wrapping_add(1), Ordering::Release);
        true
    }

    /// Pushes like [`push_with`](Self::push_with), for a record that is known as a whole. Returns
    /// `None`, without effect, if no slot is large enough.
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
        // Acquire: the reader has finished with the slot that is about to be overwritten.
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
            // Release: a reader that sees the count sees the slot.
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

    /// Returns the number and slot of the oldest record.
    fn oldest(&self) -> Option<(u64, Slot<'_>)> {
        let read = self.popper.read.load(Ordering::Relaxed);
        // Acquire: the slot is visible as it was when it was counted.
        if self.pusher.pushed.load(Ordering::Acquire) == read {
            return None;
        }
        Some((read, self.slot(read)?))
    }

    /// Checks whether no record is queued. Either side may call it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.popper.read.load(Ordering::Relaxed) == self.pusher.pushed.load(Ordering::Relaxed)
    }

    /// Returns the time of the oldest record, which stays in the ring. Call it on the reader's
    /// thread.
    #[must_use]
    pub fn peek_time(&self) -> Option<u64> {
        let (_, slot) = self.oldest()?;
        Some(slot.time.load(Ordering::Relaxed))
    }

    /// Removes the oldest record, replaces `record` by its words, and returns its time. If the ring
    /// is empty, returns `None` and leaves `record` unchanged. Call it on the reader's thread.
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

    /// Returns the counters so far. They are exact while the pusher is idle.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        // `read` comes first, with Acquire: all of it is then counted as pushed.
        RingStats {
            read: self.popper.read.load(Ordering::Acquire),
            pushed: self.pusher.pushed.load(Ordering::Acquire),
            dropped: self.pusher.dropped.load(Ordering::Relaxed),
        }
    }

    /// Returns the position of a record's slot, by the record's number.
    fn start(&self, number: u64) -> usize {
        let stride = self.slot_words + SLOT_OVERHEAD_WORDS;
        (number & (self.slots - 1)) as usize * stride
    }

    /// Returns a record's slot, by the record's number.
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

/// A visit of the pusher: all records of one hit have the same time.
#[derive(Debug)]
pub struct Visit<'a> {
    ring: &'a Ring,
    tsc: u64,
}

impl Visit<'_> {
    /// Returns the time of the visit's records.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        self.tsc
    }

    /// Adds a record with the visit's time. Returns `false` if the ring is full; the drop is
    /// counted.
    ///
    /// A record longer than [`Ring::slot_words`] is an error of the caller. It is also dropped and
    /// counted.
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

    /// Adds the record of `first` and `second`, like [`push`](Self::push). Returns `None`, without
    /// effect, if it does not fit into a slot.
    #[inline(always)]
    pub(crate) fn push_both<const A: usize, const B: usize>(
        &self,
        first: &[u64; A],
        second: &[u64; B],
    ) -> Option<bool> {
        self.ring.push_both(self.tsc, first, second)
    }

    /// Adds the record that `fill` writes directly into its slot, with the visit's time. Returns
    /// `false` if the ring is full (`fill` is not called then) or if `fill` gave up. Both are
    /// counted as dropped.
    #[inline]
    pub fn push_with(&self, fill: impl FnOnce(&mut SlotWriter<'_>)) -> bool {
        self.ring.push_with(self.tsc, fill)
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        // Release: a reader that sees the visit ended sees its records.
        self.ring
            .pusher
            .visiting_since
            .store(IDLE, Ordering::Release);
    }
}

/// A slot into which a record is written before it is counted. The reader does not read it yet.
#[derive(Debug)]
pub struct SlotWriter<'a> {
    words: &'a [AtomicU64],
    /// The number of words written; at most `words.len()`.
    length: usize,
    given_up: bool,
}

impl SlotWriter<'_> {
    /// Adds a word to the record. Returns `false` if it does not fit; the record is then unchanged.
    #[must_use = "a word that does not fit is not in the record"]
    pub fn push_word(&mut self, word: u64) -> bool {
        let Some(place) = self.words.get(self.length) else {
            return false;
        };
        place.store(word, Ordering::Relaxed);
        self.length += 1;
        true
    }

    /// Adds all of `words` to the record. Returns `false` if they do not fit; the record is then
    /// unchanged.
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

    /// Adds the first of `words`, as many as fit. Returns their number.
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

    /// Replaces word `index` of those written so far. Returns `false` if there is none.
    pub fn set(&mut self, index: usize, word: u64) -> bool {
        let written = self.words.get(..self.length).unwrap_or_default();
        let Some(place) = written.get(index) else {
            return false;
        };
        place.store(word, Ordering::Relaxed);
        true
    }

    /// Returns the number of words written so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Checks whether no word was written yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the number of words that still fit.
    #[must_use]
    pub fn room(&self) -> usize {
        self.words.len() - self.length
    }

    /// Gives the record up: it will not be pushed, but counted as dropped.
    pub fn give_up(&mut self) {
        self.given_up = true;
    }
}
