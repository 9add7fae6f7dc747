//! Decoders of untrusted input, for fuzz targets: each takes bytes and returns the result.
//!
//! The untrusted peers are the clients of a machine, and for a client the machine itself, whose
//! process a guest may have taken over.

use std::fs::File;

use clap::ValueEnum;
use probes::clock::Clock;
use serde::de::DeserializeOwned;

use crate::args::Format;
use crate::client::dt;
use crate::client::streams::StreamFormat;
use crate::client::streams::shape::{Guest, shape};
use crate::commands::trace_output::Writer;
use crate::expect::Expectation;
use crate::file_memory::{PAGE, Page, PageSource};
use crate::kdump::{self, Kdump};
use crate::protocol::control::{Answer, Command, decode, encode};
use crate::protocol::ports::EventName;
use crate::protocol::ports::{self, Request, Waited};
use crate::protocol::script;
use crate::protocol::trace::Line;
use crate::protocol::trace::Traced;
use crate::registry::{VmName, pid_in};

/// Decodes a request on the control socket with its content, and returns it encoded anew.
#[must_use]
pub fn question(line: &str) -> Option<String> {
    let command: Command = decode(line).ok()?;
    match &command {
        Command::Trace(request) => {
            let _ = (request.frames(), request.filter(None));
        }
        Command::Script(request) => {
            let _ = (request.parse().is_ok(), request.options());
        }
        _ => {}
    }
    encode(command).ok()
}

/// Opens the bytes of a file as a dump of kdump, and reads its first pages and last one. Returns
/// the number of those that are there.
#[must_use]
pub fn dump(bytes: &[u8]) -> Option<usize> {
    const PAGES: usize = 64;
    let file = rustix::fs::memfd_create("dump", rustix::fs::MemfdFlags::CLOEXEC).ok()?;
    rustix::io::write(&file, bytes).ok()?;
    let file = File::from(file);
    if !kdump::is_meant(&file).ok()? {
        return None;
    }
    let dump = Kdump::open(file).ok()?;
    let ranges = dump.ranges();
    let pages = ranges
        .iter()
        .flat_map(|range| range.clone().step_by(PAGE as usize));
    let last = ranges.last().map(|range| range.end - PAGE);
    let mut page: Page = Box::new([0; PAGE as usize]);
    let read = pages.take(PAGES).chain(last);
    Some(
        read.filter_map(|address| dump.page(address, &mut page))
            .count(),
    )
}

/// Decodes an answer on the control socket; returns it encoded anew, and the text that a user sees.
#[must_use]
pub fn answer(line: &str) -> Option<(String, Option<String>)> {
    let answer: Answer = decode(line).ok()?;
    let shown = crate::commands::shown(&answer);
    Some((encode(answer).ok()?, shown))
}

/// Receives requests for ports until one is malformed. Returns the known ones, sent again, and
/// their size in `stream` in bytes, as long as each one so far was known.
#[must_use]
pub fn port_requests(mut stream: &[u8]) -> (Vec<u8>, usize) {
    let whole = stream.len();
    let mut sent = Vec::new();
    let mut known = 0;
    while let Ok(Ok(request)) = Request::receive(&mut stream) {
        if request.send(&mut sent).is_err() {
            break;
        }
        known = whole - stream.len();
    }
    (sent, known)
}

/// Receives a machine's answers about ports and returns their size in bytes.
#[must_use]
pub fn port_answers(mut stream: &[u8]) -> usize {
    let mut all = 0;
    while let Ok((_, bytes)) = ports::receive_answer(&mut stream) {
        all += bytes.len();
        let _ = ports::clock_of(&bytes);
        let _ = bytes.first().map(|byte| Waited::of(*byte));
    }
    all
}

fn lines<L: DeserializeOwned>(stream: &[u8]) -> impl Iterator<Item = L> {
    let lines = stream.split_inclusive(|byte| *byte == b'\n');
    lines.map_while(|line| serde_json::from_slice(line).ok())
}

/// Decodes a machine's trace stream and returns the text that a user sees, in the format of this
/// number.
#[must_use]
pub fn trace_stream(stream: &[u8], format: u8) -> Vec<u8> {
    let formats = Format::value_variants();
    let format = formats.get(usize::from(format) % formats.len().max(1));
    let format = format.copied().unwrap_or(Format::Events);
    let mut writer = Writer::new(format, 1);
    let mut traced: Vec<Traced> = Vec::new();
    for line in lines::<Line>(stream) {
        match line {
            Line::Begin {
                probes, clock, hz, ..
            } => {
                traced = probes;
                writer = Writer::new(format, hz);
                if writer.begin(clock).is_err() {
                    break;
                }
            }
            Line::More { probe } => traced.push(probe),
            Line::Event { probe, event } => {
                if writer.line(&event, traced.get(probe)).is_err() {
                    break;
                }
            }
            Line::Counts { .. } => {}
            Line::End { .. } | Line::Refused { .. } => break,
        }
    }
    let _ = writer.finish();
    writer.take()
}

/// Decodes a machine's script stream and returns its output.
#[must_use]
pub fn script_stream(stream: &[u8]) -> Vec<u8> {
    let mut shown = Vec::new();
    #[cfg(feature = "export")]
    let mut metrics = crate::export::metrics::Metrics::default();
    for line in lines::<script::Line>(stream) {
        match line {
            script::Line::Output { out, err } => {
                shown.extend_from_slice(out.as_bytes());
                shown.extend_from_slice(err.as_bytes());
            }
            #[cfg(feature = "export")]
            script::Line::Counts { counts } => metrics.take_script(&counts),
            #[cfg(feature = "export")]
            script::Line::Map(map) => metrics.take_map(map),
            _ => {}
        }
    }
    // Of metrics nothing is shown on a terminal.
    #[cfg(feature = "export")]
    let _ = metrics.families();
    shown
}

/// Shows records of a trace device's port, cut from `records`, in the format of this number; `None`
/// if there is no such format.
#[must_use]
pub fn events(records: &[u8], ptrace: bool, format: u8, hz: u64) -> Option<Vec<u8>> {
    let formats = StreamFormat::value_variants();
    let format = *formats.get(usize::from(format) % formats.len().max(1))?;
    let (port, size) = match ptrace {
        true => (
            EventName::Ptrace,
            trace_devices::ptrace::record::RECORD_BYTES,
        ),
        false => (EventName::Trace, trace_devices::trace_line::LINE_BYTES),
    };
    let clock = Clock {
        tsc: 1 << 20,
        unix_ns: 1 << 60,
        hz,
    };
    let name = |address: u64| (address & 1 != 0).then(|| format!("f{address:x}"));
    let mut shape = shape(port, format, &Guest::new(Some(clock), name)).ok()?;
    let mut shown = Vec::new();
    for record in records.chunks(size) {
        let _ = shape.record(record, &mut shown);
    }
    let _ = shape.finish(&mut shown);
    Some(shown)
}

/// Shows events of the device dt(4), cut from `events`.
#[must_use]
pub fn dt_events(events: &[u8], json: bool) -> Option<Vec<u8>> {
    let format = match json {
        true => StreamFormat::Json,
        false => StreamFormat::Text,
    };
    let mut shape = dt::show::shape(format, &dt::show::Names::default()).ok()?;
    let mut shown = Vec::new();
    for event in events.chunks(dt::ABI.event_size()) {
        let _ = shape.record(event, &mut shown);
    }
    let _ = shape.finish(&mut shown);
    Some(shown)
}

/// Parses an expectation and returns its rule and its bound.
#[must_use]
pub fn expectation(text: &str) -> Option<(String, String)> {
    let expectation = Expectation::parse(text).ok()?;
    Some((expectation.rule(), expectation.bound()))
}

/// Parses a machine's name.
#[must_use]
pub fn machine_name(text: &str) -> Option<String> {
    let name: VmName = text.parse().ok()?;
    Some(name.as_str().to_owned())
}

/// Returns the process id in a lock file.
#[must_use]
pub fn process_of_lock(mut file: &[u8]) -> String {
    pid_in(&mut file)
}
