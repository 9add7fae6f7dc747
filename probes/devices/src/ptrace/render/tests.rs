#![allow(clippy::unwrap_used)]
//! Renders a story (`testdata/story.txt`) in every format and compares it with files beside it;
//! also renders any records. With `EXOTRACE_BLESS=1` the files are written instead.

use std::io;

use proptest::prelude::*;

use super::{Json, MAX_DRAWN, MAX_ROWS, MAX_TASKS, Perfetto, Svg, Text};
use crate::perfetto::decode::{Decoded, decode};
use crate::ptrace::record::{EventType, Record};
use crate::render::Render;

/// The time at which the story begins.
const ZERO: i64 = 1_790_000_000_000_000_000;

fn story() -> Vec<Record> {
    let lines = include_str!("testdata/story.txt").lines();
    let told = lines.filter(|line| !line.starts_with('#'));
    told.map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [pid, event, machine, after, argument] = words[..] else {
            panic!("{line}");
        };
        let known = EventType::ALL.iter().find(|known| known.name() == event);
        let hex = argument.trim_start_matches("0x");
        Record {
            pid: pid.parse().unwrap(),
            event: known.map_or_else(|| event.parse().unwrap(), |known| known.number()),
            machine: machine.parse().unwrap(),
            time: ZERO + after.parse::<i64>().unwrap(),
            argument: u64::from_str_radix(hex, 16).unwrap(),
        }
    })
    .collect()
}

fn rendered(records: &[Record], mut format: impl Render<Record>) -> Vec<u8> {
    let mut out = Vec::new();
    for record in records {
        format.record(record, &mut out).unwrap();
    }
    format.finish(&mut out).unwrap();
    out
}

fn decoded(records: &[Record]) -> Decoded {
    let file = rendered(records, Perfetto::default());
    decode(&file, ZERO.cast_unsigned()).unwrap()
}

/// Compares with a file of `testdata`.
fn matches(name: &str, got: &str) {
    let path = crate::test_data::source("probes/devices/src/ptrace/render/testdata").join(name);
    if std::env::var_os("EXOTRACE_BLESS").is_some() {
        std::fs::write(path, got).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    for (number, (got, expected)) in (1..).zip(got.lines().zip(expected.lines())) {
        assert_eq!(got, expected, "line {number} of {}", path.display());
    }
    assert_eq!(got, expected, "{}", path.display());
}

#[test]
fn the_story_is_told_in_every_format() {
    let text = |format: &[u8]| String::from_utf8(format.to_vec()).unwrap();
    matches("story.text", &text(&rendered(&story(), Text::default())));
    matches("story.json", &text(&rendered(&story(), Json::default())));
    matches("story.svg", &text(&rendered(&story(), Svg::default())));
    matches(
        "story.perfetto",
        &(decoded(&story()).lines.join("\n") + "\n"),
    );
}

/// Readers of ptrace(1)'s text rely on at least eight fields, of which they use the first four and
/// the last two.
#[test]
fn text_can_be_taken_apart_by_fields() {
    let mut named = story()[0];
    named.argument = u64::from_le_bytes(*b"a b\t'c# ");
    let text = String::from_utf8(rendered(&[named], Text::default())).unwrap();
    let lines: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
    let fields: Vec<&str> = lines[0].split_whitespace().collect();
    let expected = [
        "00000000000",
        "100",
        "00",
        "a_b__c#_",
        "Run",
        "Name",
        "15",
        "0x202363270962206",
    ];
    assert_eq!(fields[..7], expected[..7]);
}

fn record(pid: u32, event: EventType, machine: u32, time: i64) -> Record {
    Record {
        pid,
        event: event.number(),
        machine,
        time: ZERO + time,
        argument: 0,
    }
}

/// Returns the lines of events, without those about tracks and clocks.
fn events(records: &[(u32, EventType, u32)]) -> Vec<String> {
    let records = (0..).zip(records);
    let records = records.map(|(time, (pid, event, cpu))| record(*pid, *event, *cpu, time));
    let lines = decoded(&records.collect::<Vec<_>>()).lines.into_iter();
    let events = lines.filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
    events.collect()
}

#[test]
fn arrows_lead_from_the_waker_to_the_next_run() {
    use EventType::{Dead, Edf, Ready, Run, Sleep};
    for (what, records, arrows) in [
        (
            "one process wakes another",
            &[(1, Run, 0), (2, Ready, 0), (2, Run, 1)][..],
            &["_ 1: ! wakeup: wakes _ 2 ->1", "_ 2: [ sched: Running 1->"][..],
        ),
        (
            "nobody that is known wakes it",
            &[(2, Ready, 0), (2, Run, 1)],
            &[
                "CPU 0: ! wakeup: wakes _ 2 ->1",
                "_ 2: [ sched: Running 1->",
            ],
        ),
        (
            "preempted on its own CPU",
            &[(1, Run, 0), (1, Ready, 0), (2, Run, 0), (1, Run, 0)],
            &[],
        ),
        (
            "preempted, told after the next one runs",
            &[(1, Run, 0), (2, Run, 0), (1, Ready, 0), (1, Run, 0)],
            &[],
        ),
        (
            "woken before it waits",
            &[
                (1, Run, 0),
                (2, Run, 1),
                (2, Ready, 0),
                (2, Sleep, 1),
                (2, Run, 1),
            ],
            &["_ 1: ! wakeup: wakes _ 2 ->1", "_ 2: [ sched: Running 1->"],
        ),
        (
            "woken while it runs, and preempted after that",
            &[
                (1, Run, 0),
                (2, Run, 1),
                (2, Ready, 0),
                (2, Ready, 1),
                (2, Run, 1),
            ],
            &["_ 1: ! wakeup: wakes _ 2 ->1"],
        ),
        (
            "who exits wakes its parent",
            &[
                (1, Sleep, 1),
                (2, Run, 0),
                (2, Dead, 0),
                (1, Ready, 0),
                (1, Run, 1),
            ],
            &["_ 2: ! wakeup: wakes _ 1 ->1", "_ 1: [ sched: Running 1->"],
        ),
        (
            "after it the CPU is idle",
            &[
                (2, Run, 0),
                (2, Dead, 0),
                (0, Run, 0),
                (1, Ready, 0),
                (1, Edf, 0),
            ],
            &[
                "CPU 0: ! wakeup: wakes _ 1 ->1",
                "_ 1: [ sched: Running 1->",
            ],
        ),
        (
            "woken twice before it runs",
            &[(1, Run, 0), (2, Ready, 0), (2, Ready, 0), (2, Run, 1)],
            &["_ 1: ! wakeup: wakes _ 2 ->1", "_ 2: [ sched: Running 1->"],
        ),
    ] {
        let all = events(records);
        let found: Vec<&str> = (all.iter().filter(|line| line.contains("->")))
            .map(|line| {
                let line = line.split_once(' ').unwrap().1;
                line.split(" (").next().unwrap()
            })
            .collect();
        assert_eq!(found, arrows, "{what}: {all:#?}");
    }
}

#[test]
fn who_runs_elsewhere_no_longer_runs_here() {
    use EventType::{Dead, Ready, Run, Sleep, Trap};
    for (what, records, expected) in [
        (
            "another runs on the CPU",
            &[(1, Run, 0), (2, Run, 0)][..],
            "0 CPU 0: [ 1|0 _ 1: [ Running|1 CPU 0: ]|1 _ 1: ]|1 CPU 0: [ 2|1 _ 2: [ Running|1 _ 2: ]|1 CPU 0: ]",
        ),
        (
            "it moves",
            &[(1, Run, 0), (1, Run, 1)],
            "0 CPU 0: [ 1|0 _ 1: [ Running|1 CPU 0: ]|1 CPU 1: [ 1|1 _ 1: ]|1 _ 1: [ Running|1 _ 1: ]|1 CPU 1: ]",
        ),
        (
            "it dies",
            &[(1, Run, 0), (1, Dead, 0)],
            "0 CPU 0: [ 1|0 _ 1: [ Running|1 _ 1: ! Dead|1 _ 1: ]|1 CPU 0: ]",
        ),
        (
            "idle tasks of two CPUs",
            &[
                (1, Run, 0),
                (0, Run, 1),
                (0, Run, 0),
                (0, Trap, 1),
                (0, Ready, 0),
            ],
            "0 CPU 0: [ 1|0 _ 1: [ Running|2 CPU 0: ]|2 _ 1: ]|3 CPU 1: ! trap: Trap",
        ),
        (
            "it sleeps, told late",
            &[(1, Run, 0), (2, Run, 0), (1, Sleep, 0)],
            "0 CPU 0: [ 1|0 _ 1: [ Running|1 CPU 0: ]|1 _ 1: ]|1 CPU 0: [ 2|1 _ 2: [ Running|2 _ 1: [ Sleep (Dead)|2 _ 1: ]|2 _ 2: ]|2 CPU 0: ]",
        ),
    ] {
        let all: Vec<String> = (events(records).iter())
            .map(|line| {
                let short = line.replace(" sched: ", " ").replace("[ _ ", "[ ");
                let end = ["(pid", "(cpu", "(pc", "(vector"]
                    .iter()
                    .filter_map(|n| short.find(n))
                    .min();
                short[..end.unwrap_or(short.len())].trim().to_owned()
            })
            .collect();
        assert_eq!(all.join("|"), expected, "{what}");
    }
}

/// More processes and CPUs than are kept: a forgotten one is closed, and does not come back before
/// its earlier events.
#[test]
fn a_crowd_is_a_timeline_too() {
    use EventType::{Ints, Run};
    let many = u32::try_from(MAX_TASKS.get()).unwrap() + 100;
    let mut crowd: Vec<Record> = (1..=many)
        .flat_map(|number| {
            let time = i64::from(number);
            [
                record(number, Run, number, time),
                record(number, Ints, number, time),
            ]
        })
        .collect();
    crowd.extend([record(1, Run, 1, 0), record(1, Ints, 1, 0)]);
    let all = decoded(&crowd);
    let slices = usize::try_from(many).unwrap() + 1;
    assert_eq!(all.slices, 3 * slices);
}

#[test]
fn a_picture_says_what_it_leaves_out() {
    let picture =
        |records: &[Record]| String::from_utf8(rendered(records, Svg::default())).unwrap();
    let processes = u32::try_from(MAX_ROWS).unwrap() + 3;
    let crowd: Vec<Record> = (1..=processes)
        .map(|pid| record(pid, EventType::Run, 0, i64::from(pid)))
        .collect();
    let drawn = picture(&crowd);
    assert!(drawn.contains(">3 records after that are left out<"));
    assert_eq!(drawn.matches("<rect class=\"l\"").count(), MAX_ROWS);

    let traps = i64::try_from(MAX_DRAWN).unwrap() + 5;
    let busy: Vec<Record> = (0..traps)
        .map(|time| record(1, EventType::Trap, 0, time))
        .collect();
    assert!(picture(&busy).contains(">5 records after that are left out<"));
    assert!(!picture(&busy[..1000]).contains("left out"));
    assert!(picture(&[]).ends_with("</svg>\n"));
}

/// Checks that every tag that opens closes, in order, and that no text looks like markup.
fn is_well_formed(xml: &str) -> Result<(), String> {
    let mut open = Vec::new();
    let mut pieces = xml.split('<');
    if pieces.next() != Some("") {
        return Err("text before the first tag".to_owned());
    }
    for piece in pieces {
        let (tag, text) = piece.split_once('>').ok_or(format!("no end of <{piece}"))?;
        if tag.matches('"').count() % 2 != 0 || text.contains(['>', '"']) {
            return Err(format!("<{piece}"));
        }
        for after in text.split('&').skip(1) {
            let entity = after.split(';').next().unwrap_or("");
            if !["amp", "apos", "lt", "gt", "quot"].contains(&entity) {
                return Err(format!("&{entity}"));
            }
        }
        if text.chars().any(|c| c < ' ' && c != '\n') {
            return Err(format!("a control character in {text:?}"));
        }
        let name = tag.split([' ', '/']).next().unwrap_or("");
        match tag.strip_prefix('/') {
            Some(name) if open.pop() != Some(name) => return Err(format!("</{name}>")),
            Some(_) => {}
            None if tag.ends_with('/') => {}
            None => open.push(name),
        }
    }
    match open[..] {
        [] => Ok(()),
        _ => Err(format!("{open:?} not closed")),
    }
}

/// Returns records of few processes, CPUs and times, so that they meet, with some of any values.
fn any_record() -> impl Strategy<Value = Record> {
    let number = || prop_oneof![9 => 0..4_u32, 1 => any::<u32>()];
    let event = prop_oneof![9 => 0..17_u32, 1 => any::<u32>()];
    let time = prop_oneof![9 => ZERO..ZERO + 1000, 1 => any::<i64>()];
    (number(), event, number(), time, any::<u64>()).prop_map(
        |(pid, event, machine, time, argument)| Record {
            pid,
            event,
            machine,
            time,
            argument,
        },
    )
}

struct Nowhere;

impl io::Write for Nowhere {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_closed_pipe_is_an_error_of_its_kind() {
    let formats: [Box<dyn Render<Record>>; 4] = [
        Box::new(Text::default()),
        Box::new(Json::default()),
        Box::new(Perfetto::default()),
        Box::new(Svg::default()),
    ];
    for mut format in formats {
        let all = story();
        let written = (all.iter())
            .try_for_each(|record| format.record(record, &mut Nowhere))
            .and_then(|()| format.finish(&mut Nowhere));
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}

proptest! {
    #[test]
    fn any_records_make_well_formed_output(records in prop::collection::vec(any_record(), 0..60)) {
        let json = String::from_utf8(rendered(&records, Json::default())).unwrap();
        prop_assert_eq!(json.lines().count(), records.len());
        for (line, record) in json.lines().zip(&records) {
            let object: serde_json::Value = serde_json::from_str(line).unwrap();
            prop_assert_eq!(&object["pid"], record.pid);
            prop_assert_eq!(&object["time"], record.time);
            prop_assert_eq!(&object["arg"], &format!("{:#x}", record.argument));
        }

        let text = String::from_utf8(rendered(&records, Text::default())).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        prop_assert_eq!(lines.clone().count(), records.len());
        for line in lines {
            let fields: Vec<&str> = line.split_whitespace().collect();
            prop_assert!(fields.len() >= 8, "{}", line);
            let [.., number, argument] = fields[..] else { unreachable!() };
            number.parse::<u32>().unwrap();
            u64::from_str_radix(argument.strip_prefix("0x").unwrap(), 16).unwrap();
        }

        let file = decode(&rendered(&records, Perfetto::default()), 0);
        prop_assert!(file.is_ok(), "{}", file.unwrap_err());

        let picture = String::from_utf8(rendered(&records, Svg::default())).unwrap();
        prop_assert_eq!(is_well_formed(&picture), Ok(()));
    }
}
