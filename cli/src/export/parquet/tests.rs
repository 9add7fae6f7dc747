//! Tables read back by the crate's own reader. DuckDB reads them in the tests of the command.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use parquet::file::reader::{FileReader, SerializedFileReader};
use probes::clock::Clock;
use trace_devices::ptrace::record::{EventType, Record, TRAP_SYSTEM_CALL};
use trace_devices::render::Render;
use trace_devices::trace_line::{LineKind, NO_PROCESS, TraceLine};

use super::*;
use crate::protocol::event::{ClockPair, EventLine};
use crate::protocol::trace::Traced;

/// The rows of a group here. A usual one takes seconds to write without optimization.
const MOST_ROWS: usize = 1 << 10;

/// Returns the rows of a file as JSON, and its metadata.
fn rows(file: Vec<u8>) -> (Vec<serde_json::Value>, BTreeMap<String, String>) {
    let reader = SerializedFileReader::new(Bytes::from(file)).unwrap();
    let notes = reader.metadata().file_metadata().key_value_metadata();
    let notes = notes.into_iter().flatten();
    let notes = notes.map(|note| (note.key.clone(), note.value.clone().unwrap_or_default()));
    let rows = reader.get_row_iter(None).unwrap();
    let shown = rows.map(|row| {
        let columns = row.unwrap().into_columns().into_iter();
        let present = columns.filter(|(_, field)| *field != parquet::record::Field::Null);
        present
            .map(|(name, field)| (name, serde_json::Value::String(field.to_string())))
            .collect::<serde_json::Map<_, _>>()
            .into()
    });
    (shown.collect(), notes.collect())
}

fn shown(rows: &[serde_json::Value], row: usize) -> String {
    let row = rows[row].as_object().unwrap();
    let fields = row.iter().map(|(name, value)| format!("{name}={value}"));
    fields
        .collect::<Vec<_>>()
        .join(" ")
        .replace(['"', '\\'], "")
}

fn entry(number: u64) -> EventLine {
    serde_json::from_value(serde_json::json!({
        "event": "entry", "probe": "uprobe:/bin/app:ns::open:entry", "function": "ns::open",
        "pc": "0xffffffff81000010", "tsc": 1000 + number, "cpu": 1, "pid": 5, "tid": 6,
        "comm": "sh", "args": ["0x10", "0xffffffffffffffff"],
        "strings": {"1": "/etc/passwd", "0": null, "77": "beyond"},
        "kstack": ["a+0x1", "b"],
    }))
    .unwrap()
}

fn hits(lines: &[EventLine]) -> (Hits, Vec<u8>) {
    let probe = Traced {
        name: "uprobe:/bin/app:ns::open:entry".into(),
        function: "ns::open".into(),
        arguments: vec!["how".into(), "path".into()],
        signed: vec![],
    };
    let pair = ClockPair {
        tsc: 1000,
        unix_ns: 1_000_000_000_000_000_000,
    };
    let hits = Hits::new(pair, 1_000_000_000).unwrap();
    let (mut hits, mut file) = (hits.with_groups_of(MOST_ROWS), Vec::new());
    for line in lines {
        let probe = Some(&probe);
        hits.record(&Hit { line, probe }, &mut file).unwrap();
    }
    (hits, file)
}

#[test]
fn a_hit_is_a_row_of_typed_columns() {
    let back = EventLine {
        event: "return".into(),
        args: None,
        strings: BTreeMap::new(),
        returned: Some("0xfffffffffffffffe".into()),
        pid: None,
        tid: None,
        comm: None,
        kstack: Vec::new(),
        ..entry(7)
    };
    let (mut hits, mut file) = hits(&[entry(0), back]);
    hits.finish(&mut file).unwrap();
    let (rows, notes) = rows(file);
    assert_eq!(rows.len(), 2);
    assert_eq!(
        shown(&rows, 0),
        "arg0=16 arg1=-1 comm=sh cpu=1 event=entry function=ns::open kstack=[a+0x1, b] \
         module=/bin/app name=entry pc=18446744071578845200 pid=5 provider=uprobe \
         text1=/etc/passwd tid=6 time=1000000000000000000 tsc=1000"
    );
    assert_eq!(
        shown(&rows, 1),
        "cpu=1 event=return function=ns::open module=/bin/app name=entry \
         pc=18446744071578845200 provider=uprobe returned=-2 time=1000000000000000007 tsc=1007"
    );
    let arguments = &notes["exotrace.arguments"];
    assert_eq!(
        arguments,
        "{\"uprobe:/bin/app:ns::open:entry\":[\"how\",\"path\"]}"
    );
}

#[test]
fn a_table_without_rows_is_a_file() {
    let (mut hits, mut file) = hits(&[]);
    hits.finish(&mut file).unwrap();
    assert_eq!(rows(file).0.len(), 0);
}

#[test]
fn rows_are_held_for_one_group_and_none_is_lost_between_groups() {
    let lines: Vec<EventLine> = (0..MOST_ROWS as u64 + 3).map(entry).collect();
    let (mut hits, mut file) = hits(&lines);
    assert!(!file.is_empty());
    hits.finish(&mut file).unwrap();
    let reader = SerializedFileReader::new(Bytes::from(file.clone())).unwrap();
    assert_eq!(reader.num_row_groups(), 2);
    let (rows, _) = rows(file);
    assert_eq!(rows.len(), lines.len());
    let times = rows.iter().zip(0..);
    for (row, number) in times {
        assert_eq!(row["tsc"], (1000 + number).to_string());
    }
}

#[test]
fn a_file_that_is_cut_off_keeps_its_whole_groups() {
    let lines: Vec<EventLine> = (0..2 * MOST_ROWS as u64 + 3).map(entry).collect();
    let (hits, file) = hits(&lines);
    let whole = file.len() as u64;
    let groups = MOST_ROWS as u64;
    for (intact, lost) in [
        (whole, 3),
        (whole + 1, 3),
        (whole - 1, groups + 3),
        (4, 2 * groups + 3),
    ] {
        let cut = hits.cut_off(intact).unwrap();
        assert_eq!(cut.lost, lost, "{intact} of {whole}");
        assert!(cut.length <= intact);
        let length = usize::try_from(cut.length).unwrap();
        let kept = [&file[..length], &cut.end].concat();
        let reader = SerializedFileReader::new(Bytes::from(kept)).unwrap();
        let rows = reader.metadata().file_metadata().num_rows();
        assert_eq!(rows.unsigned_abs() + lost, lines.len() as u64);
        assert_eq!(
            reader.get_row_iter(None).unwrap().count() as u64 + lost,
            lines.len() as u64
        );
    }
    assert_eq!(hits.cut_off(3), None);
}

#[test]
fn records_of_devices_are_rows() {
    let clock = Clock {
        tsc: 0,
        unix_ns: 100,
        hz: 1_000_000_000,
    };
    let names = Box::new(|address| (address == 3).then(|| "f3".to_owned()));
    let (mut calls, mut file) = (Calls::table(names, Some(clock)).unwrap(), Vec::new());
    for (kind, pid) in [
        (LineKind::Entry, 5),
        (LineKind::Exit, 5),
        (LineKind::Exit, NO_PROCESS),
    ] {
        let line = TraceLine {
            kind,
            pc: if kind == LineKind::Entry { 3 } else { 9 },
            ticks: 2,
            pid,
            arguments: [u64::MAX, 2, 0, 0],
        };
        calls.record(&line, &mut file).unwrap();
    }
    calls.finish(&mut file).unwrap();
    let (found, _) = rows(file);
    for (row, expected) in [
        "arg0=-1 arg1=2 arg2=0 arg3=0 event=entry function=f3 pc=3 pid=5 symbol=f3 time=102 tsc=2",
        "event=return function=f3 pc=9 pid=5 returned=-1 time=102 tsc=2",
        "event=return pc=9 returned=-1 time=102 tsc=2",
    ]
    .iter()
    .enumerate()
    {
        assert_eq!(&shown(&found, row), expected);
    }
    let record = Record {
        pid: 7,
        event: EventType::Trap.number(),
        machine: 1,
        time: 5,
        argument: TRAP_SYSTEM_CALL | 39,
    };
    let (mut processes, mut file) = (Processes::table().unwrap(), Vec::new());
    processes.record(&record, &mut file).unwrap();
    processes.finish(&mut file).unwrap();
    let (found, _) = rows(file);
    assert_eq!(
        shown(&found, 0),
        "arg=2305843009213693991 cpu=1 event=trap number=39 pid=7 syscall=getpid time=5 \
         trap=syscall type=13"
    );
    let (mut device, mut file) = (
        Device::table(Arc::new(BTreeMap::new())).unwrap(),
        Vec::new(),
    );
    device.finish(&mut file).unwrap();
    assert_eq!(rows(file).0.len(), 0);
}
