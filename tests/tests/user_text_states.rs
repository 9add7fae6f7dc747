//! Programs that come to a probe in a state of the CPU to which the displaced instruction matters: stepped by a debugger,
//! with floating-point exceptions unmasked. They run as without a probe, and no state of theirs ends the machine.

use std::collections::BTreeSet;

use probes::engine::Filter;
use support::host;
use support::user_guest::{FOR_EVER, STATES, UserGuest};
use vmm::host::Int3;

#[test]
fn a_program_in_any_state_runs_on_and_each_call_is_one_hit() {
    let host = host!();
    let guest = UserGuest::new(host);
    // So that the file is mapped when its functions are asked for.
    guest.spawn_sleeper(&format!("states 0 {FOR_EVER}"));
    let runs = ["states 3", "states 1"];
    // Exceptions are raised by real CPUs alone: not by QEMU's.
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
    // A shift by more than the operand has bits is left to the CPU, where that can be stepped over in a program.
    match host.profile.int3_user {
        Int3::GuestHandler => assert_eq!((hits, given_up), (vec![3, 3, 3, 1], vec![0, 0, 0, 1])),
        _ => assert_eq!((hits, given_up), (vec![3, 3, 3, 3], vec![0; 4])),
    }
    // Who arms the place anew sees it again.
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
