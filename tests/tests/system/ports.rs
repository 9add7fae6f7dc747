//! The ports of a running machine's trace devices, as a user finds them: sockets, `ctl`, `read`,
//! and files in a folder.
//!
//! Where any guest suffices, it is the micro guest, which starts immediately.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use rustix::process::Signal;
use support::busy;
use support::command::{Running, World, words};
use support::host;
use support::host::Host;
use support::shell::{COMMAND_LIMIT, snapshot_folder};

const NAME: &str = "ported";
const SOCKETS: [&str; 5] = ["ports", "trace", "tracectl", "ptrace", "ptracectl"];
/// The size of a line of trace(3) in bytes.
const LINE: usize = 121;

fn start(world: &World, host: &Host) -> Running {
    let mut line = words(&format!("run --name {NAME} --restore"));
    line.push(snapshot_folder(host).into());
    started(world, line)
}

/// Starts a guest that calls `micro_leaf` without end.
fn start_micro(world: &World) -> Running {
    let made = world.run(words("guest micro micro"), COMMAND_LIMIT);
    assert_eq!(made.status, 0, "{made:?}");
    let mut line = words(&format!(
        "run --name {NAME} --serial null --kernel micro/micro.elf --cmdline"
    ));
    line.push("calls 4000000000".into());
    started(world, line)
}

fn started(world: &World, line: Vec<OsString>) -> Running {
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        SOCKETS.iter().all(|name| socket(world, name).exists())
    });
    machine
}

/// Starts the mount, and returns it with its folder.
fn mount(world: &World) -> (Running, PathBuf) {
    let place = world.path("mounted");
    fs::create_dir(&place).expect("a folder");
    let mut mounted = world.start(words("mount mounted"));
    mounted.wait_until("mount", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("ends with")
    });
    (mounted, place)
}

/// Returns whether the environment declares that this host has no FUSE.
fn without_fuse() -> bool {
    std::env::var_os("EXOTRACE_NO_FUSE").is_some()
}

fn socket(world: &World, name: &str) -> PathBuf {
    world.path("run/exotrace").join(NAME).join(name)
}

/// Returns a plain control port's answer to these lines.
fn told(world: &World, port: &str, lines: &str) -> String {
    let mut stream = UnixStream::connect(socket(world, port)).expect("the socket is there");
    stream
        .write_all(lines.as_bytes())
        .expect("commands are taken");
    stream.shutdown(Shutdown::Write).expect("no more commands");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

fn shell(folder: &std::path::Path, script: &str) -> Output {
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).current_dir(folder);
    shell.output().unwrap_or_else(|e| panic!("sh: {e}"))
}

/// Makes the guest call the traced function.
fn work(machine: &mut Running) {
    const DONE: &str = "worked=42";
    let before = machine.printed().0.matches(DONE).count();
    machine.type_line("dd if=/proc/version of=/tmp/v bs=1k; echo worked=$((2*21))");
    machine.wait_until("work of the guest", COMMAND_LIMIT, |stdout, _| {
        stdout.matches(DONE).count() > before
    });
}

#[test]
fn sockets_come_and_go_with_the_machine_and_refusals_are_told() {
    let _ = host!();
    let world = World::new();
    let machine = start_micro(&world);
    for name in SOCKETS {
        let kind = fs::symlink_metadata(socket(&world, name)).map(|meta| meta.file_type());
        assert!(kind.is_ok_and(|kind| kind.is_socket()), "{name}");
    }
    for (line, status) in [
        ("ctl brew coffee", 1),
        ("read trace --format svg", 2),
        ("read trace --all", 2),
        ("read ptrace --format collapsed", 2),
        ("mount /proc", 1),
        ("mount no/such/folder", 1),
    ] {
        let ended = world.run(words(line), COMMAND_LIMIT);
        assert_eq!(
            (ended.status, ended.stdout.as_str()),
            (status, ""),
            "{line}: {ended:?}"
        );
        assert_eq!(ended.stderr.lines().count(), 1, "{line}: {ended:?}");
    }
    let answer = told(&world, "tracectl", "brew coffee\n");
    assert!(answer.len() > 1 && answer.ends_with('\n'), "{answer:?}");
    world.stop(NAME, machine);
    for name in SOCKETS {
        assert!(!socket(&world, name).exists(), "{name}");
    }
}

#[test]
fn events_of_dt_are_read_by_the_names_of_their_probes() {
    let _ = host!();
    let world = World::new();
    let machine = start_micro(&world);
    let read = |line: &str| world.run(words(line), COMMAND_LIMIT);
    let probe = "kprobe:micro_leaf:entry";
    let mut reading = world.start(words(&format!("read dt {probe}")));
    reading.wait_until("events", COMMAND_LIMIT, |stdout, _| {
        stdout.lines().count() > 20
    });
    reading.signal(Signal::INT);
    let text = reading.finish(COMMAND_LIMIT);
    assert_eq!(text.status, 0, "{text:?}");
    let lines: Vec<&str> = text.stdout.lines().collect();
    assert!(lines.len() > 10, "{text:?}");
    // The guest's argument counts up.
    let argument = |line: &&str| {
        let (_, arguments) = line.split_once(probe).unwrap_or_default();
        let first = arguments.split_whitespace().next().unwrap_or_default();
        u64::from_str_radix(first.trim_start_matches("0x"), 16)
            .unwrap_or_else(|e| panic!("{line}: {e}"))
    };
    let arguments: Vec<u64> = lines.iter().map(argument).collect();
    assert!(arguments.is_sorted(), "{arguments:?}");
    let told = format!("exotrace: {} records, ", lines.len());
    assert!(text.stderr.contains(&told), "{text:?}");

    let raw = read(&format!(
        "read dt {probe} kprobe:micro_leaf:return --for 2 --format raw -o raw --rotate 100K --keep 1"
    ));
    assert_eq!(raw.status, 0, "{raw:?}");
    for file in ["raw", "raw.1"] {
        let size = fs::metadata(world.path(file)).map_or(1, |meta| meta.len());
        assert!(
            size <= 100 << 10 && size.is_multiple_of(456),
            "{file}: {size}"
        );
    }
    let unknown = read("read dt kprobe:no_such_function:entry");
    assert_eq!(unknown.status, 1, "{unknown:?}");
    assert!(unknown.stderr.contains("no_such_function"), "{unknown:?}");
    world.stop(NAME, machine);
}

#[test]
fn a_reader_of_the_output_that_goes_is_no_failure() {
    let _ = host!();
    let world = World::new();
    let machine = start_micro(&world);
    let mut reader = world.command();
    reader.args(["read", "dt", "kprobe:micro_leaf:entry"]);
    let mut reader = reader.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut first = [0; 1000];
    let mut output = reader.stdout.take().expect("a pipe");
    output.read_exact(&mut first).expect("events");
    drop(output);
    let ended = reader.wait().expect("it ends");
    assert_eq!(ended.code(), Some(0));
    world.stop(NAME, machine);
}

#[test]
fn a_mount_ends_with_its_machine_and_keeps_nobody_waiting() {
    let _ = host!();
    if without_fuse() {
        return;
    }
    for is_killed in [false, true] {
        let world = World::new();
        let machine = start_micro(&world);
        let (mounted, place) = mount(&world);
        let stat = fs::read_to_string(place.join("stat")).expect("stat");
        assert!(stat.contains("trace readers 0\n"), "{stat}");
        let held = fs::File::open(place.join("stat")).expect("the file is there");
        match is_killed {
            true => drop(machine),
            false => world.stop(NAME, machine),
        }
        let ended = mounted.finish(COMMAND_LIMIT);
        assert_eq!(ended.status, i32::from(is_killed), "{ended:?}");
        assert!(ended.stderr.contains("machine"), "{ended:?}");
        (&held)
            .read(&mut [0; LINE])
            .expect_err("its machine has ended");
        assert_eq!(fs::read_dir(&place).map_or(9, Iterator::count), 0);
    }
}

#[test]
fn the_manual_pages_example_gives_the_same_lines_by_command_socket_and_file() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host);
    let ctl = |command: &str| world.run(words(&format!("ctl {command}")), COMMAND_LIMIT);
    for command in ["trace vfs_read vfs_read+1 new a", "trace a on"] {
        let ended = ctl(command);
        assert_eq!(ended.status, 0, "{command}: {ended:?}");
    }
    let configuration = ctl("").stdout;
    assert!(configuration.contains(" new a\n"), "{configuration}");
    // Readers at the same time get the same.
    let plain = UnixStream::connect(socket(&world, "trace")).expect("the socket is there");
    let (mounted, place) = mount(&world);
    let held = fs::File::open(place.join("trace")).expect("the file is there");
    let mut reader = world.start(words("read trace"));
    reader.wait_until("readers", COMMAND_LIMIT, |_, _| {
        let stat = fs::read_to_string(place.join("stat")).expect("stat");
        stat.contains("trace readers 3\n")
    });
    // Not before all are there: the guest's shell may read at any time.
    assert_eq!(ctl("start").status, 0);
    work(&mut machine);
    let stopped = shell(&place, "echo stop > tracectl");
    assert!(stopped.status.success(), "{stopped:?}");

    // In one read with enough room: a read of less than a line returns nothing.
    let mut lines = vec![0; 1 << 20];
    let read = (&held).read(&mut lines).expect("the file is read");
    lines.truncate(read);
    assert!(lines.len() >= 2 * LINE && lines.len().is_multiple_of(LINE));
    let mut by_socket = vec![0; lines.len()];
    (&plain).read_exact(&mut by_socket).expect("as many lines");
    assert!(by_socket == lines, "the socket gives other lines");
    reader.wait_until("lines", COMMAND_LIMIT, |stdout, _| {
        stdout.len() >= lines.len()
    });
    reader.signal(Signal::INT);
    let by_command = reader.finish(COMMAND_LIMIT);
    assert_eq!(by_command.status, 0, "{:?}", by_command.stderr);
    assert!(
        by_command.stdout.as_bytes() == lines,
        "the command gives other lines"
    );
    let count = format!("{} records, 0 dropped", lines.len() / LINE);
    assert!(
        by_command.stderr.contains(&count),
        "{:?}",
        by_command.stderr
    );
    // Lines that were read are gone, and new ones reach the next reader.
    let now = || world.run(words("read trace --now"), COMMAND_LIMIT).stdout;
    assert_eq!(now(), "");
    drop((plain, held));
    assert_eq!(ctl("start").status, 0);
    work(&mut machine);
    assert_eq!(ctl("stop").status, 0);
    assert_eq!(now().len() % LINE, 0);
    assert!(now().is_empty());
    let shown = shell(
        &place,
        "echo start > tracectl; sleep 1; echo stop > tracectl; cat trace",
    );
    assert!(
        shown.status.success() && shown.stdout.len().is_multiple_of(LINE),
        "{shown:?}"
    );

    let refused = shell(&place, "echo trace b on > tracectl");
    assert!(!refused.status.success());
    let stat = fs::read_to_string(place.join("stat")).expect("stat");
    assert!(stat.contains("devtrace: trace not found"), "{stat}");
    // The mount ends with its machine.
    world.stop(NAME, machine);
    let ended = mounted.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
}

#[test]
fn a_machine_that_is_killed_keeps_nobody_waiting() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host);
    let mut reader = world.start(words("read ptrace --all"));
    reader.wait_until("records", COMMAND_LIMIT, |stdout, _| !stdout.is_empty());
    let (mounted, place) = mount(&world);
    let held = fs::File::open(place.join("trace")).expect("the file is there");
    work(&mut machine);
    // The drop kills the machine.
    drop(machine);
    let ended = reader.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 1, "{ended:?}");
    (&held)
        .read(&mut [0; LINE])
        .expect_err("its machine has ended");
    let ended = mounted.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 1, "{ended:?}");
}

/// Returns the hash of the kernel's text in the guest's memory.
fn text_hash(world: &World) -> String {
    let stat = world.run(words("stat --hash --json"), COMMAND_LIMIT);
    assert_eq!(stat.status, 0, "{stat:?}");
    let (_, text) = stat.stdout.split_once("\"text\":").unwrap_or_default();
    text.chars().take(70).collect()
}

/// Checks all misuse by readers for a while, while the guest works and all is traced.
#[test]
fn readers_that_are_killed_or_stand_still_leave_nothing_behind() {
    let host = host!();
    let has_fuse = !without_fuse();
    let world = World::new();
    let mut machine = start(&world, host);
    let ctl = |command: &str| {
        let ended = world.run(words(&format!("ctl {command}")), COMMAND_LIMIT);
        assert_eq!(ended.status, 0, "{command}: {ended:?}");
        ended.stdout
    };
    let hash = text_hash(&world);
    assert_eq!(hash.len(), 70, "{hash}");
    machine.type_line("while :; do read line < /proc/version; done &");
    for command in ["trace vfs_read vfs_write new a", "trace a on", "start"] {
        ctl(command);
    }
    let round = |number: usize| {
        let connect = || UnixStream::connect(socket(&world, "trace")).expect("the socket is there");
        // One reader that never reads, one that disconnects after some bytes, and commands whose
        // output nobody reads.
        let still = connect();
        let mut some = [0; 100];
        connect().read_exact(&mut some).expect("lines come");
        let mut full = world.command();
        full.args(["read", "trace"]).stdout(Stdio::piped());
        let mut full = full.spawn().expect("it starts");
        let mut all = world.command();
        all.args(["read", "ptrace", "--all"]).stdout(Stdio::piped());
        let mut all = all.spawn().expect("it starts");
        if has_fuse {
            let (mounted, place) = mount(&world);
            let held = fs::File::open(place.join("trace")).expect("the file is there");
            let unmounted = match number % 2 {
                0 => {
                    let lazy = Command::new("umount").arg("-l").arg(&place).status();
                    lazy.is_ok_and(|status| status.success())
                }
                _ => {
                    mounted.signal(Signal::INT);
                    true
                }
            };
            assert!(unmounted);
            // The read does not wait, whether lines still come or not.
            let _ = (&held).read(&mut some);
            drop(held);
            let ended = mounted.finish(COMMAND_LIMIT);
            assert_eq!(ended.status, 0, "{ended:?}");
            let _ = Command::new("umount").arg("-l").arg(&place).output();
            fs::remove_dir(&place).expect("nothing is mounted there");
        }
        for command in [&mut full, &mut all] {
            command.kill().expect("it runs");
            command.wait().expect("it ends");
        }
        drop(still);
        // Processes traced by --all stay traced when it is killed.
        ctl("--port ptracectl trace all 0");
        if number.is_multiple_of(3) {
            ctl("stop");
            ctl("start");
        }
    };
    round(0);
    let before = machine.settled();
    let begin = std::time::Instant::now();
    let mut rounds = 1;
    // Each of them some times, however long one takes.
    while begin.elapsed() < busy::time() || rounds < 12 {
        round(rounds);
        rounds += 1;
    }
    println!("{rounds} rounds, {before:?} descriptors and threads");
    ctl("stop");
    ctl("trace a remove");
    machine.type_line("kill %1; wait; echo quiet=$((2*21))");
    machine.wait_until("rest", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("quiet=42")
    });
    let after = machine.settled();
    let open = fs::read_dir(format!("/proc/{}/fd", machine.pid()));
    let open = open.into_iter().flatten();
    let open: Vec<_> = open
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .collect();
    // One thread drains while the device runs.
    assert!(
        after.0 <= before.0 && after.1 <= before.1,
        "{before:?}, then {after:?}: {open:?}"
    );
    assert_eq!(text_hash(&world), hash);

    // Counts are exact.
    for command in [
        "size 14",
        "trace __x64_sys_getppid __x64_sys_getppid+1 new g",
        "trace g on",
        "start",
    ] {
        ctl(command);
    }
    machine.type_line("syscount 1000; echo counted=$((2*21))");
    machine.wait_until("calls", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("counted=42")
    });
    ctl("stop");
    let lines = world.run(words("read trace --now"), COMMAND_LIMIT).stdout;
    assert_eq!(lines.len(), 2000 * LINE);
    let told = ctl("");
    for line in [
        "#traceinhits 1000\n",
        "#traceouthits 1000\n",
        "#tracelost 0\n",
    ] {
        assert!(told.contains(line), "{line} is not in {told}");
    }
    world.stop(NAME, machine);
}
