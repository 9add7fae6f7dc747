//! Writing a trace to a file or a stream, on a thread of its own.
//!
//! The thread owns the trace and the writer. However the trace ends, its traps are removed first.
//! The events recorded until then are still written.

use crate::output_file::Output;
use crate::protocol::event::ClockPair;
use crate::tracing::{Stop, Stopper, TracePanicked, TraceStartError};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use introspect::kernel::symbols::Symbols;
use probes::engine::ProbeStats;
use probes::event::Event;
use serde::Serialize;
use trace_devices::render::CutOff;
#[cfg(feature = "export")]
use trace_devices::render::Render;
use trace_devices::trace_line::TraceLine;

use crate::args::Format;
#[cfg(feature = "export")]
use crate::export::parquet::{Hit, Hits};
use crate::guest_kernel::symbolize;
use crate::protocol::event::EventLine;
use crate::protocol::trace::{Counts, Traced};
use crate::server::outbox::Outbox;
use crate::tracing::{Tracing, text};
use crate::vm::Vm;

/// The result of a trace.
#[derive(Debug)]
pub struct Summary {
    /// The counts of all probes together.
    pub counts: Counts,
    /// The traced probes with their counts, for the demo.
    #[cfg_attr(not(feature = "guests"), expect(dead_code))]
    pub probes: Vec<(Traced, ProbeStats)>,
    /// The result of writing the output.
    pub written: io::Result<()>,
}

/// A running trace.
pub struct Trace {
    stopper: Stopper,
    thread: JoinHandle<Summary>,
}

impl Trace {
    /// Starts to write the records of `tracing` from `vm`'s machine, whose kernel has `symbols`. If
    /// `output` fails, the trace ends and the machine is stopped.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn start(
        vm: Arc<Vm>,
        tracing: Tracing,
        symbols: Symbols,
        output: Output,
        format: Format,
    ) -> Result<Self, TraceStartError> {
        let (stopper, stop) = Stopper::new(tracing.waiter());
        let hz = vm.tsc_hz();
        let thread = std::thread::Builder::new()
            .name("trace".into())
            .spawn(move || {
                let mut writer = Writer::new(format, hz);
                writer.symbols = Some(symbols);
                let summary = run(&vm, tracing, writer, output, &stop);
                if summary.written.is_err() {
                    vm.machine.stop();
                }
                summary
            })?;
        Ok(Self { stopper, thread })
    }

    /// Removes the traps and writes the remaining events.
    ///
    /// # Errors
    /// If the thread panicked.
    pub fn finish(self) -> Result<Summary, TracePanicked> {
        drop(self.stopper);
        self.thread.join().map_err(|_| TracePanicked)
    }
}

fn run(vm: &Vm, mut tracing: Tracing, mut writer: Writer, output: Output, stop: &Stop) -> Summary {
    let (written, each) = match Outbox::new(output) {
        Ok(outbox) => follow(vm, &mut tracing, &mut writer, outbox, stop),
        Err(error) => (Err(error), tracing.stop()),
    };
    Summary {
        counts: tracing.counts(&each),
        probes: tracing.traced().iter().cloned().zip(each).collect(),
        written,
    }
}

fn follow(
    vm: &Vm,
    tracing: &mut Tracing,
    writer: &mut Writer,
    mut outbox: Outbox,
    stop: &Stop,
) -> (io::Result<()>, Vec<ProbeStats>) {
    // Only a table can fail, and there is none here.
    if let Err(error) = writer.begin(tracing.began()) {
        return (Err(error), tracing.stop());
    }
    let mut events = Vec::new();
    loop {
        let ended = stop.wait();
        tracing.take_up(vm);
        let each = if ended { tracing.stop() } else { Vec::new() };
        // A slow reader loses events and delays nobody.
        let room = outbox.has_room();
        if ended || room == Ok(true) {
            tracing.drain(|event| events.push(event));
            if let Err(error) = writer.write(&events, tracing.traced()) {
                return (Err(error), tracing.stop());
            }
            events.clear();
        }
        let put = outbox.put(writer.take());
        if ended || room.is_err() || put.is_err() {
            let each = if ended { each } else { tracing.stop() };
            return (outbox.finish(), each);
        }
    }
}

/// A formatter of events as lines.
pub struct Writer {
    format: Format,
    symbols: Option<Symbols>,
    hz: u64,
    begin: ClockPair,
    /// The bytes to be written.
    bytes: Vec<u8>,
    /// The table of the events, from the first clock on.
    #[cfg(feature = "export")]
    table: Option<Hits>,
}

/// The first line of a JSON trace.
#[derive(Serialize)]
struct JsonClock {
    event: &'static str,
    clock: &'static str,
    #[serde(flatten)]
    pair: ClockPair,
    hz: u64,
}

impl Writer {
    /// Returns a writer for events of a clock with `hz` ticks per second.
    pub fn new(format: Format, hz: u64) -> Self {
        Self {
            format,
            symbols: None,
            hz: hz.max(1),
            begin: ClockPair { tsc: 0, unix_ns: 0 },
            bytes: Vec::new(),
            #[cfg(feature = "export")]
            table: None,
        }
    }

    /// Adds the lines before the first event.
    ///
    /// # Errors
    /// If a table cannot be made.
    pub fn begin(&mut self, pair: ClockPair) -> io::Result<()> {
        self.begin = pair;
        #[cfg(feature = "export")]
        if self.format == Format::Parquet {
            self.table = Some(Hits::new(pair, self.hz)?);
        }
        if self.format == Format::Json {
            let line = JsonClock {
                event: "clock",
                clock: "tsc",
                pair,
                hz: self.hz,
            };
            json_line(&mut self.bytes, &line);
        }
        Ok(())
    }

    fn write(&mut self, events: &[Event], probes: &[Traced]) -> io::Result<()> {
        for event in events {
            if self.format == Format::Text {
                if let Some(line) = TraceLine::of(event) {
                    self.bytes.extend(line.to_bytes());
                }
                continue;
            }
            let probe = probes.get(usize::try_from(event.probe).unwrap_or(usize::MAX));
            let symbols = self.symbols.as_ref();
            let line = EventLine::new(event, probe, &|pc| symbolize(symbols, pc));
            self.line(&line, probe)?;
        }
        Ok(())
    }

    /// Adds an event of `probe`.
    ///
    /// # Errors
    /// If a table cannot be continued.
    pub fn line(&mut self, line: &EventLine, probe: Option<&Traced>) -> io::Result<()> {
        match self.format {
            Format::Json => json_line(&mut self.bytes, line),
            Format::Text => {
                if let Some(line) = line.trace_line() {
                    self.bytes.extend(line.to_bytes());
                }
            }
            // These formats are for scripts only; here they mean the usual form.
            Format::Events | Format::Collapsed => {
                let ticks = line.tsc.saturating_sub(self.begin.tsc);
                let seconds = ticks as f64 / self.hz as f64;
                self.bytes.extend(text::line(line, probe, seconds).bytes());
                self.bytes.push(b'\n');
            }
            #[cfg(feature = "export")]
            Format::Parquet => {
                if let Some(table) = &mut self.table {
                    table.record(&Hit { line, probe }, &mut self.bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Adds the end of a table. Nothing may be added then.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn finish(&mut self) -> io::Result<()> {
        #[cfg(feature = "export")]
        if let Some(table) = &mut self.table {
            return table.finish(&mut self.bytes);
        }
        Ok(())
    }

    /// Returns the end for a file that has `intact` bytes of a table.
    pub fn cut_off(&self, intact: u64) -> Option<CutOff> {
        #[cfg(feature = "export")]
        if let Some(table) = &self.table {
            return table.cut_off(intact);
        }
        let _ = intact;
        None
    }

    /// Returns the bytes made since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

/// Adds `line`, which can always be serialised: its keys are text.
fn json_line(bytes: &mut Vec<u8>, line: &impl Serialize) {
    if let Err(error) = serde_json::to_writer(&mut *bytes, line) {
        log::error!("invalid event: expected JSON: {error}");
    }
    bytes.push(b'\n');
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use probes::event::EventKind;

    use super::*;

    fn written(format: Format) -> String {
        let probe = Traced {
            name: "kprobe:vmlinux:vfs_read:entry".into(),
            function: "vfs_read".into(),
            arguments: vec!["file".into(), "buf".into()],
            signed: vec![false, false],
        };
        let back = Traced {
            name: "kprobe:vmlinux:vfs_read:return".into(),
            ..probe.clone()
        };
        let mut writer = Writer::new(format, 1_000_000);
        let entry = Event {
            probe: 0,
            kind: EventKind::Entry,
            vcpu: 1,
            pc: 0xffff_ffff_8110_0000,
            tsc: 0x96_d201_1acb,
            pid: Some(86),
            tid: Some(87),
            arguments: vec![1, 2, 3, u64::MAX],
            comm: Some(*b"fsload\0\0\0\0\0\0\0\0\0\0"),
            kernel_stack: Vec::new(),
            user_stack: Vec::new(),
            strings: Vec::new(),
        };
        let exit = Event {
            probe: 1,
            kind: EventKind::Return,
            pid: None,
            tid: None,
            comm: None,
            arguments: vec![9],
            ..entry.clone()
        };
        let tsc = 0x96_d201_1acb - 1_500_000;
        writer.begin(ClockPair { tsc, unix_ns: 6 }).unwrap();
        writer.write(&[entry, exit], &[probe, back]).unwrap();
        String::from_utf8(writer.take()).unwrap()
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
    fn events_are_lines_for_people() {
        assert_eq!(
            written(Format::Events),
            "    1.500000   1      87 fsload          -> vfs_read(file=0x1, buf=0x2, 0x3, 0xffffffffffffffff)\n    \
             1.500000   1       - -               <- vfs_read = 9\n"
        );
    }

    #[test]
    fn json_says_its_clock_and_names_the_probe() {
        assert_eq!(
            written(Format::Json),
            "{\"event\":\"clock\",\"clock\":\"tsc\",\"tsc\":647766882155,\"unix_ns\":6,\"hz\":1000000}\n\
             {\"event\":\"entry\",\"probe\":\"kprobe:vmlinux:vfs_read:entry\",\"function\":\"vfs_read\",\"pc\":\"0xffffffff81100000\",\
             \"tsc\":647768382155,\"cpu\":1,\"pid\":86,\"tid\":87,\"comm\":\"fsload\",\
             \"args\":[\"0x1\",\"0x2\",\"0x3\",\"0xffffffffffffffff\"]}\n\
             {\"event\":\"return\",\"probe\":\"kprobe:vmlinux:vfs_read:return\",\"function\":\"vfs_read\",\"pc\":\"0xffffffff81100000\",\
             \"tsc\":647768382155,\"cpu\":1,\"pid\":null,\"tid\":null,\"return\":\"0x9\"}\n"
        );
    }
}
