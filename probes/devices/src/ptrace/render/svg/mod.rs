//! Draws the timeline as an SVG picture, as ptrace(1)'s viewer does: one row for each process, and
//! its states as a bar.
//!
//! Blue means running, green ready, red waiting. Above the bar, each system call is a blue mark.
//! Below it, each page fault is a red mark and each other trap a black one. A slice's or mark's
//! meaning is shown when the mouse rests on it. The file is self-contained and has no script in it.
//!
//! Idle CPUs have no row: their tasks share one number and are no process.
//!
//! The picture can only be drawn once everything is known, so what is kept is bounded. The bounds
//! are the first [`MAX_ROWS`] processes, and [`MAX_DRAWN`] slices and marks. The picture ends
//! there, and says how many records came after it.

mod draw;

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::IDLE;
use super::tasks::name;
use crate::ptrace::record::{EventType, Record};
use crate::render::Render;

/// The greatest number of processes in a picture.
pub const MAX_ROWS: usize = 1000;
/// The greatest number of slices and marks in a picture.
pub const MAX_DRAWN: usize = 50_000;

/// A renderer that keeps what is to be drawn, and draws it at the end.
#[derive(Debug, Default)]
pub struct Svg {
    first: i64,
    /// Nanoseconds from `first` to the last record that is drawn.
    end: i64,
    rows: Vec<Row>,
    /// The processes' indexes in `rows`.
    places: BTreeMap<u32, usize>,
    /// The number of slices and marks kept.
    drawn: usize,
    left_out: u64,
}

/// A process.
#[derive(Debug)]
struct Row {
    pid: u32,
    /// The CPU of its last record.
    cpu: u32,
    name: Option<String>,
    slices: Vec<Slice>,
    marks: Vec<Mark>,
    /// Its current state, the CPU, and the time since when.
    now: Option<(State, u32, i64)>,
}

/// The meaning of a part of a bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Ready,
    /// Waiting, with the number of Plan 9's state.
    Waiting(u8),
}

/// A part of a bar.
#[derive(Debug)]
struct Slice {
    state: State,
    cpu: u32,
    from: i64,
    to: i64,
}

/// A trap.
#[derive(Debug)]
struct Mark {
    time: i64,
    argument: u64,
}

impl Svg {
    /// Returns the row of the record's process; `None` if there is no room for another one.
    fn row(&mut self, record: &Record) -> Option<&mut Row> {
        let place = match self.places.get(&record.pid) {
            Some(place) => *place,
            None if self.rows.len() >= MAX_ROWS => return None,
            None => {
                self.places.insert(record.pid, self.rows.len());
                self.rows.push(Row::new(record.pid));
                self.rows.len() - 1
            }
        };
        let row = self.rows.get_mut(place)?;
        row.cpu = record.machine;
        Some(row)
    }
}

impl Row {
    fn new(pid: u32) -> Self {
        Self {
            pid,
            cpu: 0,
            name: None,
            slices: Vec::new(),
            marks: Vec::new(),
            now: None,
        }
    }

    /// Changes the process's state, or ends it. Returns whether a slice has come to its end.
    fn change(&mut self, state: Option<State>, cpu: u32, time: i64) -> bool {
        let before = self.now.take();
        self.now = state.map(|state| (state, cpu, time));
        let Some((state, cpu, from)) = before else {
            return false;
        };
        let to = time.max(from);
        self.slices.push(Slice {
            state,
            cpu,
            from,
            to,
        });
        true
    }
}

impl Render<Record> for Svg {
    fn record(&mut self, record: &Record, _: &mut dyn Write) -> io::Result<()> {
        if record.pid == IDLE {
            return Ok(());
        }
        if self.rows.is_empty() {
            self.first = record.time;
        }
        if self.drawn >= MAX_DRAWN {
            self.left_out += 1;
            return Ok(());
        }
        let time = record.time.saturating_sub(self.first).max(0);
        let event = EventType::of(record.event);
        let Some(row) = self.row(record) else {
            self.left_out += 1;
            return Ok(());
        };
        let cpu = record.machine;
        let drawn = match event {
            Some(EventType::Run | EventType::Edf) => row.change(Some(State::Running), cpu, time),
            Some(EventType::Ready) => row.change(Some(State::Ready), cpu, time),
            Some(EventType::Sleep) => {
                row.change(Some(State::Waiting(record.argument as u8)), cpu, time)
            }
            Some(EventType::Dead) => row.change(None, cpu, time),
            _ => {
                // Only a running process does this, so a process first seen by it runs.
                let runs = matches!(
                    event,
                    Some(
                        EventType::Trap
                            | EventType::User
                            | EventType::Yield
                            | EventType::Slice
                            | EventType::Ints
                    )
                );
                if runs && row.now.is_none() && row.slices.is_empty() {
                    row.now = Some((State::Running, cpu, time));
                }
                match event {
                    Some(EventType::Name) => row.name = name(record),
                    Some(EventType::Trap) => row.marks.push(Mark {
                        time,
                        argument: record.argument,
                    }),
                    _ => {}
                }
                event == Some(EventType::Trap)
            }
        };
        self.drawn += usize::from(drawn);
        // A deadline lies in the future.
        if event != Some(EventType::Deadline) {
            self.end = self.end.max(time);
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        for row in &mut self.rows {
            row.change(None, row.cpu, self.end);
        }
        draw::picture(self, out)
    }
}
