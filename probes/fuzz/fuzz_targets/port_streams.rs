//! Fuzzes the trace devices' ports as a guest uses them: any bytes as commands, and opens, reads
//! and closes of events that leave some unread.
//!
//! A reader gets whole records in their order; none is skipped, and unread ones come again.
#![no_main]

use std::sync::Arc;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use probes::name::ProbePattern;
use trace_devices::port::stream::{Access, ControlStream, EventStream, PortStream};
use trace_devices::port::{ControlPort, EventLog, EventPort, EventReader, LogReader, PortError};
use trace_devices::ptrace::record::{RECORD_BYTES, Record};
use trace_devices::trace_line::{LINE_BYTES, TraceLine};

/// The size of a record in bytes: its number.
const RECORD: usize = 8;
/// The greatest number of records of one run; the log has room for all.
const MOST: u64 = 4000;
/// The number of unread bytes that are kept for certain.
const KEPT: u64 = 4096;

/// Both devices' commands, which are parsed and have no effect.
struct Commands;

impl ControlPort for Commands {
    fn command(&self, text: &str) -> Result<(), PortError> {
        let _ = ProbePattern::parse(text);
        let (trace, ptrace) = (
            trace_devices::trace::read_command(text),
            trace_devices::ptrace::read_command(text),
        );
        trace.and(ptrace)
    }

    fn configuration(&self) -> String {
        "logsize 16\n".to_owned()
    }
}

struct Events(EventLog);

struct Reader(LogReader);

impl EventPort for Events {
    fn record_bytes(&self) -> usize {
        RECORD
    }

    fn open(&self) -> Result<Box<dyn EventReader>, PortError> {
        Ok(Box::new(Reader(self.0.reader())))
    }
}

impl EventReader for Reader {
    fn read(&mut self, most: usize) -> Vec<u8> {
        self.0.read(most)
    }

    fn wait(&mut self, limit: Duration) -> bool {
        self.0.wait(limit)
    }

    fn dropped(&self) -> u64 {
        self.0.dropped()
    }
}

fn control(bytes: &[u8]) {
    let (access, bytes) = match bytes.split_first() {
        Some((byte, rest)) if byte & 1 != 0 => (Access::ReadOnly, rest),
        Some((_, rest)) => (Access::ReadWrite, rest),
        None => return,
    };
    let mut stream = ControlStream::new(Arc::new(Commands), access);
    for part in bytes.split(|byte| *byte == 0) {
        stream.open();
        stream.write(part);
        let mut shown = Vec::new();
        let mut buffer = [0; 100];
        while stream.has_data() {
            let count = stream.read(&mut buffer);
            assert!(count > 0);
            shown.extend_from_slice(&buffer[..count]);
        }
        let shown = String::from_utf8(shown).expect("text");
        assert!(
            shown.chars().all(|c| c == '\n' || !c.is_control()),
            "{shown:?}"
        );
        stream.close(0);
    }
}

fn events(bytes: &[u8]) {
    let log = EventLog::new(RECORD, MOST as usize + 256);
    let mut stream = EventStream::new(Arc::new(Events(log.clone())));
    let mut pushed = 0_u64;
    // Of this open: the number of its first record, and the bytes read.
    let (mut is_open, mut first, mut read) = (false, 0_u64, 0_u64);
    for pair in bytes.chunks_exact(2) {
        let amount = u64::from(pair[1]);
        match (pair[0] % 4, is_open) {
            (0, _) if pushed < MOST => {
                for number in pushed..pushed + amount {
                    let record = number.to_le_bytes();
                    log.push([record.as_slice()]);
                }
                pushed += amount;
            }
            (1, false) => {
                stream.open();
                (is_open, read) = (true, 0);
            }
            (2, true) => {
                let mut buffer = vec![0; amount as usize];
                let count = stream.read(&mut buffer);
                for (at, byte) in (read..).zip(&buffer[..count]) {
                    let number = first + at / RECORD as u64;
                    assert!(number < pushed);
                    let expected = number.to_le_bytes()[at as usize % RECORD];
                    assert_eq!(*byte, expected, "byte {at} behind record {first}");
                }
                read += count as u64;
            }
            (3, true) => {
                let unread = (amount * 16).min(read).min(KEPT);
                stream.close(unread);
                first += (read - unread).div_ceil(RECORD as u64);
                is_open = false;
            }
            _ => stream.write(pair),
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((which, bytes)) = bytes.split_first() else {
        return;
    };
    match which % 3 {
        0 => control(bytes),
        1 => events(bytes),
        _ => {
            for line in bytes.chunks(LINE_BYTES) {
                if let Ok(parsed) = TraceLine::parse(line) {
                    assert_eq!(parsed.to_bytes(), line);
                }
            }
            for record in bytes.as_chunks::<RECORD_BYTES>().0 {
                let _ = Record::parse(record).to_bytes();
            }
        }
    }
});
