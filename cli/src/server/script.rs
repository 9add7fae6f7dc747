//! A script streamed to another command over the control socket, until either side ends.
//!
//! The first line names the traced probes, or the faults of the script. Then comes a line for each
//! piece of output, and a last one with the counts.
//!
//! The client ends the script by closing its side; a script that exits ends the stream. A slow
//! client loses output, which is counted: the guest does not wait for it.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use probes::engine::{WatchedStream, Woken};

use crate::protocol::end::MachineEnd;
use crate::protocol::error::RequestError;
use crate::protocol::script::{Line, PIECE, ScriptRequest, Text};
use crate::scripting::{Job, Rendered};
use crate::server::outbox::Outbox;
use crate::server::trace::{Interval, PATIENCE, write};
use crate::vm::Vm;

/// Adds what was put out, in lines that the client takes.
fn write_output(lines: &mut Vec<u8>, rendered: &Rendered) -> io::Result<()> {
    let text = |piece: &[u8]| Text::from(piece.to_vec());
    for piece in pieces(&rendered.out) {
        let (out, err) = (text(piece), Text::default());
        write(lines, &Line::Output { out, err })?;
    }
    for piece in pieces(&rendered.err) {
        let (out, err) = (Text::default(), text(piece));
        write(lines, &Line::Output { out, err })?;
    }
    Ok(())
}

/// Adds a line for each map of the script.
fn write_maps(lines: &mut Vec<u8>, job: &mut Job) -> io::Result<()> {
    let maps = job.maps().into_iter();
    maps.map(Line::Map).try_for_each(|line| write(lines, &line))
}

/// Returns parts of at most [`PIECE`] bytes. Characters stay whole.
fn pieces(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    const LONGEST_CHARACTER: usize = 4;
    std::iter::from_fn(move || {
        let most = bytes.len().min(PIECE);
        let goes_on = |end: &usize| bytes.get(*end).is_some_and(|byte| byte & 0xc0 == 0x80);
        let ends = (0..LONGEST_CHARACTER).map(|less| most.saturating_sub(less));
        // Bytes that are not text are cut anywhere.
        let end = ends.filter(|end| *end > 0).find(|end| !goes_on(end));
        let (piece, rest) = bytes.split_at(end.unwrap_or(most));
        bytes = rest;
        Some(piece).filter(|piece| !piece.is_empty())
    })
}

/// Runs a script until the client closes its side, the script exits, or the machine ends.
///
/// # Errors
/// If the client has disconnected.
pub fn serve(vm: &Arc<Vm>, request: &ScriptRequest, stream: UnixStream) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut outbox = Outbox::new(Box::new(stream.try_clone()?))?;
    let mut first = Vec::new();
    let (mut job, rendered) = match start(vm, request) {
        Ok(started) => started,
        Err(error) => {
            write(&mut first, &Line::Refused(error))?;
            // The client may have disconnected, which does not matter here.
            let _ = outbox.put(first);
            return outbox.finish();
        }
    };
    let begin = Line::Begin {
        probes: job.probes(),
        skipped: job.skipped().to_vec(),
        open: job.waiting().map(str::to_owned).collect(),
    };
    write(&mut first, &begin)?;
    write_output(&mut first, &rendered)?;
    let mut failed = outbox.put(first).is_err();
    let mut interval = Interval::of(request.whose.interval_ms);
    let waiter = job.waiter();
    let wait = || waiter.wait(Some(WatchedStream::until_closed(&stream)));
    while !(failed || job.has_exited() || wait() == Woken::Stream || vm.has_ended()) {
        job.take_up();
        // A slow client loses output and delays nobody.
        let room = outbox.has_room();
        if room == Ok(true) {
            let mut lines = Vec::new();
            write_output(&mut lines, &job.step())?;
            if interval.is_over() {
                write_maps(&mut lines, &mut job)?;
                let counts = job.counts();
                write(&mut lines, &Line::Counts { counts })?;
            }
            failed = outbox.put(lines).is_err();
        }
        failed |= room.is_err();
    }
    let mut last = Vec::new();
    if request.whose.interval_ms > 0 {
        write_maps(&mut last, &mut job)?;
    }
    let (rendered, counts) = job.finish();
    write_output(&mut last, &rendered)?;
    let symbols = vm.engine.get().map(|engine| &engine.view().kernel.symbols);
    let machine = MachineEnd::of(vm, symbols);
    write(&mut last, &Line::End { counts, machine })?;
    // The call of `finish` reports a disconnected client.
    let _ = outbox.put(last);
    outbox.finish()
}

fn start(vm: &Arc<Vm>, request: &ScriptRequest) -> Result<(Job, Rendered), RequestError> {
    let view = vm.kernel_view()?;
    let engine = vm.engine(&view);
    Job::start(vm, &engine, &view, request)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::protocol::trace::LONGEST_LINE;

    #[test]
    fn output_of_any_size_comes_whole_in_lines_that_are_taken() {
        let characters = "aé→𝄞".repeat(3 * PIECE / 10).into_bytes();
        for out in [
            characters,
            vec![0x1b; 2 * PIECE + 1],
            vec![0x80; 2 * PIECE],
            b"short\n".to_vec(),
            Vec::new(),
        ] {
            let rendered = Rendered {
                out: out.clone(),
                err: b"told\n".to_vec(),
            };
            let mut lines = Vec::new();
            write_output(&mut lines, &rendered).unwrap();
            let mut shown = Rendered::default();
            for line in lines.split_inclusive(|byte| *byte == b'\n') {
                assert!(line.len() as u64 <= LONGEST_LINE);
                let Line::Output { out, err } = serde_json::from_slice(line).unwrap() else {
                    panic!("no output")
                };
                assert_eq!(
                    matches!(out, Text::Text(_)),
                    std::str::from_utf8(&rendered.out).is_ok() || out.is_empty()
                );
                shown.out.extend(out.as_bytes());
                shown.err.extend(err.as_bytes());
            }
            assert!(shown == rendered, "{} bytes", out.len());
        }
    }
}
