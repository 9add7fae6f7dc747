//! Maps that scripts fill, as they are shown. In bt(5) the cases are the groups of OpenBSD's
//! regression tests about maps and histograms; others are bpftrace's.
#![allow(clippy::unwrap_used)]

use super::tests::{Fixed, int, word};
use super::*;
use crate::ast::{Aggregation, Dialect};
use crate::maps::{MapDeclaration, MapKind, Maps};

const RANGE: Aggregation = Aggregation::LinearHistogram {
    min: 5,
    max: 9,
    step: 2,
};

fn aggregation(name: &str) -> Aggregation {
    match name {
        "count" => Aggregation::Count,
        "sum" => Aggregation::Sum,
        "min" => Aggregation::Min,
        "max" => Aggregation::Max,
        "avg" => Aggregation::Average,
        "stats" => Aggregation::Stats,
        "hist" => Aggregation::PowerHistogram(0),
        "lhist" => RANGE,
        other => panic!("{other}"),
    }
}

/// Returns what a map shows during steps of the form `VERB [KEYS [VALUE]]`. Keys have commas
/// between them, and `-` stands for none. A verb is that of an aggregation, or one of these:
///
/// - `set`: assigns a number or text;
/// - `read`: shows an entry, and nothing for a missing one;
/// - `top`: prints so many entries;
/// - `say`: shows a line;
/// - `print`, `delete`, `clear`, `zero`.
fn run(dialect: Dialect, kind: MapKind, steps: &str) -> String {
    let declaration = MapDeclaration::new("m", kind);
    let maps = Maps::new(vec![declaration], 2, dialect, 100);
    let mut out = Vec::new();
    for (turn, step) in steps.split("; ").enumerate() {
        let mut words = step.splitn(3, ' ');
        let [verb, at, value] = [(); 3].map(|()| words.next().unwrap_or(""));
        let keys = || at.split(',').filter(|key| *key != "-");
        let key = || {
            keys()
                .map(|key| int(key.parse().unwrap()))
                .collect::<Vec<_>>()
        };
        let mut print = |top| {
            let map = Output::Map {
                snapshot: maps.snapshot(0),
                top,
                divisor: None,
            };
            out.extend(text::render(&map, dialect, &Fixed));
        };
        match verb {
            "set" => maps.set(0, &key(), value.parse().map_or_else(|_| word(value), int)),
            "delete" => drop(maps.delete(0, &key())),
            "clear" => maps.clear(0),
            "zero" => maps.zero(0),
            "read" => {
                if let Some(value) = maps.get(0, &key()) {
                    out.extend(text::render(&Output::Print(value), dialect, &Fixed));
                }
            }
            "print" => print(None),
            "top" => print(Some(at.parse().unwrap())),
            "say" => out.extend(format!("-- {at}\n").bytes()),
            gather => {
                let value = value.parse().unwrap_or(0);
                maps.aggregate(0, turn, aggregation(gather), &key(), value, 0);
            }
        }
    }
    String::from_utf8(out).unwrap()
}

#[test]
fn strict_maps_are_shown_as_in_bt() {
    for (name, steps, expected) in [
        (
            "counted, assigned, zeroed, cleared",
            "count 12; say one; print; zero; say zeroed; print; count 12; count 12; set 80 500; \
             set 443 501; count 443; set 22 33; say top; top 2; say none; top 0; say all; print; clear; \
             say cleared; print",
            "-- one\n@m[12]: 1\n-- zeroed\n@m[12]: 0\n-- top\n@m[443]: 502\n@m[80]: 500\n-- none\n-- all\n\
             @m[443]: 502\n@m[80]: 500\n@m[22]: 33\n@m[12]: 2\n-- cleared\n",
        ),
        (
            "smallest, largest and sum of one entry",
            "set 4 20; min 4 31; print; max 4 31; print; sum 4 -1; print; min 5 9; min 6 -9; max 7 -9; \
             say absent; print",
            "@m[4]: 20\n@m[4]: 31\n@m[4]: 30\n-- absent\n@m[4]: 30\n@m[5]: 0\n@m[7]: 0\n@m[6]: -9\n",
        ),
        (
            "equal values by the text of their keys",
            "set 9 1; set 10 1; set 2,3 1; set 100 1; print",
            "@m[10]: 1\n@m[100]: 1\n@m[2, 3]: 1\n@m[9]: 1\n",
        ),
        (
            "numbers before text, each descending",
            "set 1 a; set 2 -5; set 3 b; set 4 7; print",
            "@m[4]: 7\n@m[2]: -5\n@m[3]: b\n@m[1]: a\n",
        ),
        (
            "nothing there",
            "say print; print; clear; zero; delete 1; print; say end",
            "-- print\n-- end\n",
        ),
        (
            "read after clear",
            "set 1 5; read 1; clear; read 1; say cleared; print; set 2 6; read 1; print",
            "5\n-- cleared\n0\n@m[2]: 6\n@m[1]: 0\n",
        ),
        (
            "deleted and set again",
            "set 1 5; set 2 4; delete 1; delete 8; print; set 1 1; print",
            "@m[2]: 4\n@m[2]: 4\n@m[1]: 1\n",
        ),
        (
            "a variable without keys",
            "print; set - -3; print; set - x y; top 0",
            "-3\nx y\n",
        ),
    ] {
        let found = run(Dialect::Strict, MapKind::Scalar, steps);
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn strict_histograms_are_shown_as_in_bt() {
    let full = "@".repeat(52);
    let half = format!("{}{}", "@".repeat(26), " ".repeat(26));
    for (kind, steps, expected) in [
        (
            Aggregation::PowerHistogram(0),
            "print; hist - 1; hist - 6; hist - 8; print; clear; print; zero; delete -; say empty; print",
            format!(
                "@m:\n[0, 1)             1 |{half}|\n[4, 8)             2 |{full}|\n-- empty\n"
            ),
        ),
        (
            RANGE,
            // Nothing is in range first, so there is no histogram.
            "lhist - 4; print; say one; lhist - 9; print",
            format!("-- one\n@m:\n[8, 10)            1 |{full}|\n"),
        ),
    ] {
        let found = run(Dialect::Strict, MapKind::Aggregation(kind), steps);
        assert_eq!(found, expected);
    }
}

#[test]
fn normal_maps_are_shown_as_in_bpftrace() {
    let gathered = |name| MapKind::Aggregation(aggregation(name));
    for (name, kind, steps, expected) in [
        (
            "ascending, the largest last",
            gathered("count"),
            "count 1; count 2; count 2; count 3; print; top 1; top 2; top 9",
            "@m[1]: 1\n@m[3]: 1\n@m[2]: 2\n@m[2]: 2\n@m[3]: 1\n@m[2]: 2\n@m[1]: 1\n@m[3]: 1\n@m[2]: 2\n",
        ),
        (
            "text by key, keys by number",
            MapKind::Scalar,
            "set 10 a; set 9 z; print",
            "@m[9]: z\n@m[10]: a\n",
        ),
        (
            "absent is what comes first",
            gathered("min"),
            "min 1 9; min 1 4; min 1 6; print; zero; print; min 1 8; print",
            "@m[1]: 4\n@m[1]: 0\n@m[1]: 8\n",
        ),
        (
            "no keys",
            gathered("max"),
            "print; max - -2; print; clear; print",
            "@m: -2\n",
        ),
        (
            "several keys",
            MapKind::Scalar,
            "set 1,2 3; print; read 9,9; print",
            "@m[1, 2]: 3\n@m[1, 2]: 3\n",
        ),
        (
            "mean",
            gathered("avg"),
            "avg - 3; avg - 6; print; read -",
            "@m: 4\n4\n",
        ),
        (
            "everything",
            gathered("stats"),
            "stats - 3; stats - 4; stats - 5; print; zero; print",
            "@m: count 3, average 4, total 12\n@m: count 0, average 0, total 0\n",
        ),
    ] {
        assert_eq!(run(Dialect::Normal, kind, steps), expected, "{name}");
    }
}

#[test]
fn normal_histograms_are_shown_as_in_bpftrace() {
    let full = "@".repeat(52);
    let half = format!("{}{}", "@".repeat(26), " ".repeat(26));
    let none = " ".repeat(52);
    let steps = "hist 7 1; hist 7 4; hist 7 7; hist 3 0; print; zero; print";
    assert_eq!(
        run(
            Dialect::Normal,
            MapKind::Aggregation(Aggregation::PowerHistogram(0)),
            steps
        ),
        format!(
            "@m[3]:\n[0]                    1 |{full}|\n\n\
             @m[7]:\n[1]                    1 |{half}|\n[2, 4)                 0 |{none}|\n\
             [4, 8)                 2 |{full}|\n\n\
             @m[3]:\n\n@m[7]:\n\n"
        )
    );
}
