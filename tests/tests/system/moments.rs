//! Moments of a guest that are kept as snapshots: the one of a hit, and the one before its end.

use std::ffi::OsString;
use std::fs;

use support::command::{Ended, Running, World, words};
use support::shell::COMMAND_LIMIT;
use support::{host, rich};

/// The number of calls of the micro guest.
const CALLS: u64 = 50;

/// Runs the micro guest's program `calls`.
fn micro(world: &World, options: &[&str]) -> Ended {
    let kernel = world.path("micro");
    fs::write(&kernel, guest::micro::elf()).unwrap_or_else(|e| panic!("micro guest: {e}"));
    let program = format!("calls {CALLS}");
    let words = ["run", "--kernel", "micro", "--memory", "4M", "--serial"];
    let words = words.into_iter().chain(["null", "--cmdline", &program]);
    world.run(words.chain(options.iter().copied()), COMMAND_LIMIT)
}

/// Checks that a snapshot is of the call with this argument, before the function's first
/// instruction: the call itself is the first one of the restored machine.
fn assert_is_of_call(world: &World, snapshot: &str, argument: u64) {
    let expected = format!("micro_leaf=={}", CALLS - argument);
    let first = format!("micro_leaf/arg0 == {argument}/==1");
    let words = ["run", "--serial", "null", "--restore", snapshot];
    let words = words
        .into_iter()
        .chain(["--expect", &expected, "--expect", &first]);
    let ended = world.run(words, COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
}

#[test]
fn a_snapshot_is_of_the_very_hit_and_the_guest_goes_on() {
    let _ = host!();
    let world = World::new();
    let options = [
        "--snapshots",
        "kept",
        "--snapshot-at",
        "micro_leaf/arg0 >= 7/",
        "--expect",
        "micro_leaf==50",
    ];
    let ended = micro(&world, &options);
    assert_eq!(ended.status, 0, "{ended:?}");
    assert!(
        ended.stderr.contains("the guest was paused for"),
        "{ended:?}"
    );
    assert_is_of_call(&world, "kept/kprobe-micro_leaf-entry", 7);
}

#[test]
fn a_script_keeps_hits_by_name_and_by_number() {
    let _ = host!();
    let world = World::new();
    let script = "kprobe:micro_leaf:entry /arg0 % 20 == 13/ { snapshot(\"thirteen\") }
        kprobe:micro_leaf:entry /arg0 == 40/ { snapshot(\"last\"); exit() }";
    let ended = micro(&world, &["-e", script]);
    assert_eq!(ended.status, 0, "{ended:?}");
    for (name, argument) in [("thirteen", 13), ("thirteen-2", 33), ("last", 40)] {
        assert_is_of_call(&world, name, argument);
    }
}

#[test]
fn what_cannot_be_kept_is_refused_before_anything_runs() {
    let _ = host!();
    let world = World::new();
    for (options, message) in [
        (
            vec!["-e", "BEGIN { rewind(\"past\") }"],
            "rewind(): this machine has no history; start it with `run --history 60s`",
        ),
        (
            vec!["-e", "kprobe:micro_leaf:entry { snapshot(\"a/b\") }"],
            "the name of a snapshot is that of a file",
        ),
        (
            vec!["--history", "1m,most=64K"],
            "--history: the oldest checkpoint takes",
        ),
        (
            vec!["--snapshots", "micro/below", "--history", "1m"],
            "the folder for snapshots micro/below: Not a directory",
        ),
    ] {
        let ended = micro(&world, &options);
        assert_eq!(ended.status, 1, "{options:?}: {ended:?}");
        assert!(ended.stderr.contains(message), "{options:?}: {ended:?}");
    }
    assert!(!world.path("past").exists());
}

/// Starts a machine of the guest with a shell, with a history.
fn with_history(
    world: &World,
    restore: impl IntoIterator<Item = OsString>,
    name: &str,
    options: &str,
) -> Running {
    let mut line = words(&format!("run --name {name} {options}"));
    line.extend(restore);
    let machine = world.start(line);
    answer(machine, "x=6; echo up=$((x*7))", "up=42")
}

/// Types a line and waits for the answer.
fn answer(mut machine: Running, line: &str, expected: &str) -> Running {
    machine.type_line(line);
    machine.wait_until(expected, COMMAND_LIMIT, |stdout, _| {
        stdout.contains(expected)
    });
    machine
}

#[test]
fn a_guest_that_panicked_is_restored_as_it_was_before() {
    let host = host!();
    let world = World::new();
    let options = "--history 1h,every=50ms --snapshots kept";
    let mut machine = with_history(&world, rich::restore(host), "first", options);

    // Its first checkpoint is older than the line that was typed.
    let rewound = world.run(words("rewind --vm first --ago 1h back"), COMMAND_LIMIT);
    assert_eq!(rewound.status, 0, "{rewound:?}");
    assert!(rewound.stderr.contains("first: saved "), "{rewound:?}");
    let counts = || world.run(words("stat --vm first"), COMMAND_LIMIT).stdout;
    assert!(
        counts().contains("checkpoints left out              0\n"),
        "{}",
        counts()
    );
    // A snapshot needs no log of its own.
    let saved = world.run(words("snapshot --vm first now"), COMMAND_LIMIT);
    assert_eq!(saved.status, 0, "{saved:?}");

    machine = answer(
        machine,
        "dd if=/dev/urandom bs=8 count=1 2>/dev/null | od -x; echo more=$((x*2))",
        "more=12",
    );
    machine.type_line("echo c > /proc/sysrq-trigger");
    let ended = machine.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 1, "{ended:?}");
    assert!(
        ended.stderr.contains("kept/before-panic: the machine of "),
        "{ended:?}"
    );

    // The line was in the serial port when the first checkpoint was made.
    for (snapshot, line, expected) in [
        ("back", "", "up=42"),
        ("now", "echo x=$((x+1))", "x=7"),
        ("kept/before-panic", "echo there=$((1+1))", "there=2"),
    ] {
        let restore = words("run --name second --disks-as-saved --restore").into_iter();
        let machine = world.start(restore.chain([OsString::from(snapshot)]));
        let machine = answer(machine, line, expected);
        world.stop("second", machine);
    }

    // With the recorded input it comes to the same end, by what was typed.
    let line = words("run --replay --disks-as-saved --restore kept/before-panic");
    let again = world.run(line, COMMAND_LIMIT);
    assert_eq!(again.status, 1, "{again:?}");
    assert!(again.stdout.contains("more=12"), "{again:?}");
    for part in [
        "guest kernel panic on vCPU 0: sysrq triggered crash",
        "the recording of ",
        "the guest went the same way",
    ] {
        assert!(again.stderr.contains(part), "{part}: {again:?}");
    }
    let refused = world.run(
        words("run --replay --disks-as-saved --restore now"),
        COMMAND_LIMIT,
    );
    assert!(
        refused
            .stderr
            .contains("has no recording of the guest's input"),
        "{refused:?}"
    );
}
