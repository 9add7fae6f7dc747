//! The guard: a process that resumes a paused guest of QEMU if this one is killed.
//!
//! It has the monitor's connection, and a pipe of which this process has the other end. If the pipe
//! ends without a word, it sends `cont`. It is in a group of its own, so that Ctrl-C and signals
//! for this process's group do not reach it.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::json;

use super::monitor::request;

/// The hidden command of the process.
const COMMAND: &str = "resume-guard";
/// The byte that says that the guest was resumed.
const RELEASED: u8 = b'.';
/// The character by which a monitor forgets the half of a command (qmp-spec of QEMU, 2.3).
const RESET: u8 = 0xff;

/// The event that says that the guest runs.
const RESUMED: &[u8] = b"\"RESUME\"";
/// The time that it may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest number of bytes that are read until then.
const LONGEST: usize = 1 << 20;

/// A process that waits.
#[derive(Debug)]
pub(super) struct Guard(Child);

impl Guard {
    /// Starts the process before the guest is paused.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(super) fn start(monitor: &UnixStream) -> io::Result<Self> {
        let monitor = monitor.as_fd().try_clone_to_owned()?;
        let child = Command::new(std::env::current_exe()?)
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::from(monitor))
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self(child))
    }

    /// Ends the process without a `cont`: the guest was resumed.
    pub(super) fn release(mut self) {
        if let Some(pipe) = &mut self.0.stdin {
            // A process that has ended needs no byte.
            let _ = pipe.write_all(&[RELEASED]);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It ends as soon as its pipe does.
        let _ = self.0.wait();
    }
}

/// Runs the process: standard input is the pipe, standard output the monitor's connection.
///
/// # Errors
/// If the monitor cannot be reached. The error goes nowhere: the parent process has ended.
pub fn run() -> io::Result<()> {
    let mut word = [0];
    if io::stdin().read(&mut word)? == 1 && word == [RELEASED] {
        return Ok(());
    }
    let mut monitor = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    monitor.write_all(&[RESET])?;
    monitor.write_all(&request("cont", &json!({})))?;
    // The connection stays until QEMU has answered, so that it does not close before.
    monitor.set_read_timeout(Some(PATIENCE))?;
    let (mut said, mut piece) = (Vec::<u8>::new(), [0; 4096]);
    while said.len() < LONGEST && !said.windows(RESUMED.len()).any(|part| part == RESUMED) {
        match monitor.read(&mut piece)? {
            0 => break,
            read => said.extend(piece.get(..read).unwrap_or_default()),
        }
    }
    Ok(())
}
