//! Moves records from the engine's rings to the log, on a thread of its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use probes::clock::Clock;
use probes::engine::{Session, Waiter};

use super::record::{RECORD_BYTES, Record};
use crate::port::EventLog;

/// The state that turns a session's words into records.
pub(super) struct Recording {
    session: Session,
    clock: Clock,
    log: EventLog,
    /// The latest time of each machine.
    latest: Vec<i64>,
    /// The number of dropped records that the log already counts.
    dropped: u64,
}

impl Recording {
    pub(super) fn new(session: Session, clock: Clock, log: EventLog) -> Self {
        let vcpus = session.engine().machine().vcpus();
        Self {
            session,
            clock,
            log,
            latest: vec![i64::MIN; vcpus],
            dropped: 0,
        }
    }

    /// Drains the rings into the log.
    pub(super) fn drain(&mut self) {
        let mut bytes = Vec::new();
        let (clock, latest) = (self.clock, &mut self.latest);
        self.session.drain_records(|vcpu, tsc, words| {
            if let Some(record) = record(&clock, latest, vcpu, tsc, words) {
                bytes.extend_from_slice(&record.to_bytes());
            }
        });
        let dropped = self.session.dropped_records();
        let newly = dropped.saturating_sub(self.dropped);
        if newly > 0 {
            self.log.add_lost(newly);
        }
        self.dropped = dropped;
        if !bytes.is_empty() {
            self.log.push(bytes.chunks_exact(RECORD_BYTES));
        }
    }

    /// Adds records with the current time. The machine is paused, and its earlier records come
    /// first.
    pub(super) fn add(&mut self, records: &[Record]) {
        self.drain();
        let now = self.clock.unix_ns(vmm::host_tsc());
        let time = i64::try_from(now).unwrap_or(i64::MAX);
        let records = records.iter().map(|record| Record { time, ..*record });
        let bytes: Vec<_> = records.map(|record| record.to_bytes()).collect();
        self.log.push(bytes.iter().map(|record| &record[..]));
    }
}

/// Returns the record that words in a ring stand for; `None` if they are invalid.
pub(super) fn record(
    clock: &Clock,
    latest: &mut [i64],
    vcpu: usize,
    tsc: u64,
    words: &[u64],
) -> Option<Record> {
    let [first, argument, ahead] = words else {
        return None;
    };
    let mut time = i64::try_from(clock.unix_ns(tsc)).unwrap_or(i64::MAX);
    // The processor may read the counter of a machine a few ticks early.
    if let Some(latest) = latest.get_mut(vcpu) {
        time = time.max(*latest);
        *latest = time;
    }
    Some(Record {
        pid: (first & 0xffff_ffff) as u32,
        event: (first >> 32) as u32,
        machine: u32::try_from(vcpu).unwrap_or(u32::MAX),
        time: time.saturating_add_unsigned(*ahead),
        argument: *argument,
    })
}

struct Shared {
    /// The recording; `None` once the thread is to end.
    recording: Mutex<Option<Recording>>,
    waiter: Waiter,
}

/// The draining thread. After a drop the thread has ended and the session's probes are disarmed.
pub(super) struct Drainer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Drainer {
    /// Starts to drain records into the log.
    ///
    /// # Errors
    /// The thread cannot be made.
    pub(super) fn start(recording: Recording) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            waiter: recording.session.waiter(),
            recording: Mutex::new(Some(recording)),
        });
        let thread = std::thread::Builder::new().name("ptrace".into()).spawn({
            let shared = shared.clone();
            move || shared.run()
        })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Adds records as [`Recording::add`] does.
    pub(super) fn add(&self, records: &[Record]) {
        if let Some(recording) = self.shared.lock().as_mut() {
            recording.add(records);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Recording>> {
        self.recording
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while self.lock().as_mut().map(Recording::drain).is_some() {
            let _ = self.waiter.wait(None);
        }
    }
}

impl Drop for Drainer {
    fn drop(&mut self) {
        // Probes are removed while nobody holds the lock. The session's end wakes the thread.
        let recording = self.shared.lock().take();
        drop(recording);
        let thread = self.thread.take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread of ptrace panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::program::words;
    use super::super::record::EventType;
    use super::*;

    const CLOCK: Clock = Clock {
        tsc: 1_000,
        unix_ns: 5_000_000_000,
        hz: 1_000_000,
    };

    /// Returns (time, event, argument) of records at these counters, all of machine 1.
    fn times(ticks: &[(u64, [u64; 3])]) -> Vec<(i64, u32, u64)> {
        let mut latest = [i64::MIN; 2];
        let records = ticks.iter().map(|(tsc, words)| {
            let record = record(&CLOCK, &mut latest, 1, *tsc, words).map(|it| {
                assert_eq!((it.pid, it.machine), (42, 1));
                (it.time, it.event, it.argument)
            });
            record.unwrap_or_default()
        });
        records.collect()
    }

    #[test]
    fn times_do_not_go_back_but_for_deadlines_to_come() {
        let run = words(42, EventType::Run, 0, 0);
        let deadline = words(42, EventType::Deadline, 7, 500);
        assert_eq!(
            times(&[(2_000, run), (2_000, deadline), (1_999, run), (2_001, run)]),
            [
                (5_001_000_000, 3, 0),
                (5_001_000_500, 8, 7),
                (5_001_000_000, 3, 0),
                (5_001_001_000, 3, 0)
            ]
        );
    }

    #[test]
    fn words_of_another_kind_are_no_record() {
        assert_eq!(record(&CLOCK, &mut [], 0, 0, &[1, 2]), None);
    }

    proptest! {
        #[test]
        fn whatever_is_in_a_ring_a_record_has_28_bytes(
            words: [u64; 3], vcpu in 0usize..4, tsc: u64, hz: u64, unix_ns: u64,
        ) {
            let clock = Clock { tsc: 9, unix_ns, hz };
            let mut latest = [i64::MIN; 2];
            let record = record(&clock, &mut latest, vcpu, tsc, &words);
            let bytes = record.map(|record| record.to_bytes());
            prop_assert_eq!(bytes.map(|bytes| bytes.len()), Some(RECORD_BYTES));
        }
    }
}
