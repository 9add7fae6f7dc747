//! Files for <https://ui.perfetto.dev>: clocks, tracks, and slices, instants and flows on them.
//!
//! Of Perfetto's format only the few `TrackEvent` messages are written that a timeline needs;
//! [`fields`] has their numbers. All packets are of one sequence, each event has its names, and
//! each time names its clock. So a file that is cut short is readable as far as it goes.
//!
//! The caller owns the identity of tracks (`uuid`) and decides when slices begin and end. A
//! [`Track`] keeps its events in order: times never go back, and only what has begun ends.

#[cfg(test)]
pub(crate) mod decode;
mod fields;
mod proto;

use std::hash::Hash;
use std::io::{self, Write};

use fields::{annotation, clock_snapshot, event, packet, process, thread, trace, track};
use lru::LruCache;
use proto::Message;

/// The sequence of all packets.
const SEQUENCE: u64 = 1;

/// Removes and returns the least recently used value if the table is full and `key` is new.
pub(crate) fn make_room<K: Hash + Eq, V>(table: &mut LruCache<K, V>, key: K) -> Option<V> {
    let fits = table.len() < table.cap().get() || table.contains(&key);
    (!fits).then(|| table.pop_lru())?.map(|(_, value)| value)
}

/// Writes the first packet: times are CLOCK_REALTIME, and so is the timeline. If CLOCK_BOOTTIME at
/// that time is known, other files that use it can be shown together with this one.
pub(crate) fn start(out: &mut dyn Write, realtime: u64, boottime: Option<u64>) -> io::Result<()> {
    let mut snapshot = Message::new();
    let known = [
        (clock_snapshot::REALTIME, Some(realtime)),
        (clock_snapshot::BOOTTIME, boottime),
    ];
    for (id, time) in known {
        let Some(time) = time else { continue };
        let mut clock = Message::new();
        clock.number(clock_snapshot::CLOCK_ID, id);
        clock.number(clock_snapshot::CLOCK_TIMESTAMP, time);
        snapshot.message(clock_snapshot::CLOCKS, &clock);
    }
    snapshot.number(
        clock_snapshot::PRIMARY_TRACE_CLOCK,
        clock_snapshot::REALTIME,
    );
    let mut first = Message::new();
    first.number(packet::FIRST_PACKET_ON_SEQUENCE, 1);
    let cleared = packet::SEQ_INCREMENTAL_STATE_CLEARED;
    first.number(packet::SEQUENCE_FLAGS, cleared);
    at(&mut first, realtime);
    first.message(packet::CLOCK_SNAPSHOT, &snapshot);
    send(out, first)
}

/// Writes a packet of our sequence.
fn send(out: &mut dyn Write, mut packet: Message) -> io::Result<()> {
    packet.number(packet::TRUSTED_PACKET_SEQUENCE_ID, SEQUENCE);
    let mut file = Message::new();
    file.message(trace::PACKET, &packet);
    out.write_all(file.bytes())
}

/// Sets a packet's time.
fn at(packet: &mut Message, time: u64) {
    packet.number(packet::TIMESTAMP, time);
    packet.number(packet::TIMESTAMP_CLOCK_ID, clock_snapshot::REALTIME);
}

/// A track that belongs to no process.
pub(crate) struct NamedTrack<'a> {
    /// The track's identity.
    pub(crate) uuid: u64,
    /// The shown name.
    pub(crate) name: &'a str,
    /// The track under which it is shown, and its rank there.
    pub(crate) below: Option<(u64, u32)>,
}

impl NamedTrack<'_> {
    /// Writes the track's descriptor.
    pub(crate) fn describe(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut described = Message::new();
        described.number(track::UUID, self.uuid);
        described.text(track::NAME, self.name);
        match self.below {
            None => described.number(track::CHILD_ORDERING, track::EXPLICIT),
            Some((parent, rank)) => {
                described.number(track::PARENT_UUID, parent);
                let rank = i32::try_from(rank).unwrap_or(i32::MAX);
                described.signed(track::SIBLING_ORDER_RANK, i64::from(rank))
            }
        };
        send(out, descriptor(&described))
    }
}

/// The track of a thread. Threads of other processes are not distinguished from processes: each is
/// shown as a process with one thread.
pub(crate) struct ThreadTrack<'a> {
    /// The identity of the thread's track, where its slices are.
    pub(crate) uuid: u64,
    /// The identity of the process's track, which has no slices.
    pub(crate) process: u64,
    /// The thread's number.
    pub(crate) id: u64,
    /// The thread's name.
    pub(crate) name: &'a str,
    /// The track's name if no thread can have this number in Perfetto: there, 0 is the idle thread
    /// of each CPU.
    pub(crate) otherwise: &'a str,
}

impl ThreadTrack<'_> {
    /// Writes the track's descriptor. After a change of name it can be written again, and the last
    /// one counts.
    pub(crate) fn describe(&self, out: &mut dyn Write) -> io::Result<()> {
        let Ok(id @ 1..) = i32::try_from(self.id) else {
            let track = NamedTrack {
                uuid: self.uuid,
                name: self.otherwise,
                below: None,
            };
            return track.describe(out);
        };
        let id = i64::from(id);
        let mut owner = Message::new();
        owner.signed(process::PID, id);
        owner.text(process::PROCESS_NAME, self.name);
        let mut described = Message::new();
        described.number(track::UUID, self.process);
        described.message(track::PROCESS, &owner);
        send(out, descriptor(&described))?;

        let mut task = Message::new();
        task.signed(thread::PID, id).signed(thread::TID, id);
        task.text(thread::THREAD_NAME, self.name);
        let mut described = Message::new();
        described.number(track::UUID, self.uuid);
        described.number(track::PARENT_UUID, self.process);
        described.message(track::THREAD, &task);
        send(out, descriptor(&described))
    }
}

fn descriptor(described: &Message) -> Message {
    let mut packet = Message::new();
    packet.message(packet::TRACK_DESCRIPTOR, described);
    packet
}

/// The description of a slice or an instant.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Event<'a> {
    /// The shown name.
    pub(crate) name: &'a str,
    /// The category, by which events can be selected.
    pub(crate) category: &'a str,
    /// The arrow that begins here.
    pub(crate) flow: Option<u64>,
    /// The arrow that ends here.
    pub(crate) flow_end: Option<u64>,
    /// The values shown when the event is selected.
    pub(crate) notes: &'a [(&'a str, Note<'a>)],
}

/// The output, and the time of what is written to it.
pub(crate) struct At<'o> {
    pub(crate) out: &'o mut dyn Write,
    /// Nanoseconds since the epoch.
    pub(crate) time: u64,
}

/// A value beside an event.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Note<'a> {
    /// A number.
    Number(u64),
    /// A number shown in hexadecimal.
    Address(u64),
    /// Text.
    Text(&'a str),
    /// Yes or no.
    Flag(bool),
}

/// The state of a track in the file.
#[derive(Debug)]
pub(crate) struct Track {
    uuid: u64,
    /// The time of the last event.
    last: u64,
    /// The number of slices that have not ended.
    open: u64,
}

impl Track {
    /// Makes an empty track that has been described. No event on it will be before `first`.
    pub(crate) fn new(uuid: u64, first: u64) -> Self {
        Self {
            uuid,
            last: first,
            open: 0,
        }
    }

    /// Checks whether a slice is open.
    pub(crate) fn is_open(&self) -> bool {
        self.open > 0
    }

    /// Begins a slice, within those that are open.
    pub(crate) fn begin(&mut self, at: &mut At<'_>, said: &Event<'_>) -> io::Result<()> {
        self.open += 1;
        self.event(at, event::SLICE_BEGIN, said)
    }

    /// Ends the innermost open slice, with these further values; does nothing if there is none.
    pub(crate) fn end(&mut self, at: &mut At<'_>, notes: &[(&str, Note<'_>)]) -> io::Result<()> {
        if self.open == 0 {
            return Ok(());
        }
        self.open -= 1;
        let said = Event {
            notes,
            ..Event::default()
        };
        self.event(at, event::SLICE_END, &said)
    }

    /// Ends all open slices.
    pub(crate) fn close(&mut self, at: &mut At<'_>) -> io::Result<()> {
        while self.is_open() {
            self.end(at, &[])?;
        }
        Ok(())
    }

    /// Ends all open slices at the time of the last event, and returns that time.
    pub(crate) fn finish(&mut self, out: &mut dyn Write) -> io::Result<u64> {
        let time = self.last;
        self.close(&mut At { out, time })?;
        Ok(time)
    }

    /// Writes an event without duration.
    pub(crate) fn instant(&mut self, at: &mut At<'_>, said: &Event<'_>) -> io::Result<()> {
        self.event(at, event::INSTANT, said)
    }

    fn event(&mut self, to: &mut At<'_>, kind: u64, said: &Event<'_>) -> io::Result<()> {
        // Records of several CPUs can come some nanoseconds out of order.
        self.last = self.last.max(to.time);
        let mut body = Message::new();
        body.number(event::TYPE, kind);
        body.number(event::TRACK_UUID, self.uuid);
        if kind != event::SLICE_END {
            body.text(event::CATEGORIES, said.category);
            body.text(event::NAME, said.name);
        }
        for (field, flow) in [
            (event::FLOW_IDS, said.flow),
            (event::TERMINATING_FLOW_IDS, said.flow_end),
        ] {
            if let Some(id) = flow {
                body.fixed(field, id);
            }
        }
        for (name, note) in said.notes {
            body.message(event::DEBUG_ANNOTATIONS, &annotated(name, note));
        }
        let mut packet = Message::new();
        at(&mut packet, self.last);
        packet.message(packet::TRACK_EVENT, &body);
        send(to.out, packet)
    }
}

fn annotated(name: &str, note: &Note<'_>) -> Message {
    let mut message = Message::new();
    message.text(annotation::NAME, name);
    match *note {
        Note::Number(value) => message.number(annotation::UINT_VALUE, value),
        Note::Address(value) => message.number(annotation::POINTER_VALUE, value),
        Note::Text(value) => message.text(annotation::STRING_VALUE, value),
        Note::Flag(value) => message.number(annotation::BOOL_VALUE, u64::from(value)),
    };
    message
}
