//! Ports as plain sockets with the bytes of the device's files, for socat, Python and shell
//! scripts.
//!
//! A connection to an event port is a reader. It gets records as they come until either side
//! closes. A slow reader loses records by the log's rules and delays nobody. A reader that reads
//! nothing for a minute is disconnected. So is a second reader where only one is allowed: there is
//! no room for a message.
//!
//! On a control port each line is a command with a line as its answer: empty on success, else the
//! reason. A client that closes its writing side without a command gets the port's text.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use trace_devices::port::EventReader;

use crate::listener::{Leave, Seen, has_gone, look};
use crate::server::ports::{Control, Events, LONGEST_COMMAND};

/// The interval of checks whether a client has disconnected or the machine ends.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The largest number of event bytes in one write.
const MOST_AT_ONCE: usize = 64 << 10;
/// The time after which a reader that leaves events unread loses its place.
const READER_PATIENCE: Duration = Duration::from_secs(60);
/// The time that a client has to receive the answer to a command.
const PATIENCE: Duration = Duration::from_secs(10);

/// Sends events until the client disconnects or the machine ends.
///
/// # Errors
/// If the client disconnects during a write.
pub fn events(mut stream: &UnixStream, leave: &Leave, events: &Arc<Events>) -> io::Result<()> {
    stream.set_write_timeout(Some(READER_PATIENCE))?;
    let mut reader = match events.open() {
        Ok(reader) => reader,
        Err(refused) => {
            log::warn!("{}: a reader is refused: {refused}", events.name.as_str());
            return Ok(());
        }
    };
    loop {
        // Read before the wait, so that everything recorded until then is sent.
        let is_last = leave.is_asked();
        if reader.wait(LOOK_INTERVAL) {
            stream.write_all(&reader.read(MOST_AT_ONCE))?;
        } else if is_last || has_gone(stream)? {
            return Ok(());
        }
    }
}

/// Answers commands until the client closes its writing side.
///
/// # Errors
/// If the client has disconnected, or does not read.
pub fn control(stream: &UnixStream, leave: &Leave, control: &Control) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut lines = Lines {
        stream,
        leave,
        bytes: Vec::new(),
    };
    let mut output = stream;
    for number in 0_u64.. {
        let answer = match lines.next()? {
            Line::Command(command) => match control.command(&command) {
                Ok(()) => String::new(),
                Err(refused) => one_line(&refused.text),
            },
            Line::TooLong => {
                let why = format!("a command has at most {LONGEST_COMMAND} bytes\n");
                return output.write_all(why.as_bytes());
            }
            Line::End if number == 0 => {
                let text = control.configuration();
                let text = text.unwrap_or_else(|refused| one_line(&refused.text) + "\n");
                return output.write_all(text.as_bytes());
            }
            Line::End | Line::Leave => break,
        };
        output.write_all(format!("{answer}\n").as_bytes())?;
    }
    Ok(())
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// A reader of a client's lines.
struct Lines<'s> {
    stream: &'s UnixStream,
    leave: &'s Leave,
    /// The bytes received of the next lines.
    bytes: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
enum Line {
    /// A command without its newline.
    Command(Vec<u8>),
    /// A line longer than a command may be.
    TooLong,
    /// The client has closed its writing side.
    End,
    /// The machine ends.
    Leave,
}

impl Lines<'_> {
    fn next(&mut self) -> io::Result<Line> {
        loop {
            if let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') {
                let rest = self.bytes.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.bytes, rest);
                line.pop();
                return Ok(match line.len() > LONGEST_COMMAND {
                    true => Line::TooLong,
                    false => Line::Command(line),
                });
            }
            if self.bytes.len() > LONGEST_COMMAND {
                return Ok(Line::TooLong);
            }
            if self.leave.is_asked() {
                return Ok(Line::Leave);
            }
            match look(self.stream, LOOK_INTERVAL)? {
                Seen::Nothing => continue,
                Seen::Gone => return Ok(Line::Leave),
                Seen::Input => {}
            }
            let mut chunk = [0; LONGEST_COMMAND];
            let read = self.stream.read(&mut chunk)?;
            self.bytes.extend(chunk.iter().take(read));
            if read == 0 {
                // The last line needs no newline.
                return Ok(match std::mem::take(&mut self.bytes) {
                    rest if rest.is_empty() => Line::End,
                    rest => Line::Command(rest),
                });
            }
        }
    }
}
