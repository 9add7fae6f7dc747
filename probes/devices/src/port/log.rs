//! A bounded log of records of one size, with any number of readers.
//!
//! Reading consumes, as in the manual pages: a new reader starts behind the records read before.
//! Readers that are open at the same time get the same records, each at its own pace. A full log
//! drops its oldest record if a reader has read it. A slower reader loses that record, which is
//! counted for it. If nobody has read it, the new record is dropped, which is counted for the log.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::EventReader;

/// The counters of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogCounts {
    /// The number of records put in.
    pub produced: u64,
    /// The number of records that at least one reader has read.
    pub consumed: u64,
    /// The number of records that nobody has read.
    pub waiting: u64,
    /// The number of dropped records.
    pub lost: u64,
}

#[derive(Debug)]
struct State {
    /// The bytes of whole records.
    bytes: VecDeque<u8>,
    /// The greatest number of records.
    capacity: usize,
    /// The number of the record at the front.
    first: u64,
    /// The number of the next record to come.
    next: u64,
    /// The number of the first record that no reader has read.
    consumed: u64,
    lost: u64,
    /// The positions by the reader's number.
    readers: BTreeMap<u64, ReaderPosition>,
    next_reader: u64,
}

#[derive(Debug, Clone, Copy)]
struct ReaderPosition {
    /// The number of the reader's next record.
    at: u64,
    dropped: u64,
}

#[derive(Debug)]
struct Shared {
    record: usize,
    state: Mutex<State>,
    changed: Condvar,
}

/// The log. Clones share it.
#[derive(Debug, Clone)]
pub struct EventLog(Arc<Shared>);

impl EventLog {
    /// Makes an empty log of `capacity` records of `record` bytes each. Memory is allocated as it
    /// fills.
    #[must_use]
    pub fn new(record: usize, capacity: usize) -> Self {
        Self(Arc::new(Shared {
            record,
            state: Mutex::new(State {
                bytes: VecDeque::new(),
                capacity,
                first: 0,
                next: 0,
                consumed: 0,
                lost: 0,
                readers: BTreeMap::new(),
                next_reader: 0,
            }),
            changed: Condvar::new(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Returns the size of a record in bytes.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        self.0.record
    }

    /// Returns the greatest number of records.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.state().capacity
    }

    /// Puts records in, in their order; those without room are dropped. A record of another size is
    /// not accepted.
    pub fn push<'r>(&self, records: impl IntoIterator<Item = &'r [u8]>) {
        let mut state = self.state();
        for record in records {
            if record.len() == self.0.record {
                state.push(record);
            }
        }
        drop(state);
        self.0.changed.notify_all();
    }

    /// Counts records that were dropped before they came here.
    pub fn add_lost(&self, records: u64) {
        let mut state = self.state();
        state.lost = state.lost.saturating_add(records);
    }

    /// Drops everything unread and starts again with `capacity`. Counts begin anew. Readers stay,
    /// and do not count these records as dropped.
    pub fn restart(&self, capacity: usize) {
        let mut state = self.state();
        state.bytes = VecDeque::new();
        state.capacity = capacity;
        (state.first, state.next, state.consumed, state.lost) = (0, 0, 0, 0);
        for place in state.readers.values_mut() {
            place.at = 0;
        }
    }

    /// Opens a reader, at the first record that nobody has read.
    #[must_use]
    pub fn reader(&self) -> LogReader {
        let mut state = self.state();
        let number = state.next_reader;
        state.next_reader += 1;
        let place = ReaderPosition {
            at: state.consumed,
            dropped: 0,
        };
        state.readers.insert(number, place);
        LogReader {
            log: self.clone(),
            number,
        }
    }

    /// Returns the number of open readers.
    #[must_use]
    pub fn readers(&self) -> usize {
        self.state().readers.len()
    }

    /// Returns the counts since the log was made or restarted.
    #[must_use]
    pub fn counts(&self) -> LogCounts {
        let state = self.state();
        LogCounts {
            produced: state.next,
            consumed: state.consumed,
            waiting: state.next - state.consumed,
            lost: state.lost,
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn push(&mut self, record: &[u8]) {
        let held = usize::try_from(self.next - self.first).unwrap_or(usize::MAX);
        if held >= self.capacity && !self.make_room(record.len()) {
            self.lost = self.lost.saturating_add(1);
            return;
        }
        self.bytes.extend(record);
        self.next += 1;
    }

    /// Drops the oldest record if a reader has read it.
    fn make_room(&mut self, record: usize) -> bool {
        if self.first >= self.consumed {
            return false;
        }
        self.bytes.drain(..record.min(self.bytes.len()));
        self.first += 1;
        for place in self.readers.values_mut() {
            if place.at < self.first {
                place.at = self.first;
                place.dropped += 1;
            }
        }
        true
    }

    /// Removes the records that all readers have read.
    fn trim(&mut self, record: usize) {
        let needed = self.readers.values().map(|place| place.at).min();
        let keep = needed.unwrap_or(self.consumed).min(self.consumed);
        let done = usize::try_from(keep.saturating_sub(self.first)).unwrap_or(0);
        self.bytes.drain(..(done * record).min(self.bytes.len()));
        self.first = self.first.max(keep);
    }
}

/// One reader of a log.
#[derive(Debug)]
pub struct LogReader {
    log: EventLog,
    number: u64,
}

impl EventReader for LogReader {
    fn read(&mut self, most: usize) -> Vec<u8> {
        let record = self.log.0.record;
        let mut state = self.log.state();
        let Some(at) = state.readers.get(&self.number).map(|place| place.at) else {
            return Vec::new();
        };
        let waiting = usize::try_from(state.next - at).unwrap_or(usize::MAX);
        let records = waiting.min(most / record.max(1));
        let skip = usize::try_from(at - state.first).unwrap_or(0) * record;
        let taken = state.bytes.range(skip..skip + records * record);
        let taken: Vec<u8> = taken.copied().collect();
        let end = at + records as u64;
        if let Some(place) = state.readers.get_mut(&self.number) {
            place.at = end;
        }
        state.consumed = state.consumed.max(end);
        state.trim(record);
        taken
    }

    fn wait(&mut self, limit: Duration) -> bool {
        let number = self.number;
        let has_some = |state: &State| {
            let place = state.readers.get(&number);
            place.is_some_and(|place| place.at < state.next)
        };
        let state = self.log.state();
        if has_some(&state) {
            return true;
        }
        let waited = self.log.0.changed.wait_timeout(state, limit);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        has_some(&state)
    }

    fn dropped(&self) -> u64 {
        let state = self.log.state();
        state.readers.get(&self.number).map_or(0, |p| p.dropped)
    }
}

impl Drop for LogReader {
    fn drop(&mut self) {
        let mut state = self.log.state();
        state.readers.remove(&self.number);
        state.trim(self.log.0.record);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Makes a log of one-byte records.
    fn log(capacity: usize, records: &[u8]) -> EventLog {
        let log = EventLog::new(1, capacity);
        push(&log, records);
        log
    }

    fn push(log: &EventLog, records: &[u8]) {
        log.push(records.chunks(1));
    }

    fn counts(log: &EventLog) -> [u64; 4] {
        let counts = log.counts();
        [
            counts.produced,
            counts.consumed,
            counts.waiting,
            counts.lost,
        ]
    }

    #[test]
    fn what_finds_no_room_is_lost_and_counted() {
        let log = log(3, b"abcde");
        assert_eq!(counts(&log), [3, 0, 3, 2]);
        let mut reader = log.reader();
        assert_eq!(reader.read(2), b"ab");
        push(&log, b"fgh");
        assert_eq!(reader.read(100), b"cfg");
        assert_eq!(counts(&log), [5, 5, 0, 3]);
        assert_eq!(reader.dropped(), 0);
    }

    #[test]
    fn readers_have_their_own_places_and_the_slow_one_counts_what_it_loses() {
        let log = log(4, b"ab");
        let (mut quick, mut slow) = (log.reader(), log.reader());
        assert_eq!(quick.read(100), b"ab");
        push(&log, b"cdef");
        assert_eq!(quick.read(100), b"cdef");
        assert_eq!((quick.dropped(), slow.dropped()), (0, 2));
        assert_eq!(slow.read(3), b"cde");
        assert_eq!(log.reader().read(9), b"", "reading consumes");
        assert_eq!(slow.read(9), b"f");
        assert_eq!(counts(&log), [6, 6, 0, 0]);
    }

    #[test]
    fn only_whole_records_are_given() {
        let log = EventLog::new(4, 10);
        log.push([b"abcd".as_slice(), b"no", b"efgh"]);
        let mut reader = log.reader();
        assert_eq!(reader.read(3), b"");
        assert_eq!(reader.read(7), b"abcd");
        assert_eq!(reader.read(8), b"efgh");
        assert_eq!(log.readers(), 1);
        drop(reader);
        assert_eq!(log.readers(), 0);
    }

    #[test]
    fn a_new_start_forgets_records_and_counts_and_keeps_readers() {
        let log = log(2, b"abc");
        let mut reader = log.reader();
        log.restart(5);
        assert_eq!(counts(&log), [0; 4]);
        assert_eq!(reader.read(9), b"");
        push(&log, b"xyz");
        assert_eq!((reader.read(9), reader.dropped()), (b"xyz".to_vec(), 0));
    }

    #[test]
    fn a_reader_that_waits_is_woken_by_a_record() {
        let log = log(2, b"");
        let mut reader = log.reader();
        assert!(!reader.wait(Duration::from_millis(1)));
        let writer = std::thread::spawn({
            let log = log.clone();
            move || push(&log, b"a")
        });
        while !reader.wait(Duration::from_secs(10)) {}
        assert_eq!(reader.read(1), b"a");
        writer.join().unwrap();
    }
}
