//! Timelines as Perfetto's own definitions read them. No KVM is needed; the network only the first time.

use std::fs;

use probes::clock::Clock;
use probes::render::Render;
use probes::trace_line::{LineKind, TraceLine};
use probes::{ptrace, trace_render};
use support::command::World;
use support::second_opinion::Timeline;
use support::story;

/// What the renderer makes of the records, as Perfetto reads it.
fn timeline<T>(records: &[T], mut format: impl Render<T>) -> Timeline {
    let mut file = Vec::new();
    for record in records {
        let rendered = format.record(record, &mut file);
        rendered.unwrap_or_else(|e| panic!("rendering: {e}"));
    }
    let rendered = format.finish(&mut file);
    rendered.unwrap_or_else(|e| panic!("rendering: {e}"));
    check(&file)
}

fn check(file: &[u8]) -> Timeline {
    let world = World::new();
    let path = world.path("timeline.pftrace");
    fs::write(&path, file).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Timeline::check(&path)
}

#[test]
fn what_processes_did_is_a_timeline() {
    let told = timeline(&story::records(), ptrace::render::Perfetto::new());
    for (what, number) in [
        ("clock_snapshot", 1),
        ("flows", 3),
        // Process 7 is woken at the end, and does not run any more.
        ("flows_open", 1),
        ("TYPE_SLICE_BEGIN", 22),
        ("TYPE_SLICE_END", 22),
        ("TYPE_INSTANT", 20),
    ] {
        assert_eq!(told.count(what), number, "{what}: {told:?}");
    }
    let tracks = [
        "CPU 0",
        "CPU 1",
        "CPU 1 interrupts",
        "_ 99",
        "cat 101",
        "sh 100",
        "thread/2 7",
    ];
    assert_eq!(told.tracks, tracks);
}

/// The check itself notices: here what is open is never closed.
#[test]
#[should_panic(expected = "slices do not end")]
fn a_timeline_that_is_cut_short_is_told() {
    let (mut file, mut format) = (Vec::new(), ptrace::render::Perfetto::new());
    for record in story::records() {
        let rendered = format.record(&record, &mut file);
        rendered.unwrap_or_else(|e| panic!("rendering: {e}"));
    }
    check(&file);
}

#[test]
fn a_timeline_says_both_clocks_and_may_be_empty() {
    let hour = 3_600_000_000_000;
    let format = || ptrace::render::Perfetto::new().with_boottime_offset(story::BEGINNING - hour);
    let told = timeline(&story::records(), format());
    assert_eq!(told.count("clock_snapshot"), 1);
    let told = timeline(&[], format());
    assert_eq!(told.tracks, Vec::<String>::new());
}

#[test]
fn what_functions_called_is_a_timeline() {
    let clock = Clock {
        tsc: 0,
        unix_ns: story::BEGINNING.unsigned_abs(),
        hz: 2_000_000_000,
    };
    let line = |(kind, pid, ticks)| TraceLine {
        kind,
        pc: 0xffff_ffff_8100_0000,
        ticks,
        pid,
        arguments: [1, u64::MAX, 0, 0],
    };
    use LineKind::{Entry, Exit};
    // A recursion, a call that does not return, a return whose call was before, and no process.
    let lines = [
        (Entry, 7, 100),
        (Entry, 7, 120),
        (Exit, 7, 140),
        (Exit, 8, 150),
        (Exit, 7, 160),
        (Entry, 8, 170),
        (Entry, u64::MAX, 180),
    ]
    .map(line);
    let symbols = Box::new(|_| Some("vfs_read".to_owned()));
    let told = timeline(&lines, trace_render::Perfetto::new(symbols, clock));
    for (what, number) in [
        ("TYPE_SLICE_BEGIN", 4),
        ("TYPE_SLICE_END", 4),
        ("TYPE_INSTANT", 1),
    ] {
        assert_eq!(told.count(what), number, "{what}: {told:?}");
    }
    assert_eq!(told.tracks, ["no process", "process 7", "process 8"]);
}
