//! The trace devices as a guest has them: files in /dev/virtio-ports, with what `--guest-ports` lets it do.

use std::ffi::OsString;
use std::fs;
use std::time::Duration;

use support::command::{Running, World};
use support::host;
use support::host::Host;
use support::ports;
use support::shell::COMMAND_LIMIT;

const NAME: &str = "inside";
/// How long ports are opened again and again.
const BUSY_SECONDS: u64 = 60;
/// Bytes of a line of trace(3).
const LINE: usize = 121;

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

fn start(world: &World, host: &Host, access: &str) -> Running {
    let mut line = words(&format!(
        "run --name {NAME} --guest-ports {access} --restore"
    ));
    line.push(ports::snapshot_folder(host).into());
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        let folder = world.path("run/exotrace").join(NAME);
        ["ports", "dt"]
            .iter()
            .all(|name| folder.join(name).exists())
    });
    machine
}

/// Runs a line in the guest; what it printed.
fn tell(machine: &mut Running, line: &str) -> String {
    let number = machine.printed().0.matches("told=").count();
    let (begin, end) = (format!("begin{number}=1"), format!("told={number}!"));
    // The mark is not in the line as it may be echoed.
    machine.type_line(&format!(
        "echo begin{number}=$((2-1)); {line}; echo told=$((0+{number}))'!'"
    ));
    machine.wait_until(line, 4 * COMMAND_LIMIT, |stdout, _| stdout.contains(&end));
    let printed = machine.printed().0.replace('\r', "");
    let (_, rest) = printed
        .split_once(&begin)
        .unwrap_or_else(|| panic!("no {begin} in {printed}"));
    let (text, _) = rest
        .split_once(&end)
        .unwrap_or_else(|| panic!("no {end} in {rest}"));
    text.trim_start().to_owned()
}

fn stop(world: &World, machine: Running) {
    let stopped = world.run(words(&format!("stop --vm {NAME}")), COMMAND_LIMIT);
    assert_eq!(stopped.status, 0, "{stopped:?}");
    let ended = machine.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
}

/// Lines of trace(3) in what a guest printed.
fn lines(text: &str) -> Vec<&str> {
    let lines = text.lines();
    lines
        .filter(|line| line.len() == LINE - 1 && matches!(line.as_bytes(), [b'E' | b'X', b' ', ..]))
        .collect()
}

#[test]
fn the_manual_pages_example_works_inside_the_guest() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host, "rw");
    for command in ["trace vfs_read vfs_write new a", "trace a on"] {
        assert_eq!(
            tell(&mut machine, &format!("echo {command} > tracectl")),
            ""
        );
    }
    // What a command has changed is there when its writer has closed.
    let told = tell(&mut machine, "cat tracectl");
    assert!(
        told.contains(" new a\n") && told.contains("trace a on\n"),
        "{told}"
    );
    assert!(told.contains("#traceactive 0\n"), "{told}");
    // The host reads the same at the same time.
    let reader = world.start(words("read trace"));
    std::thread::sleep(Duration::from_millis(500));
    let shown = tell(
        &mut machine,
        "echo start > tracectl; dd if=/proc/version of=/tmp/v bs=333 count=1 2> /dev/null; echo stop > tracectl; cat trace > /tmp/lines; \
         wc -c < /tmp/lines; tail -n 4 /tmp/lines",
    );
    let count: usize = shown
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("{shown}"));
    let by_host = reader.printed().0;
    assert!(count % LINE == 0, "{shown}\n{by_host}");
    assert!(
        by_host.contains(" 000000000000014d "),
        "a read of 333 bytes: {by_host}"
    );
    // One that was refused says why.
    let told = tell(
        &mut machine,
        "echo trace b on > tracectl; tail -n 1 tracectl",
    );
    assert_eq!(told.trim_end(), "#error devtrace: trace not found");
    let told = tell(
        &mut machine,
        "echo size 14 > tracectl; head -n 1 tracectl; grep -c error tracectl",
    );
    assert_eq!(
        told.split_whitespace().collect::<Vec<_>>(),
        ["logsize", "16384", "0"]
    );
    stop(&world, machine);
}

#[test]
fn the_guest_alone_reads_what_it_traces_until_there_is_no_more() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host, "rw");
    tell(
        &mut machine,
        "echo trace vfs_read vfs_write new a > tracectl; echo trace a on > tracectl; echo start > tracectl; \
         dd if=/proc/version of=/tmp/v bs=333 count=1 2> /dev/null; echo stop > tracectl",
    );
    let told = tell(&mut machine, "cat tracectl");
    let waiting = told
        .lines()
        .find_map(|line| line.split_once("in queue ")?.1.parse::<usize>().ok())
        .unwrap_or_else(|| panic!("{told}"));
    assert!(waiting > 4, "{told}");
    // The first lines by themselves; what head(1) was given and did not look at comes again.
    let first = tell(&mut machine, "head -n 1 trace");
    assert_eq!(lines(&first).len(), 1, "{first}");
    let rest = tell(&mut machine, "cat trace");
    let rest = lines(&rest);
    assert!(
        !rest.is_empty() && rest.len() < waiting,
        "{} of {waiting}",
        rest.len()
    );
    assert!(rest.iter().any(|line| line.contains(" 000000000000014d ")));
    assert_eq!(
        tell(&mut machine, "cat trace; echo empty").trim_end(),
        "empty"
    );
    stop(&world, machine);
}

#[test]
fn a_guest_that_may_only_read_is_told_so_and_reads_what_the_host_traces() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host, "ro");
    let told = tell(
        &mut machine,
        "echo trace vfs_read vfs_write new a > tracectl; cat tracectl",
    );
    assert!(!told.contains(" new a"), "{told}");
    assert!(
        told.trim_end()
            .ends_with("#error permission denied: this guest may not change what is traced"),
        "{told}"
    );
    for command in ["trace vfs_read vfs_read new h", "trace h on", "start"] {
        let ended = world.run(words(&format!("ctl {command}")), COMMAND_LIMIT);
        assert_eq!(ended.status, 0, "{ended:?}");
    }
    tell(&mut machine, "cat /proc/version > /dev/null");
    let ended = world.run(words("ctl stop"), COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    let shown = tell(&mut machine, "cat trace");
    assert!(lines(&shown).len() > 2, "{shown}");
    stop(&world, machine);
}

#[test]
fn ports_that_are_opened_again_and_again_neither_hang_nor_leak() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host, "rw");
    let pid = machine.pid();
    let open_files = || fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let threads = || fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let round = "for p in tracectl trace ptracectl; do cat $p > /dev/null; done; echo start > tracectl; echo stop > tracectl";
    tell(&mut machine, round);
    let before = (open_files(), threads());
    let told = tell(
        &mut machine,
        &format!(
            "n=0; end=$(($(date +%s)+{}); while [ $(date +%s) -lt $end ]; do {round}; n=$((n+1)); done; echo rounds=$n",
            BUSY_SECONDS
        ),
    );
    assert!(told.contains("rounds="), "{told}");
    assert_eq!((open_files(), threads()), before);
    let told = tell(&mut machine, "cat tracectl");
    assert!(told.contains("#traceactive 0\n#traceinhits 0\n"), "{told}");
    stop(&world, machine);
}
