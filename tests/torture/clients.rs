//! Badly behaved clients: killed at any moment, sending garbage, reading nothing, sending requests
//! all the time.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::json;
use support::command::World;

use crate::control::Trace;
use crate::guest::{HOST_LIMIT, NAME, SOCKETS};
use crate::phase::Crowd;

/// The name of the figure of killed clients.
pub const KILLED: &str = "clients killed";
/// The longest life of a client that is killed.
const LONGEST: Duration = Duration::from_millis(600);
/// The number of clients that read nothing, at the same time.
const STALLED: usize = 8;
/// The commands that are killed.
const COMMANDS: [&[&str]; 11] = [
    &["trace", "vfs_read", "vfs_write"],
    &[
        "trace",
        "kprobe:vfs_*:entry",
        "--stack",
        "16",
        "--format",
        "json",
    ],
    &["trace", "uprobe:/bin/alarms:counted", "--ustack", "8"],
    &[
        "trace",
        "-e",
        "syscall:*:entry { @[comm, probe] = count(); } interval:ms:20 { print(@); clear(@); }",
    ],
    &["trace", "-e", "profile:hz:99 { @[kstack] = count(); }"],
    &["trace", "tracepoint:sched:*"],
    &["ctl", "trace vfs_read vfs_write new killed"],
    &["read", "trace"],
    &["read", "ptrace"],
    &["read", "dt", "kprobe:vfs_read:entry"],
    &["stat", "--hash", "--json"],
];
/// Beginnings that a machine parses further.
const BEGINNINGS: [&[u8]; 6] = [
    b"{\"version\":2,\"command\":\"trace\",\"probes\":[\"vfs_*\"",
    b"{\"version\":2,\"command\":\"stat\"}\n",
    b"{\"version\":2,\"command\":\"script\",",
    b"trace vfs_read vfs_write new garbage\n",
    b"\x00\x00\x00\x00\x05\x00\x00\x00trace",
    b"",
];

/// Starts clients and kills them.
pub fn killed(crowd: &Crowd<'_>, mut random: Rng) {
    while crowd.goes_on() {
        crowd.pace(KILLED);
        let command = random.choice(COMMANDS).unwrap_or_default();
        let mut child = start(&crowd.guest.world, command);
        thread::sleep(LONGEST.mul_f64(random.f64()));
        kill(&mut child);
        crowd.count(KILLED, 1);
    }
}

/// Sends garbage to every socket.
///
/// # Panics
/// If a socket accepts no connection.
pub fn garbage(crowd: &Crowd<'_>, mut random: Rng) {
    while crowd.goes_on() {
        let name = random.choice(SOCKETS).unwrap_or(SOCKETS[0]);
        let path = crowd.guest.socket(name);
        let mut stream =
            UnixStream::connect(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let limits = stream
            .set_write_timeout(Some(HOST_LIMIT))
            .and(stream.set_read_timeout(Some(LONGEST)));
        limits.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut bytes = random.choice(BEGINNINGS).unwrap_or_default().to_vec();
        let known = bytes.len();
        bytes.resize(known + random.usize(..20_000), 0);
        random.fill(bytes.get_mut(known..).unwrap_or_default());
        if random.bool() {
            bytes.push(b'\n');
        }
        // The machine may close the connection at any byte.
        let sent = stream.write_all(&bytes);
        if random.bool() {
            let _ = stream.read(&mut [0; 4096]);
        }
        crowd.count("garbage sent", 1);
        crowd.count(
            "garbage refused while it was sent",
            u64::from(sent.is_err()),
        );
        thread::sleep(Duration::from_millis(random.u64(..50)));
    }
}

/// Starts traces and reads nothing of them.
///
/// # Panics
/// If the machine does not answer.
pub fn stalled(crowd: &Crowd<'_>, mut random: Rng) {
    let control = crowd.guest.control();
    let mut held: VecDeque<(Trace, UnixStream)> = VecDeque::new();
    while crowd.goes_on() {
        let probes = ["kprobe:vfs_*:entry", "syscall:*:entry"].map(str::to_owned);
        let trace = control.trace(&probes, &json!({"kernel_stack": 8, "slots": 16384}));
        let trace = trace.unwrap_or_else(|e| panic!("no answer to a trace that nobody reads: {e}"));
        let port = UnixStream::connect(crowd.guest.socket("trace"));
        let port = port.unwrap_or_else(|e| panic!("port: {e}"));
        if let Ok(trace) = trace {
            held.push_back((trace, port));
            crowd.count("readers that stalled", 1);
        }
        if held.len() > STALLED {
            held.pop_front();
        }
        wait(crowd, Duration::from_millis(random.u64(500..3000)));
    }
}

/// Requests everything that the machine can report of itself and its guest.
///
/// # Panics
/// If it does not answer.
pub fn curious(crowd: &Crowd<'_>, mut random: Rng) {
    let control = crowd.guest.control();
    while crowd.goes_on() {
        let process = random
            .choice(["moves", "selfmod", "busybox", "alarms", "init"])
            .unwrap_or("init");
        let process = json!({"name": process});
        let question = match random.u8(..5) {
            0 => json!({"command": "ps", "threads": random.bool()}),
            1 => json!({"command": "maps", "process": process}),
            2 => json!({"command": "stack", "process": process, "symfs": null}),
            3 => json!({"command": "stat", "hash": random.bool()}),
            _ => json!({"command": "list", "pattern": "uprobe:/bin/moves::"}),
        };
        let answer = control
            .ask(&question)
            .unwrap_or_else(|e| panic!("no answer to {question}: {e}"));
        // A process may have ended.
        let refused = answer["answer"] == "error";
        crowd.count("questions", 1);
        crowd.count("questions refused", u64::from(refused));
        wait(crowd, Duration::from_millis(random.u64(..200)));
    }
}

/// Starts a command without input or output.
///
/// # Panics
/// If it cannot be started.
pub fn start(world: &World, words: &[&str]) -> Child {
    let mut command = world.command();
    let [name, rest @ ..] = words else {
        panic!("no command")
    };
    command.args([name, "--vm", NAME]).args(rest);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.spawn().unwrap_or_else(|e| panic!("{words:?}: {e}"))
}

/// Kills a command.
pub fn kill(child: &mut Child) {
    // Fails if it has ended by itself, which is as good.
    let _ = child.kill();
    let _ = child.wait();
}

fn wait(crowd: &Crowd<'_>, time: Duration) {
    let until = Instant::now() + time;
    while crowd.goes_on() && Instant::now() < until {
        thread::sleep(Duration::from_millis(50));
    }
}
