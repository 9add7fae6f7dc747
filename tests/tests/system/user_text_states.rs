//! Programs that reach a probe in a state of the CPU to which the displaced instruction matters:
//! stepped by a debugger, with floating-point exceptions unmasked, with anything on top of their
//! stack. They run as without a probe, and no state of theirs ends the machine.

use std::collections::BTreeSet;

use introspect::Gpa;
use probes::engine::Filter;
use probes::probe::{Moment, Probe, Target};
use support::user_guest::{FOR_EVER, STATES, UserGuest};
use support::{host, tiny_program};
use vmm::host::Int3;

#[test]
fn a_program_in_any_state_runs_on_and_each_call_is_one_hit() {
    let host = host!();
    let guest = UserGuest::new(host);
    // Keeps the file mapped when its functions are looked up.
    guest.spawn_sleeper(&format!("states 0 {FOR_EVER}"));
    let runs = ["states 3", "states 1"];
    // Only real CPUs raise the exceptions: QEMU's do not.
    let untraced = runs.map(|run| guest.shell.output(run));
    assert!(
        untraced[0].starts_with("states: 6 traps, sum 3.75, "),
        "{untraced:?}"
    );
    let mut traced = guest.session();
    let mut entries = Vec::new();
    for function in ["stepped", "sums", "divides", "shifts"] {
        entries.extend(traced.enable(
            &format!("uprobe:{STATES}:{function}:entry"),
            &Filter::default(),
        ));
    }
    let sites = guest.user_sites();
    assert_eq!(guest.shell.output(runs[0]), untraced[0]);
    let counts: Vec<_> = entries.iter().map(|entry| traced.stats(*entry)).collect();
    let hits: Vec<u64> = counts.iter().map(|stats| stats.hits).collect();
    let given_up: Vec<u64> = counts.iter().map(|stats| stats.given_up).collect();
    // A shift by more than the operand's bits is left to the CPU, if an instruction of a program
    // can be single-stepped.
    match host.profile.int3_user {
        Int3::GuestHandler => assert_eq!((hits, given_up), (vec![3, 3, 3, 1], vec![0, 0, 0, 1])),
        _ => assert_eq!((hits, given_up), (vec![3, 3, 3, 3], vec![0; 4])),
    }
    // A new session that arms the site sees it again.
    let before = counts[3].given_up;
    let mut second = guest.session();
    let again = second.enable(&format!("uprobe:{STATES}:shifts:entry"), &Filter::default());
    assert_eq!(guest.shell.output(runs[1]), untraced[1]);
    let stats = second.stats(again[0]);
    assert_eq!((stats.hits, stats.given_up), (1, before));
    second.finish();
    traced.finish();
    assert_eq!(guest.standing(&sites), BTreeSet::new());
    guest.assert_clean(&sites);
}

/// Checks that no trap is set within an instruction: a program controls its function's return
/// address, which may be within an instruction that others execute.
#[test]
fn a_program_does_not_choose_where_traps_for_returns_stand() {
    const PROGRAM: &str = "/tmp/jumps";
    const ROUNDS: u8 = 64;
    // It pauses if it has an argument: cmpq $1, (%rsp); je behind; mov $34, %eax; syscall: pause();
    // behind:
    let mut code = vec![0x48, 0x83, 0x3c, 0x24, 1, 0x74, 7];
    code.extend([0xb8, 34, 0, 0, 0, 0x0f, 0x05]);
    // Within the third instruction.
    let chosen = tiny_program::BASE + tiny_program::CODE + 7 + 1;
    code.extend([0xb9, ROUNDS, 0, 0, 0]); // mov $ROUNDS, %ecx
    code.push(0x68); // again: push $chosen
    code.extend((chosen as u32).to_le_bytes());
    code.extend([0xeb, 0]); // jmp function
    let function = tiny_program::CODE + code.len() as u64;
    code.extend([0x90, 0x58, 0xff, 0xc9, 0x75, 0xf3]); // function: nop; pop %rax; dec %ecx; jnz again
    code.extend(tiny_program::EXIT);
    let host = host!();
    let guest = UserGuest::new(host);
    let file = tiny_program::elf(&code, 0);
    let made = guest
        .shell
        .run(&tiny_program::line_that_makes(PROGRAM, &file));
    assert_eq!(made.status, 0, "{made:?}");
    guest.spawn_sleeper(&format!("{PROGRAM} still"));
    let points = guest.probes(&format!("uprobe:{PROGRAM}:-:{function:#x}"));
    let [
        Probe {
            name,
            target: Target::User { text, .. },
            ..
        },
    ] = points.as_slice()
    else {
        panic!("{points:?}")
    };
    let within = text.physical.unwrap_or_else(|| panic!("{text:?}"));
    let within = Gpa(within.0 - function + (chosen - tiny_program::BASE));
    let byte = guest.shell.linux.byte(within);
    let returns = Probe {
        name: name.clone(),
        signature: None,
        target: Target::User {
            text: text.clone(),
            moment: Moment::Return,
        },
    };
    let mut traced = guest.session();
    let enabled = traced.enable_one(&returns, &Filter::default());
    enabled.unwrap_or_else(|e| panic!("{e}"));
    let answer = guest.shell.run(PROGRAM);
    assert_eq!(answer.status, 0, "{answer:?}");
    let stats = guest.engine.stats();
    assert_eq!(stats.without_return, u64::from(ROUNDS), "{stats:?}");
    assert_eq!(guest.shell.linux.byte(within), byte);
}
