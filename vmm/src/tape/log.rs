//! The recording: inputs with their bytes, outputs as marks.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The maximum size of a recording in bytes. What is older is forgotten.
const MOST: usize = 32 << 20;
/// The size that an event takes besides its bytes, about.
const EVENT: usize = 64;
/// The maximum number of bytes of output that one mark stands for.
const MARKED: u64 = 4096;

/// The place where bytes go in or out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Stream {
    /// The serial port.
    Serial,
    /// The virtio device of this number.
    Device(u16),
    /// The port of this number of the virtio-console. An input without bytes is the moment at which
    /// its backend had handled an open or a close.
    Port(u32),
}

impl std::fmt::Display for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Serial => write!(f, "the serial port"),
            Self::Device(number) => write!(f, "virtio device {number}"),
            Self::Port(number) => write!(f, "port {number} of the console"),
        }
    }
}

/// The amount and the hash of all bytes that a stream has put out: FNV-1a, for which the places of
/// calls do not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    pub(crate) length: u64,
    pub(crate) hash: u64,
}

impl Default for Mark {
    fn default() -> Self {
        Self {
            length: 0,
            hash: 0xcbf2_9ce4_8422_2325,
        }
    }
}

impl Mark {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.length += bytes.len() as u64;
    }
}

/// An event of a recording.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Event {
    /// The time since the beginning.
    pub(crate) at: Duration,
    pub(crate) stream: Stream,
    pub(crate) kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// The guest was given these bytes.
    Input(Vec<u8>),
    /// The guest had put out so much.
    Output(Mark),
}

/// The recorded input of a machine from a moment on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recording {
    pub(crate) events: Vec<Event>,
    /// The output of each stream until that moment.
    pub(crate) marks: Vec<(Stream, Mark)>,
    /// The length of the recording.
    pub(crate) length: Duration,
}

impl Recording {
    /// Returns the time that was recorded.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.length
    }

    /// Returns the number of events: inputs, and marks of outputs.
    #[must_use]
    pub fn events(&self) -> usize {
        self.events.len()
    }
}

/// A place in a recording.
#[derive(Debug, Clone)]
pub(crate) struct Position {
    /// The number of the next event.
    next: u64,
    at: Duration,
    marks: BTreeMap<Stream, Mark>,
}

/// A recording in progress.
pub(crate) struct Recorder {
    began: Instant,
    events: VecDeque<Event>,
    /// The number of the first event.
    first: u64,
    /// The size of all events.
    size: usize,
    marks: BTreeMap<Stream, Mark>,
    /// The beginning of the output of the last event, if more may be added to it.
    open: Option<(Stream, u64)>,
}

impl Default for Recorder {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            events: VecDeque::new(),
            first: 0,
            size: 0,
            marks: BTreeMap::new(),
            open: None,
        }
    }
}

fn size(event: &Event) -> usize {
    EVENT
        + match &event.kind {
            Kind::Input(bytes) => bytes.len(),
            Kind::Output(_) => 0,
        }
}

impl Recorder {
    /// Returns the place behind the last event.
    pub(crate) fn position(&mut self) -> Position {
        self.open = None;
        Position {
            next: self.first + self.events.len() as u64,
            at: self.began.elapsed(),
            marks: self.marks.clone(),
        }
    }

    /// Adds bytes that the guest was given.
    pub(crate) fn input(&mut self, stream: Stream, bytes: &[u8]) {
        self.open = None;
        self.add(stream, Kind::Input(bytes.to_vec()));
    }

    /// Adds bytes that the guest has put out. No bytes are no event: a player would take the next
    /// ones for them.
    pub(crate) fn output(&mut self, stream: Stream, parts: &[&[u8]]) {
        if parts.iter().all(|part| part.is_empty()) {
            return;
        }
        let mark = self.marks.entry(stream).or_default();
        let before = mark.length;
        parts.iter().for_each(|part| mark.add(part));
        let mark = *mark;
        if let Some((open, from)) = self.open
            && open == stream
            && mark.length - from <= MARKED
            && let Some(last) = self.events.back_mut()
        {
            last.kind = Kind::Output(mark);
            return;
        }
        self.add(stream, Kind::Output(mark));
        self.open = Some((stream, before));
    }

    fn add(&mut self, stream: Stream, kind: Kind) {
        let at = self.began.elapsed();
        let event = Event { at, stream, kind };
        self.size += size(&event);
        self.events.push_back(event);
        while self.size > MOST {
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        if let Some(event) = self.events.pop_front() {
            self.size -= size(&event);
            self.first += 1;
        }
    }

    /// Forgets the events before a place.
    pub(crate) fn forget_before(&mut self, position: &Position) {
        while self.first < position.next && !self.events.is_empty() {
            self.forget_first();
        }
    }

    /// Returns the events from a place on. `None` if some of them are forgotten.
    pub(crate) fn since(&self, position: &Position) -> Option<Recording> {
        let skipped = position.next.checked_sub(self.first)?;
        let skipped = usize::try_from(skipped).ok()?;
        let later = self.events.iter().skip(skipped).cloned();
        let events = later.map(|event| Event {
            at: event.at.saturating_sub(position.at),
            ..event
        });
        Some(Recording {
            events: events.collect(),
            marks: position
                .marks
                .iter()
                .map(|(of, mark)| (*of, *mark))
                .collect(),
            length: self.began.elapsed().saturating_sub(position.at),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const DISK: Stream = Stream::Device(1);

    fn mark(bytes: &[u8]) -> Mark {
        let mut mark = Mark::default();
        mark.add(bytes);
        mark
    }

    fn kinds(recording: &Recording) -> Vec<(Stream, Kind)> {
        let events = recording.events.iter();
        events
            .map(|event| (event.stream, event.kind.clone()))
            .collect()
    }

    #[test]
    fn outputs_are_joined_until_an_input_another_stream_or_a_place() {
        let mut recorder = Recorder::default();
        let start = recorder.position();
        recorder.output(Stream::Serial, &[b"a"]);
        recorder.output(Stream::Serial, &[b"b", b"c"]);
        recorder.input(Stream::Serial, b"x");
        recorder.output(Stream::Serial, &[b"d"]);
        recorder.output(Stream::Port(1), &[b""]);
        recorder.output(DISK, &[b"1"]);
        let middle = recorder.position();
        recorder.output(DISK, &[b"2"]);
        let serial = |bytes: &[u8]| (Stream::Serial, Kind::Output(mark(bytes)));
        let disk = |bytes: &[u8]| (DISK, Kind::Output(mark(bytes)));
        let all = [
            serial(b"abc"),
            (Stream::Serial, Kind::Input(b"x".to_vec())),
            serial(b"abcd"),
            disk(b"1"),
            disk(b"12"),
        ];
        assert_eq!(kinds(&recorder.since(&start).unwrap()), all);
        let later = recorder.since(&middle).unwrap();
        assert_eq!(kinds(&later), all[4..]);
        assert_eq!(
            later.marks,
            [(Stream::Serial, mark(b"abcd")), (DISK, mark(b"1"))]
        );
        recorder.forget_before(&middle);
        assert_eq!(recorder.since(&start), None);
        assert_eq!(kinds(&recorder.since(&middle).unwrap()), all[4..]);
    }

    #[test]
    fn a_recording_is_bounded() {
        let mut recorder = Recorder::default();
        let start = recorder.position();
        for _ in 0..40 {
            recorder.input(DISK, &vec![0; 1 << 20]);
        }
        assert!(recorder.size <= MOST && recorder.events.len() > 30);
        assert_eq!(recorder.since(&start), None);
    }
}
