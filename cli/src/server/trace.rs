//! A trace streamed to another command over the control socket, until either side ends.
//!
//! The first line names the traced probes, or the reason why nothing is traced. Then comes a line
//! for each event (`event`), and a last one (`end`) with the counts.
//!
//! The client ends the trace by closing its side, as a killed client does too. A slow client loses
//! events, which are counted: the guest does not wait for it.

use std::io::{self, BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use probes::engine::{WatchedStream, Woken};
use serde::Serialize;

use crate::guest_kernel::symbolize;
use crate::protocol::end::MachineEnd;
use crate::protocol::error::RequestError;
use crate::protocol::event::EventLine;
use crate::protocol::trace::{Line, Request};
use crate::server::outbox::Outbox;
use crate::tracing::Tracing;
use crate::vm::Vm;

/// The time limit of a write: a stopped client must not keep its traps in the guest for ever.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The interval of a stream's counts.
pub struct Interval {
    length: Option<Duration>,
    last: Instant,
}

impl Interval {
    /// The shortest interval.
    const SHORTEST: Duration = Duration::from_millis(100);

    /// Begins an interval of a length in milliseconds; 0 never ends.
    pub fn of(ms: u32) -> Self {
        let length = Duration::from_millis(ms.into()).max(Self::SHORTEST);
        Self {
            length: (ms > 0).then_some(length),
            last: Instant::now(),
        }
    }

    /// Checks whether the interval is over, and begins the next one.
    pub fn is_over(&mut self) -> bool {
        let is_over = self
            .length
            .is_some_and(|length| self.last.elapsed() >= length);
        if is_over {
            self.last = Instant::now();
        }
        is_over
    }
}

/// Traces until the client closes its side, or the machine ends.
///
/// # Errors
/// If the client has disconnected.
pub fn serve(vm: &Arc<Vm>, request: &Request, stream: UnixStream) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut output = BufWriter::new(stream.try_clone()?);
    let started = start(vm, request);
    let (mut tracing, symbols) = match started {
        Ok(started) => started,
        Err(error) => return send(&mut output, &Line::Refused(error)),
    };
    let begin = Line::Begin {
        probes: tracing.traced().to_vec(),
        clock: tracing.began(),
        hz: vm.tsc_hz(),
        skipped: tracing.skipped().to_vec(),
        open: tracing.open().map(str::to_owned).collect(),
    };
    send(&mut output, &begin)?;
    let told = output
        .into_inner()
        .map_err(io::IntoInnerError::into_error)?;
    let mut outbox = Outbox::new(Box::new(told))?;
    let waiter = tracing.waiter();
    let mut known = tracing.traced().len();
    let (mut ended, mut failed) = (false, false);
    let mut interval = Interval::of(request.interval_ms);
    while !ended && !failed {
        let woken = waiter.wait(Some(WatchedStream::until_closed(&stream)));
        ended = woken == Woken::Stream || vm.has_ended();
        tracing.take_up(vm);
        let each = if ended { tracing.stop() } else { Vec::new() };
        // A slow client loses events and delays nobody.
        let room = outbox.has_room();
        let mut lines = Vec::new();
        if ended || room == Ok(true) {
            for probe in tracing.traced().get(known..).unwrap_or_default() {
                let probe = probe.clone();
                write(&mut lines, &Line::More { probe })?;
            }
            known = tracing.traced().len();
            let mut events = Vec::new();
            tracing.drain(|event| events.push(event));
            for event in events {
                let probe = usize::try_from(event.probe).unwrap_or(usize::MAX);
                let line = EventLine::new(&event, tracing.traced().get(probe), &|pc| {
                    symbolize(Some(&symbols), pc)
                });
                write(&mut lines, &Line::Event { probe, event: line })?;
            }
            if !ended && interval.is_over() {
                let each = tracing.look();
                let hits = each.iter().map(|stats| stats.hits).collect();
                let counts = tracing.counts(&each);
                write(&mut lines, &Line::Counts { counts, hits })?;
            }
        }
        if ended {
            let hits = each.iter().map(|stats| stats.hits).collect();
            let counts = tracing.counts(&each);
            let machine = MachineEnd::of(vm, Some(&symbols));
            let end = Line::End {
                counts,
                hits,
                machine,
            };
            write(&mut lines, &end)?;
        }
        failed = room.is_err() || outbox.put(lines).is_err();
    }
    drop(tracing);
    outbox.finish()
}

fn start(
    vm: &Vm,
    request: &Request,
) -> Result<(Tracing, introspect::kernel::symbols::Symbols), RequestError> {
    let view = vm.kernel_view()?;
    let symbols = view.kernel.symbols.clone();
    let engine = vm.engine(&view);
    let tracing = Tracing::start(&vm.traceable(&view), &engine, request)?;
    Ok((tracing, symbols))
}

fn send(output: &mut impl Write, line: &Line) -> io::Result<()> {
    write(output, line)?;
    output.flush()
}

/// Writes a line of a stream.
///
/// # Errors
/// If `output` does not accept it.
pub fn write(output: &mut impl Write, line: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *output, line).map_err(io::Error::from)?;
    output.write_all(b"\n")
}
