//! The guest's own uprobes at sites of ours, and beside them in the same page. Both see every call,
//! and neither is mistaken for the other.

use iced_x86::{Decoder, DecoderOptions};
use introspect::x86_64::PAGE;
use probes::probe::Target;
use support::shell::COMMAND_LIMIT;
use support::user_guest::{FOR_EVER, FSLOAD, UserGuest};
use support::{host, rich};

/// The folder by which the guest's tracers are controlled.
const TRACEFS: &str = "/sys/kernel/tracing";

/// Returns the offsets in the file of the first two instructions of a function of fsload.
fn instructions(guest: &UserGuest, function: &str) -> [u64; 2] {
    let probes = guest.probes(&format!("uprobe:/tmp/y:{function}:entry"));
    match probes.first().map(|probe| &probe.target) {
        Some(Target::User { text, .. }) => {
            let mut decoder = Decoder::with_ip(64, &text.code, text.offset, DecoderOptions::NONE);
            [text.offset, decoder.decode().next_ip()]
        }
        other => panic!("{function}: {other:?}"),
    }
}

/// Runs a command that must succeed, and returns its output.
fn tell(guest: &UserGuest, command: &str) -> String {
    let answer = guest.shell.start(command).answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.status, 0, "{command}: {answer:?}");
    answer.output.trim_end().to_owned()
}

/// Returns the hits of the guest's own uprobes since the last call.
fn seen_by_the_guest(guest: &UserGuest) -> [String; 2] {
    let seen = ["over", "beside"].map(|name| {
        // grep's status is that of a search.
        tell(guest, &format!("grep -c ' {name}:' trace || true"))
    });
    tell(guest, "echo > trace");
    seen
}

#[test]
fn the_guests_uprobes_and_ours_see_the_same_calls() {
    let host = host!();
    let guest = UserGuest::of(rich::guest(host));
    tell(
        &guest,
        &format!("mount -t tracefs t {TRACEFS}; cd {TRACEFS} && cp {FSLOAD} /tmp/y"),
    );
    let before = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    let [over, _] = instructions(&guest, "one_round");
    let [_, beside] = instructions(&guest, "write_file");
    assert_eq!(over / PAGE, beside / PAGE);
    let on = format!(
        "(echo 'p:over /tmp/y:{over:#x}'; echo 'p:beside /tmp/y:{beside:#x}') > uprobe_events && echo 1 > events/uprobes/enable"
    );
    let off = "echo 0 > events/uprobes/enable && echo > uprobe_events";

    // The guest's over ours.
    let mut traced = guest.session();
    traced.enable_fsload("/tmp/y");
    assert_eq!(tell(&guest, "/tmp/y 1 0"), "fsload: 1 rounds");
    let of_file = guest.user_sites();
    tell(&guest, &on);
    println!("{:?}", guest.engine.stats());
    let running = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    assert_eq!(tell(&guest, "/tmp/y 5 0"), "fsload: 5 rounds");
    assert_eq!(traced.recorded("one_round"), (1 + 1 + 5, 1 + 1 + 5));
    assert_eq!(traced.recorded("write_file"), (7, 7));
    assert_eq!(seen_by_the_guest(&guest), ["6", "6"]);
    tell(&guest, off);
    assert_eq!(tell(&guest, "/tmp/y 3 0"), "fsload: 3 rounds");
    assert_eq!(traced.recorded("one_round"), (10, 10));
    assert_eq!(seen_by_the_guest(&guest), ["0", "0"]);
    traced.finish();
    guest.assert_clean(&of_file);

    // Ours over the guest's.
    tell(&guest, &on);
    assert_eq!(tell(&guest, "/tmp/y 2 0"), "fsload: 2 rounds");
    let mut traced = guest.session();
    traced.enable_fsload("/tmp/y");
    assert_eq!(tell(&guest, "/tmp/y 4 0"), "fsload: 4 rounds");
    assert_eq!(traced.recorded("one_round"), (4, 4));
    assert_eq!(traced.recorded("write_file"), (4, 4));
    assert_eq!(seen_by_the_guest(&guest), ["6", "6"]);
    traced.finish();
    assert_eq!(tell(&guest, "/tmp/y 2 0"), "fsload: 2 rounds");
    assert_eq!(seen_by_the_guest(&guest), ["2", "2"]);
    tell(&guest, off);
    assert_eq!(
        tell(&guest, &format!("busybox cmp {FSLOAD} /tmp/y && echo same")),
        "same"
    );
    for pid in [before, running] {
        guest.kill(pid);
    }
    guest.assert_clean(&of_file);
    let complaints = "dmesg | grep -e BUG -e WARNING -e Oops -e 'cut here' | head; true";
    assert_eq!(tell(&guest, complaints), "");
}

/// Checks for missed calls. The guest takes long to place a uprobe: it waits for all its CPUs, and
/// other programs run meanwhile.
#[test]
fn calls_of_other_files_are_seen_while_the_guests_uprobes_come_and_go() {
    let host = host!();
    let guest = UserGuest::of(rich::guest(host));
    tell(
        &guest,
        &format!(
            "mount -t tracefs t {TRACEFS}; cd {TRACEFS} && cp {FSLOAD} /tmp/y && cp {FSLOAD} /tmp/z"
        ),
    );
    let theirs = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    let ours = guest.spawn_sleeper(&format!("/tmp/z 0 {FOR_EVER}"));
    let [place, _] = instructions(&guest, "one_round");
    let mut traced = guest.session();
    traced.enable_fsload("/tmp/z");
    let on = format!("echo 'p:over /tmp/y:{place:#x}' > uprobe_events");
    let rounds = tell(
        &guest,
        &format!(
            "(for i in 1 2 3 4 5; do {on}; echo 1 > events/uprobes/enable; echo 0 > events/uprobes/enable; echo > uprobe_events; done; \
             touch /tmp/done) & n=0; until [ -e /tmp/done ]; do /tmp/z 1 0 > /dev/null; n=$((n + 1)); done; echo $n"
        ),
    );
    let rounds: u64 = rounds.parse().unwrap_or_else(|e| panic!("{rounds:?}: {e}"));
    assert!(rounds > 1, "{rounds} rounds");
    assert_eq!(traced.recorded("one_round"), (rounds, rounds));
    traced.finish();
    for pid in [theirs, ours] {
        guest.kill(pid);
    }
}
