//! ptrace(3) of a task under deadline scheduling: its way in and out, its periods, and its slices.

use support::host;
use support::ptrace::{Traced, is, shell_pid, taken};
use support::shell::COMMAND_LIMIT;
use trace_devices::ptrace::record::{EventType, Record, SleepState, name_of, sleep_parts};

/// The task's period in nanoseconds.
const PERIOD: i64 = 100_000_000;

#[test]
fn a_deadline_task_is_admitted_released_throttled_and_expelled() {
    let host = host!();
    let traced = Traced::small(host);
    let own = shell_pid(&traced.shell);
    traced.command(&format!("trace {own} 1"));
    let mut reader = traced.open();
    let answer = traced.shell.start("deadline 3");
    let answer = answer.answer(4 * COMMAND_LIMIT);
    assert_eq!(
        (answer.status, answer.output.as_str()),
        (0, "deadline: done\n")
    );
    let records = taken(reader.as_mut());
    let is_name = |it: &&Record| is(it, EventType::Name) && name_of(it.argument) == b"deadline";
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
    // While it is a deadline task, it runs as one.
    for (at, (event, _)) in events.iter().enumerate() {
        match event {
            EventType::Edf => assert!(at > admit && at < expel, "{names:?}"),
            EventType::Run => assert!(at < admit || at > expel, "{names:?}"),
            _ => {}
        }
    }
    // Three rounds of more than a slice each, and up to three yields.
    assert!(count(EventType::Slice) >= 3, "{names:?}");
    // A yield after the end of the period, if the host delayed the guest, gives up nothing: the
    // next slice begins at once (update_curr_dl() and start_dl_timer() in kernel/sched/deadline.c).
    assert!((1..=3).contains(&count(EventType::Yield)), "{names:?}");
    assert!(count(EventType::Release) >= 6, "{names:?}");
    for pair in events.windows(2) {
        match (pair[0], pair[1]) {
            // After the end of a slice the task waits for its next release.
            ((EventType::Slice | EventType::Yield, _), (event, sleep)) => {
                assert_eq!(event, EventType::Sleep, "{names:?}");
                let (state, _) = sleep_parts(sleep.argument);
                assert_eq!(state, SleepState::Waitrelease as u8);
            }
            // A release is followed by its deadline, in the future.
            ((EventType::Release, release), (event, deadline)) => {
                assert_eq!(event, EventType::Deadline, "{names:?}");
                let ahead = deadline.time - release.time;
                assert!(ahead > 0 && ahead <= PERIOD, "{ahead} ns");
            }
            _ => {}
        }
    }
}
