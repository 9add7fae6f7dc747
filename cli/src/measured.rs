//! Parts of the command for benchmarks and tests: the forms of a trace, without a machine.

use std::time::{Duration, Instant};

use crate::args::Format;
use crate::commands::trace_output::Writer;
use crate::protocol::event::{ClockPair, EventLine};
use crate::protocol::trace::{Line, Traced};

/// The events that are rendered again and again.
const DISTINCT: usize = 4096;

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
    let probes = ["vfs_read", "vfs_write", "do_sys_openat2", "tcp_sendmsg"].map(probe);
    let lines = (0..DISTINCT).map(|number| line(number, &probes));
    let lines: Vec<String> = lines.collect::<Result<_, _>>()?;
    let begin = Instant::now();
    let events: Result<Vec<Line>, _> = lines
        .iter()
        .map(|line| serde_json::from_str(line))
        .collect();
    let events: Vec<(usize, EventLine)> = events?
        .into_iter()
        .filter_map(|line| match line {
            Line::Event { probe, event } => Some((probe, event)),
            _ => None,
        })
        .collect();
    let parsing = begin.elapsed().mul_f64(count as f64 / DISTINCT as f64);
    let mut writer = Writer::new(format, 2_000_000_000);
    let begin = Instant::now();
    writer.begin(ClockPair {
        tsc: 0,
        unix_ns: 1_700_000_000_000_000_000,
    })?;
    let mut bytes = 0;
    let mut clock = 0;
    let mut events = events;
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
