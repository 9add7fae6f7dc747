//! Functions of a running Linux kernel, traced from outside: exact events, exact counts, an unchanged guest.

use std::time::{Duration, Instant};

use probes::event::{Event, EventKind};
use probes::function_trace::{FunctionTracer, TraceOptions};
use probes::kernel_view::KernelView;
use support::shell::COMMAND_LIMIT;
use support::{Host, Linux, Shell, host, rich};

/// Rings large enough to drop nothing here.
const SLOTS: usize = 1 << 16;
const WRITES: usize = 200;
const BLOCK: u64 = 0x400;

fn arm(linux: &Linux, view: &KernelView, names: &[&str], options: &TraceOptions) -> FunctionTracer {
    let names: Vec<String> = names.iter().map(|name| (*name).to_string()).collect();
    let tracer = FunctionTracer::arm(&linux.machine, view, &names, options);
    tracer.unwrap_or_else(|e| panic!("{e}"))
}

/// Stops the tracer, takes what it has, and checks its counts against each other and against the machine's.
fn finish(linux: &Linux, tracer: &mut FunctionTracer, traps_before: u64) -> Vec<Event> {
    tracer.stop(&linux.machine);
    let mut events = Vec::new();
    tracer.drain(&mut events);
    let stats = tracer.stats();
    assert_eq!(stats.read, stats.pushed, "{stats:?}");
    assert_eq!(
        stats.read + stats.dropped,
        stats.entries - stats.filtered + stats.returns,
        "{stats:?}"
    );
    let hits = stats.entries + stats.returns + stats.unpaired_returns;
    assert_eq!(
        linux.machine.stats().traps - traps_before,
        hits,
        "{stats:?}"
    );
    assert_eq!(
        stats.lost_returns + stats.without_return + stats.unknown_task,
        0,
        "{stats:?}"
    );
    events
}

/// Waits for an entry that the filter lets through.
fn wait_for_hit(tracer: &FunctionTracer, linux: &Linux) {
    let deadline = Instant::now() + COMMAND_LIMIT;
    while tracer.stats().entries == tracer.stats().filtered {
        assert!(
            Instant::now() < deadline,
            "no hit in {COMMAND_LIMIT:?}\n{}",
            linux.situation()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn traced_shell(host: &Host) -> (Shell, KernelView) {
    let shell = Shell::new(host);
    let view = shell.linux.view();
    (shell, view)
}

#[test]
fn every_write_of_dd_is_seen_with_its_process_arguments_and_result() {
    let host = host!();
    let (shell, view) = traced_shell(host);
    let linux = &shell.linux;
    let before = linux.text_hash(&view);
    let names = ["vfs_read", "vfs_write", "vfs_open", "do_filp_open"];
    let options = TraceOptions {
        ring_slots: SLOTS,
        ..TraceOptions::default()
    };
    let traps = linux.machine.stats().traps;
    let mut tracer = arm(linux, &view, &names, &options);
    assert_ne!(
        linux.text_hash(&view),
        before,
        "the hash does not see traps"
    );
    let functions = tracer.functions().to_vec();
    let known: Vec<_> = functions.iter().map(|f| f.arguments).collect();
    assert_eq!(
        known,
        [Some(4), Some(4), Some(2), Some(3)],
        "arguments by BTF"
    );

    let line = format!("sh -c 'echo pid=$$; exec dd if=/dev/zero of=/tmp/x bs=1k count={WRITES}'");
    let answer = shell.start(&line).answer(4 * COMMAND_LIMIT);
    let events = finish(linux, &mut tracer, traps);
    assert!(answer.output.contains("200+0 records out"), "{answer:?}");
    let pid = answer
        .output
        .lines()
        .find_map(|l| l.strip_prefix("pid=")?.parse::<u64>().ok());
    let pid = pid.unwrap_or_else(|| panic!("no pid: {answer:?}"));

    // One task, and none of these functions calls another of them but do_filp_open: calls and returns alternate.
    let of = |function: usize| {
        let own = events
            .iter()
            .filter(move |e| e.pid == pid && e.function as usize == function);
        own.collect::<Vec<_>>()
    };
    let calls = |function: usize, size: u64| {
        let own = of(function);
        let mut found = 0;
        for pair in own.chunks(2) {
            let [entry, exit] = pair else {
                panic!("{} has no return: {pair:?}", names[function])
            };
            assert_eq!(
                (entry.kind, exit.kind),
                (EventKind::Entry, EventKind::Exit),
                "{pair:?}"
            );
            assert_eq!(entry.pc, functions[function].address.0);
            assert!(entry.tsc < exit.tsc, "{pair:?}");
            assert_eq!(exit.arguments[1..], [0; 3], "{pair:?}");
            if entry.arguments[2] == size {
                assert_eq!(exit.arguments[0], size, "{pair:?}");
                found += 1;
            }
        }
        found
    };
    assert_eq!(calls(1, BLOCK), WRITES, "vfs_write");
    assert_eq!(calls(0, BLOCK), WRITES, "vfs_read");

    for (function, arguments) in [(2, 2), (3, 3)] {
        let entries: Vec<_> = of(function)
            .into_iter()
            .filter(|e| e.kind == EventKind::Entry)
            .collect();
        assert!(entries.len() >= 2, "{}: {entries:?}", names[function]);
        for entry in entries {
            assert!(
                entry.arguments[arguments..].iter().all(|a| *a == 0),
                "{entry:?}"
            );
            assert!(entry.arguments[arguments - 1] != 0, "{entry:?}");
        }
    }
    assert_eq!(
        linux.text_hash(&view),
        before,
        "something was left in the kernel's text"
    );
    assert_eq!(shell.output("echo well"), "well");
}

#[test]
fn only_the_chosen_process_is_recorded_and_the_others_are_counted() {
    let host = host!();
    let (shell, view) = traced_shell(host);
    let linux = &shell.linux;
    shell.type_line("fsload 0 5 > /dev/null & echo load=$!");
    let pid = linux.wait("pid of fsload", 0, COMMAND_LIMIT, |printed| {
        let digits = printed.rsplit_once("load=")?.1.split_once("\r\n")?.0;
        digits.parse::<u64>().ok()
    });
    let options = TraceOptions {
        pids: vec![pid],
        ring_slots: SLOTS,
        ..TraceOptions::default()
    };
    let traps = linux.machine.stats().traps;
    let mut tracer = arm(linux, &view, &["vfs_write"], &options);
    // The shell and this cat write, too.
    let version = shell.output("cat /proc/version");
    assert!(version.starts_with("Linux version 6.1"), "{version}");
    wait_for_hit(&tracer, linux);
    let events = finish(linux, &mut tracer, traps);
    assert!(
        tracer.stats().filtered > 0 && !events.is_empty(),
        "{:?}",
        tracer.stats()
    );
    assert!(events.iter().all(|e| e.pid == pid), "{events:?}");
}

#[test]
fn a_full_ring_drops_events_and_counts_each() {
    let host = host!();
    let (shell, view) = traced_shell(host);
    let options = TraceOptions {
        ring_slots: 64,
        ..TraceOptions::default()
    };
    let traps = shell.linux.machine.stats().traps;
    let mut tracer = arm(&shell.linux, &view, &["vfs_read", "vfs_write"], &options);
    shell.output("dd if=/dev/zero of=/tmp/x bs=1k count=100 2> /dev/null");
    let events = finish(&shell.linux, &mut tracer, traps);
    assert_eq!(events.len(), 64);
    assert!(tracer.stats().dropped >= 400 - 64, "{:?}", tracer.stats());
}

#[test]
fn attaching_and_detaching_time_and_again_leaves_a_busy_guest_as_it_was() {
    let host = host!();
    const ROUNDS: usize = 20;
    let (shell, view) = traced_shell(host);
    let linux = &shell.linux;
    shell.type_line("fsload 0 1 &");
    let before = linux.text_hash(&view);
    let names = [
        "vfs_read",
        "vfs_write",
        "vfs_open",
        "vfs_rename",
        "vfs_unlink",
        "schedule",
    ];
    let options = TraceOptions::default();
    for round in 0..ROUNDS {
        let traps = linux.machine.stats().traps;
        let mut tracer = arm(linux, &view, &names, &options);
        // At once, after some time, or once the workload has met a trap.
        match round % 3 {
            0 => {}
            1 => std::thread::sleep(Duration::from_millis(4 * round as u64)),
            _ => wait_for_hit(&tracer, linux),
        }
        finish(linux, &mut tracer, traps);
        assert_eq!(linux.text_hash(&view), before, "round {round}");
    }
    assert_eq!(shell.output("kill $!; echo $((40+2))"), "42");
    let log = shell.output("dmesg | grep -c -i -e bug -e oops -e stall || true");
    assert_eq!(log, "0", "{}", shell.output("dmesg | tail -n 20"));
}

#[test]
fn functions_of_a_loaded_module_are_traced_by_name() {
    let host = host!();
    let shell = rich::guest(host);
    let linux = &shell.linux;
    let names = ["brd_submit_bio", "vfs_write"];
    let unknown = FunctionTracer::arm(
        &linux.machine,
        &linux.view(),
        &names.map(str::to_owned),
        &TraceOptions::default(),
    );
    let told = unknown.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(
        told.contains("loaded modules have no function \"brd_submit_bio\""),
        "{told}"
    );

    shell.type_lines(&[&format!("insmod {}", rich::BRD)]);
    let view = linux.view();
    let traps = linux.machine.stats().traps;
    let options = TraceOptions {
        ring_slots: SLOTS,
        ..TraceOptions::default()
    };
    let mut tracer = arm(linux, &view, &names, &options);
    let line = "dd if=/dev/zero of=/dev/ram0 bs=4k count=5 conv=fsync";
    let answer = shell.start(line).answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.status, 0, "{answer:?}");
    let events = finish(linux, &mut tracer, traps);
    let of_module = events.iter().filter(|e| e.function == 0);
    let (entries, exits): (Vec<&Event>, Vec<&Event>) =
        of_module.partition(|e| e.kind == EventKind::Entry);
    assert!(!entries.is_empty(), "{answer:?}");
    assert_eq!(entries.len(), exits.len());
    let module = view.modules.modules().first();
    let module = module.unwrap_or_else(|| panic!("no module is known"));
    let address = tracer.functions().first().map(|f| f.address.0);
    assert!(
        address.is_some_and(|address| module.module.range_of(address).is_some()),
        "{address:x?} in {:?}",
        module.module
    );
}
