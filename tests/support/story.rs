//! A story in the records of ptrace(3): a shell forks, reads from a pipe and is woken; interrupts,
//! faults, a deadline.

use std::str::FromStr;

use trace_devices::ptrace::record::{EventType, Record};

/// The lines of the story, one record each.
const TEXT: &str = include_str!("../../probes/devices/src/ptrace/render/testdata/story.txt");
/// The begin of the story, in nanoseconds since 1970.
pub const BEGINNING: i64 = 1_790_000_000_000_000_000;

fn number<T: FromStr>(word: &str) -> T {
    let number = word.parse().ok();
    number.unwrap_or_else(|| panic!("{word:?} is no number"))
}

/// Returns the story's records.
///
/// # Panics
/// If the text does not match the format that its first lines describe.
pub fn records() -> Vec<Record> {
    let lines = TEXT.lines().filter(|line| !line.starts_with('#'));
    lines.map(record).collect()
}

fn record(line: &str) -> Record {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [pid, event, machine, after, argument] = words[..] else {
        panic!("{line:?}: five columns are a record");
    };
    let known = EventType::ALL.iter().find(|known| known.name() == event);
    let argument = u64::from_str_radix(argument.trim_start_matches("0x"), 16);
    Record {
        pid: number(pid),
        event: known.map_or_else(|| number(event), |known| known.number()),
        machine: number(machine),
        time: BEGINNING + number::<i64>(after),
        argument: argument.unwrap_or_else(|e| panic!("{line:?}: {e}")),
    }
}
