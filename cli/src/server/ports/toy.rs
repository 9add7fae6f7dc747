//! Ports without a machine, for tests.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use probes::clock::Clock;
use trace_devices::port::{
    ControlPort, EventLog, EventPort, EventReader, LogReader, PortError, Refusal,
};
use trace_devices::ptrace::record::{RECORD_BYTES, Record};
use trace_devices::trace_line::{LINE_BYTES, LineKind, TraceLine};

use crate::protocol::end::MachineEnd;
use crate::server::ports::server::Server;
use crate::server::ports::{Guest, Makers, Ports};

/// The number of lines that the log of trace(3) holds.
pub const LINES: usize = 64;
/// The time limit of [`until`].
const LIMIT: Duration = Duration::from_secs(20);

/// The commands that are refused, each with its refusal and Linux's error number.
pub const REFUSED: [(&str, Refusal, i32); 8] = [
    ("bad", Refusal::Invalid, 22),
    ("gone", Refusal::NotFound, 2),
    ("twice", Refusal::Exists, 17),
    ("busy", Refusal::Busy, 16),
    ("large", Refusal::NoRoom, 28),
    ("forbidden", Refusal::NotPermitted, 1),
    ("dead", Refusal::NoProcess, 3),
    ("broken", Refusal::Failed, 5),
];

/// The toy devices, by their ports.
#[derive(Clone)]
pub struct Toy {
    /// A control port that accepts every command but a few.
    pub tracectl: Arc<ToyControl>,
    /// A control port that accepts every command but a few.
    pub ptracectl: Arc<ToyControl>,
    /// The lines of trace(3).
    pub trace: EventLog,
    /// The records of ptrace(3), for a single reader.
    pub ptrace: EventLog,
}

/// A control port that keeps its commands, but for [`REFUSED`] ones and `slow`, which waits at a
/// gate.
#[derive(Default)]
pub struct ToyControl {
    commands: Mutex<Vec<String>>,
    /// The gate at which `slow` waits.
    pub gate: Gate,
}

impl ToyControl {
    /// Returns the accepted commands.
    pub fn commands(&self) -> Vec<String> {
        self.commands.lock().unwrap().clone()
    }
}

impl ControlPort for ToyControl {
    fn command(&self, text: &str) -> Result<(), PortError> {
        if let Some((_, refusal, _)) = REFUSED.iter().find(|(word, ..)| *word == text) {
            let why = format!("toy: {text} is refused");
            return Err(PortError::new(*refusal, why));
        }
        match text {
            "slow" => self.gate.pass(),
            _ => self.commands.lock().unwrap().push(text.to_owned()),
        }
        Ok(())
    }

    fn configuration(&self) -> String {
        let commands = self.commands();
        let mut text = format!("#commands {}\n", commands.len());
        for command in commands {
            text += &command;
            text.push('\n');
        }
        text
    }
}

struct ToyEvents {
    log: EventLog,
    most: usize,
}

impl EventPort for ToyEvents {
    fn record_bytes(&self) -> usize {
        self.log.record_bytes()
    }

    fn open(&self) -> Result<Box<dyn EventReader>, PortError> {
        if self.log.readers() >= self.most {
            return Err(PortError::new(
                Refusal::Busy,
                "device or object already in use",
            ));
        }
        let reader: LogReader = self.log.reader();
        Ok(Box::new(reader))
    }
}

impl Toy {
    /// Returns empty ports.
    pub fn new() -> Self {
        Self {
            tracectl: Arc::default(),
            ptracectl: Arc::default(),
            trace: EventLog::new(LINE_BYTES, LINES),
            ptrace: EventLog::new(RECORD_BYTES, LINES),
        }
    }

    /// Returns makers of these ports.
    pub fn makers(&self) -> Makers {
        let (tracectl, ptracectl) = (self.tracectl.clone(), self.ptracectl.clone());
        let events = |log: &EventLog, most| {
            let log = log.clone();
            Arc::new(ToyEvents { log, most })
        };
        let (trace, ptrace) = (events(&self.trace, usize::MAX), events(&self.ptrace, 1));
        Makers {
            tracectl: Box::new(move || Ok(tracectl.clone())),
            trace: Box::new(move || Ok(trace.clone())),
            ptracectl: Box::new(move || Ok(ptracectl.clone())),
            ptrace: Box::new(move || Ok(ptrace.clone())),
        }
    }

    /// Logs lines with these numbers as program counters.
    pub fn push_lines(&self, numbers: impl IntoIterator<Item = u64>) {
        let lines: Vec<_> = numbers.into_iter().map(line).collect();
        self.trace.push(lines.iter().map(|line| line.as_slice()));
    }

    /// Logs records with these numbers as processes.
    pub fn push_records(&self, numbers: impl IntoIterator<Item = u32>) {
        let records: Vec<_> = numbers.into_iter().map(record).collect();
        self.ptrace.push(records.iter().map(|r| r.as_slice()));
    }
}

/// The devices, and a server of their ports in a folder.
pub struct World {
    /// The folder of the sockets.
    pub folder: tempfile::TempDir,
    /// The devices.
    pub toy: Toy,
    /// The server; taken out to end the machine.
    pub server: Option<Server>,
}

impl World {
    /// Starts a server of empty ports.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let toy = Toy::new();
        let ports = Arc::new(Ports::new(toy.makers(), guest()));
        let server = Some(Server::start(folder.path(), &ports).unwrap());
        Self {
            folder,
            toy,
            server,
        }
    }
}

/// A gate at which threads wait until a test opens it.
#[derive(Default)]
pub struct Gate {
    /// The number of threads that came, and whether the gate is open.
    state: Mutex<(usize, bool)>,
    opened: Condvar,
}

impl Gate {
    /// Waits for [`Self::open`].
    pub fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.0 += 1;
        drop(self.opened.wait_while(state, |(_, open)| !*open).unwrap());
    }

    /// Returns the number of threads that came so far.
    pub fn come(&self) -> usize {
        self.state.lock().unwrap().0
    }

    /// Opens the gate for good.
    pub fn open(&self) {
        self.state.lock().unwrap().1 = true;
        self.opened.notify_all();
    }
}

/// Waits until `is` returns true; panics with `what` if that takes too long.
pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is() {
        assert!(Instant::now() < end, "{what} was waited for");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns a guest with a clock that does not advance.
pub fn guest() -> Guest {
    Guest {
        clock: Box::new(|| {
            Some(Clock {
                tsc: 1,
                unix_ns: 2,
                hz: 1_000_000_000,
            })
        }),
        name: Box::new(|address| (address < 10).then(|| format!("f{address}"))),
        end: Box::new(|| {
            Some(MachineEnd {
                message: "halted".to_owned(),
                is_orderly: true,
            })
        }),
    }
}

/// Returns the line with this number.
pub fn line(number: u64) -> [u8; LINE_BYTES] {
    let line = TraceLine {
        kind: LineKind::Entry,
        pc: number,
        ticks: 2,
        pid: 3,
        arguments: [4; 4],
    };
    line.to_bytes()
}

/// Returns the lines with these numbers, one after the other.
pub fn lines(numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
    numbers.into_iter().flat_map(line).collect()
}

/// Returns the record with this number.
pub fn record(number: u32) -> [u8; RECORD_BYTES] {
    let record = Record {
        pid: number,
        event: 3,
        machine: 0,
        time: i64::from(number),
        argument: 0,
    };
    record.to_bytes()
}
