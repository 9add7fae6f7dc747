//! The ports of a running machine's trace devices, as a user finds them: sockets, `ctl`, `read`, and files in a folder.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use support::command::{Running, World};
use support::host;
use support::host::Host;
use support::shell::{COMMAND_LIMIT, snapshot_folder};

const NAME: &str = "ported";
const SOCKETS: [&str; 5] = ["ports", "trace", "tracectl", "ptrace", "ptracectl"];
/// Bytes of a line of trace(3).
const LINE: usize = 121;

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

fn start(world: &World, host: &Host) -> Running {
    let mut line = words(&format!("run --name {NAME} --restore"));
    line.push(snapshot_folder(host).into());
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        SOCKETS.iter().all(|name| socket(world, name).exists())
    });
    machine
}

fn socket(world: &World, name: &str) -> PathBuf {
    world.path("run/exotrace").join(NAME).join(name)
}

fn stop(world: &World, machine: Running) {
    let stopped = world.run(words(&format!("stop --vm {NAME}")), COMMAND_LIMIT);
    assert_eq!(stopped.status, 0, "{stopped:?}");
    let ended = machine.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
}

/// What a plain control port answers to these lines.
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

/// Has the guest call the traced function.
fn work(machine: &mut Running) {
    machine.type_line("dd if=/proc/version of=/tmp/v bs=1k; echo worked=$((2*21))");
    machine.wait_until("work of the guest", COMMAND_LIMIT, |stdout, _| {
        stdout.matches("worked=42").count() > 0
    });
}

#[test]
fn sockets_come_and_go_with_the_machine_and_refusals_are_told() {
    let host = host!();
    let world = World::new();
    let machine = start(&world, host);
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
    stop(&world, machine);
    for name in SOCKETS {
        assert!(!socket(&world, name).exists(), "{name}");
    }
}

#[test]
#[ignore = "the devices are not behind the ports yet"]
fn the_manual_pages_example_gives_the_same_lines_by_command_socket_and_file() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host);
    let ctl = |command: &str| world.run(words(&format!("ctl {command}")), COMMAND_LIMIT);
    for command in ["trace vfs_read vfs_read new a", "trace a on", "start"] {
        let ended = ctl(command);
        assert_eq!(ended.status, 0, "{command}: {ended:?}");
    }
    let configuration = ctl("").stdout;
    assert!(configuration.contains(" new a\n"), "{configuration}");
    // Readers at the same time get the same.
    let plain = UnixStream::connect(socket(&world, "trace")).expect("the socket is there");
    let place = world.path("mounted");
    fs::create_dir(&place).expect("a folder");
    let mut line = words("mount");
    line.push(place.clone().into());
    let mut mounted = world.start(line);
    mounted.wait_until("mount", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("ends with")
    });
    let held = fs::File::open(place.join("trace")).expect("the file is there");
    work(&mut machine);
    let stopped = shell(&place, "echo stop > tracectl");
    assert!(stopped.status.success(), "{stopped:?}");

    let by_command = world.run(words("read trace --now"), COMMAND_LIMIT);
    assert_eq!(by_command.status, 0, "{by_command:?}");
    let lines = by_command.stdout.into_bytes();
    assert!(lines.len() >= 2 * LINE && lines.len() % LINE == 0);
    let mut by_socket = vec![0; lines.len()];
    (&plain).read_exact(&mut by_socket).expect("as many lines");
    assert!(by_socket == lines, "the socket gives other lines");
    // In one read with room enough: less than a line gives nothing.
    let mut by_file = vec![0; lines.len() + LINE];
    let read = (&held).read(&mut by_file).expect("the file is read");
    by_file.truncate(read);
    assert!(by_file == lines, "the file gives other lines");

    let refused = shell(&place, "echo trace b on > tracectl");
    assert!(!refused.status.success());
    let stat = fs::read_to_string(place.join("stat")).expect("stat");
    assert!(stat.contains("devtrace: trace not found"), "{stat}");
    drop(held);
    // The mount ends with its machine.
    stop(&world, machine);
    let ended = mounted.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
}

#[test]
#[ignore = "the devices are not behind the ports yet"]
fn a_machine_that_is_killed_keeps_nobody_waiting() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host);
    let mut reader = world.start(words("read ptrace --all"));
    reader.wait_until("records", COMMAND_LIMIT, |stdout, _| !stdout.is_empty());
    let place = world.path("mounted");
    fs::create_dir(&place).expect("a folder");
    let mut line = words("mount");
    line.push(place.clone().into());
    let mut mounted = world.start(line);
    mounted.wait_until("mount", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("ends with")
    });
    let held = fs::File::open(place.join("trace")).expect("the file is there");
    work(&mut machine);
    // Kills it.
    drop(machine);
    let ended = reader.finish(Duration::from_secs(10));
    assert_eq!(ended.status, 1, "{ended:?}");
    assert!((&held).read(&mut [0; LINE]).is_err());
    let ended = mounted.finish(Duration::from_secs(10));
    assert_eq!(ended.status, 0, "{ended:?}");
}
