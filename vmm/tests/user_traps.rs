//! Traps in user mode, system calls and hardware breakpoints: the guest's programs run as they
//! would without.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use iced_x86::{Mnemonic, OpKind};
use introspect::{Gpa, Gva};
use support::{micro, paused_before_program};
use vmm::host::{Breakpoint, Int3};
use vmm::trap::{ArmError, INT3, SiteId, TrapKind};

#[test]
fn each_call_of_a_user_function_is_one_trap_with_its_argument() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, "usercalls 300", 1);
    let before = guest.text();
    let recorder = guest.record();
    let leaf = guest.symbol("micro_user_leaf");
    let site = guest.arm_user(leaf);
    drop(paused);
    assert_eq!(guest.count(), 300, "{}", guest.situation());
    assert_eq!(
        recorder.rdi(),
        (0..300).collect::<Vec<_>>(),
        "{}",
        guest.situation()
    );
    for seen in recorder.seen() {
        assert_eq!(
            (seen.trap.kind, seen.trap.site, seen.user_mode),
            (TrapKind::User, Some(site), true)
        );
        assert_eq!((seen.trap.address, seen.rip), (leaf, leaf.0));
    }
    assert_eq!(guest.machine.traps().hits(), [(site, 300, 0)]);
    assert!(guest.machine.disarm(site));
    assert!(guest.text() == before, "a byte of the text has changed");
}

#[test]
fn a_user_site_on_every_instruction_changes_nothing() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, "usercalls 100", 1);
    let before = guest.text();
    let space = guest.space();
    let places = guest.instructions("micro_user_leaf");
    let arm = |i: &iced_x86::Instruction| guest.machine.arm_user(Gva(i.ip()), space).unwrap();
    let sites: Vec<SiteId> = places.iter().map(arm).collect();
    drop(paused);
    assert_eq!(guest.count(), 100, "{}", guest.situation());
    let all = guest.machine.traps().hits();
    for site in sites {
        let hits = all
            .iter()
            .find(|(id, ..)| *id == site)
            .map(|(_, hits, _)| *hits);
        assert_eq!(hits, Some(100), "{all:?}");
        assert!(guest.machine.disarm(site));
    }
    assert!(guest.text() == before, "a byte of the text has changed");
}

/// Tests a write behind a trap.
///
/// A program that maps a page twice can write to its text behind the trap, which stays in the first
/// byte.
#[test]
fn an_instruction_that_is_rewritten_behind_its_trap_is_executed_as_it_is() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, "usercalls 100", 1);
    let leaf = guest.instructions("micro_user_leaf");
    // lea 1(%rdi), %rax: the program checks the sum, and stops at the first that is wrong.
    let lea = leaf.iter().find(|i| i.mnemonic() == Mnemonic::Lea).unwrap();
    assert_eq!((lea.len(), lea.memory_displacement64()), (4, 1));
    let site = guest.arm_user(Gva(lea.ip()));
    let last = Gpa(site.0.0 + 3);
    guest.machine.ram().write_physical(last, &[2]).unwrap();
    drop(paused);
    assert_eq!(guest.count(), 0, "{}", guest.situation());
    assert_eq!(guest.machine.traps().hits(), [(site, 1, 0)]);
}

/// Tests that without a gate for #BP a user int3 is refused if the host does not report it: it
/// would have no place to arrive.
#[test]
fn a_user_site_before_the_guest_has_gates_is_refused_where_it_needs_them() {
    let host = host!();
    let guest = micro(host, "usercalls 1");
    let before = guest.text();
    let armed = guest
        .machine
        .arm_user(guest.symbol("micro_user_leaf"), guest.space());
    match host.profile.int3_user {
        Int3::GuestHandler => {
            let error = armed.unwrap_err();
            assert!(
                matches!(error, ArmError::NoBreakpointHandler { .. }),
                "{error}"
            );
            assert!(guest.text() == before, "a refused site has left something");
        }
        _ => {
            armed.unwrap();
        }
    }
}

#[test]
fn a_refused_user_site_leaves_nothing_behind() {
    let host = host!();
    let (guest, _paused) = paused_before_program(host, "usercalls 1", 1);
    let before = guest.text();
    let error = guest
        .machine
        .arm_user(Gva(0x7fff_0000_0000), guest.space())
        .unwrap_err();
    assert!(matches!(error, ArmError::NotMapped { .. }), "{error}");
    assert!(guest.text() == before, "a byte of the text has changed");
}

/// Tests that the guest itself counts its own int3s, whatever sites of ours are elsewhere.
#[test]
fn the_guests_own_int3s_stay_its_own_beside_sites_of_ours() {
    let host = host!();
    for program in ["int3k 150", "int3u 150"] {
        let (guest, paused) = paused_before_program(host, program, 1);
        let before = guest.text();
        let user = guest.arm_user(guest.symbol("micro_user_leaf"));
        let kernel = guest.arm_kernel(guest.symbol("micro_leaf"));
        drop(paused);
        assert_eq!(guest.count(), 150, "{program}: {}", guest.situation());
        assert_eq!(guest.machine.stats().traps, 0, "{program}");
        assert!(guest.machine.disarm(user) && guest.machine.disarm(kernel));
        assert!(
            guest.text() == before,
            "{program}: a byte of the text has changed"
        );
    }
}

#[test]
fn user_sites_come_and_go_while_the_program_runs_through_them() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, "usercalls 20000000", 1);
    let before = guest.text();
    let space = guest.space();
    let leaf = guest.instructions("micro_user_leaf");
    let recorder = guest.record();
    // Armed before the guest runs, so that it is hit however late this thread gets its next turn.
    let first = guest.machine.arm_user(Gva(leaf[0].ip()), space).unwrap();
    drop(paused);
    guest.wait_until("hit", || recorder.count() > 0);
    assert!(guest.machine.disarm(first));
    let mut rounds = 0;
    while rounds < 150 && guest.machine.wait(Some(Duration::ZERO)).is_none() {
        let place = leaf[rounds % leaf.len()].ip();
        let site = guest.machine.arm_user(Gva(place), space).unwrap();
        if rounds % 3 == 0 {
            std::thread::sleep(Duration::from_micros(300));
        }
        assert!(guest.machine.disarm(site));
        rounds += 1;
    }
    assert_eq!(
        guest.count(),
        20_000_000,
        "after {rounds} rounds: {}",
        guest.situation()
    );
    assert!(guest.text() == before, "a byte of the text has changed");
}

#[test]
fn a_system_call_arrives_with_its_flags_masked() {
    let host = host!();
    let mut guest = micro(host, "syscalls 100");
    let recorder = guest.record();
    guest.arm_kernel(guest.symbol("micro_syscall_entry"));
    guest.machine.start();
    assert_eq!(guest.count(), 100, "{}", guest.situation());
    assert_eq!(recorder.count(), 100);
    // The guest masks TF, IF and DF, and its program runs with IF.
    for seen in recorder.seen() {
        assert_eq!(seen.rflags & 0x700, 0, "rflags {:#x}", seen.rflags);
    }
    let repaired = if host.profile.user_syscall { 0 } else { 100 };
    assert_eq!(guest.machine.stats().syscalls_repaired, repaired);
}

/// Tests that a program that only jumps to the target of SYSCALL has made no system call. The guest
/// takes its fault.
#[test]
fn a_jump_to_the_entry_is_no_system_call() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, "usercalls 1", 1);
    let entry = guest.symbol("micro_syscall_entry").0;
    guest.write_jump(guest.symbol("micro_user_calls").0, entry);
    drop(paused);
    guest.end();
    let text = guest.serial.text();
    assert!(
        text.contains(&format!("micro: trap 14 at 0x{entry:016x}")),
        "{}",
        guest.situation()
    );
    assert_eq!(guest.machine.stats().syscalls_repaired, 0);
}

#[test]
fn a_site_on_the_page_fault_entry_sees_every_fault() {
    let host = host!();
    let mut guest = micro(host, "fault 100");
    let entry = guest.symbol("micro_page_fault_entry");
    let site = guest.arm_kernel(entry);
    guest.machine.start();
    assert_eq!(guest.count(), 100, "{}", guest.situation());
    assert_eq!(guest.machine.traps().hits(), [(site, 100, 0)]);
}

#[test]
fn a_site_whose_instruction_faults_is_one_hit_and_the_guests_own_fault() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, "fault 100", 1);
    let places = guest.instructions("micro_user_fault");
    let store = places.iter().find(|i| i.op0_kind() == OpKind::Memory);
    let site = guest.arm_user(Gva(store.unwrap().ip()));
    drop(paused);
    assert_eq!(guest.count(), 100, "faults: {}", guest.situation());
    let hits = guest.machine.traps().hits();
    assert_eq!((hits[0].0, hits[0].1), (site, 100), "{}", guest.situation());
}

#[test]
fn hardware_breakpoints_fire_at_every_execution_and_the_guest_goes_on() {
    let host = host!();
    let cases = [
        (
            "calls 200",
            "micro_leaf",
            host.profile.breakpoint_kernel,
            false,
        ),
        (
            "usercalls 200",
            "micro_user_leaf",
            host.profile.breakpoint_user,
            true,
        ),
    ];
    for (program, function, breakpoint, user_mode) in cases {
        let mut guest = micro(host, program);
        let before = guest.text();
        let recorder = guest.record();
        let address = guest.symbol(function);
        guest.machine.set_breakpoint(2, Some(address)).unwrap();
        guest.machine.start();
        assert_eq!(guest.count(), 200, "{program}: {}", guest.situation());
        let expected: Vec<u64> = if breakpoint == Breakpoint::Silent {
            vec![]
        } else {
            (0..200).collect()
        };
        assert_eq!(recorder.rdi(), expected, "{program}");
        for seen in recorder.seen() {
            assert_eq!(
                (seen.trap.kind, seen.trap.site),
                (TrapKind::Breakpoint(2), None)
            );
            assert_eq!((seen.trap.address, seen.user_mode), (address, user_mode));
        }
        assert!(
            guest.text() == before,
            "{program}: a hardware breakpoint is not in memory"
        );
    }
}

#[test]
fn an_int3_and_a_hardware_breakpoint_on_one_instruction_both_see_it() {
    let host = host!();
    let mut guest = micro(host, "calls 50");
    let recorder = guest.record();
    let leaf = guest.symbol("micro_leaf");
    let site = guest.arm_kernel(leaf);
    guest.machine.set_breakpoint(1, Some(leaf)).unwrap();
    guest.machine.start();
    assert_eq!(guest.count(), 50, "{}", guest.situation());
    let kinds = |kind| {
        recorder
            .seen()
            .iter()
            .filter(|s| s.trap.kind == kind)
            .count()
    };
    assert_eq!(
        (kinds(TrapKind::Kernel), kinds(TrapKind::Breakpoint(1))),
        (50, 50)
    );
    assert_eq!(guest.machine.traps().hits(), [(site, 50, 0)]);
    assert_eq!(guest.machine.ram().read_byte(Gpa(leaf.0)).unwrap(), INT3);
}

#[test]
fn a_breakpoint_taken_away_while_the_guest_runs_through_it_is_gone() {
    let host = host!();
    let mut guest = micro(host, "calls 20000");
    let recorder = guest.record();
    guest
        .machine
        .set_breakpoint(1, Some(guest.symbol("micro_leaf")))
        .unwrap();
    guest.machine.start();
    guest.wait_until("hit", || recorder.count() > 10);
    guest.machine.set_breakpoint(1, None).unwrap();
    let at_removal = recorder.count();
    assert_eq!(guest.count(), 20_000);
    assert_eq!(recorder.count(), at_removal);
    let error = guest
        .machine
        .set_breakpoint(0, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("breakpoint 0") && error.contains("1 to 3"),
        "{error}"
    );
}
