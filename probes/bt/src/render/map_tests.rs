//! Maps that scripts fill, as they are shown. In bt(5) the cases are the groups of OpenBSD's
//! regression tests about maps and histograms; others are bpftrace's.
#![allow(clippy::unwrap_used)]

use super::tests::{Fixed, int, word};
use super::*;
use crate::ast::{Aggregation, Dialect};
use crate::maps::{MapDeclaration, MapKind, Maps};

/// An operation on a map.
enum Step {
    Set(&'static [i64], i64),
    SetText(&'static [i64], &'static str),
    Gather(Aggregation, &'static [i64], i64),
    Delete(&'static [i64]),
    Clear,
    Zero,
    /// Reads an entry and shows it; a missing one shows nothing.
    Read(&'static [i64]),
    Print,
    Top(usize),
    Say(&'static str),
}

use Step::{Clear, Delete, Gather, Print, Read, Say, Set, SetText, Top, Zero};

fn run(dialect: Dialect, kind: MapKind, steps: &[Step]) -> String {
    let declaration = MapDeclaration {
        name: "m".to_owned(),
        kind,
    };
    let maps = Maps::new(vec![declaration], 2, dialect, 100);
    let key = |key: &[i64]| key.iter().copied().map(int).collect::<Vec<_>>();
    let mut out = Vec::new();
    for (turn, step) in steps.iter().enumerate() {
        let map = |top| Output::Map {
            snapshot: maps.snapshot(0),
            top,
            divisor: None,
        };
        match step {
            Set(at, value) => maps.set(0, &key(at), int(*value)),
            SetText(at, value) => maps.set(0, &key(at), word(value)),
            Gather(how, at, value) => maps.aggregate(0, turn, *how, &key(at), *value),
            Delete(at) => drop(maps.delete(0, &key(at))),
            Clear => maps.clear(0),
            Zero => maps.zero(0),
            Read(at) => {
                if let Some(value) = maps.get(0, &key(at)) {
                    out.extend(text::render(&Output::Print(value), dialect, &Fixed));
                }
            }
            Print => out.extend(text::render(&map(None), dialect, &Fixed)),
            Top(most) => out.extend(text::render(&map(Some(*most)), dialect, &Fixed)),
            Say(line) => out.extend(format!("-- {line}\n").bytes()),
        }
    }
    String::from_utf8(out).unwrap()
}

const COUNT: Aggregation = Aggregation::Count;
const SUM: Aggregation = Aggregation::Sum;
const MIN: Aggregation = Aggregation::Min;
const MAX: Aggregation = Aggregation::Max;
const HIST: Aggregation = Aggregation::PowerHistogram;

#[test]
fn strict_maps_are_shown_as_in_bt() {
    let cases: &[(&str, &[Step], &str)] = &[
        (
            "counted, assigned, zeroed, cleared",
            &[
                Gather(COUNT, &[12], 0),
                Say("one"),
                Print,
                Zero,
                Say("zeroed"),
                Print,
                Gather(COUNT, &[12], 0),
                Gather(COUNT, &[12], 0),
                Set(&[80], 500),
                Set(&[443], 501),
                Gather(COUNT, &[443], 0),
                Set(&[22], 33),
                Say("top"),
                Top(2),
                Say("none"),
                Top(0),
                Say("all"),
                Print,
                Clear,
                Say("cleared"),
                Print,
            ],
            "-- one\n@m[12]: 1\n-- zeroed\n@m[12]: 0\n-- top\n@m[443]: 502\n@m[80]: 500\n-- none\n-- all\n\
             @m[443]: 502\n@m[80]: 500\n@m[22]: 33\n@m[12]: 2\n-- cleared\n",
        ),
        (
            "smallest, largest and sum of one entry",
            &[
                Set(&[4], 20),
                Gather(MIN, &[4], 31),
                Print,
                Gather(MAX, &[4], 31),
                Print,
                Gather(SUM, &[4], -1),
                Print,
                // Missing entries count as 0.
                Gather(MIN, &[5], 9),
                Gather(MIN, &[6], -9),
                Gather(MAX, &[7], -9),
                Say("absent"),
                Print,
            ],
            "@m[4]: 20\n@m[4]: 31\n@m[4]: 30\n-- absent\n@m[4]: 30\n@m[5]: 0\n@m[7]: 0\n@m[6]: -9\n",
        ),
        (
            "equal values by the text of their keys",
            &[
                Set(&[9], 1),
                Set(&[10], 1),
                Set(&[2, 3], 1),
                Set(&[100], 1),
                Print,
            ],
            "@m[10]: 1\n@m[100]: 1\n@m[2, 3]: 1\n@m[9]: 1\n",
        ),
        (
            "numbers before text, each descending",
            &[
                SetText(&[1], "a"),
                Set(&[2], -5),
                SetText(&[3], "b"),
                Set(&[4], 7),
                Print,
            ],
            "@m[4]: 7\n@m[2]: -5\n@m[3]: b\n@m[1]: a\n",
        ),
        (
            "nothing there",
            &[
                Say("print"),
                Print,
                Clear,
                Zero,
                Delete(&[1]),
                Print,
                Say("end"),
            ],
            "-- print\n-- end\n",
        ),
        (
            "read after clear",
            &[
                Set(&[1], 5),
                Read(&[1]),
                Clear,
                Read(&[1]),
                Say("cleared"),
                Print,
                Set(&[2], 6),
                Read(&[1]),
                Print,
            ],
            "5\n-- cleared\n0\n@m[2]: 6\n@m[1]: 0\n",
        ),
        (
            "deleted and set again",
            &[
                Set(&[1], 5),
                Set(&[2], 4),
                Delete(&[1]),
                Delete(&[8]),
                Print,
                Set(&[1], 1),
                Print,
            ],
            "@m[2]: 4\n@m[2]: 4\n@m[1]: 1\n",
        ),
        (
            "a variable without keys",
            &[Print, Set(&[], -3), Print, SetText(&[], "x y"), Top(0)],
            "-3\nx y\n",
        ),
    ];
    for &(name, steps, expected) in cases {
        assert_eq!(
            run(Dialect::Strict, MapKind::Scalar, steps),
            expected,
            "{name}"
        );
    }
}

#[test]
fn strict_histograms_are_shown_as_in_bt() {
    let full = "@".repeat(52);
    let half = format!("{}{}", "@".repeat(26), " ".repeat(26));
    let kind = MapKind::Aggregation(HIST);
    assert_eq!(
        run(
            Dialect::Strict,
            kind,
            &[
                Print,
                Gather(HIST, &[], 1),
                Gather(HIST, &[], 6),
                Gather(HIST, &[], 8),
                Print,
                Clear,
                Print,
                Zero,
                Delete(&[]),
                Say("empty"),
                Print,
            ],
        ),
        format!("@m:\n[0, 1)             1 |{half}|\n[4, 8)             2 |{full}|\n-- empty\n")
    );
    // Nothing is in range, so there is no histogram.
    let range = Aggregation::LinearHistogram {
        min: 5,
        max: 9,
        step: 2,
    };
    assert_eq!(
        run(
            Dialect::Strict,
            MapKind::Aggregation(range),
            &[
                Gather(range, &[], 4),
                Print,
                Say("one"),
                Gather(range, &[], 9),
                Print
            ]
        ),
        format!("-- one\n@m:\n[8, 10)            1 |{full}|\n")
    );
}

#[test]
fn normal_maps_are_shown_as_in_bpftrace() {
    let cases: &[(&str, MapKind, &[Step], &str)] = &[
        (
            "ascending, the largest last",
            MapKind::Aggregation(COUNT),
            &[
                Gather(COUNT, &[1], 0),
                Gather(COUNT, &[2], 0),
                Gather(COUNT, &[2], 0),
                Gather(COUNT, &[3], 0),
                Print,
                Top(1),
                Top(2),
                Top(9),
            ],
            "@m[1]: 1\n@m[3]: 1\n@m[2]: 2\n@m[2]: 2\n@m[3]: 1\n@m[2]: 2\n@m[1]: 1\n@m[3]: 1\n@m[2]: 2\n",
        ),
        (
            "text by key, keys by number",
            MapKind::Scalar,
            &[SetText(&[10], "a"), SetText(&[9], "z"), Print],
            "@m[9]: z\n@m[10]: a\n",
        ),
        (
            "absent is what comes first",
            MapKind::Aggregation(MIN),
            &[
                Gather(MIN, &[1], 9),
                Gather(MIN, &[1], 4),
                Gather(MIN, &[1], 6),
                Print,
                Zero,
                Print,
                Gather(MIN, &[1], 8),
                Print,
            ],
            "@m[1]: 4\n@m[1]: 0\n@m[1]: 8\n",
        ),
        (
            "no keys",
            MapKind::Aggregation(MAX),
            &[Print, Gather(MAX, &[], -2), Print, Clear, Print],
            "@m: -2\n",
        ),
        (
            "several keys",
            MapKind::Scalar,
            &[Set(&[1, 2], 3), Print, Read(&[9, 9]), Print],
            "@m[1, 2]: 3\n@m[1, 2]: 3\n",
        ),
        (
            "mean",
            MapKind::Aggregation(Aggregation::Average),
            &[
                Gather(Aggregation::Average, &[], 3),
                Gather(Aggregation::Average, &[], 6),
                Print,
                Read(&[]),
            ],
            "@m: 4\n4\n",
        ),
        (
            "everything",
            MapKind::Aggregation(Aggregation::Stats),
            &[
                Gather(Aggregation::Stats, &[], 3),
                Gather(Aggregation::Stats, &[], 4),
                Gather(Aggregation::Stats, &[], 5),
                Print,
                Zero,
                Print,
            ],
            "@m: count 3, average 4, total 12\n@m: count 0, average 0, total 0\n",
        ),
    ];
    for &(name, kind, steps, expected) in cases {
        assert_eq!(run(Dialect::Normal, kind, steps), expected, "{name}");
    }
}

#[test]
fn normal_histograms_are_shown_as_in_bpftrace() {
    let full = "@".repeat(52);
    let half = format!("{}{}", "@".repeat(26), " ".repeat(26));
    let none = " ".repeat(52);
    let steps = [
        Gather(HIST, &[7], 1),
        Gather(HIST, &[7], 4),
        Gather(HIST, &[7], 7),
        Gather(HIST, &[3], 0),
        Print,
        Zero,
        Print,
    ];
    assert_eq!(
        run(Dialect::Normal, MapKind::Aggregation(HIST), &steps),
        format!(
            "@m[3]:\n[0]                    1 |{full}|\n\n\
             @m[7]:\n[1]                    1 |{half}|\n[2, 4)                 0 |{none}|\n\
             [4, 8)                 2 |{full}|\n\n\
             @m[3]:\n\n@m[7]:\n\n"
        )
    );
}
