//! Tracing functions of a running machine to a writer, on a thread of its own.
//!
//! The thread owns the tracer and the writer. However the trace ends, its traps are removed first; what was
//! recorded until then is still written.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use probes::event::{Event, EventKind, NO_PROCESS};
use probes::function_trace::{FunctionStats, FunctionTracer, TraceStats, TracedFunction};
use probes::trace_line::TraceLine;
use serde::Serialize;

use crate::args::Format;
use crate::session::Session;

/// How often the rings are emptied. They hold some ten times what the fastest guest makes in this time.
const DRAIN_INTERVAL: Duration = Duration::from_millis(5);

/// Where a trace goes.
pub type Output = Box<dyn Write + Send>;

/// One reading of the time stamp counter and the wall clock together: converts the events' times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ClockPair {
    /// Time stamp counter, in ticks.
    pub tsc: u64,
    /// Nanoseconds since 1970, UTC.
    pub unix_ns: u64,
}

impl ClockPair {
    /// Both clocks now.
    pub fn now() -> Self {
        let tsc = vmm::host_tsc();
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            tsc,
            unix_ns: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

/// What a trace came to.
#[derive(Debug)]
pub struct Summary {
    /// All functions together.
    pub stats: TraceStats,
    /// What was traced, and how often each was hit.
    pub functions: Vec<(TracedFunction, FunctionStats)>,
    /// Whether everything could be written.
    pub written: io::Result<()>,
}

/// A trace that runs.
pub struct Trace {
    stop: Sender<()>,
    thread: JoinHandle<Summary>,
}

impl Trace {
    /// Begins to write what `tracer` records of `session`'s machine. If `output` cannot take it, the trace ends and
    /// the machine is stopped.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn start(
        session: Arc<Session>,
        tracer: FunctionTracer,
        output: Output,
        format: Format,
    ) -> Result<Self, TraceStartError> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("trace".into())
            .spawn(move || {
                let writer = Writer {
                    output,
                    format,
                    functions: tracer.functions().to_vec(),
                };
                let summary = run(&session, tracer, writer, &stopped);
                if summary.written.is_err() {
                    session.machine.stop();
                }
                summary
            })?;
        Ok(Self { stop, thread })
    }

    /// Removes the traps and writes what is left.
    ///
    /// # Errors
    /// If the thread panicked.
    pub fn finish(self) -> Result<Summary, TracePanicked> {
        drop(self.stop);
        self.thread.join().map_err(|_| TracePanicked)
    }
}

/// The trace's thread cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("the trace thread cannot be started: {0}")]
pub struct TraceStartError(#[from] io::Error);

/// A programming error on the trace's thread.
#[derive(Debug, thiserror::Error)]
#[error("the trace thread panicked: the trace is incomplete")]
pub struct TracePanicked;

fn run(
    session: &Session,
    mut tracer: FunctionTracer,
    mut writer: Writer,
    stopped: &Receiver<()>,
) -> Summary {
    let mut events = Vec::new();
    let mut written = writer.begin(ClockPair::now());
    while written.is_ok() && stopped.recv_timeout(DRAIN_INTERVAL) == Err(RecvTimeoutError::Timeout)
    {
        tracer.drain(&mut events);
        written = writer.write(&events);
        events.clear();
    }
    tracer.stop(&session.machine);
    tracer.drain(&mut events);
    if written.is_ok() {
        written = writer.write(&events);
    }
    let counts = tracer.function_stats();
    Summary {
        stats: tracer.stats(),
        functions: tracer.functions().iter().cloned().zip(counts).collect(),
        written,
    }
}

struct Writer {
    output: Output,
    format: Format,
    functions: Vec<TracedFunction>,
}

/// The first line of a JSON trace.
#[derive(Serialize)]
struct JsonClock {
    event: &'static str,
    clock: &'static str,
    #[serde(flatten)]
    pair: ClockPair,
}

/// An event as JSON. Addresses and values are hexadecimal text, since JSON readers round large numbers.
#[derive(Serialize)]
struct JsonEvent<'a> {
    event: &'static str,
    function: &'a str,
    pc: String,
    tsc: u64,
    cpu: u16,
    /// `null` where there is no process.
    pid: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<[String; 4]>,
    #[serde(rename = "return", skip_serializing_if = "Option::is_none")]
    returned: Option<String>,
}

impl Writer {
    fn begin(&mut self, pair: ClockPair) -> io::Result<()> {
        match self.format {
            Format::Text => Ok(()),
            Format::Json => {
                let line = JsonClock {
                    event: "clock",
                    clock: "tsc",
                    pair,
                };
                json_line(&mut self.output, &line)?;
                self.output.flush()
            }
        }
    }

    fn write(&mut self, events: &[Event]) -> io::Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        for event in events {
            match self.format {
                Format::Text => self.output.write_all(&TraceLine::from(event).to_bytes())?,
                Format::Json => self.event(event)?,
            }
        }
        self.output.flush()
    }

    fn event(&mut self, event: &Event) -> io::Result<()> {
        let index = usize::try_from(event.function).unwrap_or(usize::MAX);
        let function = self.functions.get(index).map_or("", |f| f.name.as_str());
        let hex = |value: u64| format!("{value:#x}");
        let (kind, args, returned) = match event.kind {
            EventKind::Entry => ("entry", Some(event.arguments.map(hex)), None),
            EventKind::Exit => ("exit", None, event.arguments.first().copied().map(hex)),
        };
        let line = JsonEvent {
            event: kind,
            function,
            pc: hex(event.pc),
            tsc: event.tsc,
            cpu: event.vcpu,
            pid: (event.pid != NO_PROCESS).then_some(event.pid),
            args,
            returned,
        };
        json_line(&mut self.output, &line)
    }
}

fn json_line(output: &mut Output, line: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *output, line).map_err(io::Error::from)?;
    output.write_all(b"\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Mutex;

    use introspect::Gva;

    use super::*;

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);
    impl Write for Memory {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(format: Format) -> String {
        let memory = Memory::default();
        let function = TracedFunction {
            name: "vfs_read".into(),
            address: Gva(0xffff_ffff_8110_0000),
            namesakes: 1,
            arguments: Some(4),
        };
        let mut writer = Writer {
            output: Box::new(memory.clone()),
            format,
            functions: vec![function],
        };
        let entry = Event {
            kind: EventKind::Entry,
            vcpu: 1,
            function: 0,
            pc: 0xffff_ffff_8110_0000,
            tsc: 0x96_d201_1acb,
            pid: 87,
            arguments: [1, 2, 3, u64::MAX],
        };
        let exit = Event {
            kind: EventKind::Exit,
            pid: NO_PROCESS,
            arguments: [9, 0, 0, 0],
            ..entry
        };
        writer.begin(ClockPair { tsc: 5, unix_ns: 6 }).unwrap();
        writer.write(&[entry, exit]).unwrap();
        let bytes = memory.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn text_is_lines_of_trace_3() {
        let text = written(Format::Text);
        assert_eq!(text.len(), 242);
        assert!(
            text.starts_with(
                "E ffffffff81100000 00000096d2011acb 0000000000000057 0000000000000001 "
            )
        );
        assert!(
            text[121..].starts_with(
                "X ffffffff81100000 00000096d2011acb ffffffffffffffff 0000000000000009 "
            )
        );
    }

    #[test]
    fn json_says_its_clock_and_names_the_function() {
        assert_eq!(
            written(Format::Json),
            "{\"event\":\"clock\",\"clock\":\"tsc\",\"tsc\":5,\"unix_ns\":6}\n\
             {\"event\":\"entry\",\"function\":\"vfs_read\",\"pc\":\"0xffffffff81100000\",\"tsc\":647768382155,\"cpu\":1,\"pid\":87,\
             \"args\":[\"0x1\",\"0x2\",\"0x3\",\"0xffffffffffffffff\"]}\n\
             {\"event\":\"exit\",\"function\":\"vfs_read\",\"pc\":\"0xffffffff81100000\",\"tsc\":647768382155,\"cpu\":1,\"pid\":null,\
             \"return\":\"0x9\"}\n"
        );
    }
}
