//! A script for another command: the control socket carries its output until one of the two ends.
//!
//! The first line says what is traced, or what is wrong with the script; then comes a line for each piece of output, and a last one with the
//! counts. The client ends the script by closing its side; a script that exits ends it from here. A client that reads too slowly loses
//! output, which is counted: the guest does not wait for it.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::commands::trace_output::DRAIN_INTERVAL;
use crate::end_report::MachineEnd;
use crate::protocol::script::ScriptRequest;
use crate::scripting::{Counts, Job, Rendered};
use crate::server::outbox::Outbox;
use crate::server::trace::{LONGEST_LINE, PATIENCE, has_ended, write};
use crate::tracing::Refusal;
use crate::vm::Vm;

/// Most bytes of output in one line.
const PIECE: usize = 1 << 20;
/// What a byte takes in JSON at most: `\u001b`.
const ESCAPED: usize = 6;
// A map may have more to show than the longest line holds: it comes in several.
const _: () = assert!((ESCAPED * 2 * PIECE) as u64 <= LONGEST_LINE);

/// A line of the stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "kebab-case")]
pub enum Line {
    /// The first.
    Begin {
        /// Names of the probes that are enabled.
        probes: Vec<String>,
        /// Probes of patterns that cannot be traced, and why.
        skipped: Vec<String>,
    },
    /// What was put out.
    Output {
        /// For standard output. What is no UTF-8 is given as its bytes.
        #[serde(default, skip_serializing_if = "Text::is_empty")]
        out: Text,
        /// For standard error.
        #[serde(default, skip_serializing_if = "Text::is_empty")]
        err: Text,
    },
    /// The last.
    End {
        /// What it came to.
        counts: Counts,
        /// Why the machine has ended, if it has.
        machine: Option<MachineEnd>,
    },
    /// Nothing is traced.
    Refused {
        /// What is wrong, as it is to be shown.
        message: String,
    },
}

/// Bytes that mostly are text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Text {
    /// UTF-8.
    Text(String),
    /// Something else: a guest says what it likes.
    Bytes(Vec<u8>),
}

impl Default for Text {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

impl Text {
    fn is_empty(&self) -> bool {
        self.as_bytes().is_empty()
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Text {
    fn from(bytes: Vec<u8>) -> Self {
        String::from_utf8(bytes).map_or_else(|error| Self::Bytes(error.into_bytes()), Self::Text)
    }
}

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

/// Parts of [`PIECE`] bytes at most. Characters stay whole.
fn pieces(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    const LONGEST_CHARACTER: usize = 4;
    std::iter::from_fn(move || {
        let most = bytes.len().min(PIECE);
        let goes_on = |end: &usize| bytes.get(*end).is_some_and(|byte| byte & 0xc0 == 0x80);
        let ends = (0..LONGEST_CHARACTER).map(|less| most.saturating_sub(less));
        // What is no text is cut anywhere.
        let end = ends.filter(|end| *end > 0).find(|end| !goes_on(end));
        let (piece, rest) = bytes.split_at(end.unwrap_or(most));
        bytes = rest;
        Some(piece).filter(|piece| !piece.is_empty())
    })
}

/// Runs a script until the client closes its side, the script exits, or the machine ends.
///
/// # Errors
/// If the client has gone.
pub fn serve(vm: &Arc<Vm>, request: &ScriptRequest, mut stream: UnixStream) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    // Waiting for the client to end it is waiting for the next time to drain.
    stream.set_read_timeout(Some(DRAIN_INTERVAL))?;
    let mut outbox = Outbox::new(Box::new(stream.try_clone()?))?;
    let mut first = Vec::new();
    let (mut job, rendered) = match start(vm, request) {
        Ok(started) => started,
        Err(message) => {
            write(&mut first, &Line::Refused { message })?;
            // Whether the client is there to read it is its own affair.
            let _ = outbox.put(first);
            return outbox.finish();
        }
    };
    let begin = Line::Begin {
        probes: job.probes(),
        skipped: job.skipped().to_vec(),
    };
    write(&mut first, &begin)?;
    write_output(&mut first, &rendered)?;
    let mut failed = outbox.put(first).is_err();
    while !(failed || job.has_exited() || has_ended(&mut stream)? || vm.has_ended()) {
        // A client that reads too slowly loses output, and holds up nobody.
        let room = outbox.has_room();
        if room == Ok(true) {
            let mut lines = Vec::new();
            write_output(&mut lines, &job.step())?;
            failed = outbox.put(lines).is_err();
        }
        failed |= room.is_err();
    }
    let (rendered, counts) = job.finish();
    let mut last = Vec::new();
    write_output(&mut last, &rendered)?;
    let symbols = vm.engine.get().map(|engine| &engine.view().symbols);
    let machine = MachineEnd::of(vm, symbols);
    write(&mut last, &Line::End { counts, machine })?;
    // A client that has gone is told of by `finish`.
    let _ = outbox.put(last);
    outbox.finish()
}

fn start(vm: &Arc<Vm>, request: &ScriptRequest) -> Result<(Job, Rendered), Refusal> {
    let view = vm.kernel_view()?;
    let engine = vm.engine(&view);
    Job::start(vm, &engine, &view, request)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

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
