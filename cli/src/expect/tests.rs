//! Tests of expectations as data: their parsing, their verdicts, and the reports.
#![allow(clippy::unwrap_used)]

use super::crash::Crash;
use super::events::Hit;
use super::report::{End, EndKind, Report, Verdict};
use super::{Comparison, Expectation};

#[test]
fn expectations_are_read() {
    use Comparison::{AtLeast, AtMost, Exactly, Fewer, More};
    for (text, probe, predicate, comparison, number) in [
        ("vfs_read", "kprobe:vfs_read:entry", None, AtLeast, 1),
        ("vfs_*==0", "kprobe:vfs_*:entry", None, Exactly, 0),
        (" vfs_read >= 5 ", "kprobe:vfs_read:entry", None, AtLeast, 5),
        ("kprobe:vfs_read>2", "kprobe:vfs_read", None, More, 2),
        (
            "kprobe:vfs_*:return<=7",
            "kprobe:vfs_*:return",
            None,
            AtMost,
            7,
        ),
        ("syscall:openat<3", "syscall:openat:entry", None, Fewer, 3),
        (
            "syscall::openat:",
            "syscall::openat:entry",
            None,
            AtLeast,
            1,
        ),
        (
            "syscall::openat>=2",
            "syscall::openat:entry",
            None,
            AtLeast,
            2,
        ),
        // All system calls, not one of the name "entry".
        ("syscall:", "syscall::entry", None, AtLeast, 1),
        (
            "syscall::openat::>2",
            "syscall::openat:entry",
            None,
            More,
            2,
        ),
        (
            "tracepoint:sched:sched_switch",
            "tracepoint:sched:sched_switch",
            None,
            AtLeast,
            1,
        ),
        ("interval:s:1==3", "interval:s:1", None, Exactly, 3),
        // A probe's name may have slashes, and anything between quotation marks.
        (
            "uprobe:/bin/busybox:main>=2",
            "uprobe:/bin/busybox:main",
            None,
            AtLeast,
            2,
        ),
        (
            "uprobe:/bin/busybox:main/pid > 1/",
            "uprobe:/bin/busybox:main",
            Some("pid > 1"),
            AtLeast,
            1,
        ),
        (
            "pid22:libc.so.6:malloc: /arg0 / 2 == 8/<9",
            "pid22:libc.so.6:malloc:entry",
            Some("arg0 / 2 == 8"),
            Fewer,
            9,
        ),
        (
            "u:/bin/x:\"b<int>(char)\"==4",
            "u:/bin/x:\"b<int>(char)\"",
            None,
            Exactly,
            4,
        ),
        // So may a predicate.
        (
            "vfs_read/comm == \"sh\" && arg2 > 10/",
            "kprobe:vfs_read:entry",
            Some("comm == \"sh\" && arg2 > 10"),
            AtLeast,
            1,
        ),
        (
            "syscall:openat:return / str(arg0) == \"/etc/passwd\" / >= 1",
            "syscall:openat:return",
            Some("str(arg0) == \"/etc/passwd\""),
            AtLeast,
            1,
        ),
    ] {
        let read = Expectation::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let expected = Expectation {
            text: text.trim().to_owned(),
            probe: probe.to_owned(),
            predicate: predicate.map(str::to_owned),
            comparison,
            number,
        };
        assert_eq!(read, expected, "{text}");
        // What is made of it is a rule of the language.
        assert_eq!(Expectation::parse(&read.rule()).unwrap().probe, probe);
    }
}

#[test]
fn what_is_no_expectation_says_why() {
    for (text, part) in [
        ("", "no probe; write PROBE"),
        (">=1", "no probe; write PROBE"),
        ("vfs_read=1", "unknown comparison \"=\""),
        ("vfs_read=>1", "expected >=, ==, <=, > or <"),
        ("vfs_read!=1", "\"!=\""),
        ("vfs_read>=", "invalid count \"\""),
        (
            "vfs_read>=many",
            "invalid count \"many\": expected a number, such as >=5",
        ),
        ("vfs_read>=-1", "invalid count \"-1\""),
        ("vfs_read>=99999999999999999999", "invalid count"),
        ("vfs_read>=0", ">=0 always holds, whatever the guest does"),
        ("vfs_read<0", "<0 never holds"),
        ("vfs_read vfs_write", "expected the end, found 'vfs_write'"),
        (
            "vfs_read, vfs_write",
            "2 probes; write an --expect for each",
        ),
        ("vfs_read { exit(); } vfs_write", "2 rules of a script"),
        ("struct s { int a; }; vfs_read", "definitions of a script"),
        ("BEGIN", "BEGIN is not a probe of the guest"),
        (
            "vfs_read /pid == 1",
            "expected '/' at the filter's end, found the end",
        ),
        ("vfs_read /pid ==/", "expected an expression"),
        ("vfs_read /pid/ // all of them", "invalid predicate"),
        ("a:b:c:d:e:f", "has 6 parts"),
        // What is put behind it stands between quotation marks.
        ("syscall::\"read::\"", "has a \" too few"),
        // A name of 1020 bytes may be looked for; with what is put around it there are too many.
        (&"f".repeat(1020), "a probe name of 1033 bytes"),
    ] {
        let error = match Expectation::parse(text) {
            Ok(read) => panic!("{text}: {read:?}"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn counts_are_compared() {
    for (text, holding, bounded) in [
        ("f", &[1, 2, u64::MAX][..], false),
        ("f>=2", &[2, u64::MAX], false),
        ("f>1", &[2, u64::MAX], false),
        ("f==2", &[2], true),
        ("f==0", &[0], true),
        ("f<=1", &[0, 1], true),
        ("f<1", &[0], true),
    ] {
        let expected = Expectation::parse(text).unwrap();
        for seen in [0, 1, 2, u64::MAX] {
            assert_eq!(
                expected.holds(seen),
                holding.contains(&seen),
                "{text} {seen}"
            );
        }
        assert_eq!(expected.has_upper_bound(), bounded, "{text}");
    }
}

/// Returns the report of a run with two expectations, of which one holds.
fn report(kind: EndKind, text: &str) -> Report {
    let judged = |text: &str, seen| Verdict::new(&Expectation::parse(text).unwrap(), Some(seen));
    Report {
        machine: "vm1".into(),
        passed: false,
        began_unix_ns: 1_234_567_890_000_000_000,
        seconds: 2.5,
        asked_seconds: Some(2.5),
        end: End {
            kind,
            text: text.into(),
        },
        expectations: vec![
            judged("syscall:openat/comm == \"sh\" && arg2 > 1/>=2", 12),
            judged("vfs_unlink==0", 3),
        ],
        crash: None,
        console: vec!["login: <&> ]]>".into(), "two\u{fffe}".into()],
        trace: vec!["    0.100000   0      22 sh -> read(fd=0x3)".into()],
        events: vec![Hit {
            unix_ns: 1_234_567_890_500_000_000,
            expectations: vec![0, 1],
            probe: "kprobe:vmlinux:vfs_unlink:entry".into(),
            comm: Some("rm\u{1b}".into()),
            pid: Some(22),
            tid: Some(23),
            cpu: 1,
        }],
        events_lost: 0,
    }
}

fn crashed() -> Report {
    Report {
        crash: Some(Crash {
            message: "guest kernel panic on vCPU 0: \"no <init>\"".into(),
            kernel_stack: vec!["0xffffffff81000000 panic".into()],
            stack_ends: Some("no unwind information".into()),
        }),
        events_lost: 2,
        ..report(EndKind::Panic, "guest kernel panic on vCPU 0")
    }
}

#[test]
fn junit_reports_are_as_in_their_files() {
    let mut uncounted = report(EndKind::NotCounted, "no probe kprobe:vfs_unlnk:entry");
    for judged in &mut uncounted.expectations {
        (judged.seen, judged.holds) = (None, false);
    }
    uncounted.console.clear();
    for (report, expected) in [
        (
            report(EndKind::TimeUp, "the time was up"),
            include_str!("tests/failed.xml"),
        ),
        (crashed(), include_str!("tests/panic.xml")),
        (uncounted, include_str!("tests/uncounted.xml")),
    ] {
        let xml = super::report::junit(&report).unwrap();
        assert_eq!(xml, expected, "\n{xml}");
    }
}

#[test]
fn json_reports_are_as_in_their_files() {
    let json = super::report::json(&crashed()).unwrap();
    assert_eq!(json, include_str!("tests/panic.json"), "\n{json}");
}

#[test]
fn a_failure_is_told_in_a_sentence() {
    let mut passed = report(EndKind::TimeUp, "the time was up");
    passed.passed = true;
    for (report, expected) in [
        (passed, None),
        (
            report(EndKind::TimeUp, "the time was up"),
            Some("1 of 2 expectations do not hold"),
        ),
        (
            report(EndKind::CutShort, "ended by a signal"),
            Some("the run was not whole: ended by a signal"),
        ),
    ] {
        assert_eq!(report.failure().as_deref(), expected);
    }
}
