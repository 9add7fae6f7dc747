//! gdb(1) and lldb(1) on a process of a guest, as a user runs them. Their scripts and what they
//! have to print are data.

mod kernel;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use support::command::{Running, World, executable, words};
use support::shell::{COMMAND_LIMIT, snapshot_folder};
use support::{crashes, host};

/// The commands before all others: gdb asks nobody, and looks for nothing elsewhere.
const QUIET: [&str; 6] = [
    "set pagination off",
    "set confirm off",
    "set width 0",
    "set debuginfod enabled off",
    "set auto-load off",
    "set remotetimeout 60",
];

/// Commands of a session and what gdb prints for each: parts of lines, in this order.
type Session = &'static [(&'static str, &'static [&'static str])];

const LOOKS: Session = &[
    ("info threads", &["debugged (", "debugged (", "debugged ("]),
    ("bt", &[" in main ()"]),
    ("info proc mappings", &["r-xp   /bin/debugged", "[stack]"]),
    (
        "info sharedlibrary",
        &["target:/lib/x86_64-linux-gnu/libc.so.6"],
    ),
    ("break count_one if $rdi == 1", &["Breakpoint 1 at"]),
    ("continue", &["Breakpoint 1, ", " in count_one ()"]),
    // Evaluated at the hit.
    (
        "info breakpoints",
        &["stop only if $rdi == 1 (target evals)"],
    ),
    ("print $rdi", &["= 1"]),
    ("bt", &[" in count_one ()", " in count ()"]),
    ("stepi", &[" in count_one ()"]),
    ("stepi", &[" in count_one ()"]),
    ("finish", &[" in count ()"]),
    ("delete", &[]),
    ("thbreak count_one", &["Hardware assisted breakpoint 2 at"]),
    (
        "continue",
        &["Temporary breakpoint 2, ", " in count_one ()"],
    ),
    ("delete", &[]),
    (
        "catch syscall clock_nanosleep",
        &["Catchpoint 3 (syscall 'clock_nanosleep' [230])"],
    ),
    ("set $me = $_thread", &[]),
    ("condition 3 $_thread == $me", &[]),
    (
        "continue",
        &["Catchpoint 3 (call to syscall clock_nanosleep)"],
    ),
    ("print $orig_rax", &["= 230"]),
    (
        "continue",
        &["Catchpoint 3 (returned from syscall clock_nanosleep)"],
    ),
    ("print $rax", &["= 0"]),
    ("delete", &[]),
    ("print *(long *)&counted >= 0", &["= 1"]),
    ("print *(long *)16", &["Cannot access memory"]),
    ("set var *(long *)&counted = 5", &["Cannot access memory"]),
    ("detach", &["detached"]),
];

/// Registers and memory are changed.
const CHANGES: Session = &[
    ("tbreak count_one if $rdi == 0", &["Temporary breakpoint 1"]),
    (
        "continue",
        &["Temporary breakpoint 1, ", " in count_one ()"],
    ),
    ("print $mxcsr", &["= 8064"]),
    ("print $ftag", &["= 65535"]),
    ("set var *(long *)&counted = 1000", &[]),
    ("print *(long *)&counted", &["= 1000"]),
    ("set var $rsi = 1", &[]),
    ("finish", &[" in count ()"]),
    ("print $rax", &["= 1001"]),
    (
        "set var *(char *)count_one = 0xc3",
        &["Cannot access memory"],
    ),
    ("detach", &["detached"]),
];

/// Functions of the program are called.
const CALLS: Session = &[
    ("tbreak count_one", &["Temporary breakpoint 1"]),
    (
        "continue",
        &["Temporary breakpoint 1, ", " in count_one ()"],
    ),
    ("set $at = $pc", &[]),
    ("print (long)labs(-42)", &["= 42"]),
    ("print (int)getpid() > 1", &["= 1"]),
    // One that stops on its way.
    ("tbreak abs", &["Temporary breakpoint 2"]),
    (
        "print (int)abs(-7)",
        &["The program being debugged stopped while in a function called from GDB."],
    ),
    ("bt 2", &["abs (i=-7)", "<function called from gdb>"]),
    ("finish", &["Value returned", "= 7"]),
    ("print $pc == $at", &["= 1"]),
    ("detach", &["detached"]),
];

/// Children and new programs of a process, after its first child.
const FAMILY: Session = &[
    ("info threads", &["sh ("]),
    ("delete", &[]),
    ("catch exec", &["Catchpoint 2 (exec)"]),
    (
        "continue",
        &[
            "[Detaching after fork from child process",
            "is executing new program: ",
            "/bin/busybox",
            "Catchpoint 2 (exec'd ",
        ],
    ),
    ("delete 2", &[]),
    ("catch vfork", &["Catchpoint 3 (vfork)"]),
    ("continue", &["Catchpoint 3 (vforked process "]),
    ("delete", &[]),
    (
        "catch syscall wait4",
        &["Catchpoint 4 (syscall 'wait4' [61])"],
    ),
    (
        "continue",
        &["[Detaching ", "Catchpoint 4 (call to syscall wait4)"],
    ),
    ("delete", &[]),
    ("continue", &["exited normally]"]),
];

/// A crash is caught at its signal, with the stack of the moment.
const CRASHES: Session = &[
    ("bt", &[" in fall ()", " in stumble ()", " in main ()"]),
    ("print $rdi", &["= 16"]),
    ("x/i $pc", &["(%rdi)"]),
    (
        "continue",
        &["Program terminated with signal SIGSEGV, Segmentation fault."],
    ),
];

/// Restores the machine `g` from a snapshot.
fn restored(world: &World, folder: &Path) -> Running {
    let mut line = words("run --name g --restore");
    line.push(folder.into());
    world.start(line)
}

/// Finds the parts in a text, one behind the other. Returns the first that is not there.
fn missing<'p>(text: &str, parts: &[&'p str]) -> Option<&'p str> {
    let mut rest = text;
    for part in parts {
        let Some((_, behind)) = rest.split_once(part) else {
            return Some(part);
        };
        rest = behind;
    }
    None
}

/// Starts gdb, attached to a process by the command.
fn gdb(world: &World, options: &str) -> Running {
    let mut gdb = Command::new("gdb");
    gdb.env("XDG_RUNTIME_DIR", world.path("run"))
        .env("HOME", world.path(""))
        .args(["-q", "-nx"]);
    for command in QUIET {
        gdb.args(["-ex", command]);
    }
    let executable = executable();
    let attach = format!("target remote | {} gdb {options}", executable.display());
    gdb.args(["-ex", &attach, "-ex", "echo attached\\n"]);
    let mut gdb = world.spawn(gdb.stdin(Stdio::piped()));
    gdb.wait_until("debugger", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("attached\n")
    });
    gdb
}

/// Types a command, waits until gdb is done with it, and returns its output.
fn ask(gdb: &mut Running, command: &str) -> String {
    let before = [gdb.printed().0.len(), gdb.printed().1.len()];
    gdb.type_line(command);
    gdb.type_line("echo done\\n");
    let is_done = |stdout: &str, _: &str| stdout[before[0]..].contains("done\n");
    gdb.wait_until(command, COMMAND_LIMIT, is_done);
    let (stdout, stderr) = gdb.printed();
    format!("{}{}", &stdout[before[0]..], &stderr[before[1]..])
}

/// Checks that gdb prints the parts for each command.
fn talk(gdb: &mut Running, session: Session) {
    for (command, parts) in session {
        let printed = ask(gdb, command);
        let missing = missing(&printed, parts);
        assert_eq!(missing, None, "{command} printed:\n{printed}");
    }
}

#[test]
fn a_process_of_a_guest_is_debugged_and_runs_on_and_its_crash_is_caught() {
    let host = host!();
    let world = World::new();
    let mut machine = restored(&world, snapshot_folder(host));
    machine.type_line("mkfifo /tmp/line; debugged < /tmp/line & exec 3> /tmp/line");
    machine.wait_until("program", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("debugged: ")
    });

    let mut first = gdb(&world, "-p debugged");
    talk(&mut first, LOOKS);
    first.type_line("quit");
    assert_eq!(first.finish(COMMAND_LIMIT).status, 0);

    let changes = || {
        let stat = world.run(words("stat --vm g"), COMMAND_LIMIT).stdout;
        let line = stat
            .lines()
            .find(|line| line.starts_with("changes by debuggers"));
        line.and_then(|line| line.split_whitespace().last()?.parse::<u64>().ok())
    };
    assert_eq!(changes(), Some(0));
    let mut changing = gdb(&world, "--write -p debugged");
    talk(&mut changing, CHANGES);
    changing.type_line("quit");
    assert_eq!(changing.finish(COMMAND_LIMIT).status, 0);
    assert_eq!(changes(), Some(2));
    let mut calling = gdb(&world, "--write -p debugged");
    talk(&mut calling, CALLS);
    calling.type_line("quit");
    assert_eq!(calling.finish(COMMAND_LIMIT).status, 0);

    // The guest runs on, and is paused for the next debugger until that lets it go on.
    let mut second = gdb(&world, "-p debugged");
    second.type_line("continue");
    machine.type_line("echo >&3");
    second.wait_until("crash", COMMAND_LIMIT, |stdout, _| {
        stdout.contains(" received signal SIGSEGV, Segmentation fault.")
    });
    talk(&mut second, CRASHES);
    second.type_line("quit");
    assert_eq!(second.finish(COMMAND_LIMIT).status, 0);
    machine.type_line("echo still=$((6*7))");
    machine.wait_until("shell", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("still=42")
    });
    world.stop("g", machine);
}

#[test]
fn children_and_new_programs_of_a_process_are_caught() {
    let host = host!();
    let world = World::new();
    let mut machine = restored(&world, snapshot_folder(host));
    machine.type_line("mkfifo /tmp/line");
    // A shell that makes a child, and becomes a program that makes another one by vfork(2).
    machine.type_line(
        "sh -c 'read x; (exit 3); exec /bin/busybox time /bin/busybox true' < /tmp/line & \
         exec 3> /tmp/line; echo pid=$!.",
    );
    let mut pid = String::new();
    machine.wait_until("program", COMMAND_LIMIT, |stdout, _| {
        let found = stdout.lines().find_map(|line| {
            let (_, rest) = line.split_once("pid=")?;
            rest.split_once('.')
        });
        pid = found.unwrap_or_default().0.to_owned();
        !pid.is_empty()
    });
    let mut gdb = gdb(&world, &format!("-p {pid}"));
    talk(&mut gdb, &[("catch fork", &["Catchpoint 1 (fork)"])]);
    gdb.type_line("continue");
    machine.type_line("echo >&3");
    gdb.wait_until("child", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("Catchpoint 1 (forked process ")
    });
    talk(&mut gdb, FAMILY);
    gdb.type_line("quit");
    assert_eq!(gdb.finish(COMMAND_LIMIT).status, 0);
    world.stop("g", machine);
}

/// Returns the frames that gdb has printed, without addresses, and with the guest's files named as
/// this machine's.
fn frames(printed: &str) -> Vec<String> {
    let frames = printed.lines().filter_map(|line| {
        let frame = line.strip_prefix("(gdb) ").unwrap_or(line);
        frame.starts_with('#').then_some(frame)
    });
    let without_addresses = |frame: &str| {
        let words = frame.split("0x").enumerate();
        let words = words.map(|(number, text)| match number {
            0 => text.to_owned(),
            _ => format!(
                "ADDRESS{}",
                text.trim_start_matches(|c: char| c.is_ascii_hexdigit())
            ),
        });
        words.collect::<String>().replace("target:", "")
    };
    frames.map(without_addresses).collect()
}

/// Returns the stack of a program that crashes on this machine, as gdb shows it.
fn frames_here(world: &World, program: &str) -> Vec<String> {
    let input = world.path("input");
    fs::write(&input, "2\n").unwrap_or_else(|e| panic!("{e}"));
    let mut gdb = Command::new("gdb");
    gdb.env("HOME", world.path(""))
        .args(["-q", "-nx", "-batch"]);
    for command in QUIET {
        gdb.args(["-ex", command]);
    }
    let run = format!("run < {}", input.display());
    gdb.args(["-ex", &run, "-ex", "bt"]);
    let ran = gdb.arg(crashes::programs().join(program)).output();
    let ran = ran.unwrap_or_else(|e| panic!("gdb: {e}"));
    let printed = String::from_utf8_lossy(&ran.stdout);
    assert!(printed.contains("received signal SIGSEGV"), "{printed}");
    frames(&printed)
}

/// The stack of a crash in a thread of a guest is what gdb shows of the same program on this
/// machine: names, arguments, files and lines.
#[test]
fn crashes_of_programs_in_several_languages_have_their_stacks() {
    let host = host!();
    let world = World::new();
    let mut machine = restored(&world, crashes::snapshot_folder(host));
    for (number, program) in crashes::PROGRAMS.iter().enumerate() {
        let name = program.name;
        let pipe = format!("/tmp/{name}");
        machine.type_line(&format!("mkfifo {pipe}; {name} < {pipe} & exec 3> {pipe}"));
        machine.wait_until("program", COMMAND_LIMIT, |stdout, _| {
            stdout.matches("crash: ready").count() == number + 1
        });
        let mut gdb = gdb(&world, &format!("-p {name}"));
        gdb.type_line("continue");
        machine.type_line("echo 2 >&3");
        gdb.wait_until("crash", COMMAND_LIMIT, |stdout, _| {
            stdout.contains("received signal SIGSEGV")
        });
        let found = frames(&ask(&mut gdb, "bt"));
        assert!(found.len() > 3, "{name}: {found:?}");
        assert_eq!(found, frames_here(&world, name), "{name}");
        ask(&mut gdb, "detach");
        gdb.type_line("quit");
        assert_eq!(gdb.finish(COMMAND_LIMIT).status, 0);
        // The end of a program would interrupt the next command.
        machine.type_line("wait; echo ended=$((6*7))");
        machine.wait_until("end", COMMAND_LIMIT, |stdout, _| {
            stdout.matches("ended=42").count() == number + 1
        });
    }
    world.stop("g", machine);
}

/// Commands of lldb after a crash, and what it prints for each.
const LLDB_CRASH: Session = &[
    ("bt", &["`total", "crash-c.c:", "`work"]),
    ("register read rip", &["`total + "]),
    ("image list", &["crash-c", "libc.so.6"]),
    ("thread list", &["stop reason = signal SIGSEGV"]),
    ("process detach", &["detached"]),
];

/// lldb debugs with a copy of the program on this machine.
#[test]
fn lldb_catches_a_crash() {
    let host = host!();
    let world = World::new();
    let mut machine = restored(&world, crashes::snapshot_folder(host));
    machine.type_line("mkfifo /tmp/line; crash-c < /tmp/line & exec 3> /tmp/line");
    machine.wait_until("program", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("crash: ready")
    });
    let socket = world.path("lldb.socket");
    let mut served = words("gdb --vm g -p crash-c --listen");
    served.push(socket.clone().into());
    let mut served = world.start(served);
    served.wait_until("socket", COMMAND_LIMIT, |_, _| socket.exists());

    let mut lldb = Command::new("lldb");
    lldb.env("HOME", world.path(""))
        .args(["--no-lldbinit", "--no-use-colors"]);
    lldb.arg(crashes::programs().join("crash-c"));
    let mut lldb = world.spawn(lldb.stdin(Stdio::piped()));
    lldb.type_line(&format!(
        "process connect --plugin gdb-remote unix-connect://{}",
        socket.display()
    ));
    lldb.wait_until("connection", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("stopped")
    });
    lldb.type_line("continue");
    machine.type_line("echo 2 >&3");
    lldb.wait_until("crash", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("stop reason = signal SIGSEGV")
    });
    for (command, parts) in LLDB_CRASH {
        let before = lldb.printed().0.len();
        lldb.type_line(command);
        lldb.wait_until(command, COMMAND_LIMIT, |stdout, _| {
            let printed = stdout.get(before..).unwrap_or_default();
            missing(printed, parts).is_none()
        });
    }
    lldb.type_line("quit");
    assert_eq!(lldb.finish(COMMAND_LIMIT).status, 0);
    served.signal(Signal::INT);
    served.finish(COMMAND_LIMIT);
    machine.type_line("wait; echo still=$((6*7))");
    machine.wait_until("shell", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("still=42")
    });
    world.stop("g", machine);
}

#[test]
fn a_process_that_is_none_is_told_and_a_debugger_that_breaks_off_leaves_the_guest_running() {
    let host = host!();
    let world = World::new();
    let mut machine = restored(&world, snapshot_folder(host));
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        let vms = world.run(words("vms"), COMMAND_LIMIT);
        vms.stdout.contains("g ")
    });
    for (process, told) in [
        ("9999", "the guest has no process 9999; see ps"),
        (
            "2",
            "2 is a thread of the kernel, which has no program to debug; see --kernel",
        ),
        (
            "nobody",
            "the guest has no process called \"nobody\"; see ps",
        ),
    ] {
        let ended = world.run(words(&format!("gdb -p {process}")), COMMAND_LIMIT);
        assert_eq!((ended.status, ended.stdout.as_str()), (1, ""), "{ended:?}");
        assert!(ended.stderr.contains(told), "{ended:?}");
    }
    // A socket for debuggers goes with the command.
    let socket = world.path("debuggers");
    let mut line = words("gdb -p 1 --listen");
    line.push(socket.clone().into());
    let mut listening = world.start(line);
    listening.wait_until("socket", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("waiting for debuggers")
    });
    assert!(socket.exists());
    listening.signal(Signal::INT);
    assert_eq!(listening.finish(COMMAND_LIMIT).status, 0);
    assert!(!socket.exists());
    // No packet, half a packet, a packet that is none, and one with a wrong sum.
    for said in [
        "hello",
        "$vCont;c",
        "$vCont;c:p1.-1#99",
        "$X#58",
        "\u{3}",
        "$m0,ffffffff#fc",
    ] {
        let mut nonsense = world.start(words("gdb -p 1"));
        nonsense.type_line(said);
        drop(nonsense);
        machine.type_line(&format!("echo {}", "after=$((6*7))"));
    }
    machine.wait_until("shell", COMMAND_LIMIT, |stdout, _| {
        stdout.matches("after=42").count() == 6
    });
    world.stop("g", machine);
}
