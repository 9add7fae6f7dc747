//! A script for another command: the control socket carries its output until one of the two ends.
//!
//! The first line says what is traced, or what is wrong with the script; then comes a line for each piece of output, and a last one with the
//! counts. The client ends the script by closing its side; a script that exits ends it from here. A client that reads too slowly loses
//! output, which is counted: the guest does not wait for it.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::request::ScriptRequest;
use super::{Counts, Job, Rendered};
use crate::session::Session;
use crate::tracing::Refusal;
use crate::tracing::outbox::Outbox;
use crate::tracing::output::DRAIN_INTERVAL;
use crate::tracing::stream::{PATIENCE, has_ended};

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

impl From<Rendered> for Line {
    fn from(Rendered { out, err }: Rendered) -> Self {
        Self::Output {
            out: out.into(),
            err: err.into(),
        }
    }
}

/// Runs a script until the client closes its side, the script exits, or the machine ends.
///
/// # Errors
/// If the client has gone.
pub fn serve(
    session: &Arc<Session>,
    request: &ScriptRequest,
    mut stream: UnixStream,
) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    // Waiting for the client to end it is waiting for the next time to drain.
    stream.set_read_timeout(Some(DRAIN_INTERVAL))?;
    let mut outbox = Outbox::new(Box::new(stream.try_clone()?))?;
    let mut first = Vec::new();
    let (mut job, rendered) = match start(session, request) {
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
    write(&mut first, &rendered.into())?;
    let mut failed = outbox.put(first).is_err();
    loop {
        let ended = failed || job.has_exited() || has_ended(&mut stream)? || session.has_ended();
        if ended {
            break;
        }
        // A client that reads too slowly loses output, and holds up nobody.
        let room = outbox.has_room();
        if room == Ok(true) {
            let rendered = job.step();
            let mut lines = Vec::new();
            if !rendered.is_empty() {
                write(&mut lines, &rendered.into())?;
            }
            failed = outbox.put(lines).is_err();
        }
        failed |= room.is_err();
    }
    let (rendered, counts) = job.finish();
    let mut last = Vec::new();
    write(&mut last, &rendered.into())?;
    write(&mut last, &Line::End { counts })?;
    // A client that has gone is told of by `finish`.
    let _ = outbox.put(last);
    outbox.finish()
}

fn start(session: &Arc<Session>, request: &ScriptRequest) -> Result<(Job, Rendered), Refusal> {
    let view = session.locate().map_err(|error| error.to_string())?.ok_or(
        "the guest's kernel has not booted far enough to be traced, or its file is not at hand",
    )?;
    let view = Arc::new(view);
    let engine = session.engine(&view);
    Job::start(session, &engine, &view, request)
}

fn write(output: &mut impl Write, line: &Line) -> io::Result<()> {
    serde_json::to_writer(&mut *output, line).map_err(io::Error::from)?;
    output.write_all(b"\n")
}
