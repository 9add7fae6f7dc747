#![allow(clippy::unwrap_used)]

use probes::clock::Clock;
use proptest::prelude::*;

use super::{Collapsed, Json, Perfetto, Symbols};
use crate::perfetto::decode::decode;
use crate::render::Render;
use crate::trace_line::{LineKind, TraceLine};

/// Two ticks are a nanosecond; tick 0 is nanosecond 1000.
const CLOCK: Clock = Clock {
    tsc: 0,
    unix_ns: 1000,
    hz: 2_000_000_000,
};

fn symbols() -> Symbols {
    Box::new(|pc| match pc {
        0xa000 => Some("outer".to_owned()),
        0xa010 => Some("outer+0x10".to_owned()),
        0xb000 => Some("in ner;".to_owned()),
        _ => None,
    })
}

fn line(kind: LineKind, pc: u64, ticks: u64, pid: u64, arguments: [u64; 4]) -> TraceLine {
    TraceLine {
        kind,
        pc,
        ticks,
        pid,
        arguments,
    }
}

/// Parses a story. `E outer 1 100` is an entry of `outer` by process 1 at tick 100; `X` returns to
/// `outer+0x10`.
fn lines(story: &str) -> Vec<TraceLine> {
    let words = story
        .split(", ")
        .map(|line| line.split(' ').collect::<Vec<_>>());
    words
        .map(|words| {
            let kind = if words[0] == "E" {
                LineKind::Entry
            } else {
                LineKind::Exit
            };
            let pc = match (words[0], words[1]) {
                ("X", _) => 0xa010,
                (_, "outer") => 0xa000,
                (_, "inner") => 0xb000,
                _ => 0xc000,
            };
            let number = |word: &str| word.parse().unwrap_or(u64::MAX);
            line(kind, pc, number(words[3]), number(words[2]), [0; 4])
        })
        .collect()
}

fn rendered(lines: &[TraceLine], mut format: impl Render<TraceLine>) -> String {
    String::from_utf8(bytes(lines, &mut format)).unwrap()
}

fn bytes(lines: &[TraceLine], format: &mut impl Render<TraceLine>) -> Vec<u8> {
    let mut out = Vec::new();
    for line in lines {
        format.record(line, &mut out).unwrap();
    }
    format.finish(&mut out).unwrap();
    out
}

const NESTED: &str = "E outer 1 100, E inner 1 120, E outer 2 130, X - 1 150, X - 2 160, E inner 1 170, E inner 1 180, X - 1 190, X - 1 195, X - 1 200";

#[test]
fn stacks_have_the_time_of_their_last_function() {
    for (what, story, hz, expected) in [
        (
            "calls",
            NESTED,
            None,
            "outer 75\nouter;in_ner_ 45\nouter;in_ner_;in_ner_ 10\n",
        ),
        (
            "in nanoseconds",
            NESTED,
            Some(2_000_000_000),
            "outer 37\nouter;in_ner_ 22\nouter;in_ner_;in_ner_ 5\n",
        ),
        (
            "a return too many, and a call that does not return",
            "X - 1 5, E other 1 10, X - 1 15, E outer 1 20, E other 1 30, E outer 1 45",
            None,
            "0xc000 5\nouter 10\nouter;0xc000 15\n",
        ),
        (
            "time that goes back",
            "E outer 1 50, E inner 1 40, X - 1 60",
            None,
            "outer;in_ner_ 10\n",
        ),
        ("no process", "E outer - 1, X - - 3", None, "outer 2\n"),
    ] {
        assert_eq!(
            rendered(&lines(story), Collapsed::new(symbols(), hz)),
            expected,
            "{what}"
        );
    }
}

/// Calls that never return, as in a stream that has lost its returns, or in a hostile file.
#[test]
fn what_nests_for_ever_takes_a_bounded_room() {
    let deep: Vec<TraceLine> = (0..4000)
        .map(|n| line(LineKind::Entry, 0x1000 + n, 10 * n, 7, [0; 4]))
        .collect();
    let text = rendered(&deep, Collapsed::new(symbols(), None));
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|l| l.rsplit_once(' ')).collect();
    let frames: usize = lines
        .iter()
        .map(|(stack, _)| stack.split(';').count())
        .sum();
    assert!(frames <= 1 << 22, "{frames}");
    let ticks: u64 = lines
        .iter()
        .filter_map(|(_, n)| n.parse::<u64>().ok())
        .sum();
    assert_eq!(ticks, 10 * 3999);
    assert!(lines.iter().any(|(stack, _)| *stack == "[further stacks]"));
}

#[test]
fn a_line_is_a_json_object() {
    let story = [
        line(LineKind::Entry, 0xa000, 10, 7, [1, u64::MAX, 3, 0]),
        line(
            LineKind::Exit,
            0xa010,
            20,
            7,
            [0xffff_ffff_ffff_fff5, 0, 0, 0],
        ),
        line(LineKind::Exit, 0xc000, 30, u64::MAX, [0; 4]),
        line(LineKind::Entry, 0xb000, 40, 7, [0; 4]),
    ];
    let with_clock = r#"{"event":"entry","pid":7,"pc":"0xa000","symbol":"outer","function":"outer","tsc":10,"time":1005,"clock":"realtime","args":["0x1","0xffffffffffffffff","0x3","0x0"]}
{"event":"return","pid":7,"pc":"0xa010","symbol":"outer+0x10","function":"outer","tsc":20,"time":1010,"clock":"realtime","return":"0xfffffffffffffff5"}
{"event":"return","pid":null,"pc":"0xc000","tsc":30,"time":1015,"clock":"realtime","return":"0x0"}
{"event":"entry","pid":7,"pc":"0xb000","symbol":"in ner;","function":"in ner;","tsc":40,"time":1020,"clock":"realtime","args":["0x0","0x0","0x0","0x0"]}
"#;
    assert_eq!(
        rendered(&story, Json::new(symbols(), Some(CLOCK))),
        with_clock
    );
    let first = r#"{"event":"entry","pid":7,"pc":"0xa000","symbol":"outer","function":"outer","tsc":10,"args":["0x1","0xffffffffffffffff","0x3","0x0"]}
"#;
    assert_eq!(rendered(&story[..1], Json::new(symbols(), None)), first);
}

#[test]
fn calls_are_slices_within_each_other() {
    let story = "E outer 1 0, E inner 1 10, E outer 2 20, X - 1 40, E inner 1 60, E inner 1 80, X - 1 90, X - - 100";
    let file = bytes(&lines(story), &mut Perfetto::new(symbols(), CLOCK));
    let decoded = decode(&file, 1000).unwrap();
    let args = " (arg1 0x0) (arg2 0x0) (arg3 0x0) (arg4 0x0)";
    let text = decoded.lines.join("\n").replace(args, "");
    let expected = "clocks id 1 time 1000 primary 1
process process 1
thread process 1
0 process 1: [ call: outer
5 process 1: [ call: in ner;
process process 2
thread process 2
10 process 2: [ call: outer
20 process 1: ] (return 0x0)
30 process 1: [ call: in ner;
40 process 1: [ call: in ner;
45 process 1: ] (return 0x0)
track no process
50 no process: ! return: return to outer+0x10 (return 0x0)
50 process 1: ]
50 process 1: ]
50 process 2: ]";
    assert_eq!(text, expected);
    assert_eq!((decoded.slices, decoded.instants), (5, 1));
}

fn any_line() -> impl Strategy<Value = TraceLine> {
    let number = || prop_oneof![9 => 0..4_u64, 1 => any::<u64>()];
    let ticks = prop_oneof![9 => 0..1000_u64, 1 => any::<u64>()];
    (any::<bool>(), number(), ticks, number(), any::<[u64; 4]>()).prop_map(
        |(entry, pc, ticks, pid, arguments)| {
            let kind = if entry {
                LineKind::Entry
            } else {
                LineKind::Exit
            };
            line(kind, pc, ticks, pid, arguments)
        },
    )
}

proptest! {
    #[test]
    fn any_lines_make_well_formed_output(lines in prop::collection::vec(any_line(), 0..60)) {
        for clock in [None, Some(CLOCK)] {
            let json = rendered(&lines, Json::new(symbols(), clock));
            prop_assert_eq!(json.lines().count(), lines.len());
            for (text, line) in json.lines().zip(&lines) {
                let object: serde_json::Value = serde_json::from_str(text).unwrap();
                prop_assert_eq!(&object["tsc"], line.ticks);
            }
        }
        let file = bytes(&lines, &mut Perfetto::new(symbols(), CLOCK));
        let entries = lines.iter().filter(|line| line.kind == LineKind::Entry).count();
        prop_assert_eq!(decode(&file, 0).map(|decoded| decoded.slices), Ok(entries));
        for line in rendered(&lines, Collapsed::new(symbols(), None)).lines() {
            let (_, weight) = line.rsplit_once(' ').unwrap();
            prop_assert!(weight.parse::<u128>().is_ok(), "{}", line);
        }
    }
}
