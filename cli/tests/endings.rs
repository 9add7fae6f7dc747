//! Orderly ends of machines, by the guest, by signals and by commands, also while nobody reads.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use rustix::process::Signal;
use support::{Running, World, has_kvm};

#[test]
fn stop_returns_when_the_machine_is_gone() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    // Nobody reads its trace: it cannot end before that is written.
    let machine = world.start("calls 1000000000", "--serial null --trace micro_leaf");
    world.wait_for_traps(|hits| hits.iter().sum::<u64>() > 5_000);
    let mut stop = world.command("stop").spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(stop.try_wait().unwrap().is_none());
    assert_eq!(world.registered(), ["vm1"]);
    let machine = std::thread::spawn(|| machine.finish_reading());
    assert!(stop.wait().unwrap().success());
    assert_eq!(world.registered(), Vec::<String>::new());
    assert_eq!(machine.join().unwrap().status, 0);
}

#[test]
fn a_crash_shows_registers_and_a_place_with_a_name() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let ended = world.micro("triple", "--serial null");
    assert_eq!(ended.status, 1, "{ended:?}");
    let last = ended.stderr.lines().last().unwrap();
    let doctor: serde_json::Value =
        serde_json::from_str(&world.run("doctor --json").stdout).unwrap();
    if doctor["triple_fault_keeps_registers"] == true {
        assert!(
            last.starts_with("exotrace: triple fault on vCPU 0 at 0x")
                && last.contains("micro_triple"),
            "{last}"
        );
        assert!(
            ended.stderr.contains("rax ") && ended.stderr.contains("cr3 "),
            "{ended:?}"
        );
    } else {
        assert!(
            last.starts_with("exotrace: triple fault on vCPU 0; its place is not known"),
            "{last}"
        );
    }
    assert_eq!(world.registered(), Vec::<String>::new());
}

#[test]
fn a_halted_guest_and_a_time_limit_are_orderly_ends() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    for (program, options, end) in [
        ("dead", "", "guest halted"),
        ("spin", "--for 0.2", "stopped"),
        ("spin", "--for 0.2 --trace micro_leaf", "0 events"),
        ("out 1", "", "guest reset"),
    ] {
        let ended = world.micro(program, options);
        assert_eq!(ended.status, 0, "{program}: {ended:?}");
        assert!(ended.stderr.contains(end), "{program}: {ended:?}");
    }
}

#[test]
fn signals_end_a_run_in_order() {
    if !has_kvm() {
        return;
    }
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let world = World::new();
        let machine = world.start("spin", "--trace micro_leaf");
        machine.signal(signal);
        let ended = machine.finish();
        assert_eq!(ended.status, 0, "{signal:?}: {ended:?}");
        assert!(
            ended.stderr.contains("0 events"),
            "the trace was ended first: {ended:?}"
        );
        assert_eq!(world.registered(), Vec::<String>::new());
    }
}

/// A line, printed more often than a small pipe and the queue before it hold.
const LINE: &str = "nobody reads this line";
const LINES: usize = 3_500;
/// The size of the pipe in bytes. A guest needs twice the exits to fill a usual one.
const PIPE: usize = 4096;

/// Starts a machine whose guest prints more than a pipe and the queue before it hold, to a standard
/// output that nobody reads. Returns it when the guest is blocked by that.
fn stalled(world: &World, options: &str) -> Running {
    world.write("typed", format!("{LINE}\n").repeat(LINES).as_bytes());
    let mut command = world.micro_command("echo", options);
    command.stdin(std::fs::File::open(world.path("typed")).unwrap());
    let running = Running::of(command);
    running.shrink_output(PIPE);
    let mut last = 0;
    world.wait_until("a guest that waits", || {
        let stat = world.run("stat --json");
        let told: serde_json::Value = serde_json::from_str(&stat.stdout).unwrap_or_default();
        let exits = told["port_exits"].as_u64().unwrap_or(0);
        let stands = exits > 64 << 10 && exits == last;
        last = exits;
        // Meanwhile the guest has the CPU.
        std::thread::sleep(Duration::from_millis(200));
        stands
    });
    running
}

#[test]
fn a_reader_that_stands_still_holds_up_no_command_and_no_stop() {
    ends_while_it_stands_still(|world, _| assert_eq!(world.run("stop").status, 0));
}

#[test]
fn a_reader_that_stands_still_holds_up_no_end_by_a_signal() {
    ends_while_it_stands_still(|_, running| running.signal(Signal::TERM));
}

/// Checks that a machine whose output nobody reads is saved, and that `end` ends it.
fn ends_while_it_stands_still(end: impl FnOnce(&World, &Running)) {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let running = stalled(&world, "");
    let saved = world.run("snapshot saved");
    assert_eq!(saved.status, 0, "{saved:?}");
    end(&world, &running);
    let ended = running.finish();
    assert_eq!(ended.status, 0, "{ended:?}");
    assert!(ended.stderr.contains("exotrace: stopped"), "{ended:?}");
}

#[test]
fn a_reader_that_comes_late_gets_all_that_the_guest_has_printed() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let mut running = stalled(&world, "");
    let mut lines = running.read_lines(LINES + 1);
    lines.retain(|line| line.trim_end() == LINE);
    assert_eq!(lines.len(), LINES);
    assert_eq!(world.run("stop").status, 0);
}

/// Checks that the first signal requests the end, which may have to wait, and that the second one
/// does not wait.
#[test]
fn a_second_signal_ends_the_process_whatever_it_waits_for() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let running = stalled(&world, "");
    // Two different signals, because the same one twice may arrive as one.
    running.signal(Signal::TERM);
    running.signal(Signal::INT);
    let ended = running.finish();
    assert_eq!(ended.status, -1, "{ended:?}");
}

#[test]
fn a_killed_machine_leaves_nothing_in_the_way() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let machine = world.start("hlt", "--name web");
    machine.signal(Signal::KILL);
    drop(machine.finish());
    assert_eq!(world.registered(), ["web"]);
    let vms = world.run("vms");
    assert!(
        vms.stdout.is_empty() && vms.stderr.contains("dead machine web"),
        "{vms:?}"
    );
    assert_eq!(world.registered(), Vec::<String>::new());
}
