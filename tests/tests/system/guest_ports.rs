//! The trace devices as a guest has them: files in /dev/virtio-ports, with the permissions of
//! `--guest-ports`.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use sha2::{Digest, Sha256};
use support::busy;
use support::command::{Running, World, words};
use support::host;
use support::host::Host;
use support::ports;
use support::shell::COMMAND_LIMIT;

const NAME: &str = "inside";
/// The size of a line of trace(3) in bytes.
const LINE: usize = 121;

fn start(world: &World, host: &Host, access: &str) -> Running {
    restore(
        world,
        &format!("--guest-ports {access}"),
        ports::snapshot_folder(host),
    )
}

/// Restores a machine with these options.
fn restore(world: &World, options: &str, snapshot: &Path) -> Running {
    let mut line = words(&format!("run --name {NAME} {options} --restore"));
    line.push(snapshot.into());
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        let folder = world.path("run/exotrace").join(NAME);
        ["ports", "dt"]
            .iter()
            .all(|name| folder.join(name).exists())
    });
    machine
}

/// Runs a line in the guest, and returns its output.
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

/// Returns the lines of trace(3) in a guest's output.
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
    // A command takes effect before its writer's close returns.
    let told = tell(&mut machine, "cat tracectl");
    assert!(
        told.contains(" new a\n") && told.contains("trace a on\n"),
        "{told}"
    );
    assert!(told.contains("#traceactive 0\n"), "{told}");
    // The guest and the host read at the same time, and get the same.
    let socket = world.path("run/exotrace").join(NAME).join("trace");
    let mut host_side = UnixStream::connect(&socket).unwrap_or_else(|e| panic!("{e}"));
    let told = tell(&mut machine, "cat tracectl");
    assert!(told.contains("#tracehits 0, in queue 0\n"), "{told}");
    let shown = tell(
        &mut machine,
        "exec 3< trace; echo start > tracectl; dd if=/proc/version of=/tmp/v bs=333 count=1 2> /dev/null; echo stop > tracectl; \
         cat <&3 > /tmp/lines; exec 3<&-; wc -c < /tmp/lines; sha256sum < /tmp/lines",
    );
    let mut told = shown.split_whitespace();
    let count: u64 = told
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or_default();
    assert!(
        count > 4 * LINE as u64 && count.is_multiple_of(LINE as u64),
        "{shown}"
    );
    let mut by_host = vec![0; usize::try_from(count).unwrap_or(0)];
    let read = host_side.read_exact(&mut by_host);
    read.unwrap_or_else(|e| panic!("{e}"));
    let hash: String = Sha256::digest(&by_host)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(
        told.next(),
        Some(hash.as_str()),
        "{}",
        String::from_utf8_lossy(&by_host)
    );
    assert!(String::from_utf8_lossy(&by_host).contains(" 000000000000014d "));
    // A refused one reports the reason.
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
    world.stop(NAME, machine);
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
    // A program that opens the port to write is sent lines, which it does not read: they come
    // again.
    tell(&mut machine, "echo mark > trace");
    let rest = tell(&mut machine, "cat trace");
    let rest = lines(&rest);
    assert_eq!(rest.len(), waiting, "{rest:?}");
    assert!(rest.iter().any(|line| line.contains(" 000000000000014d ")));
    assert_eq!(
        tell(&mut machine, "cat trace; echo empty").trim_end(),
        "empty"
    );
    world.stop(NAME, machine);
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
    for command in ["trace vfs_read vfs_write new h", "trace h on", "start"] {
        let ended = world.run(words(&format!("ctl {command}")), COMMAND_LIMIT);
        assert_eq!(ended.status, 0, "{ended:?}");
    }
    tell(&mut machine, "cat /proc/version > /dev/null");
    let ended = world.run(words("ctl stop"), COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    let told = world.run(words("ctl"), COMMAND_LIMIT).stdout;
    let shown = tell(&mut machine, "cat trace");
    assert!(
        lines(&shown).len() > 2,
        "{told}\n{shown}\n{}",
        machine.printed().0
    );
    world.stop(NAME, machine);
}

/// Checks two messages of probes/devices/src/dt/wire.rs: an open in today's layout, and the request
/// for the counts, which is answered by 32 bytes.
#[test]
fn dt_answers_a_guest_that_may_write() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host, "rw");
    let open = r"printf 'DT4\001\001\000\000\000\000\000\000\000' >&3; head -c 8 <&3";
    let counts = r"printf '\002\104\040\100\000\000\000\000' >&3; head -c 40 <&3";
    let hex = r#"hexdump -v -e '1/1 "%02x"'"#;
    // Each opening of the port is a client of its own.
    for _ in 0..2 {
        let line = format!("exec 3<> dt; {{ {open}; {counts}; }} | {hex}; exec 3<&-");
        let told = tell(&mut machine, &line);
        let expected = ["00000000", "00000000", "00000000", "20000000"].concat();
        assert_eq!(told.trim_end(), expected + &"00".repeat(32));
    }
    // An invalid message ends the connection, and has no other effect.
    let told = tell(
        &mut machine,
        "exec 3<> dt; echo hello, world >&3; head -c 8 <&3 | wc -c; exec 3<&-; head -n 1 tracectl",
    );
    assert!(told.contains("\nlogsize "), "{told}");
    world.stop(NAME, machine);
}

#[test]
fn a_write_to_the_port_marks_a_moment_of_ptrace() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host, "ro");
    let mut reader = world.start(words("read ptrace --all"));
    reader.wait_until("records", COMMAND_LIMIT, |stdout, _| !stdout.is_empty());
    tell(&mut machine, "echo here > trace; echo not > tracectl");
    reader.wait_until("mark", COMMAND_LIMIT, |stdout, _| stdout.contains(" User "));
    std::thread::sleep(Duration::from_millis(500));
    reader.signal(Signal::INT);
    let ended = reader.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{:?}", ended.stderr);
    let marks = ended.stdout.lines().filter(|line| line.contains(" User "));
    let marks: Vec<&str> = marks.collect();
    // Of trace(3)'s port alone, by the shell.
    assert_eq!(marks.len(), 1, "{marks:?}");
    assert!(marks[0].contains(" sh "), "{marks:?}");
    world.stop(NAME, machine);
}

#[test]
fn a_replay_answers_the_guest_as_it_was_answered() {
    let host = host!();
    let world = World::new();
    let options = "--guest-ports rw --history 1h,every=50ms";
    let mut machine = restore(&world, options, ports::snapshot_folder(host));
    tell(
        &mut machine,
        "for c in 'trace vfs_read vfs_write new a' 'trace a on' start; do echo $c > tracectl; done; \
         dd if=/proc/version of=/tmp/v bs=333 count=1 2> /dev/null; echo stop > tracectl",
    );
    let answers = ["cat tracectl", "cat trace"].map(|command| tell(&mut machine, command));
    let [told, traced] = &answers;
    assert!(told.contains("trace a on\n"), "{told}");
    assert!(lines(traced).len() > 4, "{traced}");
    let kept = words(&format!("rewind --vm {NAME} --ago 1h back"));
    let kept = world.run(kept, COMMAND_LIMIT);
    assert_eq!(kept.status, 0, "{kept:?}");
    world.stop(NAME, machine);

    let options = "--guest-ports rw --replay";
    let mut again = restore(&world, options, &world.path("back"));
    let mut end = String::new();
    again.wait_until("end of the replay", COMMAND_LIMIT, |_, stderr| {
        let mut lines = stderr.split_inclusive('\n');
        let told = lines.find(|line| line.contains(" recording ") && line.ends_with('\n'));
        end = told.unwrap_or_default().to_owned();
        told.is_some()
    });
    assert!(end.contains("the guest went the same way"), "{end}");
    let printed = again.printed().0.replace('\r', "");
    for answer in &answers {
        assert!(printed.contains(answer), "{answer}\nnot in {printed}");
    }
    // From then on it is the machine that answers, for which nothing was traced.
    let told = tell(&mut again, "cat tracectl");
    assert!(
        told.contains("#traceactive") && !told.contains("trace a on"),
        "{told}"
    );
    world.stop(NAME, again);
}

#[test]
fn ports_that_are_opened_again_and_again_neither_hang_nor_leak() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host, "rw");
    let round = "for p in tracectl trace ptracectl; do cat $p > /dev/null; done; echo start > tracectl; echo stop > tracectl";
    tell(&mut machine, round);
    let before = machine.settled();
    let told = tell(
        &mut machine,
        &format!(
            "n=0; end=$(($(date +%s)+{})); while [ $(date +%s) -lt $end ]; do {round}; n=$((n+1)); done; echo rounds=$n",
            busy::time().as_secs()
        ),
    );
    assert!(told.contains("rounds="), "{told}");
    assert_eq!(machine.settled(), before, "open files, threads");
    let told = tell(&mut machine, "cat tracectl");
    assert!(told.contains("#traceactive 0\n#traceinhits 0\n"), "{told}");
    world.stop(NAME, machine);
}
