//! The device trace(3) over a Linux guest: its commands and their errors, its lines for programs
//! whose calls are known, and an unchanged guest afterwards.

use std::sync::Arc;

use probes::kernel_view::KernelView;
use support::shell::{Answer, COMMAND_LIMIT};
use support::{Shell, host, host::Host};
use trace_devices::port::{ControlPort, EventPort, EventReader};
use trace_devices::trace::Device;
use trace_devices::trace_line::{LINE_BYTES, LineKind, TraceLine};

/// A size of reads that nothing else in the guest uses.
const SIZE: u64 = 777;

/// A guest and its device.
struct Traced {
    shell: Shell,
    view: Arc<KernelView>,
    device: Device,
}

impl Traced {
    fn new(host: &Host) -> Self {
        let shell = Shell::new(host);
        let view = shell.linux.view();
        let device = shell.linux.vm.trace_device();
        Self {
            device: device.unwrap_or_else(|e| panic!("{e}")),
            shell,
            view,
        }
    }

    fn tell(&self, commands: &[&str]) {
        for command in commands {
            let done = self.device.command(command);
            done.unwrap_or_else(|error| panic!("{command}: {error}"));
        }
    }

    /// Runs `command` in the guest between `start` and `stop`, and returns the lines that can be
    /// read then.
    fn trace(&self, start: &str, command: &str) -> (Vec<TraceLine>, Answer) {
        let mut reader = self.open();
        self.tell(&[start]);
        let answer = self.shell.start(command).answer(4 * COMMAND_LIMIT);
        self.tell(&["stop"]);
        let lines = parse(&reader.read(usize::MAX));
        assert_eq!(reader.dropped(), 0);
        (lines, answer)
    }

    fn open(&self) -> Box<dyn EventReader> {
        self.device.open().unwrap_or_else(|e| panic!("{e}"))
    }

    fn address(&self, name: &str) -> u64 {
        let address = self.view.kernel.symbols.address_of(name);
        address.unwrap_or_else(|| panic!("no {name}"))
    }
}

fn parse(bytes: &[u8]) -> Vec<TraceLine> {
    assert_eq!(bytes.len() % LINE_BYTES, 0);
    let one = |line: &[u8]| TraceLine::parse(line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
    bytes.chunks(LINE_BYTES).map(one).collect()
}

/// Returns the number of a process that the shell prints by `echo pid=$!`.
fn told_pid(answer: &Answer) -> u64 {
    let mut words = answer.output.split_whitespace();
    let pid = words.find_map(|word| word.strip_prefix("pid=")?.parse().ok());
    pid.unwrap_or_else(|| panic!("{answer:?}"))
}

/// Pairs each entry with its return, by process and nesting, in the order of the entries.
fn calls(lines: &[TraceLine]) -> Vec<(TraceLine, TraceLine)> {
    let mut calls: Vec<(TraceLine, Option<TraceLine>)> = Vec::new();
    for line in lines {
        match line.kind {
            LineKind::Entry => calls.push((*line, None)),
            LineKind::Exit => {
                let mut open = calls.iter_mut().rev();
                let entry = open.find(|(e, x)| e.pid == line.pid && x.is_none());
                // The call may have been made before the start.
                if let Some((_, exit)) = entry {
                    *exit = Some(*line);
                }
            }
        }
    }
    let whole = calls.into_iter();
    whole
        .filter_map(|(entry, exit)| Some((entry, exit?)))
        .collect()
}

#[test]
fn commands_change_the_configuration_or_say_what_is_wrong() {
    let host = host!();
    let traced = Traced::new(host);
    let [base, read, write] = ["_text", "vfs_read", "vfs_write"].map(|name| traced.address(name));
    let etext = traced.address("_etext");
    let offsets = format!("trace {:x} 0x{:x} new b", read - base, read - base + 1);
    let short = format!(
        "trace {:x} {:x} new c",
        read & 0x7fff_ffff,
        write & 0x7fff_ffff
    );
    let one = format!("trace {read:x} {read:x} new c");
    let beyond = format!("trace {read:x} {:x} new c", etext + 1);
    let turned = format!("trace {write:x} {read:x} new c");
    let inside = format!("trace {:x} {:x} new c", read + 1, read + 2);
    for (command, expected) in [
        ("trace vfs_read vfs_write new a", ""),
        (
            "trace vfs_read vfs_read+1 new b",
            "devtrace: given range overlaps with existing trace",
        ),
        (
            "trace vfs_open vfs_open+1 new a",
            "devtrace: trace with that name already exists",
        ),
        ("trace a vfs_open new b", "devtrace: trace already exists"),
        (&turned, "devtrace: invalid address range"),
        (&one, "devtrace: invalid address range"),
        (&short, "devtrace: given range overlaps with existing trace"),
        (
            &inside,
            "devtrace: given range overlaps with existing trace",
        ),
        (&beyond, "devtrace: bad address"),
        ("trace ffff 10 new c", "devtrace: invalid address range"),
        (
            "trace xyzzy vfs_read new c",
            "devtrace: bad address: the kernel has no symbol \"xyzzy\"",
        ),
        (
            "trace vfs_raed vfs_read new c",
            "devtrace: bad address: the kernel has no symbol \"vfs_raed\" (did you mean vfs_read",
        ),
        (
            "trace vfs_read+zz vfs_read new c",
            "devtrace: bad address: invalid offset in vfs_read+zz: expected a hexadecimal number after +",
        ),
        (
            "trace _text _etext new c",
            "devtrace: given range overlaps with existing trace",
        ),
        ("trace b on", "devtrace: trace not found"),
        ("trace b remove", "devtrace: trace not found"),
        ("trace a on", ""),
        ("trace a on", ""),
        ("trace a off", ""),
        ("trace a remove", ""),
        ("trace a off", "devtrace: trace not found"),
        (
            &inside,
            "devtrace: invalid address range: no function begins in it",
        ),
        ("trace _text _etext new c", "too many exits: "),
        (&offsets, ""),
        ("trace b on", ""),
        ("size 4", ""),
        ("watch 9", ""),
        ("watch 7", ""),
        ("watch 9", ""),
        ("start", ""),
        ("start", ""),
        ("nonsense", "devtrace:  usage: 'trace'"),
    ] {
        let found = traced.device.command(command);
        let found = found.map_or_else(|error| error.text, |()| String::new());
        assert!(
            found.starts_with(expected),
            "{command}: {found:?}, expected {expected:?}"
        );
        assert_eq!(
            found.is_empty(),
            expected.is_empty(),
            "{command}: {found:?}"
        );
    }
    let end = read + 1;
    let expected = format!(
        "logsize 16\n\
         trace {read:016x} {end:016x} new b\n\
         #  tracept E {read:016x} vfs_read\n\
         #trace {read:016x} traced? 1\n\
         trace b on\n\
         watch 7\nwatch 9\n\
         start\n\
         #tracehits 0, in queue 0\n\
         #traceactive 1\n\
         #traceinhits 0\n\
         #traceouthits 0\n\
         #tracelost 0\n"
    );
    assert_eq!(traced.device.configuration(), expected);
    for pid in 0..100 {
        let full = traced.device.command(&format!("watch {}", 1000 + pid));
        let text = full.map_or_else(|error| error.text, |()| String::new());
        assert_eq!(text, if pid < 62 { "" } else { "pidwatch array full!" });
    }
    traced.tell(&["all", "watch 0"]);
    assert!(traced.device.configuration().contains("\nall\n"));
    traced.tell(&["stop", "trace b remove"]);
    let text = traced.device.configuration();
    assert!(
        !text.contains("trace b") && text.contains("#traceactive 0"),
        "{text}"
    );
    // The reported configuration can be written back.
    for line in expected.lines() {
        traced.tell(&[line]);
    }
    assert_eq!(traced.device.configuration(), expected);
}

#[test]
fn entries_and_returns_of_a_range_are_those_of_the_programs_calls() {
    let host = host!();
    let traced = Traced::new(host);
    let hash = traced.shell.linux.text_hash(&traced.view);
    let [read, write] = ["vfs_read", "vfs_write"].map(|name| traced.address(name));
    traced.tell(&["trace vfs_read vfs_write new a", "trace a on", "size 16"]);
    let command =
        format!("dd if=/dev/zero of=/dev/null bs={SIZE} count=20 2> /dev/null & echo pid=$!; wait");
    let (lines, answer) = traced.trace("start", &command);
    let pid = told_pid(&answer);
    assert!(lines.is_sorted_by_key(|line| line.ticks));
    let in_range =
        |line: &TraceLine| line.kind == LineKind::Exit || (read..=write).contains(&line.pc);
    assert!(lines.iter().all(in_range));
    let calls = calls(&lines);
    for function in [read, write] {
        let of_dd = |(entry, _): &&(TraceLine, TraceLine)| {
            entry.pid == pid && entry.pc == function && entry.arguments[2] == SIZE
        };
        let of_dd: Vec<_> = calls.iter().filter(of_dd).collect();
        assert_eq!(of_dd.len(), 20, "{function:x} of {pid} in {lines:#x?}");
        for (entry, exit) in of_dd {
            assert_eq!(exit.arguments, [SIZE, 0, 0, 0]);
            assert!(exit.ticks > entry.ticks);
            // file, buffer, size, position: four arguments, all present.
            assert!(
                entry.arguments.iter().take(3).all(|a| *a != 0),
                "{entry:x?}"
            );
        }
    }
    // It has ended, and no more lines come.
    assert_eq!(traced.shell.run("true").status, 0);
    assert_eq!(traced.open().read(usize::MAX), b"");
    assert_eq!(traced.shell.linux.text_hash(&traced.view), hash);
    let counts = traced.device.counts();
    assert_eq!((counts.waiting, counts.lost), (0, 0));
    assert_eq!(counts.entries + counts.exits, lines.len() as u64);
}

#[test]
fn arguments_that_a_function_does_not_take_are_zero() {
    let host = host!();
    let traced = Traced::new(host);
    // One argument, and none.
    for (function, takes) in [("fput", 1), ("schedule", 0), ("filp_close", 2)] {
        traced.tell(&[
            &format!("trace {function} {function}+1 new {function}"),
            &format!("trace {function} on"),
        ]);
        let (lines, _) = traced.trace("start", "cat /proc/uptime");
        traced.tell(&[&format!("trace {function} remove")]);
        let entries = lines.iter().filter(|line| line.kind == LineKind::Entry);
        let entries: Vec<_> = entries.map(|line| line.arguments).collect();
        assert!(!entries.is_empty(), "{function}");
        for arguments in entries {
            assert_eq!(
                arguments[takes..],
                [0; 4][takes..],
                "{function}: {arguments:x?}"
            );
        }
        let exits = lines.iter().filter(|line| line.kind == LineKind::Exit);
        for exit in exits {
            assert_eq!(exit.arguments[1..], [0; 3], "{function}");
        }
    }
}

#[test]
fn interrupts_are_ignored_unless_all_is_said() {
    let host = host!();
    let traced = Traced::new(host);
    // Called by the timer's interrupt alone; its name since Linux 6.11 is the second.
    let old = traced
        .view
        .kernel
        .symbols
        .address_of("scheduler_tick")
        .is_some();
    let name = if old { "scheduler_tick" } else { "sched_tick" };
    let tick = traced.address(name);
    traced.tell(&[
        &format!("trace {name} {name}+1 new t"),
        "trace t on",
        "size 16",
    ]);
    // Ticks come to a CPU that is not idle: until the clock, of hundredths of a second, has
    // advanced five times.
    let busy = "for i in 1 2 3 4 5; do read a b </proc/uptime; c=$a; \
                while [ $c = $a ]; do read c b </proc/uptime; done; done";
    let (lines, _) = traced.trace("start", busy);
    assert_eq!(lines, []);
    let (lines, _) = traced.trace("all", busy);
    assert!(lines.len() > 2, "{lines:x?}");
    for line in &lines {
        assert_eq!(line.pid, u64::MAX);
        assert!(line.kind == LineKind::Exit || line.pc == tick);
    }
    // `stop` is the end of `all`.
    let (lines, _) = traced.trace("start", busy);
    assert_eq!(lines, []);
}

#[test]
fn only_watched_processes_are_recorded_and_what_finds_no_room_is_counted() {
    let host = host!();
    let traced = Traced::new(host);
    traced.tell(&["trace vfs_read vfs_read+1 new a", "trace a on", "size 16"]);
    // A child's number is known before it reads: it waits for the shell to let it go on.
    let answer = traced
        .shell
        .run("mkfifo /tmp/gate; sh -c 'read go < /tmp/gate; cat /proc/uptime' & echo pid=$!");
    let pid = told_pid(&answer);
    traced.tell(&[&format!("watch {pid}")]);
    let (lines, _) = traced.trace("start", "cat /proc/uptime; echo go > /tmp/gate; wait");
    assert!(!lines.is_empty());
    assert!(
        lines.iter().all(|line| line.pid == pid),
        "{pid}: {lines:x?}"
    );
    traced.tell(&["watch 0", "size 3"]);
    let mut reader = traced.open();
    traced.tell(&["start"]);
    traced
        .shell
        .output("dd if=/dev/zero of=/dev/null bs=777 count=50 2> /dev/null");
    traced.tell(&["stop"]);
    let counts = traced.device.counts();
    assert_eq!(counts.waiting, 8);
    let hits = counts.entries + counts.exits;
    assert!(hits >= 100, "{counts:?}");
    assert_eq!(counts.lost, hits - 8);
    assert!(
        traced
            .device
            .configuration()
            .contains(&format!("#tracelost {}\n", counts.lost))
    );
    // Only whole lines that fit.
    assert_eq!(reader.read(LINE_BYTES - 1), b"");
    assert_eq!(parse(&reader.read(3 * LINE_BYTES + 5)).len(), 3);
    assert_eq!(parse(&reader.read(usize::MAX)).len(), 5);
}
