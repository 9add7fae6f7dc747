//! ptrace(3) of a task under deadline scheduling: its way in and out, its periods, and what becomes of its slices.

use std::sync::Arc;

use probes::clock::Clock;
use probes::port::{ControlPort, EventPort};
use probes::ptrace::Device;
use probes::ptrace::record::{EventType, RECORD_BYTES, Record, SleepState, name_of, sleep_parts};
use support::shell::COMMAND_LIMIT;
use support::{Shell, host, tracing};

/// Nanoseconds of the task's period.
const PERIOD: i64 = 100_000_000;

#[test]
fn a_deadline_task_is_admitted_released_throttled_and_expelled() {
    let host = host!();
    let shell = Shell::new(host);
    let view = Arc::new(shell.linux.view());
    let engine = tracing::engine(&shell.linux, &view);
    let clock = Clock::now(engine.tsc_hz());
    let device = Device::new(engine, clock);
    let own = shell.output("echo $$");
    let traced = device.command(&format!("trace {own} 1"));
    traced.unwrap_or_else(|e| panic!("{e}"));
    let mut reader = device.open().unwrap_or_else(|e| panic!("{e}"));
    let answer = shell.start("deadline 3").answer(4 * COMMAND_LIMIT);
    assert_eq!(
        (answer.status, answer.output.as_str()),
        (0, "deadline: done\n")
    );
    let mut bytes = Vec::new();
    while reader.wait(std::time::Duration::from_millis(500)) {
        bytes.extend(reader.read(1 << 20));
    }
    let (whole, rest) = bytes.as_chunks::<RECORD_BYTES>();
    assert!(rest.is_empty());
    let records: Vec<Record> = whole.iter().map(Record::parse).collect();
    let is_name =
        |it: &&Record| it.event == EventType::Name.number() && name_of(it.argument) == b"deadline";
    let pid = records.iter().find(is_name).map(|it| it.pid);
    let events: Vec<(EventType, &Record)> = records
        .iter()
        .filter(|it| Some(it.pid) == pid)
        .filter_map(|it| Some((EventType::of(it.event)?, it)))
        .filter(|(event, _)| !matches!(event, EventType::Ints | EventType::Inte | EventType::Trap))
        .collect();
    let names: Vec<&str> = events.iter().map(|(event, _)| event.name()).collect();
    println!("{names:?}");
    let position = |event: EventType| {
        let at = events.iter().position(|(it, _)| *it == event);
        at.unwrap_or_else(|| panic!("no {} in {names:?}", event.name()))
    };
    let count = |event: EventType| events.iter().filter(|(it, _)| *it == event).count();
    let (admit, expel) = (position(EventType::Admit), position(EventType::Expel));
    assert!(
        admit < expel && expel < position(EventType::Dead),
        "{names:?}"
    );
    assert_eq!((count(EventType::Admit), count(EventType::Expel)), (1, 1));
    // As long as it is a deadline task it runs as one.
    for (at, (event, _)) in events.iter().enumerate() {
        match event {
            EventType::Edf => assert!(at > admit && at < expel, "{names:?}"),
            EventType::Run => assert!(at < admit || at > expel, "{names:?}"),
            _ => {}
        }
    }
    // Three rounds of more than a slice each, and three yields.
    assert!(count(EventType::Slice) >= 3, "{names:?}");
    assert_eq!(count(EventType::Yield), 3, "{names:?}");
    assert!(count(EventType::Release) >= 6, "{names:?}");
    for pair in events.windows(2) {
        match (pair[0], pair[1]) {
            // What ends a slice waits for its next release.
            ((EventType::Slice | EventType::Yield, _), (event, sleep)) => {
                assert_eq!(event, EventType::Sleep, "{names:?}");
                let (state, _) = sleep_parts(sleep.argument);
                assert_eq!(state, SleepState::Waitrelease as u8);
            }
            // A release tells of its deadline, in the future.
            ((EventType::Release, release), (event, deadline)) => {
                assert_eq!(event, EventType::Deadline, "{names:?}");
                let ahead = deadline.time - release.time;
                assert!(ahead > 0 && ahead <= PERIOD, "{ahead} ns");
            }
            _ => {}
        }
    }
}
