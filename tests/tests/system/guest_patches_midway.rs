//! Probes are enabled and disabled while the guest is about to read its text. It decodes the
//! instructions of all jump labels, one after the other, and a trap on one of them would crash it.

use std::time::{Duration, Instant};

use probes::engine::{Capture, Filter, Session};
use support::host;
use support::shell::COMMAND_LIMIT;
use support::traced::Traced;
use vmm::machine::Paused;

/// A command that makes the guest decode them, a few times.
const PLACE_PROBES: &str = "for probe in a b c d; do echo \"p:$probe vfs_read\" > kprobe_events; echo > kprobe_events; done";
/// The time that the guest runs on between two checks.
const LOOK_INTERVAL: Duration = Duration::from_micros(200);

/// Pauses the guest while it is at an instruction of the functions that decode.
fn paused_midway(traced: &Traced) -> Paused {
    let machine = traced.shell.linux.machine();
    let deadline = Instant::now() + COMMAND_LIMIT;
    loop {
        let paused = machine.pause();
        let at = machine.registers(&paused, 0).map(|cpu| cpu.regs.rip);
        let function = at.and_then(|at| traced.view.kernel.symbols.resolve(at));
        let name = function.map_or("", |(symbol, _)| symbol.name);
        if ["jump_label_text_reserved", "arch_jump_entry_size"].contains(&name) {
            return paused;
        }
        drop(paused);
        assert!(Instant::now() < deadline, "{}", traced.complaints());
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// Enables probes on jump labels while the guest decodes those, beside a session of `others`. The
/// guest survives, the probes are hit afterwards, and nothing is left.
fn probes_come_midway(others: &[&str]) {
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    let probes = traced.find("tracepoint:vmlinux:sched:*");
    let beside = traced.session(others);
    let mut session = traced.empty_session();
    let command = traced.shell.start(PLACE_PROBES);
    let paused = paused_midway(&traced);
    // The kernel has no site for some of its tracepoints.
    let enable = |probe| {
        let enabled = session.enable(probe, Filter::default(), Capture::default());
        enabled.is_ok()
    };
    let enabled = probes.iter().map(enable).filter(|is_enabled| *is_enabled);
    let enabled = enabled.count();
    drop(paused);
    assert!(enabled * 2 > probes.len(), "{enabled} of {}", probes.len());
    let answer = command.answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.status, 0, "{answer:?}\n{}", traced.complaints());
    wait_for_hits(&traced, &mut session);
    let sites = traced.engine.machine().traps().stats();
    assert!(sites.iter().all(|site| !site.suspended), "{sites:?}");
    drop((session, beside));
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

/// Waits for more hits. The ring need not have room for them.
fn wait_for_hits(traced: &Traced, session: &mut Session) {
    let deadline = Instant::now() + COMMAND_LIMIT;
    let before = session.stats().probes.hits;
    while session.stats().probes.hits < before + 10 {
        session.drain(|_| ());
        assert!(Instant::now() < deadline, "{}", traced.complaints());
        std::thread::sleep(LOOK_INTERVAL);
    }
}

#[test]
fn the_first_probes() {
    probes_come_midway(&[]);
}

#[test]
fn probes_beside_others() {
    probes_come_midway(&["kprobe:vmlinux:vfs_write:entry"]);
}

/// Checks sites that are suspended for a call during which the last session ends.
#[test]
fn probes_that_are_enabled_again_after_the_last_went() {
    const SWITCH: &str = "tracepoint:vmlinux:sched:sched_switch";
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    let first = traced.session(&[SWITCH]);
    let command = traced.shell.start(PLACE_PROBES);
    let paused = paused_midway(&traced);
    drop(first);
    drop(paused);
    let answer = command.answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.status, 0, "{answer:?}\n{}", traced.complaints());
    let mut second = traced.session(&[SWITCH]);
    wait_for_hits(&traced, &mut second);
    drop(second);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}
