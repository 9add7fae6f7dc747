//! One run of a host: starts the emulator, streams the job's output, ends it at its limit.

use std::fs::File;
use std::io::{self, Read, Write};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::kind::{Files, Kind, Shape};

/// The line by which a host reports that it is up; the job's output follows.
pub const UP: &str = "exotrace-host: up";
/// The words by which a host reports that the job has ended and all of its output is written.
const DOWN: &str = "exotrace-host: down";
/// The time limit of a host's boot. It takes 4 s to 15 s on an idle machine.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// The interval at which the console's file and the emulator are polled.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The number of lines of the console that an error shows.
const TAIL_LINES: usize = 15;

/// A run did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The emulator could not be started, or its output could not be read or printed.
    #[error("cannot run the emulator of the {kind} host: {source}")]
    Start {
        /// The name of the host's kind.
        kind: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The host did not boot.
    #[error("the {kind} host did not come up in {} s and was ended; its console ends:\n{tail}", limit.as_secs())]
    NotUp {
        /// The name of the host's kind.
        kind: &'static str,
        /// The time limit.
        limit: Duration,
        /// The console's last lines.
        tail: String,
    },
    /// The job took too long.
    #[error("the command did not end in {} s and the {kind} host was ended; --limit gives it more", limit.as_secs())]
    Limit {
        /// The name of the host's kind.
        kind: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// The emulator ended by itself before the job did.
    #[error("the {kind} host ended ({status}) before the command did; its console ends:\n{tail}")]
    Ended {
        /// The name of the host's kind.
        kind: &'static str,
        /// The emulator's exit status.
        status: ExitStatus,
        /// The console's last lines.
        tail: String,
    },
}

/// The emulator's process, which is killed when the run is left.
struct Emulator(Child);

impl Drop for Emulator {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the host until it powers off, for at most `limit`, booting included.
///
/// # Errors
/// If the host does not come up, the job does not end in time, or the emulator fails. Nothing is
/// left running.
pub fn run(kind: Kind, files: &Files, shape: &Shape, limit: Duration) -> Result<(), RunError> {
    let failed = |source| RunError::Start {
        kind: kind.name(),
        source,
    };
    let mut command = kind.command(files, shape);
    if shape.interactive {
        let mut emulator = Emulator(command.spawn().map_err(failed)?);
        emulator.0.wait().map_err(failed)?;
        return Ok(());
    }
    let errors = File::create(files.folder.join("emulator.err")).map_err(failed)?;
    command.stdin(Stdio::null()).stderr(errors);
    let (sender, output) = mpsc::channel();
    let ended = Arc::new(AtomicBool::new(false));
    let emulator = match kind {
        Kind::Svm => {
            let mut child = command.stdout(Stdio::piped()).spawn().map_err(failed)?;
            if let Some(mut pipe) = child.stdout.take() {
                thread::spawn(move || while send_some(&mut pipe, &sender) == Some(true) {});
            }
            Emulator(child)
        }
        Kind::Vmx => {
            // Bochs writes the console to a file, which is there before it starts.
            File::create(&files.console).map_err(failed)?;
            let mut file = File::open(&files.console).map_err(failed)?;
            command.stdout(File::create(files.folder.join("emulator.out")).map_err(failed)?);
            let child = command.spawn().map_err(failed)?;
            let ended = ended.clone();
            thread::spawn(move || {
                loop {
                    // A read after the end is the last.
                    let is_last = ended.load(Ordering::SeqCst);
                    match send_some(&mut file, &sender) {
                        Some(false) if !is_last => thread::sleep(LOOK_INTERVAL),
                        Some(true) => {}
                        _ => return,
                    }
                }
            });
            Emulator(child)
        }
    };
    follow(kind, emulator, &output, &ended, limit)
}

/// Sends the next piece. Returns whether there was one; `None` if it cannot be read or the receiver
/// is gone.
fn send_some(from: &mut impl Read, to: &mpsc::Sender<Vec<u8>>) -> Option<bool> {
    let mut bytes = vec![0; 16 << 10];
    let count = from.read(&mut bytes).ok()?;
    bytes.truncate(count);
    // An empty piece checks whether the receiver is still there.
    to.send(bytes).ok()?;
    Some(count > 0)
}

/// Prints the job's output until the emulator has ended.
fn follow(
    kind: Kind,
    mut emulator: Emulator,
    output: &Receiver<Vec<u8>>,
    ended: &AtomicBool,
    limit: Duration,
) -> Result<(), RunError> {
    let failed = |source| RunError::Start {
        kind: kind.name(),
        source,
    };
    let mut console = Console::default();
    let started = Instant::now();
    let boot_limit = limit.min(BOOT_LIMIT);
    let mut stdout = io::stdout().lock();
    loop {
        match output.recv_timeout(LOOK_INTERVAL) {
            Ok(bytes) => {
                let shown = console.take(&bytes);
                stdout
                    .write_all(&shown)
                    .and_then(|()| stdout.flush())
                    .map_err(failed)?;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK_INTERVAL),
        }
        if let Some(status) = emulator.0.try_wait().map_err(failed)? {
            ended.store(true, Ordering::SeqCst);
            while let Ok(bytes) = output.recv() {
                stdout.write_all(&console.take(&bytes)).map_err(failed)?;
            }
            stdout.flush().map_err(failed)?;
            return match console.is_up() {
                true => Ok(()),
                false => Err(RunError::Ended {
                    kind: kind.name(),
                    status,
                    tail: console.tail(),
                }),
            };
        }
        match console.is_up() {
            true if started.elapsed() > limit => {
                return Err(RunError::Limit {
                    kind: kind.name(),
                    limit,
                });
            }
            false if started.elapsed() > boot_limit => {
                return Err(RunError::NotUp {
                    kind: kind.name(),
                    limit: boot_limit,
                    tail: console.tail(),
                });
            }
            _ => {}
        }
    }
}

/// The host's console. Output before [`UP`] is of the firmware and kernel, and shown only in
/// errors. So is output from [`DOWN`] on.
#[derive(Default)]
struct Console {
    /// Everything up to the line with [`UP`].
    before: Vec<u8>,
    is_up: bool,
    /// The end of the job's output that may be the start of [`DOWN`].
    held: Vec<u8>,
    is_down: bool,
}

impl Console {
    fn is_up(&self) -> bool {
        self.is_up
    }

    /// Accepts more bytes and returns those that are the job's output.
    fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        if self.is_up {
            self.held.extend(bytes);
        } else {
            self.before.extend(bytes);
            let Some(start) = line_after(&self.before, UP.as_bytes()) else {
                return Vec::new();
            };
            self.is_up = true;
            self.held = self.before.split_off(start);
        }
        if self.is_down {
            self.held.clear();
        }
        if let Some(end) = position(&self.held, DOWN.as_bytes()) {
            self.is_down = true;
            self.held.truncate(end);
            return std::mem::take(&mut self.held);
        }
        let kept = (1..DOWN.len()).rev();
        let kept = kept
            .filter(|length| {
                self.held
                    .ends_with(DOWN.as_bytes().get(..*length).unwrap_or_default())
            })
            .max();
        let shown = self.held.len() - kept.unwrap_or(0);
        let rest = self.held.split_off(shown);
        std::mem::replace(&mut self.held, rest)
    }

    fn tail(&self) -> String {
        let text = String::from_utf8_lossy(&self.before);
        let lines: Vec<_> = text
            .lines()
            .filter(|line| !line.trim().is_empty())
            .collect();
        let first = lines.len().saturating_sub(TAIL_LINES);
        lines.get(first..).unwrap_or_default().join("\n")
    }
}

/// Returns the start of the line behind the one with `part`.
fn line_after(bytes: &[u8], part: &[u8]) -> Option<usize> {
    let found = position(bytes, part)?;
    let length = bytes.get(found..)?.iter().position(|byte| *byte == b'\n')?;
    Some(found + length + 1)
}

/// Returns the position of `part` in `bytes`.
fn position(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_begins_behind_the_line_that_says_up() {
        let mut console = Console::default();
        let mut shown = Vec::new();
        for piece in [
            "SeaBIOS\r\n[ 0.1] x\r\nexotrace-",
            "host: up",
            "\r",
            "\nhello",
            " world\n",
        ] {
            shown.extend(console.take(piece.as_bytes()));
        }
        assert_eq!(String::from_utf8_lossy(&shown), "hello world\n");
        assert!(console.tail().starts_with("SeaBIOS"));
    }

    #[test]
    fn output_ends_before_the_words_that_say_down() {
        let mut console = Console::default();
        let mut shown = Vec::new();
        for piece in [
            "exotrace-host: up\n",
            "exo trace",
            " exotrace-",
            "host: down\n[ 2] re",
            "boot\n",
        ] {
            shown.extend(console.take(piece.as_bytes()));
        }
        assert_eq!(String::from_utf8_lossy(&shown), "exo trace ");
    }

    #[test]
    fn a_console_that_never_says_up_shows_nothing() {
        let mut console = Console::default();
        assert_eq!(console.take(b"panic\n\nend"), b"");
        assert!(!console.is_up());
        assert_eq!(console.tail(), "panic\nend");
    }
}
