//! A script's output, to the byte. Maps after several operations are in
//! [`map_tests`](super::map_tests).
#![allow(clippy::unwrap_used)]

use super::*;
use crate::ast::Dialect;
use crate::histogram::{Buckets, Histogram};
use crate::maps::{Key, MapDeclaration, MapKind, Maps, Reading};
use crate::time::Zone;
use crate::value::{FileContent, Names};
use crate::value_text::write_value;

/// Names of a made-up system: kernel symbols at 0x1000 and 0x2000 (0x800 bytes each), programs with
/// a function each 0x100 bytes.
pub(crate) struct Fixed;

impl Names for Fixed {
    fn kernel(&self, address: u64) -> String {
        match (address & !0x7ff, address & 0x7ff) {
            (symbol @ (0x1000 | 0x2000), 0) => format!("k{symbol:x}"),
            (symbol @ (0x1000 | 0x2000), offset) => format!("k{symbol:x}+{offset:#x}"),
            _ => format!("{address:#x}"),
        }
    }

    fn user(&self, pid: u32, address: u64) -> String {
        match (address & !0xff, address & 0xff) {
            (symbol, 0) => format!("p{pid}_{symbol:x}"),
            (symbol, offset) => format!("p{pid}_{symbol:x}+{offset:#x}"),
        }
    }

    fn file(&self, path: &[u8]) -> FileContent {
        FileContent {
            bytes: [path, b":\n"].concat().into(),
            lost: None,
        }
    }
}

pub(super) fn int(number: i64) -> Value {
    Value::Int(number)
}

pub(super) fn word(word: &str) -> Value {
    Value::text(word.as_bytes())
}

/// Makes maps with a stack in their key, and other values.
fn stacks(dialect: Dialect) -> Maps {
    let declarations = ["", "v"].map(|name| MapDeclaration::new(name, MapKind::Scalar));
    let maps = Maps::new(declarations.to_vec(), 1, dialect, 100);
    let kernel = Value::KernelStack([0x1010, 0x2000].as_slice().into());
    let user = Value::UserStack {
        pid: 7,
        frames: [0x4012, 0x5000].as_slice().into(),
    };
    maps.set(0, &[kernel.clone(), word("a;b")], int(2));
    maps.set(0, &[kernel, word("a;b"), user.clone()], int(3));
    maps.set(1, &[int(1)], user);
    maps
}

fn shown(maps: &Maps, map: usize, dialect: Dialect) -> String {
    let output = Output::Map {
        snapshot: maps.snapshot(map),
        top: None,
        divisor: None,
    };
    String::from_utf8(text::render(&output, dialect, &Fixed)).unwrap()
}

#[test]
fn stacks_are_lines() {
    let maps = stacks(Dialect::Normal);
    assert_eq!(
        shown(&maps, 0, Dialect::Normal),
        "@[\n    k1000+16\n    k2000+0\n, a;b]: 2\n\
         @[\n    k1000+16\n    k2000+0\n, a;b, \n    p7_4000+18\n    p7_5000+0\n]: 3\n"
    );
    assert_eq!(
        shown(&maps, 1, Dialect::Normal),
        "@v[1]: \n    p7_4000+18\n    p7_5000+0\n\n"
    );
    let maps = stacks(Dialect::Strict);
    assert_eq!(
        shown(&maps, 0, Dialect::Strict),
        "@[\nk1000+0x10\nk2000\nkernel\n, a;b, \np7_4000+0x12\np7_5000\nuserland\n]: 3\n\
         @[\nk1000+0x10\nk2000\nkernel\n, a;b]: 2\n"
    );
}

#[test]
fn values_have_a_text() {
    let frames = |frames: &[u64]| Value::KernelStack(frames.into());
    let symbol = Value::UserSymbol {
        pid: 4,
        address: 0x1204,
    };
    let nested = Value::Tuple(
        [
            int(-1),
            Value::Tuple([word("x"), Value::Unsigned(2)].into()),
        ]
        .into(),
    );
    let no_user_frames = Value::UserStack {
        pid: 1,
        frames: [].into(),
    };
    let cases: &[(Value, &str, &str)] = &[
        (
            int(i64::MIN),
            "-9223372036854775808",
            "-9223372036854775808",
        ),
        (
            Value::Unsigned(u64::MAX),
            "18446744073709551615",
            "18446744073709551615",
        ),
        (word("a\tb"), "a\tb", "a\tb"),
        (
            Value::Bytes([b'a', 0].as_slice().into()),
            "a\\x00",
            "a\\x00",
        ),
        (nested, "(-1, (x, 2))", "(-1, (x, 2))"),
        (Value::KernelSymbol(0x1008), "k1000", "k1000+0x8"),
        (Value::KernelSymbol(0x9008), "0x9008", "0x9008"),
        (symbol, "p4_1200", "p4_1200+0x4"),
        (
            frames(&[0x2001]),
            "\n    k2000+1\n",
            "\nk2000+0x1\nkernel\n",
        ),
        (frames(&[]), "\n", "\nuserland\n"),
        (no_user_frames, "\n", "\nuserland\n"),
    ];
    for (value, normal, strict) in cases {
        for (dialect, expected) in [(Dialect::Normal, normal), (Dialect::Strict, strict)] {
            let line = text::render(&Output::Print(value.clone()), dialect, &Fixed);
            assert_eq!(
                String::from_utf8(line).unwrap(),
                format!("{expected}\n"),
                "{value:?}"
            );
        }
    }
}

#[test]
fn strict_stacks_are_cut_as_in_bt() {
    let line_of = |frames: &[u64]| {
        let stack = Value::KernelStack(frames.into());
        let mut out = Vec::new();
        write_value(&mut out, &stack, Dialect::Strict, &Fixed);
        String::from_utf8(out).unwrap()
    };
    // "\nk1000" has 6 bytes: 681 of them are 4086, and leave 10 with the NUL.
    let fits = line_of(&[0x1000; 681]);
    assert_eq!(fits.len(), 4086 + "\nkernel\n".len());
    assert!(fits.ends_with("k1000\nkernel\n"));
    // The 682nd leaves 4: the last line is cut.
    let cut = line_of(&[0x1000; 682]);
    assert_eq!((cut.len(), &cut[4092..]), (4095, "\nke"));
    // The 683rd is cut itself.
    let cut = line_of(&[0x1000; 683]);
    assert_eq!((cut.len(), &cut[4092..]), (4094, "\nk"));
}

#[test]
fn the_rest_has_a_text() {
    let zone = Zone::utc();
    let time = TimeFormat::parse(b"%F %T\n", Dialect::Normal, &zone).unwrap();
    let format = Arc::new(Format::parse(b"%d-%s\n", Dialect::Normal).unwrap());
    let printf = |complaint| Output::Printf {
        format: format.clone(),
        arguments: vec![int(1), word("x")],
        complaint,
    };
    let join = Output::Join {
        parts: ["ls", "-l"].map(|part| part.as_bytes().into()).to_vec(),
        separator: b" ".as_slice().into(),
    };
    let path = Format::parse(b"/proc/%s/%d", Dialect::Normal).unwrap();
    let file = Output::File {
        path: FilePath {
            format: Arc::new(path),
            arguments: vec![Value::KernelSymbol(0x1000), int(7)],
        },
        most: 100,
    };
    let time = Output::Time {
        format: Arc::new(time),
        unix_ns: 0,
    };
    let cases = [
        (
            printf(None),
            "1-x\n",
            r#"{"type": "printf", "data": "1-x\n"}"#,
        ),
        (join, "ls -l\n", r#"{"type": "join", "data": "ls -l"}"#),
        (
            file,
            "/proc/k1000/7:\n",
            r#"{"type": "cat", "data": "/proc/k1000/7:\n"}"#,
        ),
        (
            time,
            "1970-01-01 00:00:00\n",
            r#"{"type": "time", "data": "1970-01-01 00:00:00\n"}"#,
        ),
    ];
    for (output, expected, expected_json) in cases {
        assert_eq!(
            text::render(&output, Dialect::Normal, &Fixed),
            expected.as_bytes()
        );
        assert_eq!(
            json::render(&output, Dialect::Normal, &Fixed),
            format!("{expected_json}\n")
        );
        assert!(!output.is_for_stderr());
    }
    let complaint = Complaint {
        is_error: false,
        file: "a.bt".into(),
        line: 3,
        columns: (9, 20),
    };
    let warning = printf(Some(complaint.into()));
    assert!(warning.is_for_stderr());
    let text = text::render(&warning, Dialect::Normal, &Fixed);
    assert_eq!(text, b"a.bt:3:9-20: WARNING: 1-x\n\n");
    let json = json::render(&warning, Dialect::Normal, &Fixed);
    let expected = r#"{"type": "warnf", "msg": "1-x\n", "filename": "a.bt", "line": 3, "col": 9}"#;
    assert_eq!(json, format!("{expected}\n"));
}

#[test]
fn json_is_one_object_a_line() {
    let map = |entries: &[(&[Value], Reading)]| Output::Map {
        snapshot: MapSnapshot {
            name: "x".into(),
            entries: (entries.iter())
                .map(|(key, reading)| (Key::from(*key), reading.clone()))
                .collect(),
        },
        top: None,
        divisor: None,
    };
    let value = |number| Reading::Value(int(number));
    let histogram = |buckets: Buckets, values: &[i64]| {
        let mut counts = Histogram::default();
        for bucket in values.iter().filter_map(|&value| buckets.bucket_of(value)) {
            counts.add(bucket);
        }
        Reading::Histogram { buckets, counts }
    };
    let linear = Buckets::Linear {
        min: 0,
        max: 20,
        step: 10,
    };
    let stats = Reading::Stats {
        count: 3,
        total: 13,
    };
    let average = Reading::Average { count: 2, total: 9 };
    assert_eq!(
        json::render(
            &Output::Map {
                snapshot: MapSnapshot {
                    name: "x".into(),
                    entries: vec![(
                        Key::from([]),
                        Reading::Average {
                            count: 2,
                            total: 99
                        }
                    )],
                },
                top: None,
                divisor: Some(10),
            },
            Dialect::Normal,
            &Fixed
        ),
        "{\"type\": \"stats\", \"data\": {\"@x\": 4}}\n"
    );
    let shown = Value::Tuple(
        [
            Value::Bool(true),
            Value::Address(16),
            Value::Enumerator {
                number: 3,
                name: "THREE".into(),
            },
            Value::Array([int(1), int(2)].into()),
        ]
        .into(),
    );
    let line = json::render(&Output::Print(shown.clone()), Dialect::Normal, &Fixed);
    let expected = r#"{"type": "value", "data": [true,16,3,[1,2]]}"#;
    assert_eq!(line, format!("{expected}\n"));
    let line = text::render(&Output::Print(shown), Dialect::Normal, &Fixed);
    assert_eq!(line, b"(true, 0x10, THREE, [1,2])\n");
    let cases: &[(Output, &str)] = &[
        (
            map(&[(&[word("a")], value(2)), (&[word("b c")], value(1))]),
            r#"{"type": "map", "data": {"@x": {"b c": 1, "a": 2}}}"#,
        ),
        (
            map(&[(&[int(1), word("k")], value(1))]),
            r#"{"type": "map", "data": {"@x": {"1,k": 1}}}"#,
        ),
        (
            map(&[(&[], value(-5))]),
            r#"{"type": "map", "data": {"@x": -5}}"#,
        ),
        (
            map(&[(&[], average)]),
            r#"{"type": "stats", "data": {"@x": 4}}"#,
        ),
        (map(&[]), r#"{"type": "map", "data": {"@x": {}}}"#),
        (
            map(&[(&[], stats)]),
            r#"{"type": "stats", "data": {"@x": {"count": 3, "average": 4, "total": 13}}}"#,
        ),
        (
            map(&[(&[], histogram(Buckets::Power { bits: 0 }, &[-1, 0, 5]))]),
            r#"{"type": "hist", "data": {"@x": [{"max": -1, "count": 1},{"min": 0, "max": 0, "count": 1},{"min": 1, "max": 1, "count": 0},{"min": 2, "max": 3, "count": 0},{"min": 4, "max": 7, "count": 1}]}}"#,
        ),
        (
            map(&[(&[int(1)], histogram(linear, &[5, 20]))]),
            r#"{"type": "hist", "data": {"@x": {"1": [{"min": 0, "max": 9, "count": 1},{"min": 10, "max": 19, "count": 0},{"min": 20, "count": 1}]}}}"#,
        ),
        (
            Output::Print(Value::Unsigned(u64::MAX)),
            r#"{"type": "value", "data": 18446744073709551615}"#,
        ),
        (
            Output::Print(Value::Tuple([int(1), word("a")].into())),
            r#"{"type": "value", "data": [1,"a"]}"#,
        ),
        (
            Output::Print(Value::KernelSymbol(0x1001)),
            r#"{"type": "value", "data": "k1000"}"#,
        ),
        (
            Output::Print(Value::text(b"\"\\\n\r\t\x01\x7f\xff")),
            "{\"type\": \"value\", \"data\": \"\\\"\\\\\\n\\r\\t\\u0001\x7f\u{fffd}\"}",
        ),
    ];
    for (output, expected) in cases {
        assert_eq!(
            json::render(output, Dialect::Normal, &Fixed),
            format!("{expected}\n")
        );
    }
}

#[test]
fn divisors_and_tops_apply_to_what_is_shown() {
    let entries = [(1, 100), (2, -55), (3, 7)];
    let output = |top, divisor| Output::Map {
        snapshot: MapSnapshot {
            name: "x".into(),
            entries: entries
                .map(|(key, number)| (Key::from([int(key)]), Reading::Value(int(number))))
                .to_vec(),
        },
        top,
        divisor,
    };
    let cases = [
        (None, Some(10), "@x[2]: -5\n@x[3]: 0\n@x[1]: 10\n"),
        (Some(2), Some(10), "@x[3]: 0\n@x[1]: 10\n"),
        (Some(0), None, ""),
        (None, Some(0), "@x[2]: -55\n@x[3]: 7\n@x[1]: 100\n"),
    ];
    for (top, divisor, expected) in cases {
        let line = text::render(&output(top, divisor), Dialect::Normal, &Fixed);
        assert_eq!(
            String::from_utf8(line).unwrap(),
            expected,
            "{top:?} {divisor:?}"
        );
    }
}

#[test]
fn stacks_fold() {
    let maps = stacks(Dialect::Normal);
    assert_eq!(
        collapsed::render(&maps.snapshot(0), &Fixed),
        "a:b;k2000;k1000 2\na:b;p7_5000;p7_4000;k2000;k1000 3\n"
    );
    // Apart from offsets they are the same; a number not above 0 has no line.
    let stack = |at: u64| Value::KernelStack([at, 0x2004].as_slice().into());
    maps.clear(0);
    maps.set(0, &[stack(0x1000)], int(1));
    maps.set(0, &[stack(0x1004)], int(4));
    maps.set(0, &[stack(0x1008), int(3)], int(0));
    maps.set(0, &[stack(0x1008), word("negative")], int(-4));
    maps.set(0, &[], int(9));
    assert_eq!(
        collapsed::render(&maps.snapshot(0), &Fixed),
        "@ 9\nk2000;k1000 5\n"
    );
}
