//! Parts of the command for benchmarks and tests: the forms of a trace, without a machine.

#[cfg(feature = "export")]
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(feature = "export")]
use probes::clock::Clock;

use crate::args::Format;
use crate::commands::trace_output::Writer;
#[cfg(feature = "export")]
use crate::export::otlp::{Endpoint, Form, Otlp, Record};
use crate::protocol::event::{ClockPair, EventLine};
use crate::protocol::trace::{Line, Traced};

/// The events that are rendered again and again.
const DISTINCT: usize = 4096;

/// The number of times that they are parsed.
const PARSED: usize = 64;
/// The threads that read streams.
#[cfg(feature = "export")]
const READERS: usize = 4;
/// The events that a machine sends together.
#[cfg(feature = "export")]
const TOGETHER: usize = 100;

/// The time for some events, and their size.
#[derive(Debug, Clone, Copy)]
pub struct Rendered {
    /// The time from events in memory to bytes.
    pub rendering: Duration,
    /// The time to make events of the lines that a machine sends.
    pub parsing: Duration,
    /// The bytes.
    pub bytes: u64,
}

/// Renders `count` events of a few probes as a table, or as lines of JSON.
///
/// # Errors
/// If the table cannot be made.
pub fn trace(table: bool, count: usize) -> std::io::Result<Rendered> {
    #[cfg(feature = "export")]
    let format = if table { Format::Parquet } else { Format::Json };
    #[cfg(not(feature = "export"))]
    let format = Format::Json;
    let _ = table;
    let probes = probes();
    let lines = lines(&probes)?;
    let begin = Instant::now();
    let mut events = Vec::new();
    for _ in 0..PARSED {
        events = lines
            .iter()
            .map(|line| event(line))
            .collect::<Result<_, _>>()?;
    }
    let parsing = begin
        .elapsed()
        .mul_f64(count as f64 / (PARSED * DISTINCT) as f64);
    let mut writer = Writer::new(format, 2_000_000_000);
    let begin = Instant::now();
    writer.begin(ClockPair {
        tsc: 0,
        unix_ns: 1_700_000_000_000_000_000,
    })?;
    let mut bytes = 0;
    let mut clock = 0;
    let mut rendered = 0;
    while rendered < count {
        for (probe, event) in &mut events {
            clock += 1_337;
            event.tsc = clock;
            writer.line(event, probes.get(*probe))?;
        }
        rendered += events.len();
        bytes += writer.take().len() as u64;
    }
    writer.finish()?;
    bytes += writer.take().len() as u64;
    let rendering = begin.elapsed().mul_f64(count as f64 / rendered as f64);
    Ok(Rendered {
        rendering,
        parsing,
        bytes: bytes * count as u64 / rendered as u64,
    })
}

/// The totals of many exports to one collector.
#[cfg(feature = "export")]
#[derive(Debug, Clone, Copy, Default)]
pub struct Fleet {
    /// The records that the collector has taken.
    pub taken: u64,
    /// The records that were dropped and counted.
    pub dropped: u64,
    /// The time from the first record to the last one that was handed over.
    pub handing: Duration,
    /// The time from the first record to the end of all exports.
    pub whole: Duration,
}

/// Sends the recorded stream of `events` events of each of so many machines to a collector of
/// OpenTelemetry. Several threads read the streams, as commands do.
///
/// # Errors
/// If the URL is none, or there are no threads left.
#[cfg(feature = "export")]
pub fn fleet(
    url: &str,
    machines: usize,
    events: usize,
) -> Result<Fleet, Box<dyn std::error::Error + Send + Sync>> {
    let probes = probes();
    let lines = lines(&probes)?;
    let known = probes.map(Arc::new);
    let clock = Clock {
        tsc: 0,
        unix_ns: 1_700_000_000_000_000_000,
        hz: 2_000_000_000,
    };
    let endpoint: Endpoint = url.parse()?;
    let exports: Result<Vec<Otlp>, _> = (0..machines)
        .map(|number| Otlp::start(endpoint.clone(), &format!("vm{number}"), Form::Logs))
        .collect();
    let mut exports = exports?;
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let parts = exports.chunks_mut(machines.div_ceil(READERS).max(1));
        let readers = parts.map(|part| {
            let (lines, known) = (&lines, &known);
            scope.spawn(move || -> serde_json::Result<()> {
                for (number, text) in (0..events).zip(lines.iter().cycle()) {
                    for otlp in &mut *part {
                        let (probe, line) = event(text)?;
                        otlp.record(Record::Hit {
                            line: Box::new(line),
                            probe: known.get(probe).cloned(),
                            clock,
                        });
                        if number % TOGETHER == TOGETHER - 1 {
                            otlp.flush();
                        }
                    }
                }
                Ok(())
            })
        });
        let readers: Vec<_> = readers.collect();
        let mut read = readers.into_iter().map(|reader| reader.join());
        read.try_for_each(|read| read.unwrap_or(Ok(())))
    })?;
    let handing = begin.elapsed();
    let sent: Vec<_> = std::thread::scope(|scope| {
        let ends = exports
            .into_iter()
            .map(|otlp| scope.spawn(|| otlp.finish()));
        let ends: Vec<_> = ends.collect();
        ends.into_iter().filter_map(|end| end.join().ok()).collect()
    });
    Ok(Fleet {
        taken: sent.iter().map(|sent| sent.taken).sum(),
        dropped: sent.iter().map(|sent| sent.dropped).sum(),
        handing,
        whole: begin.elapsed(),
    })
}

fn probes() -> [Traced; 4] {
    ["vfs_read", "vfs_write", "do_sys_openat2", "tcp_sendmsg"].map(probe)
}

fn lines(probes: &[Traced; 4]) -> serde_json::Result<Vec<String>> {
    (0..DISTINCT).map(|number| line(number, probes)).collect()
}

/// Returns the event of a line as a command reads it, with the number of its probe.
fn event(line: &str) -> serde_json::Result<(usize, EventLine)> {
    match serde_json::from_str(line)? {
        Line::Event { probe, event } => Ok((probe, event)),
        other => Err(serde_json::Error::io(std::io::Error::other(format!(
            "{other:?}"
        )))),
    }
}

fn probe(function: &str) -> Traced {
    Traced {
        name: format!("kprobe:vmlinux:{function}:entry"),
        function: function.to_owned(),
        arguments: ["a", "b", "c", "d"].map(str::to_owned).to_vec(),
        signed: vec![false; 4],
    }
}

/// Returns the line of one event as a machine sends it. Its arguments do not repeat.
fn line(number: usize, probes: &[Traced; 4]) -> serde_json::Result<String> {
    let mixed = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let probe = number % probes.len();
    let traced = &probes[probe];
    let hex = |value: u64| format!("{value:#x}");
    let event = EventLine {
        event: "entry".to_owned(),
        probe: traced.name.clone(),
        function: traced.function.clone(),
        pc: hex(0xffff_ffff_8100_0000 + probe as u64),
        tsc: 0,
        cpu: (number % 4) as u16,
        pid: Some((number % 64) as u32),
        tid: Some((number % 64) as u32),
        comm: Some(format!("worker/{}", number % 16)),
        args: Some(vec![
            hex(0xffff_8880_0000_0000 | mixed >> 24),
            hex(0x7ffc_0000_0000 | mixed >> 32),
            hex(mixed % 4096),
            hex(0),
        ]),
        returned: None,
        strings: Default::default(),
        kstack: Vec::new(),
        ustack: Vec::new(),
    };
    serde_json::to_string(&Line::Event { probe, event })
}

/// Renders a machine's trace stream as the table that `trace -o FILE.parquet` writes.
///
/// # Errors
/// If a line is not of such a stream.
#[cfg(feature = "export")]
pub fn table(stream: &str) -> std::io::Result<Vec<u8>> {
    let mut writer = Writer::new(Format::Parquet, 1);
    let mut traced = Vec::new();
    for line in stream.lines() {
        match serde_json::from_str(line)? {
            Line::Begin {
                probes, clock, hz, ..
            } => {
                writer = Writer::new(Format::Parquet, hz);
                writer.begin(clock)?;
                traced = probes;
            }
            Line::Event { probe, event } => writer.line(&event, traced.get(probe))?,
            _ => {}
        }
    }
    writer.finish()?;
    Ok(writer.take())
}
