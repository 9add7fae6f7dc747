//! Timelines checked by Perfetto's own definitions: of records in a file, for which no KVM is
//! needed, and of a guest. The network is needed only the first time.

use std::fs;

use probes::clock::Clock;
use support::command::{World, words};
use support::second_opinion::Timeline;
use support::shell::{COMMAND_LIMIT, snapshot_folder};
use support::{host, story};
use trace_devices::render::Render;
use trace_devices::trace_line::{LineKind, TraceLine};
use trace_devices::{ptrace, trace_render};

/// Renders the records, and returns the timeline as Perfetto reads it.
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
    let told = timeline(&story::records(), ptrace::render::Perfetto::default());
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

/// Checks the check itself: here open slices are never closed.
#[test]
#[should_panic(expected = "slices do not end")]
fn a_timeline_that_is_cut_short_is_told() {
    let (mut file, mut format) = (Vec::new(), ptrace::render::Perfetto::default());
    for record in story::records() {
        let rendered = format.record(&record, &mut file);
        rendered.unwrap_or_else(|e| panic!("rendering: {e}"));
    }
    check(&file);
}

#[test]
fn a_timeline_says_both_clocks_and_may_be_empty() {
    let hour = 3_600_000_000_000;
    let format =
        || ptrace::render::Perfetto::default().with_boottime_offset(story::BEGINNING - hour);
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

/// Checks a shell pipeline in a guest, as `exotrace read` writes it while it runs.
#[test]
fn what_a_guest_did_is_a_timeline() {
    let host = host!();
    let world = World::new();
    let mut line = words("run --name timeline --restore");
    line.push(snapshot_folder(host).into());
    let mut machine = world.start(line);
    let folder = world.path("run/exotrace/timeline");
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        folder.join("ports").exists()
    });
    let mut reader = world.start(words(
        "read ptrace --all --format perfetto -o guest.pftrace",
    ));
    let file = world.path("guest.pftrace");
    reader.wait_until("records", COMMAND_LIMIT, |_, _| {
        fs::metadata(&file).is_ok_and(|file| file.len() > 0)
    });
    machine.type_line("syscount 20 | cat | wc -c; echo done=$((2*21))");
    machine.wait_until("work", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("done=42")
    });
    // The last process has its track.
    reader.wait_until("wc", COMMAND_LIMIT, |_, _| {
        fs::read(&file).is_ok_and(|file| file.windows(3).any(|part| part == b"wc "))
    });
    reader.signal(rustix::process::Signal::INT);
    let ended = reader.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    let told = Timeline::check(&file);
    println!("{told:?}");
    for what in ["TYPE_SLICE_BEGIN", "TYPE_INSTANT", "flows"] {
        assert!(told.count(what) > 20, "{what}: {told:?}");
    }
    assert_eq!(told.count("TYPE_SLICE_BEGIN"), told.count("TYPE_SLICE_END"));
    for name in ["syscount", "cat", "wc"] {
        assert!(
            told.tracks.iter().any(|track| track.starts_with(name)),
            "{told:?}"
        );
    }
    let stopped = world.run(words("stop --vm timeline"), COMMAND_LIMIT);
    assert_eq!(stopped.status, 0, "{stopped:?}");
    machine.finish(COMMAND_LIMIT);
}
