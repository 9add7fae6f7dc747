//! The table of a trace: a row for each hit.
//!
//! | Column | Type | Value |
//! |---|---|---|
//! | `time` | TIMESTAMP(NANOS, UTC) | the time of the hit |
//! | `tsc` | UINT64 | the same in ticks of the time stamp counter |
//! | `event` | STRING | `entry`, `return`, `point` or `tick` |
//! | `provider`, `module`, `function`, `name` | STRING | the probe's parts |
//! | `cpu` | UINT32 | the vCPU |
//! | `pid`, `tid` | UINT32 | process and thread; null where there is none |
//! | `comm` | STRING | the thread's name |
//! | `pc` | UINT64 | the program counter |
//! | `arg0`... | INT64 | arguments; null where the hit has none |
//! | `text0`... | STRING | the text that an argument points to |
//! | `returned` | INT64 | of a return: the value |
//! | `kstack`, `ustack` | LIST of STRING | frames, innermost first |

use std::collections::BTreeMap;
use std::io::{self, Write};

use probes::clock::Clock;
use probes::event::MAX_STATIC_ARGUMENTS;
use trace_devices::render::{CutOff, Render};

use super::{Field, Kind, Note, Table};
use crate::protocol::event::{ClockPair, EventLine, number};
use crate::protocol::trace::Traced;

/// The number of columns of arguments, and of texts.
const ARGUMENTS: usize = MAX_STATIC_ARGUMENTS;
/// The greatest number of probes whose arguments are named in the file's metadata.
const MOST_NAMED: usize = 1000;

/// The columns with one value, in the order of [`Hits::new`].
mod column {
    pub const TIME: usize = 0;
    pub const TSC: usize = 1;
    pub const EVENT: usize = 2;
    pub const PROVIDER: usize = 3;
    pub const MODULE: usize = 4;
    pub const FUNCTION: usize = 5;
    pub const NAME: usize = 6;
    pub const CPU: usize = 7;
    pub const PID: usize = 8;
    pub const TID: usize = 9;
    pub const COMM: usize = 10;
    pub const PC: usize = 11;
    pub const RETURNED: usize = 12;
    pub const KSTACK: usize = 13;
    pub const USTACK: usize = 14;
    pub const ARGUMENT: usize = 15;
}

/// A hit with its probe, if that is known.
#[derive(Debug, Clone, Copy)]
pub struct Hit<'a> {
    /// The event.
    pub line: &'a EventLine,
    /// The probe.
    pub probe: Option<&'a Traced>,
}

/// A renderer of hits as a file of Parquet.
#[derive(Debug)]
pub struct Hits {
    table: Table,
    clock: Clock,
    /// The names of arguments, by probe.
    arguments: BTreeMap<String, Vec<String>>,
}

impl Hits {
    /// Makes a renderer for events of a clock that showed `pair`, with `hz` ticks a second.
    ///
    /// # Errors
    /// If the table cannot be made.
    pub fn new(pair: ClockPair, hz: u64) -> io::Result<Self> {
        let mut fields = vec![
            Field::required("time", Kind::Time),
            Field::required("tsc", Kind::Unsigned),
            Field::required("event", Kind::Text),
            Field::required("provider", Kind::Text),
            Field::required("module", Kind::Text),
            Field::required("function", Kind::Text),
            Field::required("name", Kind::Text),
            Field::required("cpu", Kind::Small),
            Field::optional("pid", Kind::Small),
            Field::optional("tid", Kind::Small),
            Field::optional("comm", Kind::Text),
            Field::required("pc", Kind::Unsigned),
            Field::optional("returned", Kind::Signed),
            Field::optional("kstack", Kind::Texts),
            Field::optional("ustack", Kind::Texts),
        ];
        let numbered = |name: &str, kind| {
            let name = name.to_owned();
            (0..ARGUMENTS).map(move |number| Field::optional(&format!("{name}{number}"), kind))
        };
        fields.extend(numbered("arg", Kind::Signed));
        fields.extend(numbered("text", Kind::Text));
        Ok(Self {
            table: Table::new(&fields)?,
            clock: Clock {
                tsc: pair.tsc,
                unix_ns: pair.unix_ns,
                hz: hz.max(1),
            },
            arguments: BTreeMap::new(),
        })
    }

    /// Sets the number of rows of a full group.
    #[cfg(test)]
    pub(super) fn with_groups_of(mut self, rows: usize) -> Self {
        self.table.most_rows = rows;
        self
    }

    fn notes(&self) -> Vec<Note> {
        let arguments = serde_json::to_string(&self.arguments).unwrap_or_default();
        vec![
            ("exotrace.arguments", arguments),
            ("exotrace.tsc_hz", self.clock.hz.to_string()),
        ]
    }

    fn note_arguments(&mut self, probe: &Traced) {
        if !probe.arguments.is_empty()
            && self.arguments.len() < MOST_NAMED
            && !self.arguments.contains_key(&probe.name)
        {
            let names = probe.arguments.clone();
            self.arguments.insert(probe.name.clone(), names);
        }
    }
}

impl Render<Hit<'_>> for Hits {
    fn record(&mut self, hit: &Hit<'_>, out: &mut dyn Write) -> io::Result<()> {
        use column::*;
        let line = hit.line;
        if let Some(probe) = hit.probe {
            self.note_arguments(probe);
        }
        let table = &mut self.table;
        table.number(TIME, self.clock.unix_ns(line.tsc).cast_signed());
        table.number(TSC, line.tsc.cast_signed());
        table.text(EVENT, &line.event);
        let [provider, module, function, name] = parts(&line.probe);
        for (column, part) in [
            (PROVIDER, provider),
            (MODULE, module),
            (FUNCTION, function),
            (NAME, name),
        ] {
            table.text(column, part);
        }
        table.number(CPU, line.cpu.into());
        for (column, number) in [(PID, line.pid), (TID, line.tid)] {
            if let Some(number) = number {
                table.number(column, number.into());
            }
        }
        if let Some(comm) = &line.comm {
            table.text(COMM, comm);
        }
        table.number(PC, number(&line.pc).unwrap_or(0).cast_signed());
        if let Some(returned) = line.returned.as_deref().and_then(number) {
            table.number(RETURNED, returned.cast_signed());
        }
        let arguments = line.args.iter().flatten().take(ARGUMENTS);
        for (place, argument) in arguments.enumerate() {
            if let Some(argument) = number(argument) {
                table.number(ARGUMENT + place, argument.cast_signed());
            }
        }
        for (place, text) in &line.strings {
            let place = place.parse::<usize>().ok();
            let place = place.filter(|place| *place < ARGUMENTS);
            if let (Some(place), Some(text)) = (place, text) {
                table.text(ARGUMENT + ARGUMENTS + place, text);
            }
        }
        table.texts(KSTACK, &line.kstack);
        table.texts(USTACK, &line.ustack);
        table.end_row(out)
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let notes = self.notes();
        self.table.finish(&notes, out)
    }

    fn cut_off(&self, intact: u64) -> Option<CutOff> {
        self.table.cut_off(intact, &self.notes())
    }
}

/// Returns the parts of a probe's name. The function of a program may have colons of its own.
fn parts(probe: &str) -> [&str; 4] {
    let (provider, rest) = probe.split_once(':').unwrap_or(("", probe));
    let (module, rest) = rest.split_once(':').unwrap_or(("", rest));
    let (function, name) = rest.rsplit_once(':').unwrap_or((rest, ""));
    [provider, module, function, name]
}
