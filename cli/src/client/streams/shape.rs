//! The formats in which a port's records are shown.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use probes::clock::Clock;
use trace_devices::ptrace;
use trace_devices::ptrace::record::Record;
use trace_devices::render::{CutOff, Render};
use trace_devices::trace_line::TraceLine;
use trace_devices::trace_render;

use crate::client::streams::StreamFormat;
#[cfg(feature = "export")]
use crate::export::parquet;
use crate::protocol::ports::EventName;

/// The largest number of cached names: each took a request to the machine.
const MOST_NAMES: usize = 1 << 16;

/// A renderer of a device's records as bytes. Records that are not of the device are errors.
pub type Shape = dyn Render<[u8]>;

/// The known facts about the machine whose events are shown. Cloning shares them.
#[derive(Clone)]
pub struct Guest {
    /// The clock that converts ticks to times.
    pub clock: Option<Clock>,
    names: Arc<Mutex<Names>>,
}

struct Names {
    ask: Box<dyn FnMut(u64) -> Option<String> + Send>,
    known: BTreeMap<u64, Option<String>>,
}

impl Guest {
    /// Returns a guest that calls `name` once for each address.
    pub fn new(
        clock: Option<Clock>,
        name: impl FnMut(u64) -> Option<String> + Send + 'static,
    ) -> Self {
        Self {
            clock,
            names: Arc::new(Mutex::new(Names {
                ask: Box::new(name),
                known: BTreeMap::new(),
            })),
        }
    }

    fn symbols(&self) -> trace_render::Symbols {
        let names = self.names.clone();
        Box::new(move |address| {
            let mut names = names.lock().unwrap_or_else(PoisonError::into_inner);
            let Names { ask, known } = &mut *names;
            if known.len() >= MOST_NAMES {
                known.clear();
            }
            let name = known.entry(address).or_insert_with(|| ask(address));
            name.clone()
        })
    }
}

/// Returns the shape of a port's records in a format.
///
/// # Errors
/// If the port has no such format.
pub fn shape(port: EventName, format: StreamFormat, guest: &Guest) -> Result<Box<Shape>, String> {
    let symbols = || guest.symbols();
    let clock = guest.clock;
    let known =
        || clock.ok_or("the machine has not reported its clock yet: nothing of it was traced");
    Ok(match (port, format) {
        (_, StreamFormat::Raw) | (EventName::Trace, StreamFormat::Text) => Box::new(AsIs),
        (EventName::Trace, StreamFormat::Json) => lines(trace_render::Json::new(symbols(), clock)),
        (EventName::Trace, StreamFormat::Perfetto) => {
            lines(trace_render::Perfetto::new(symbols(), known()?))
        }
        (EventName::Trace, StreamFormat::Collapsed) => {
            let hz = clock.map(|clock| clock.hz);
            lines(trace_render::Collapsed::new(symbols(), hz))
        }
        (EventName::Ptrace, StreamFormat::Text) => records(ptrace::render::Text::default()),
        (EventName::Ptrace, StreamFormat::Json) => records(ptrace::render::Json::default()),
        (EventName::Ptrace, StreamFormat::Perfetto) => records(ptrace::render::Perfetto::default()),
        (EventName::Ptrace, StreamFormat::Svg) => records(ptrace::render::Svg::default()),
        #[cfg(feature = "export")]
        (EventName::Trace, StreamFormat::Parquet) => {
            let table = parquet::Calls::table(symbols(), clock);
            lines(table.map_err(|error| error.to_string())?)
        }
        #[cfg(feature = "export")]
        (EventName::Ptrace, StreamFormat::Parquet) => {
            records(parquet::Processes::table().map_err(|error| error.to_string())?)
        }
        (EventName::Trace, StreamFormat::Svg) | (EventName::Ptrace, StreamFormat::Collapsed) => {
            return Err("not a format of this port".into());
        }
    })
}

fn lines(render: impl Render<TraceLine> + 'static) -> Box<Shape> {
    Box::new(Rendered {
        parse: |bytes| TraceLine::parse(bytes).map_err(io::Error::other),
        render,
    })
}

fn records(render: impl Render<Record> + 'static) -> Box<Shape> {
    Box::new(Rendered {
        parse: |bytes| {
            let bytes = bytes.try_into().map_err(io::Error::other)?;
            Ok(Record::parse(bytes))
        },
        render,
    })
}

/// The device's own bytes.
pub struct AsIs;

impl Render<[u8]> for AsIs {
    fn record(&mut self, record: &[u8], out: &mut dyn Write) -> io::Result<()> {
        out.write_all(record)
    }
}

struct Rendered<T, R> {
    parse: fn(&[u8]) -> io::Result<T>,
    render: R,
}

impl<T, R: Render<T>> Render<[u8]> for Rendered<T, R> {
    fn record(&mut self, record: &[u8], out: &mut dyn Write) -> io::Result<()> {
        let parsed = (self.parse)(record)?;
        self.render.record(&parsed, out)
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        self.render.finish(out)
    }

    fn cut_off(&self, intact: u64) -> Option<CutOff> {
        self.render.cut_off(intact)
    }
}
