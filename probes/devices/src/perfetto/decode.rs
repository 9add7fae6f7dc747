//! Decodes Perfetto files, for tests: only the fields that are written here, and the rules of
//! slices and arrows.

use std::collections::{BTreeMap, BTreeSet};

use super::fields::{annotation, clock_snapshot, event, packet, process, thread, trace, track};

/// The contents of a file.
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    /// The descriptions of tracks, and the events, in the order of the file.
    pub(crate) lines: Vec<String>,
    /// The number of slices that begin.
    pub(crate) slices: usize,
    /// The number of events without duration.
    pub(crate) instants: usize,
    /// The number of arrows that end.
    pub(crate) flows: usize,
}

/// A field's value.
#[derive(Debug, Clone, Copy)]
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Value<'a> {
    fn number(self) -> Result<u64, String> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Bytes(_) => Err("bytes where a number belongs".to_owned()),
        }
    }

    fn bytes(self) -> Result<&'a [u8], String> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Number(_) => Err("a number where bytes belong".to_owned()),
        }
    }

    fn text(self) -> Result<&'a str, String> {
        std::str::from_utf8(self.bytes()?).map_err(|error| error.to_string())
    }
}

/// Returns a message's fields by number, in order.
fn fields(mut bytes: &[u8]) -> Result<Vec<(u32, Value<'_>)>, String> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        let value = match key & 7 {
            0 => Value::Number(varint(&mut bytes)?),
            1 => {
                let (head, rest) = bytes.split_first_chunk().ok_or("a cut number")?;
                bytes = rest;
                Value::Number(u64::from_le_bytes(*head))
            }
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).map_err(|e| e.to_string())?;
                let (head, rest) = bytes.split_at_checked(length).ok_or("cut bytes")?;
                bytes = rest;
                Value::Bytes(head)
            }
            other => return Err(format!("wire type {other}")),
        };
        let field = u32::try_from(key >> 3).map_err(|error| error.to_string())?;
        found.push((field, value));
    }
    Ok(found)
}

fn varint(bytes: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first().ok_or("a cut varint")?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("a long varint".to_owned())
}

/// A track that is being decoded.
#[derive(Debug, Default)]
struct Track {
    name: String,
    last: u64,
    open: u64,
}

#[derive(Default)]
struct Reader {
    decoded: Decoded,
    tracks: BTreeMap<u64, Track>,
    flows: BTreeSet<u64>,
    packets: usize,
}

/// Decodes a file; its times are relative to `zero`.
pub(crate) fn decode(file: &[u8], zero: u64) -> Result<Decoded, String> {
    let mut reader = Reader::default();
    for (field, value) in fields(file)? {
        assert_eq!(field, trace::PACKET);
        let what = format!("packet {}", reader.packets);
        let read = reader.packet(value.bytes()?, zero);
        read.map_err(|error| format!("{what}: {error}"))?;
        reader.packets += 1;
    }
    for (uuid, track) in &reader.tracks {
        if track.open > 0 {
            return Err(format!("{} slices of track {uuid} do not end", track.open));
        }
    }
    Ok(reader.decoded)
}

impl Reader {
    fn packet(&mut self, bytes: &[u8], zero: u64) -> Result<(), String> {
        let (mut time, mut clock, mut sequence) = (None, None, None);
        for (field, value) in fields(bytes)? {
            match field {
                packet::TIMESTAMP => time = Some(value.number()?),
                packet::TIMESTAMP_CLOCK_ID => clock = Some(value.number()?),
                packet::TRUSTED_PACKET_SEQUENCE_ID => sequence = Some(value.number()?),
                packet::SEQUENCE_FLAGS | packet::FIRST_PACKET_ON_SEQUENCE => {
                    if self.packets > 0 || value.number()? != 1 {
                        return Err("begins a sequence".to_owned());
                    }
                }
                packet::CLOCK_SNAPSHOT => self.clocks(value.bytes()?)?,
                packet::TRACK_DESCRIPTOR => self.descriptor(value.bytes()?)?,
                packet::TRACK_EVENT => {
                    if clock != Some(clock_snapshot::REALTIME) {
                        return Err(format!("clock {clock:?}"));
                    }
                    let time = time.ok_or("no time")?;
                    self.event(value.bytes()?, time, zero)?;
                }
                other => return Err(format!("field {other} of a packet")),
            }
        }
        match sequence {
            Some(1) => Ok(()),
            other => Err(format!("sequence {other:?}")),
        }
    }

    fn clocks(&mut self, bytes: &[u8]) -> Result<(), String> {
        let mut line = "clocks".to_owned();
        for (field, value) in fields(bytes)? {
            match field {
                clock_snapshot::CLOCKS => {
                    for (field, value) in fields(value.bytes()?)? {
                        let what = match field {
                            clock_snapshot::CLOCK_ID => "id",
                            clock_snapshot::CLOCK_TIMESTAMP => "time",
                            other => return Err(format!("field {other} of a clock")),
                        };
                        line += &format!(" {what} {}", value.number()?);
                    }
                }
                clock_snapshot::PRIMARY_TRACE_CLOCK => {
                    line += &format!(" primary {}", value.number()?);
                }
                other => return Err(format!("field {other} of clocks")),
            }
        }
        self.decoded.lines.push(line);
        Ok(())
    }

    fn descriptor(&mut self, bytes: &[u8]) -> Result<(), String> {
        let (mut uuid, mut name, mut parent, mut kind) = (0, String::new(), None, "track");
        for (field, value) in fields(bytes)? {
            match field {
                track::UUID => uuid = value.number()?,
                track::NAME => value.text()?.clone_into(&mut name),
                track::PARENT_UUID => parent = Some(value.number()?),
                track::CHILD_ORDERING | track::SIBLING_ORDER_RANK => {
                    value.number()?;
                }
                track::PROCESS => {
                    let known = [process::PID, process::PID, process::PROCESS_NAME];
                    (kind, name) = ("process", task(value.bytes()?, known)?);
                }
                track::THREAD => {
                    let known = [thread::PID, thread::TID, thread::THREAD_NAME];
                    (kind, name) = ("thread", task(value.bytes()?, known)?);
                }
                other => return Err(format!("field {other} of a track")),
            }
        }
        if parent.is_some_and(|parent| !self.tracks.contains_key(&parent)) {
            return Err(format!("track {uuid} is below a track that is not known"));
        }
        self.decoded.lines.push(format!("{kind} {name}"));
        self.tracks.entry(uuid).or_default().name = name;
        Ok(())
    }

    fn event(&mut self, bytes: &[u8], time: u64, zero: u64) -> Result<(), String> {
        let (mut kind, mut uuid, mut rest) = (0, 0, String::new());
        for (field, value) in fields(bytes)? {
            match field {
                event::TYPE => kind = value.number()?,
                event::TRACK_UUID => uuid = value.number()?,
                event::CATEGORIES => rest += &format!(" {}:", value.text()?),
                event::NAME => rest += &format!(" {}", value.text()?),
                event::FLOW_IDS => {
                    let flow = value.number()?;
                    rest += &format!(" ->{flow}");
                    if !self.flows.insert(flow) {
                        return Err(format!("arrow {flow} begins twice"));
                    }
                }
                event::TERMINATING_FLOW_IDS => {
                    let flow = value.number()?;
                    rest += &format!(" {flow}->");
                    self.decoded.flows += 1;
                    if !self.flows.remove(&flow) {
                        return Err(format!("arrow {flow} ends that has not begun"));
                    }
                }
                event::DEBUG_ANNOTATIONS => rest += &note(value.bytes()?)?,
                other => return Err(format!("field {other} of an event")),
            }
        }
        let track = self.tracks.get_mut(&uuid).ok_or("no such track")?;
        if time < track.last {
            return Err(format!("{time} after {} on {}", track.last, track.name));
        }
        track.last = time;
        let mark = match kind {
            event::SLICE_BEGIN => {
                track.open += 1;
                self.decoded.slices += 1;
                "["
            }
            event::SLICE_END => {
                let less = track.open.checked_sub(1);
                track.open = less.ok_or(format!("nothing to end on {}", track.name))?;
                "]"
            }
            event::INSTANT => {
                self.decoded.instants += 1;
                "!"
            }
            other => return Err(format!("type {other}")),
        };
        let at = time.wrapping_sub(zero);
        let line = format!("{at} {}: {mark}{rest}", track.name);
        self.decoded.lines.push(line);
        Ok(())
    }
}

/// Returns number and name of a process or thread; `known` are the fields of its number, twice, and
/// of its name.
fn task(bytes: &[u8], known: [u32; 3]) -> Result<String, String> {
    let [pid, tid, named] = known;
    let (mut id, mut name) = (0, "");
    for (field, value) in fields(bytes)? {
        match field {
            _ if field == pid || field == tid => id = value.number()?,
            _ if field == named => name = value.text()?,
            other => return Err(format!("field {other} of a process or thread")),
        }
    }
    Ok(format!("{name} {id}"))
}

fn note(bytes: &[u8]) -> Result<String, String> {
    let (mut name, mut shown) = ("", String::new());
    for (field, value) in fields(bytes)? {
        match field {
            annotation::NAME => name = value.text()?,
            annotation::BOOL_VALUE => shown = (value.number()? != 0).to_string(),
            annotation::UINT_VALUE => shown = value.number()?.to_string(),
            annotation::POINTER_VALUE => shown = format!("{:#x}", value.number()?),
            annotation::STRING_VALUE => value.text()?.clone_into(&mut shown),
            other => return Err(format!("field {other} of an annotation")),
        }
    }
    Ok(format!(" ({name} {shown})"))
}
