//! A timeline for <https://ui.perfetto.dev>: a track for each process, with a slice for each call,
//! from its entry to its return. A slice lies within that of its caller if that is traced too.
//!
//! Calls that have not returned end with the file. A return without an entry is an instant. Lines
//! without a process share one track for all CPUs, because lines do not name the CPU.

use std::fmt;
use std::io::{self, Write};

use lru::LruCache;
use probes::clock::Clock;

use super::{MAX_TASKS, Symbols, named};
use crate::perfetto::{self, At, Event, Note, ThreadTrack, Track, make_room};
use crate::render::Render;
use crate::trace_line::{LineKind, NO_PROCESS, TraceLine};

/// The name of a process beside its number: lines do not have names.
const PROCESS: &str = "process";

/// A renderer that writes packets as lines arrive.
pub struct Perfetto {
    symbols: Symbols,
    clock: Clock,
    started: bool,
    tracks: LruCache<u64, Track>,
    /// The number of track identities in use.
    uuids: u64,
    /// The latest time.
    latest: u64,
}

impl fmt::Debug for Perfetto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Perfetto")
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}

impl Perfetto {
    /// Makes a renderer; `clock` converts ticks to times.
    #[must_use]
    pub fn new(symbols: Symbols, clock: Clock) -> Self {
        Self {
            symbols,
            clock,
            started: false,
            tracks: LruCache::sparse(MAX_TASKS),
            uuids: 0,
            latest: 0,
        }
    }

    fn start(&mut self, time: u64, out: &mut dyn Write) -> io::Result<()> {
        self.started = true;
        perfetto::start(out, time, None)
    }

    fn track(&mut self, pid: u64, out: &mut dyn Write) -> io::Result<&mut Track> {
        if let Some(mut gone) = make_room(&mut self.tracks, pid) {
            gone.finish(out)?;
        }
        self.tracks.try_get_or_insert_mut(pid, || {
            self.uuids += 2;
            describe(pid, self.uuids, out)?;
            Ok(Track::new(self.uuids, 0))
        })
    }
}

/// Writes the descriptor of a process's track.
fn describe(pid: u64, uuid: u64, out: &mut dyn Write) -> io::Result<()> {
    let otherwise = match pid {
        NO_PROCESS => "no process".to_owned(),
        pid => format!("{PROCESS} {pid}"),
    };
    let track = ThreadTrack {
        uuid,
        process: uuid - 1,
        id: pid,
        name: PROCESS,
        otherwise: &otherwise,
    };
    track.describe(out)
}

impl Render<TraceLine> for Perfetto {
    fn record(&mut self, line: &TraceLine, out: &mut dyn Write) -> io::Result<()> {
        let time = self.clock.unix_ns(line.ticks);
        self.latest = self.latest.max(time);
        if !self.started {
            self.start(time, out)?;
        }
        let name = named(&self.symbols, line.pc);
        let [a, b, c, d] = line.arguments;
        let track = self.track(line.pid, out)?;
        let at = &mut At { out, time };
        match line.kind {
            LineKind::Entry => {
                let notes = [("arg1", a), ("arg2", b), ("arg3", c), ("arg4", d)]
                    .map(|(name, value)| (name, Note::Address(value)));
                let call = Event {
                    name: &name,
                    category: "call",
                    notes: &notes,
                    ..Event::default()
                };
                track.begin(at, &call)
            }
            LineKind::Exit if track.is_open() => track.end(at, &[("return", Note::Address(a))]),
            LineKind::Exit => {
                let name = format!("return to {name}");
                let unmatched = Event {
                    name: &name,
                    category: "return",
                    notes: &[("return", Note::Address(a))],
                    ..Event::default()
                };
                track.instant(at, &unmatched)
            }
        }
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if !self.started {
            self.start(0, out)?;
        }
        let time = self.latest;
        (self.tracks.iter_mut()).try_for_each(|(_, track)| track.close(&mut At { out, time }))
    }
}
