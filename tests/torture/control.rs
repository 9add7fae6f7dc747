//! A client of the control socket other than the command's own: it can hold, drop and corrupt a
//! connection at will.

use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

/// The time limit of a machine's answer beside all other load.
const PATIENCE: Duration = Duration::from_secs(180);
/// The protocol's version.
const VERSION: u32 = 2;

/// A client of a machine's control socket.
pub struct Control {
    socket: PathBuf,
}

/// A trace that has begun.
pub struct Trace {
    lines: BufReader<UnixStream>,
    /// The first line.
    pub begin: Value,
}

impl Control {
    /// Makes a client of the socket at a path.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Sends a request and returns the one line of its answer.
    ///
    /// # Errors
    /// If there is none.
    pub fn ask(&self, question: &Value) -> io::Result<Value> {
        line(&mut self.send(question)?)
    }

    /// Starts a trace of these probes; `request` has further fields. The inner error is the
    /// machine's reason for a refusal.
    ///
    /// # Errors
    /// If the machine does not answer.
    pub fn trace(&self, probes: &[String], request: &Value) -> io::Result<Result<Trace, String>> {
        let mut question = json!({
            "command": "trace", "probes": probes, "pids": [], "follow": false, "tids": [], "comms": [],
            "kernel_stack": 0, "user_stack": 0, "one_in": 0, "per_second": 0, "slots": 64,
        });
        for (key, value) in request.as_object().into_iter().flatten() {
            question[key] = value.clone();
        }
        let mut lines = self.send(&question)?;
        let begin = line(&mut lines)?;
        if begin["line"] == "begin" {
            return Ok(Ok(Trace { lines, begin }));
        }
        let message = begin["message"].as_str().map(str::to_owned);
        Ok(Err(message.unwrap_or_else(|| begin.to_string())))
    }

    fn send(&self, question: &Value) -> io::Result<BufReader<UnixStream>> {
        let mut question = question.clone();
        question["version"] = VERSION.into();
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(format!("{question}\n").as_bytes())?;
        Ok(BufReader::new(stream))
    }
}

impl Trace {
    /// Reads events while `work` runs, ends the trace in order, and returns its last line. A
    /// machine drops a client that reads nothing.
    ///
    /// # Errors
    /// As [`Self::end`].
    pub fn during(mut self, work: impl FnOnce()) -> io::Result<Value> {
        let stream = self.lines.get_ref().try_clone()?;
        thread::scope(|scope| {
            let last = scope.spawn(move || self.last_line());
            work();
            stream.shutdown(Shutdown::Write)?;
            let last = last.join();
            last.unwrap_or_else(|_| Err(io::Error::other("the reader has panicked")))
        })
    }

    /// Ends the trace in order and returns its last line.
    ///
    /// # Errors
    /// If it ends without one.
    pub fn end(mut self) -> io::Result<Value> {
        self.lines.get_ref().shutdown(Shutdown::Write)?;
        self.last_line()
    }

    fn last_line(&mut self) -> io::Result<Value> {
        loop {
            let line = line(&mut self.lines)?;
            if line["line"] == "end" {
                return Ok(line);
            }
        }
    }
}

fn line(lines: &mut BufReader<UnixStream>) -> io::Result<Value> {
    let mut line = String::new();
    if lines.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_str(&line).map_err(io::Error::from)
}
