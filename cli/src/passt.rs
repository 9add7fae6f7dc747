//! The program passt(1), which connects a guest to the host's network as an unprivileged user.
//!
//! A machine starts one of its own before it is confined, over a pair of sockets, and waits until
//! it serves. It ends when its socket closes, so with the machine.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::FdFlags;

use crate::net::User;
use crate::report::{printable, say};

const PROGRAM: &str = "passt";
/// The time in which it answers. One that does not is used all the same: a host without IPv4 has
/// no answer to the question.
const PATIENCE: Duration = Duration::from_secs(5);
/// The interval at which it is checked whether the program still runs.
const LOOK: Duration = Duration::from_millis(50);
/// The maximum number of bytes of its messages that are read at its early end.
const MOST_MESSAGES: u64 = 64 << 10;
/// The longest message that is kept, in bytes.
const LONGEST_MESSAGE: u64 = 4096;
/// The beginning of messages that are about other messages.
const NO_SYSLOG: &str = "Failed to send";
/// The protocol number of ARP in an Ethernet header.
const ARP: [u8; 2] = [0x08, 0x06];
/// The longest frame that it sends.
const LONGEST_FRAME: usize = 65_536;

/// The program does not serve a machine.
#[derive(Debug, thiserror::Error)]
pub enum PasstError {
    /// It is not there.
    #[error(
        "--net user: passt is not installed (Debian: apt install passt); --net tap=NAME and --net unix=SOCKET need no program"
    )]
    Missing,
    /// It cannot be started, or spoken to.
    #[error("--net user: passt: {0}")]
    Start(#[from] io::Error),
    /// It has ended at once.
    #[error("--net user: passt: {message}{hint}")]
    Ended {
        /// Its last message.
        message: String,
        /// A likely reason, or nothing.
        hint: &'static str,
    },
}

/// The running program.
#[derive(Debug)]
pub struct Passt {
    child: Child,
    messages: ChildStderr,
}

/// The watch for its end. Dropping this ends the watch.
#[derive(Debug)]
pub struct Watch(Arc<AtomicBool>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Passt {
    /// Starts the program for a guest with the address `mac`, and waits until it serves. Returns
    /// the socket for the guest's frames.
    ///
    /// # Errors
    /// If it is not installed, or ends, as it does if a port of the host is taken.
    pub fn start(user: &User, mac: [u8; 6]) -> Result<(UnixStream, Self), PasstError> {
        let (mut near, far) = UnixStream::pair()?;
        let far = OwnedFd::from(far);
        // The program inherits this descriptor alone.
        rustix::io::fcntl_setfd(&far, FdFlags::empty()).map_err(io::Error::from)?;
        let mut command = Command::new(PROGRAM);
        command
            .args(["--foreground", "--quiet", "--one-off", "--fd"])
            .arg(far.as_raw_fd().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if !user.loopback {
            command.arg("--no-map-gw");
        }
        for forward in &user.forwards {
            let option = if forward.udp { "-u" } else { "-t" };
            command.arg(option).arg(forward.to_string());
        }
        let mut child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => PasstError::Missing,
            _ => PasstError::Start(error),
        })?;
        drop(far);
        let Some(messages) = child.stderr.take() else {
            return Err(io::Error::other("its messages cannot be read").into());
        };
        let mut passt = Self { child, messages };
        near.set_read_timeout(Some(LOOK))?;
        let asked = near.write_all(&question(mac));
        if asked.is_err() || !passt.answers(&mut near)? {
            return Err(passt.ended());
        }
        near.set_read_timeout(None)?;
        Ok((near, passt))
    }

    /// Waits for the answer to the question. Returns `false` if the program has ended.
    fn answers(&mut self, socket: &mut UnixStream) -> io::Result<bool> {
        let end = Instant::now() + PATIENCE;
        let mut buffer = vec![0; LONGEST_FRAME];
        loop {
            let mut length = [0; 4];
            match self.fill(socket, &mut length, end)? {
                Filled::Whole => {}
                Filled::Late => return Ok(true),
                Filled::Ended => return Ok(false),
            }
            let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
            let Some(frame) = buffer.get_mut(..length) else {
                let message = format!("a frame of {length} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            };
            // A frame that has begun comes whole.
            let end = Instant::now() + PATIENCE;
            match self.fill(socket, frame, end)? {
                Filled::Whole if frame.get(12..14) == Some(&ARP) => return Ok(true),
                Filled::Whole => {}
                Filled::Late => return Err(io::ErrorKind::TimedOut.into()),
                Filled::Ended => return Ok(false),
            }
        }
    }

    /// Fills `buffer` from the socket, if that succeeds until `end`.
    fn fill(
        &mut self,
        socket: &mut UnixStream,
        buffer: &mut [u8],
        end: Instant,
    ) -> io::Result<Filled> {
        let mut done = 0;
        while let Some(room) = buffer.get_mut(done..).filter(|room| !room.is_empty()) {
            match socket.read(room) {
                Ok(0) => return Ok(Filled::Ended),
                Ok(read) => done += read,
                Err(error) if is_late(&error) => {
                    if self.child.try_wait()?.is_some() {
                        return Ok(Filled::Ended);
                    }
                    if done == 0 && Instant::now() >= end {
                        return Ok(Filled::Late);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Ok(Filled::Ended);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Filled::Whole)
    }

    /// Returns the reason of its early end.
    fn ended(mut self) -> PasstError {
        // It may still run, without its socket.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut text = Vec::new();
        let _ = self.messages.take(MOST_MESSAGES).read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        let message = text.lines().rfind(|line| is_telling(line));
        let message = message.unwrap_or("it has ended without a message");
        let hint = match message.contains("bind") {
            true => "; a port of the host is in use, or not for this user",
            false => "",
        };
        PasstError::Ended {
            message: printable(message.trim()),
            hint,
        }
    }

    /// Reports the program's early end to the user, on a thread of its own.
    ///
    /// # Errors
    /// If there is no thread for that.
    pub fn watch(self) -> io::Result<Watch> {
        let over = Arc::new(AtomicBool::new(false));
        let watch = Watch(over.clone());
        std::thread::Builder::new()
            .name("passt".into())
            .spawn(move || {
                let message = last_message(self.messages);
                if !over.load(Ordering::Acquire) {
                    let message = message.map(|message| format!(": {}", printable(&message)));
                    say(format_args!(
                        "passt has ended{}; the guest's link is down",
                        message.unwrap_or_default()
                    ));
                }
            })?;
        Ok(watch)
    }
}

/// The end of an attempt to fill a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Filled {
    Whole,
    Late,
    Ended,
}

fn is_late(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

/// Checks whether a message says something about the network.
fn is_telling(line: &str) -> bool {
    !line.trim().is_empty() && !line.starts_with(NO_SYSLOG)
}

/// Reads messages until the end, and returns the last one.
fn last_message(messages: impl Read) -> Option<String> {
    let mut reader = BufReader::new(messages);
    let mut last = None;
    loop {
        let mut line = Vec::new();
        let read = reader
            .by_ref()
            .take(LONGEST_MESSAGE)
            .read_until(b'\n', &mut line);
        if !read.is_ok_and(|length| length > 0) {
            return last;
        }
        let line = String::from_utf8_lossy(&line);
        if is_telling(&line) {
            last = Some(line.trim().to_owned());
        }
    }
}

/// Returns the guest's question for an address that nobody has (ARP, RFC 826), as a frame behind
/// its length. The program answers for every address but the guest's own.
fn question(mac: [u8; 6]) -> Vec<u8> {
    const FROM: [u8; 4] = [169, 254, 0, 2];
    const FOR: [u8; 4] = [169, 254, 0, 1];
    // Ethernet, IPv4, their lengths, a request.
    const KIND: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
    let parts: [&[u8]; 8] = [&[0xff; 6], &mac, &ARP, &KIND, &mac, &FROM, &[0; 6], &FOR];
    let frame = parts.concat();
    let length = u32::try_from(frame.len()).unwrap_or(0).to_be_bytes();
    [&length[..], &frame].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_message_is_the_one_about_the_network() {
        for (text, last) in [
            ("", None),
            ("Failed to send 47 bytes to syslog\n\n", None),
            (
                "one\nFailed to send 3 bytes to syslog\ntwo\n\n",
                Some("two"),
            ),
            ("without an end", Some("without an end")),
        ] {
            assert_eq!(last_message(text.as_bytes()).as_deref(), last, "{text:?}");
        }
    }

    #[test]
    fn the_question_is_a_frame_behind_its_length() {
        let bytes = question([2, 0, 0, 0, 0, 1]);
        assert_eq!(bytes.len(), 4 + 42);
        assert_eq!(bytes[..4], [0, 0, 0, 42]);
        assert_eq!(bytes[16..18], ARP);
    }
}
