//! Playing a recording: each input after the outputs that came before it, and at its time.
//!
//! Bytes of a stream are compared where the recording has a mark of that stream. Inputs that a
//! device asks for (random numbers) are given in their order. From the first difference on, the
//! other inputs are given at their times alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::log::{Event, Kind, Mark, Recording, Stream};

/// The time that an output may be late, before the run counts as another one.
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of times of its recorded duration that a step of the guest may take besides: a busy
/// host gives it less of a CPU than it had.
const SLOWDOWN: u32 = 4;
/// The longest wait at a time, for a serial port that has no room.
const LONGEST_WAIT: Duration = Duration::from_millis(20);

/// The result of playing a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replay {
    /// The number of events of the recording.
    pub events: usize,
    /// The time that was played.
    pub played: Duration,
    /// The place where the run has gone another way, if it has.
    pub end: ReplayEnd,
}

/// The end of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplayEnd {
    /// All outputs were the recorded ones, as far as they came.
    Same,
    /// This event, from 1, was another one.
    Departed {
        /// The number of the event.
        event: usize,
        /// Its time in the recording.
        at: Duration,
        /// The difference.
        difference: String,
    },
}

impl std::fmt::Display for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (events, played) = (self.events, self.played.as_secs_f64());
        match &self.end {
            ReplayEnd::Same => write!(
                f,
                "the recording of {events} events was played in {played:.1} s, and the guest went the same way"
            ),
            ReplayEnd::Departed {
                event,
                at,
                difference,
            } => write!(
                f,
                "the guest departed from its recording at event {event} of {events}, after {:.3} s: {difference}",
                at.as_secs_f64()
            ),
        }
    }
}

/// The next input of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pull {
    /// Nothing is played: the host's own input.
    Live,
    /// There is none now.
    Nothing,
    /// These bytes.
    Bytes(Vec<u8>),
}

/// A recording that is played.
pub(crate) struct Player {
    events: Vec<Event>,
    length: Duration,
    began: Instant,
    /// The number of events that are done.
    next: usize,
    /// The time at which the last of them was, since the beginning.
    reached: Duration,
    /// The outputs of the guest so far.
    marks: BTreeMap<Stream, Mark>,
    /// The events with marks that were not reached yet, by stream.
    expected: BTreeMap<Stream, VecDeque<usize>>,
    /// The events with inputs of ports that are not due yet, by port.
    later: BTreeMap<Stream, VecDeque<usize>>,
    /// The inputs that are due.
    due: BTreeMap<Stream, VecDeque<Vec<u8>>>,
    /// The moments that are due at which ports' backends had handled an open or a close, by port.
    settled: BTreeMap<Stream, usize>,
    /// The inputs that a device has asked for before their turn.
    pulled: BTreeSet<usize>,
    departed: Option<(usize, String)>,
    /// The streams whose devices are to be woken.
    awake: BTreeSet<Stream>,
}

impl Player {
    pub(crate) fn new(recording: Recording, now: Instant) -> Self {
        let [mut expected, mut later] = [const { BTreeMap::<_, VecDeque<usize>>::new() }; 2];
        for (index, event) in recording.events.iter().enumerate() {
            let list = match (&event.kind, event.stream) {
                (Kind::Output(_), _) => &mut expected,
                (Kind::Input(_), Stream::Port(_)) => &mut later,
                (Kind::Input(_), _) => continue,
            };
            list.entry(event.stream).or_default().push_back(index);
        }
        Self {
            events: recording.events,
            length: recording.length,
            began: now,
            next: 0,
            reached: Duration::ZERO,
            marks: recording.marks.into_iter().collect(),
            expected,
            later,
            due: BTreeMap::new(),
            settled: BTreeMap::new(),
            pulled: BTreeSet::new(),
            departed: None,
            awake: BTreeSet::new(),
        }
    }

    /// Begins now.
    pub(crate) fn start(&mut self, now: Instant) {
        self.began = now;
    }

    fn depart(&mut self, event: usize, difference: String) {
        self.departed.get_or_insert((event, difference));
    }

    fn mark_of(&self, event: usize) -> Option<Mark> {
        match self.events.get(event)?.kind {
            Kind::Output(mark) => Some(mark),
            Kind::Input(_) => None,
        }
    }

    /// Returns the time until which the next event, an output at `at` in the recording, may come.
    fn patience(&self, at: Duration) -> Duration {
        let before = self.next.checked_sub(1);
        let before = before.and_then(|index| self.events.get(index));
        let step = at.saturating_sub(before.map_or(Duration::ZERO, |event| event.at));
        let most = step.saturating_mul(SLOWDOWN).saturating_add(PATIENCE);
        self.reached.saturating_add(most)
    }

    /// Takes note of bytes that the guest has put out.
    pub(crate) fn output(&mut self, stream: Stream, parts: &[&[u8]], now: Instant) {
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                let front = self
                    .expected
                    .get(&stream)
                    .and_then(VecDeque::front)
                    .copied();
                let next = front.and_then(|event| Some((event, self.mark_of(event)?)));
                let mark = self.marks.entry(stream).or_default();
                let Some((event, wanted)) = next else {
                    mark.add(rest);
                    break;
                };
                let left = wanted.length.saturating_sub(mark.length).max(1);
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                let (now, later) = rest.split_at(length);
                mark.add(now);
                rest = later;
                if mark.length >= wanted.length {
                    let same = *mark == wanted;
                    if let Some(expected) = self.expected.get_mut(&stream) {
                        expected.pop_front();
                    }
                    if !same {
                        self.depart(event, format!("{stream} has put out something else"));
                    }
                }
            }
        }
        self.advance(now);
    }

    /// Makes inputs due whose turn and time it is.
    pub(crate) fn advance(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.began);
        while let Some(event) = self.events.get(self.next) {
            let (stream, at) = (event.stream, event.at);
            match &event.kind {
                Kind::Output(wanted) => {
                    let length = self.marks.get(&stream).map_or(0, |mark| mark.length);
                    let (is_there, missing) = (
                        length >= wanted.length,
                        wanted.length - length.min(wanted.length),
                    );
                    if !is_there && self.departed.is_none() {
                        if elapsed < self.patience(at) {
                            return;
                        }
                        let late = format!("{stream} has not put out {missing} bytes in time");
                        self.depart(self.next, late);
                    }
                }
                Kind::Input(_) if self.pulled.remove(&self.next) => {}
                Kind::Input(_) if elapsed < at => return,
                Kind::Input(bytes) => {
                    match stream {
                        Stream::Port(_) if bytes.is_empty() => {
                            *self.settled.entry(stream).or_default() += 1;
                        }
                        _ => self.due.entry(stream).or_default().push_back(bytes.clone()),
                    }
                    self.awake.insert(stream);
                    if let Some(later) = self.later.get_mut(&stream) {
                        later.pop_front();
                    }
                }
            }
            self.next += 1;
            self.reached = elapsed;
        }
    }

    /// Returns the time until something may be due.
    pub(crate) fn wait(&self, now: Instant) -> Duration {
        let elapsed = now.saturating_duration_since(self.began);
        let next = self.events.get(self.next).map(|event| match event.kind {
            Kind::Input(_) => event.at,
            Kind::Output(_) => self.patience(event.at),
        });
        let next = next.unwrap_or(self.length).saturating_sub(elapsed);
        next.clamp(Duration::from_micros(100), LONGEST_WAIT)
    }

    /// Returns the streams for which inputs have become due since the last call.
    pub(crate) fn awake(&mut self) -> BTreeSet<Stream> {
        std::mem::take(&mut self.awake)
    }

    /// Takes all bytes of a stream that are due.
    pub(crate) fn take_due(&mut self, stream: Stream) -> Vec<u8> {
        let due = self.due.remove(&stream).unwrap_or_default();
        due.into_iter().flatten().collect()
    }

    /// Gives bytes back that there was no room for.
    pub(crate) fn put_back(&mut self, stream: Stream, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.due
                .entry(stream)
                .or_default()
                .push_front(bytes.to_vec());
        }
    }

    /// Returns the next input of a device that asks for it, of at most `room` bytes.
    pub(crate) fn pull(&mut self, stream: Stream, room: usize) -> Pull {
        let due = self.due.get_mut(&stream).and_then(VecDeque::pop_front);
        match due {
            Some(bytes) if bytes.len() <= room => Pull::Bytes(bytes),
            Some(_) => {
                let index = self.next.saturating_sub(1);
                self.depart(index, format!("{stream} has less room"));
                Pull::Nothing
            }
            None => Pull::Nothing,
        }
    }

    /// Returns the next bytes of a port's input, at most `room`.
    pub(crate) fn take(&mut self, stream: Stream, room: usize) -> Pull {
        let Some(due) = self.due.get_mut(&stream) else {
            return Pull::Nothing;
        };
        let Some(mut bytes) = due.pop_front() else {
            return Pull::Nothing;
        };
        let rest = bytes.split_off(bytes.len().min(room));
        self.put_back(stream, &rest);
        Pull::Bytes(bytes)
    }

    /// Takes the moment at which a port's backend had handled an open or a close. Returns whether
    /// it has come.
    pub(crate) fn settle(&mut self, stream: Stream) -> bool {
        match self.settled.get_mut(&stream) {
            Some(moments @ 1..) => {
                *moments -= 1;
                true
            }
            _ => self.departed.is_some(),
        }
    }

    /// Checks whether a port has more input before its next output.
    pub(crate) fn has_more(&self, stream: Stream) -> bool {
        let first = |of: &BTreeMap<_, VecDeque<usize>>| of.get(&stream)?.front().copied();
        let is_due = self.due.get(&stream).is_some_and(|due| !due.is_empty());
        let is_next = match (first(&self.later), first(&self.expected)) {
            (Some(input), Some(output)) => input < output,
            (input, _) => input.is_some(),
        };
        self.departed.is_none() && (is_due || is_next)
    }

    /// Returns the next input of a device that gets one for each of its requests, of exactly
    /// `length` bytes.
    pub(crate) fn answer(&mut self, stream: Stream, length: usize) -> Pull {
        if let Some(bytes) = self.due.get_mut(&stream).and_then(VecDeque::pop_front) {
            return self.of_length(self.next, stream, bytes, length);
        }
        let later = self.events.iter().enumerate().skip(self.next);
        let found = later
            .into_iter()
            .find_map(|(index, event)| match &event.kind {
                Kind::Input(bytes) if event.stream == stream && !self.pulled.contains(&index) => {
                    Some((index, bytes.clone()))
                }
                _ => None,
            });
        let Some((index, bytes)) = found else {
            return Pull::Live;
        };
        self.pulled.insert(index);
        self.of_length(index, stream, bytes, length)
    }

    fn of_length(&mut self, index: usize, stream: Stream, bytes: Vec<u8>, length: usize) -> Pull {
        match bytes.len() == length {
            true => Pull::Bytes(bytes),
            false => {
                let (found, was) = (length, bytes.len());
                self.depart(index, format!("{stream} asks for {found} bytes, not {was}"));
                Pull::Live
            }
        }
    }

    /// Returns the result, once all events are done and the recorded time is over.
    pub(crate) fn finished(&self) -> Option<Replay> {
        let now = Instant::now();
        // A guest that went another way may never open a port again.
        let may_stay =
            |stream: &Stream| matches!(stream, Stream::Port(_)) && self.departed.is_some();
        let unread = self.due.iter().filter(|(_, due)| !due.is_empty());
        let unsettled = self.settled.iter().filter(|(_, moments)| **moments > 0);
        let mut waiting = unread
            .map(|(stream, _)| stream)
            .chain(unsettled.map(|(stream, _)| stream));
        let is_done = self.next >= self.events.len()
            && waiting.all(may_stay)
            && now.saturating_duration_since(self.began) >= self.length;
        is_done.then(|| self.so_far(now))
    }

    /// Returns the result so far.
    pub(crate) fn so_far(&self, now: Instant) -> Replay {
        let at = |event: usize| {
            self.events
                .get(event)
                .map_or(Duration::ZERO, |event| event.at)
        };
        Replay {
            events: self.events.len(),
            played: now.saturating_duration_since(self.began),
            end: match &self.departed {
                None => ReplayEnd::Same,
                Some((event, difference)) => ReplayEnd::Departed {
                    event: event + 1,
                    at: at(*event),
                    difference: difference.clone(),
                },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::log::Recorder;
    use super::*;

    const RANDOM: Stream = Stream::Device(0);
    const NET: Stream = Stream::Device(1);
    const SERIAL: Stream = Stream::Serial;
    const PORT: Stream = Stream::Port(2);

    fn recorded(record: impl FnOnce(&mut Recorder)) -> (Player, Instant) {
        let mut recorder = Recorder::default();
        let start = recorder.position();
        record(&mut recorder);
        let mut recording = recorder.since(&start).unwrap();
        // All at the beginning: the test's time is its own.
        recording
            .events
            .iter_mut()
            .for_each(|event| event.at = Duration::ZERO);
        recording.length = Duration::ZERO;
        let now = Instant::now();
        (Player::new(recording, now), now)
    }

    fn conversation(recorder: &mut Recorder) {
        recorder.output(SERIAL, &[b"login: "]);
        recorder.input(SERIAL, b"root\n");
        recorder.output(SERIAL, &[b"# "]);
        recorder.input(NET, b"frame");
    }

    #[test]
    fn an_input_comes_after_the_outputs_before_it() {
        let (mut player, now) = recorded(conversation);
        player.advance(now);
        assert_eq!(player.take_due(SERIAL), b"");
        player.output(SERIAL, &[b"log"], now);
        player.output(SERIAL, &[b"in", b": "], now);
        assert_eq!(player.take_due(SERIAL), b"root\n");
        assert_eq!(player.pull(NET, 100), Pull::Nothing);
        assert!(player.finished().is_none());
        player.output(SERIAL, &[b"# more"], now);
        assert_eq!(player.awake(), BTreeSet::from([SERIAL, NET]));
        assert_eq!(player.pull(NET, 100), Pull::Bytes(b"frame".to_vec()));
        assert_eq!(player.finished().unwrap().end, ReplayEnd::Same);
    }

    #[test]
    fn the_first_difference_is_told_and_later_inputs_come_at_their_time() {
        let (mut player, now) = recorded(conversation);
        player.output(SERIAL, &[b"LOGIN: "], now);
        assert_eq!(player.take_due(SERIAL), b"root\n");
        assert_eq!(player.pull(NET, 100), Pull::Bytes(b"frame".to_vec()));
        let told = player.finished().unwrap().to_string();
        assert!(
            told.contains(
                "at event 1 of 4, after 0.000 s: the serial port has put out something else"
            ),
            "{told}"
        );
    }

    #[test]
    fn an_output_that_does_not_come_is_waited_for_so_long() {
        let (mut player, now) = recorded(conversation);
        player.advance(now + PATIENCE - Duration::from_millis(1));
        assert_eq!(player.take_due(SERIAL), b"");
        player.advance(now + PATIENCE);
        assert_eq!(player.take_due(SERIAL), b"root\n");
        let told = player.finished();
        assert!(told.is_none(), "a frame is due");
        let _ = player.pull(NET, 100);
        let told = player.finished().unwrap().to_string();
        assert!(told.contains("has not put out 7 bytes in time"), "{told}");
    }

    /// A replay on a busy host falls behind its recording further and further.
    #[test]
    fn a_guest_may_be_slower_than_it_was() {
        let (mut player, start) = recorded(|recorder| {
            for _ in 0..10 {
                recorder.output(SERIAL, &[b"a"]);
                recorder.input(SERIAL, b"b");
            }
        });
        let second = Duration::from_secs(1);
        for (at, event) in (0..).zip(&mut player.events) {
            event.at = second * (at / 2 + 1);
        }
        let mut now = start;
        for _ in 0..10 {
            now += 4 * second + PATIENCE - Duration::from_millis(1);
            player.advance(now);
            assert_eq!(player.take_due(SERIAL), b"");
            player.output(SERIAL, &[b"a"], now);
            assert_eq!(player.take_due(SERIAL), b"b");
        }
        assert_eq!(player.so_far(now).end, ReplayEnd::Same);
    }

    #[test]
    fn a_port_is_answered_as_it_was() {
        let (mut player, now) = recorded(|recorder| {
            recorder.output(PORT, &[b"o"]);
            recorder.input(PORT, b"");
            recorder.input(PORT, b"trace 0");
            recorder.output(PORT, &[b"c"]);
            recorder.input(PORT, b"");
        });
        player.advance(now);
        assert!(!player.settle(PORT), "it is not open");
        player.output(PORT, &[b"o"], now);
        assert!(player.settle(PORT) && player.has_more(PORT));
        assert_eq!(player.take(PORT, 6), Pull::Bytes(b"trace ".to_vec()));
        assert!(player.has_more(PORT) && !player.settle(PORT));
        assert_eq!(player.take(PORT, 6), Pull::Bytes(b"0".to_vec()));
        assert!(!player.has_more(PORT), "it has closed before the rest");
        assert_eq!(player.take(PORT, 6), Pull::Nothing);
        player.output(PORT, &[b"c"], now);
        assert!(player.finished().is_none());
        assert!(player.settle(PORT) && !player.settle(PORT));
        assert_eq!(player.finished().unwrap().end, ReplayEnd::Same);
    }

    /// A device may ask for bytes between its backend's open and the moment at which that is
    /// handled.
    #[test]
    fn a_port_that_is_read_before_it_has_settled_settles_nevertheless() {
        let (mut player, now) = recorded(|recorder| {
            recorder.output(PORT, &[b"o"]);
            recorder.input(PORT, b"trace");
            recorder.input(PORT, b"");
            recorder.output(PORT, &[b"c"]);
            recorder.input(PORT, b"");
        });
        player.output(PORT, &[b"o"], now);
        assert_eq!(player.take(PORT, 6), Pull::Bytes(b"trace".to_vec()));
        assert_eq!(player.take(PORT, 6), Pull::Nothing);
        assert!(player.settle(PORT) && !player.settle(PORT));
        player.output(PORT, &[b"c"], now);
        assert_eq!(player.take(PORT, 6), Pull::Nothing);
        assert!(player.finished().is_none());
        assert!(player.settle(PORT));
        assert_eq!(player.finished().unwrap().end, ReplayEnd::Same);
    }

    #[test]
    fn a_port_of_a_guest_that_went_another_way_waits_for_nothing() {
        let (mut player, now) = recorded(|recorder| {
            recorder.output(PORT, &[b"o"]);
            recorder.input(PORT, b"");
        });
        player.output(PORT, &[b"c"], now);
        assert!(!player.has_more(PORT) && player.finished().is_some());
        assert!(player.settle(PORT) && player.settle(PORT));
    }

    #[test]
    fn random_numbers_come_as_they_are_asked_for() {
        let (mut player, now) = recorded(|recorder| {
            recorder.output(SERIAL, &[b"a"]);
            recorder.input(RANDOM, b"12");
            recorder.input(RANDOM, b"345");
        });
        player.advance(now);
        assert_eq!(player.answer(RANDOM, 2), Pull::Bytes(b"12".to_vec()));
        player.output(SERIAL, &[b"a"], now);
        assert_eq!(player.answer(RANDOM, 4), Pull::Live);
        assert_eq!(player.answer(RANDOM, 4), Pull::Live);
        let told = player.finished().unwrap().to_string();
        assert!(
            told.contains("virtio device 0 asks for 4 bytes, not 3"),
            "{told}"
        );
    }
}
