//! A view's script on a machine, read on a thread of its own.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use super::table::{Collector, Frame};
use super::views::View;
use crate::client::control::connect;
use crate::commands::script::tell;
use crate::commands::trace::Lines;
use crate::protocol::control::Command;
use crate::protocol::end::MachineEnd;
use crate::protocol::script::{Form, Line, ScriptRequest};
use crate::registry::Running;
use crate::report::Failure;

/// An event of the script.
pub enum Event {
    /// The maps of a tick.
    Tick(Frame),
    /// Nothing yet.
    None,
    /// The script has ended.
    End(Result<(), Failure>),
}

/// A running script. It ends when this is dropped.
pub struct Feed {
    ticks: Receiver<Result<Frame, Result<(), Failure>>>,
    stream: UnixStream,
}

impl Feed {
    /// Starts a view's script.
    ///
    /// # Errors
    /// If the machine cannot be reached.
    pub fn start(machine: &Running, view: &View) -> Result<Self, Failure> {
        let request = ScriptRequest {
            text: view.script.clone(),
            file: view.title.clone(),
            form: Form::Json,
            ..ScriptRequest::default()
        };
        let stream = connect(machine, &Command::Script(request))?;
        let mut lines = Lines::of(stream.try_clone()?);
        let (sender, ticks) = channel();
        std::thread::Builder::new()
            .name("top".into())
            .spawn(move || {
                let mut collector = Collector::default();
                // A long line comes in several pieces.
                let mut pending = Vec::new();
                loop {
                    let ended = match lines.next() {
                        Ok(Line::Output { out, .. }) => {
                            pending.extend_from_slice(out.as_bytes());
                            let end = pending.iter().rposition(|byte| *byte == b'\n');
                            let rest = pending.split_off(end.map_or(0, |end| end + 1));
                            let whole = std::mem::replace(&mut pending, rest);
                            let text = String::from_utf8_lossy(&whole);
                            for frame in text.lines().filter_map(|line| collector.take(line)) {
                                // If nobody waits for it any more, the connection ends as well.
                                let _ = sender.send(Ok(frame));
                            }
                            continue;
                        }
                        Ok(Line::Begin { .. } | Line::Counts { .. } | Line::Map(_)) => continue,
                        Ok(Line::End { counts, machine }) => {
                            tell(&counts, false);
                            MachineEnd::report(machine.as_ref())
                        }
                        Ok(Line::Refused(error)) => Err(Failure::refused(error)),
                        Err(error) => Err(error),
                    };
                    let _ = sender.send(Err(ended));
                    return;
                }
            })?;
        Ok(Self { ticks, stream })
    }

    /// Returns the next event, after `patience` at most.
    pub fn next(&self, patience: Duration) -> Event {
        match self.ticks.recv_timeout(patience) {
            Ok(Ok(frame)) => Event::Tick(frame),
            Ok(Err(ended)) => Event::End(ended),
            Err(RecvTimeoutError::Timeout) => Event::None,
            Err(RecvTimeoutError::Disconnected) => Event::End(Ok(())),
        }
    }

    /// Returns the connection, for somebody who ends the script.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub fn connection(&self) -> std::io::Result<UnixStream> {
        self.stream.try_clone()
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        // A connection already closed is as good.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
