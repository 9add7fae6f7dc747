//! The tables of the devices' streams: lines of trace(3), records of ptrace(3), events of dt(4).
//!
//! | Device | Columns |
//! |---|---|
//! | trace | `time` (null if ticks cannot be made times), `tsc`, `event`, `pid`, `pc`, `symbol`, `function`, `arg0` to `arg3`, `returned` |
//! | ptrace | `time`, `event`, `pid`, `comm`, `cpu`, `type`, `arg`, `state`, `pc`, `trap`, `syscall`, `number`, `address`, `write`, `vector` |
//! | dt | `time`, `probe`, `cpu`, `pid`, `tid`, `comm`, `arg0` to `arg9` |
//!
//! The values are those of the devices' JSON, and numbers are numbers.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;

use lru::LruCache;
use probes::clock::Clock;
use probes::syscall_table;
use trace_devices::dt::abi::{EventFields, Values};
use trace_devices::ptrace::record::{EventType, Record, STATE_NAMES, sleep_parts};
use trace_devices::ptrace::render::{Tasks, Trap};
use trace_devices::render::{CutOff, Render};
use trace_devices::trace_line::{LineKind, NO_PROCESS, TraceLine};
use trace_devices::trace_render::{self, MAX_TASKS, Symbols};

use super::{Field, Kind, Table};

/// The columns of a record.
pub trait Rows<T> {
    /// Sets the columns of one row.
    fn fill(&mut self, record: &T, table: &mut Table);
}

/// A renderer of records as a table, a row each.
#[derive(Debug)]
pub struct Rendered<R> {
    table: Table,
    rows: R,
}

impl<R> Rendered<R> {
    fn new(fields: &[Field], rows: R) -> io::Result<Self> {
        Ok(Self {
            table: Table::new(fields)?,
            rows,
        })
    }
}

impl<T, R: Rows<T>> Render<T> for Rendered<R> {
    fn record(&mut self, record: &T, out: &mut dyn Write) -> io::Result<()> {
        self.rows.fill(record, &mut self.table);
        self.table.end_row(out)
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        self.table.finish(&[], out)
    }

    fn cut_off(&self, intact: u64) -> Option<CutOff> {
        self.table.cut_off(intact, &[])
    }
}

/// The rows of lines of trace(3).
pub struct Calls {
    symbols: Symbols,
    clock: Option<Clock>,
    /// The functions that have not returned, by process.
    calls: LruCache<u64, trace_render::Calls<u64>>,
}

impl Calls {
    /// Makes the table. With a `clock`, lines have times as well as ticks.
    ///
    /// # Errors
    /// If its columns cannot be made.
    pub fn table(symbols: Symbols, clock: Option<Clock>) -> io::Result<Rendered<Self>> {
        let fields = [
            Field::optional("time", Kind::Time),
            Field::required("tsc", Kind::Unsigned),
            Field::required("event", Kind::Text),
            Field::optional("pid", Kind::Small),
            Field::required("pc", Kind::Unsigned),
            Field::optional("symbol", Kind::Text),
            Field::optional("function", Kind::Text),
            Field::optional("returned", Kind::Signed),
            Field::optional("arg0", Kind::Signed),
            Field::optional("arg1", Kind::Signed),
            Field::optional("arg2", Kind::Signed),
            Field::optional("arg3", Kind::Signed),
        ];
        let rows = Self {
            symbols,
            clock,
            calls: LruCache::sparse(MAX_TASKS),
        };
        Rendered::new(&fields, rows)
    }
}

impl Rows<TraceLine> for Calls {
    fn fill(&mut self, line: &TraceLine, table: &mut Table) {
        let calls = self
            .calls
            .get_or_insert_mut(line.pid, trace_render::Calls::default);
        let (event, function) = match line.kind {
            LineKind::Entry => {
                calls.enter(line.pc);
                ("entry", Some(line.pc))
            }
            LineKind::Exit => ("return", calls.leave()),
        };
        if let Some(clock) = &self.clock {
            table.number(0, clock.unix_ns(line.ticks).cast_signed());
        }
        table.number(1, line.ticks.cast_signed());
        table.text(2, event);
        if line.pid != NO_PROCESS {
            table.number(3, line.pid.cast_signed());
        }
        table.number(4, line.pc.cast_signed());
        if let Some(symbol) = (self.symbols)(line.pc) {
            table.text(5, &symbol);
        }
        if let Some(function) = function.and_then(|function| (self.symbols)(function)) {
            table.text(6, &function);
        }
        match line.kind {
            LineKind::Exit => table.number(7, line.arguments[0].cast_signed()),
            LineKind::Entry => {
                for (column, argument) in (8..).zip(line.arguments) {
                    table.number(column, argument.cast_signed());
                }
            }
        }
    }
}

/// The rows of records of ptrace(3).
#[derive(Debug)]
pub struct Processes {
    tasks: Tasks,
}

impl Processes {
    /// Makes the table.
    ///
    /// # Errors
    /// If its columns cannot be made.
    pub fn table() -> io::Result<Rendered<Self>> {
        let fields = [
            Field::required("time", Kind::Time),
            Field::required("event", Kind::Text),
            Field::required("pid", Kind::Small),
            Field::optional("comm", Kind::Text),
            Field::required("cpu", Kind::Small),
            Field::required("type", Kind::Small),
            Field::required("arg", Kind::Unsigned),
            Field::optional("state", Kind::Text),
            Field::optional("pc", Kind::Unsigned),
            Field::optional("trap", Kind::Text),
            Field::optional("syscall", Kind::Text),
            Field::optional("number", Kind::Unsigned),
            Field::optional("address", Kind::Unsigned),
            Field::optional("write", Kind::Small),
            Field::optional("vector", Kind::Unsigned),
        ];
        let tasks = Tasks::default();
        Rendered::new(&fields, Self { tasks })
    }
}

impl Rows<Record> for Processes {
    fn fill(&mut self, record: &Record, table: &mut Table) {
        let event = EventType::of(record.event);
        let name = event.map_or_else(|| "unknown".to_owned(), |e| e.name().to_lowercase());
        table.number(0, record.time);
        table.text(1, &name);
        table.number(2, record.pid.into());
        if let Some(comm) = self.tasks.record(record).name() {
            table.text(3, comm);
        }
        table.number(4, record.machine.into());
        table.number(5, record.event.into());
        table.number(6, record.argument.cast_signed());
        match event {
            Some(EventType::Sleep) => {
                let (state, pc) = sleep_parts(record.argument);
                if let Some(state) = STATE_NAMES.get(usize::from(state)) {
                    table.text(7, state);
                }
                table.number(8, pc.cast_signed());
            }
            Some(EventType::Trap) => match Trap::of(record.argument) {
                Trap::Fault { address, write } => {
                    table.text(9, "fault");
                    table.number(12, address.cast_signed());
                    table.number(13, write.into());
                }
                Trap::SystemCall { number } => {
                    table.text(9, "syscall");
                    if let Some(call) = syscall_table::by_number(number) {
                        table.text(10, call.name);
                    }
                    table.number(11, number.cast_signed());
                }
                Trap::Other { vector } => {
                    table.text(9, "exception");
                    table.number(14, vector.cast_signed());
                }
            },
            Some(EventType::Ints | EventType::Inte) => {
                table.number(14, record.argument.cast_signed());
            }
            _ => {}
        }
    }
}

/// The rows of events of dt(4).
#[derive(Debug)]
pub struct Device {
    names: Arc<BTreeMap<u32, String>>,
}

impl Device {
    /// Makes the table, with the names of probes by number.
    ///
    /// # Errors
    /// If its columns cannot be made.
    pub fn table(names: Arc<BTreeMap<u32, String>>) -> io::Result<Rendered<Self>> {
        let mut fields = vec![
            Field::required("time", Kind::Time),
            Field::required("probe", Kind::Text),
            Field::required("cpu", Kind::Small),
            Field::required("pid", Kind::Small),
            Field::required("tid", Kind::Small),
            Field::required("comm", Kind::Text),
        ];
        let arguments = (0..10).map(|place| Field::optional(&format!("arg{place}"), Kind::Signed));
        fields.extend(arguments);
        Rendered::new(&fields, Self { names })
    }
}

impl Rows<EventFields> for Device {
    fn fill(&mut self, event: &EventFields, table: &mut Table) {
        let time = i64::try_from(event.time.as_nanos()).unwrap_or(i64::MAX);
        table.number(0, time);
        table.text(1, self.names.get(&event.probe).map_or("", String::as_str));
        table.number(2, event.cpu.into());
        table.number(3, event.pid.into());
        table.number(4, event.tid.into());
        table.text(5, &String::from_utf8_lossy(&event.comm));
        match event.values {
            Values::Arguments(arguments) => {
                for (column, argument) in (6..).zip(arguments) {
                    table.number(column, argument);
                }
            }
            Values::Return { .. } => {}
        }
    }
}
