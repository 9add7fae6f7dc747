//! Hits as logs or spans, and maps as metrics, for a collector of OpenTelemetry (OTLP 1.x).
//!
//! A thread of its own converts and sends. The trace hands records over and never waits: what finds
//! no room is dropped and counted. A record that a collector may have taken is sent again when the
//! answer is lost.
//!
//! The messages are those of `opentelemetry-proto`. The SDK of OpenTelemetry is not used: its
//! resource is one for the whole process, and here each process of a guest is one. It also does not
//! tell how many records it has dropped.

mod client;
mod metrics;
mod records;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use probes::clock::Clock;

use super::metrics::Metrics;
use crate::protocol::event::EventLine;
use crate::protocol::trace::Traced;
use crate::report::say;
pub use client::Endpoint;
use client::{Client, Request, SendError};
use records::Converter;

/// The bytes of records that wait to be sent, at most.
const ROOM: usize = 64 << 20;
/// The bytes that a record takes besides its texts.
const RECORD: usize = 512;
/// The most records of one request.
const MOST_RECORDS: usize = 2000;
/// The most bytes of one request, of the 4 MiB that gRPC takes.
const MOST_BYTES: usize = 2 << 20;
/// The time for which records are collected.
const LINGER: Duration = Duration::from_millis(200);
/// The interval of metrics.
const METRICS_INTERVAL: Duration = Duration::from_secs(5);
/// The time of one try.
const TRY: Duration = Duration::from_secs(5);
/// The first and the longest pause between tries.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// The time at the end to send what waits.
const LAST: Duration = Duration::from_secs(5);

/// One record, as a command has it.
#[derive(Debug, Clone)]
pub enum Record {
    /// A hit of a trace.
    Hit {
        /// The event.
        line: Box<EventLine>,
        /// The probe, if it is known.
        probe: Option<Arc<Traced>>,
        /// The clock of the event.
        clock: Clock,
    },
    /// A record of a device: its JSON.
    Device(String),
}

impl Record {
    fn bytes(&self) -> usize {
        let texts = |texts: &[String]| texts.iter().map(|text| text.len() + 24).sum::<usize>();
        RECORD
            + match self {
                Self::Device(text) => text.len(),
                Self::Hit { line, .. } => {
                    let strings = line.strings.values().flatten().map(String::len);
                    let args = line.args.as_deref().map_or(0, texts);
                    strings.sum::<usize>() + args + texts(&line.kstack) + texts(&line.ustack)
                }
            }
    }
}

/// The forms of hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A log for each.
    Logs,
    /// A span for an entry and its return; a log for any other.
    Spans,
}

/// The numbers of records at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sent {
    /// Logs and spans that the collector has taken.
    pub taken: u64,
    /// Reports of metrics that the collector has taken.
    pub reports: u64,
    /// Records that found no room, or were not taken in time.
    pub dropped: u64,
    /// Records that the collector has refused.
    pub refused: u64,
    /// Entries and returns that have no other half.
    pub unpaired: u64,
    /// Set if the last metrics were not taken.
    pub lacks_metrics: bool,
}

impl fmt::Display for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} records", self.taken)?;
        if self.reports > 0 {
            write!(f, " and {} reports of metrics", self.reports)?;
        }
        f.write_str(" taken")?;
        for (count, what) in [
            (self.dropped, "dropped: the collector was away or too slow"),
            (self.refused, "refused by the collector"),
            (self.unpaired, "entries and returns without the other"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        if self.lacks_metrics {
            f.write_str(", the last metrics not taken")?;
        }
        Ok(())
    }
}

/// The thread of exports cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("--otlp: {0}")]
pub struct StartError(#[from] io::Error);

#[derive(Default)]
struct State {
    /// The bytes of records that wait or are being sent.
    waiting: usize,
    dropped: u64,
    metrics: Option<Arc<Metrics>>,
    /// The time until which the rest may be sent, from the end on.
    end: Option<Instant>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified at the end.
    ended: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An export to a collector. It ends when this is dropped.
pub struct Otlp {
    records: Option<Sender<Vec<(Record, usize)>>>,
    /// The records of the batch that is handed over next.
    batch: Vec<(Record, usize)>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Sent>>,
    url: String,
}

impl fmt::Debug for Otlp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Otlp")
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

impl Otlp {
    /// Starts to export to a collector what is seen of `machine`. The collector may be away.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn start(endpoint: Endpoint, machine: &str, form: Form) -> Result<Self, StartError> {
        let (records, received) = channel();
        let shared = Arc::new(Shared::default());
        let url = endpoint.to_string();
        let worker = Worker {
            client: Client::new(endpoint)?,
            url: url.clone(),
            converter: Converter::new(machine, form),
            shared: shared.clone(),
            sent: Sent::default(),
            has_complained: false,
            metrics_sent: Instant::now(),
        };
        let thread = std::thread::Builder::new()
            .name("otlp".into())
            .spawn(move || worker.run(&received))?;
        Ok(Self {
            records: Some(records),
            batch: Vec::new(),
            shared,
            thread: Some(thread),
            url,
        })
    }

    /// Takes a record; call [`flush`](Self::flush) when no more follows at once.
    pub fn record(&mut self, record: Record) {
        let bytes = record.bytes();
        self.batch.push((record, bytes));
        if self.batch.len() >= MOST_RECORDS {
            self.flush();
        }
    }

    /// Hands over the records that were taken, or drops those that find no room.
    pub fn flush(&mut self) {
        let mut batch = std::mem::take(&mut self.batch);
        if batch.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        let mut room = ROOM.saturating_sub(state.waiting);
        let fitting = batch.iter().take_while(|(_, bytes)| {
            let fits = *bytes <= room;
            room = room.saturating_sub(*bytes);
            fits
        });
        let fitting = fitting.count();
        let is_first = state.dropped == 0 && fitting < batch.len();
        state.dropped += (batch.len() - fitting) as u64;
        batch.truncate(fitting);
        state.waiting += batch.iter().map(|(_, bytes)| bytes).sum::<usize>();
        drop(state);
        if is_first {
            let url = &self.url;
            say(format_args!(
                "--otlp {url}: too slow, records are dropped and counted; the trace goes on"
            ));
        }
        if let Some(records) = &self.records {
            // The thread ends only after this.
            let _ = records.send(batch);
        }
    }

    /// Sends these metrics at the next interval, and at the end.
    pub fn show(&self, metrics: Arc<Metrics>) {
        self.shared.lock().metrics = Some(metrics);
    }

    /// Sends the rest, for some seconds at most, and returns the numbers of records.
    pub fn finish(mut self) -> Sent {
        self.end()
    }

    fn end(&mut self) -> Sent {
        self.flush();
        self.shared.lock().end = Some(Instant::now() + LAST);
        self.shared.ended.notify_all();
        self.records = None;
        let ended = self.thread.take().map(JoinHandle::join);
        let sent = match ended {
            Some(Ok(sent)) => sent,
            Some(Err(_)) => {
                log::error!("the thread of --otlp panicked");
                Sent::default()
            }
            None => Sent::default(),
        };
        Sent {
            dropped: sent.dropped + self.shared.lock().dropped,
            ..sent
        }
    }
}

impl Drop for Otlp {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end();
        }
    }
}

/// The thread's side.
struct Worker {
    client: Client,
    url: String,
    converter: Converter,
    shared: Arc<Shared>,
    sent: Sent,
    has_complained: bool,
    metrics_sent: Instant,
}

impl Worker {
    fn run(mut self, received: &Receiver<Vec<(Record, usize)>>) -> Sent {
        loop {
            let left = METRICS_INTERVAL.saturating_sub(self.metrics_sent.elapsed());
            match received.recv_timeout(left) {
                Ok(batch) => self.collect(batch, received),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.metrics_sent.elapsed() >= METRICS_INTERVAL {
                self.send_metrics();
            }
        }
        self.send_metrics();
        self.sent.unpaired = self.converter.unpaired();
        self.sent
    }

    /// Sends a batch with those that follow it at once.
    fn collect(&mut self, first: Vec<(Record, usize)>, received: &Receiver<Vec<(Record, usize)>>) {
        let until = Instant::now() + LINGER;
        let mut next = Some(first);
        while let Some(batch) = next {
            for (record, bytes) in batch {
                self.converter.take(record, bytes);
                if self.converter.len() >= MOST_RECORDS || self.converter.bytes() >= MOST_BYTES {
                    self.send_records();
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            next = received.recv_timeout(left).ok();
        }
        self.send_records();
    }

    fn send_records(&mut self) {
        let (requests, bytes) = self.converter.requests();
        for request in requests {
            self.deliver(request);
        }
        let mut state = self.shared.lock();
        state.waiting = state.waiting.saturating_sub(bytes);
    }

    fn send_metrics(&mut self) {
        self.metrics_sent = Instant::now();
        let metrics = self.shared.lock().metrics.take();
        if let Some(metrics) = metrics {
            self.deliver(self.converter.metrics(&metrics));
        }
    }

    /// Sends a request until it is taken or refused, or the end is over.
    fn deliver(&mut self, request: Request) {
        let count = request.len();
        let mut pause = PAUSES.0;
        loop {
            let end = self.shared.lock().end;
            let left = end.map_or(TRY, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                self.sent.dropped += count;
                self.sent.lacks_metrics |= count == 0;
                return;
            }
            match self.client.send(&request, left.min(TRY)) {
                Ok(refused) => {
                    self.sent.reports += u64::from(count == 0);
                    self.sent.lacks_metrics &= count > 0;
                    let refused = refused.min(count);
                    self.sent.taken += count - refused;
                    self.sent.refused += refused;
                    return;
                }
                Err(SendError::Refused(why)) => {
                    self.complain(&why, "what it refuses is counted");
                    self.sent.refused += count;
                    self.sent.lacks_metrics |= count == 0;
                    return;
                }
                Err(SendError::Away(why)) => {
                    self.complain(&why, "tried again; the trace goes on");
                    self.rest(pause);
                    pause = (2 * pause).min(PAUSES.1);
                }
            }
        }
    }

    /// Waits before the next try, or until the end begins.
    fn rest(&self, pause: Duration) {
        let state = self.shared.lock();
        let pause = match state.end {
            Some(_) => pause.min(PAUSES.0),
            None => pause,
        };
        let had_ended = state.end.is_some();
        let waited = self
            .shared
            .ended
            .wait_timeout_while(state, pause, |state| state.end.is_some() == had_ended);
        drop(waited);
    }

    fn complain(&mut self, why: &str, then: &str) {
        if !std::mem::replace(&mut self.has_complained, true) {
            say(format_args!("--otlp {}: {why}; {then}", self.url));
        }
    }
}
