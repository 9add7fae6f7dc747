//! Tests of the table's numbers, names and arguments.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::dt::aliases::tests::{kernel, tracepoint};

fn table() -> Table {
    let view = kernel(&["x64_sys_call", "a_function_of_a_long_name"]);
    let tracepoints = [
        tracepoint("raw_syscalls", "sys_enter", &[("regs", "struct pt_regs *")]),
        tracepoint("sched", "sched_wakeup", &[("p", "struct task_struct *")]),
        tracepoint(
            "ext4",
            "six",
            &["a", "b", "c", "d", "e", "f"].map(|name| (name, "int")),
        ),
    ];
    Table::new(&view, Ok(tracepoints.to_vec()))
}

fn names(table: &Table) -> Vec<String> {
    table.iter().map(|(_, listed)| listed.full_name()).collect()
}

#[test]
fn numbers_go_as_openbsds_do() {
    let table = table();
    let names = names(&table);
    assert_eq!(
        names[..4],
        [
            "profile:hz:97",
            "interval:hz:1",
            "syscall:read:entry",
            "syscall:read:return"
        ]
    );
    let behind = 2 + 2 * syscall_table::all().len();
    assert_eq!(
        names[behind..],
        [
            "tracepoint:sched:wakeup",
            "tracepoint:raw_syscalls:sys_enter",
            "tracepoint:raw_syscalls:sys_exit",
            "tracepoint:sched:sched_wakeup",
            "tracepoint:ext4:six",
            "kprobe:x64_sys_call:entry",
            "kprobe:x64_sys_call:return",
            "kprobe:a_function_of_a_long_name:entry",
            "kprobe:a_function_of_a_long_name:return",
        ],
        "OpenBSD's sys_enter stands in place of Linux's"
    );
    let first = table.iter().next().unwrap();
    assert_eq!(first.0, 1);
    assert!(table.get(0).is_none() && table.get(table.len() as u32 + 1).is_none());
    assert_eq!(table.get(3).unwrap().full_name(), "syscall:read:entry");
}

/// Returns function and argument count of a record.
fn record(list: &[u8], number: usize) -> (String, u8) {
    let record = &list[56 * (number - 1)..56 * number];
    assert_eq!(record[..4], (number as u32).to_le_bytes());
    let text = record[21..37].split(|byte| *byte == 0).next().unwrap();
    (String::from_utf8(text.to_vec()).unwrap(), record[4])
}

#[test]
fn a_list_has_as_many_whole_records_as_fit() {
    let table = table();
    let all = table.list_bytes();
    assert_eq!(all, 56 * table.len() as u64);
    for (size, expected) in [(0, 0), (55, 0), (56, 56), (111, 56), (112, 112), (all, all)] {
        assert_eq!(table.list(Mode::Normal, size).len() as u64, expected);
    }
    assert_eq!(table.list(Mode::Normal, u64::MAX).len() as u64, all);
    let (normal, strict) = (table.list(Mode::Normal, all), table.list(Mode::Strict, all));
    assert_eq!(record(&normal, 5), ("write".to_owned(), 3));
    assert_eq!(record(&strict, 5), ("sys%1".to_owned(), 3));
    assert_eq!(record(&normal, 6), ("write".to_owned(), 0), "of a return");
    let six = table.len() - 4;
    let told = table.get(six as u32).unwrap();
    let counts = [Mode::Normal, Mode::Strict].map(|mode| told.argument_count(mode));
    assert_eq!(counts, [6, 5]);
    assert_eq!(record(&normal, six), ("ext4".to_owned(), 6));
    assert_eq!(record(&strict, six), ("ext4".to_owned(), 5));
    let long = table.len();
    assert_eq!(record(&normal, long).0, "a_function_of_a");
}

#[test]
fn static_probes_tell_types_and_others_do_not() {
    let table = table();
    let of = |name: &str| {
        let mut found = table.iter();
        let (_, listed) = found
            .find(|(_, listed)| listed.full_name() == name)
            .unwrap();
        listed
    };
    assert_eq!(
        of("tracepoint:sched:wakeup").types(),
        ["pid_t", "pid_t", "int"]
    );
    assert_eq!(of("tracepoint:ext4:six").types(), ["int"; 5]);
    for name in [
        "profile:hz:97",
        "syscall:read:entry",
        "kprobe:x64_sys_call:entry",
    ] {
        assert!(of(name).types().is_empty(), "{name}");
    }
    assert_eq!(of("profile:hz:97").flags(), 7);
    assert_eq!(of("syscall:read:return").flags(), 15);
}

#[test]
fn without_a_place_for_system_calls_none_are_listed() {
    let table = Table::new(&kernel(&["f"]), Err("not there".into()));
    assert_eq!(
        names(&table),
        [
            "profile:hz:97",
            "interval:hz:1",
            "kprobe:f:entry",
            "kprobe:f:return"
        ]
    );
    for beginning in ["system calls: ", "tracepoints: not there"] {
        let mut missing = table.missing().iter();
        assert!(missing.any(|why| why.starts_with(beginning)), "{beginning}");
    }
}
