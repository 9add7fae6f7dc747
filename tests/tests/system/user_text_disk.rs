//! Programs on a disk: their pages are written to it while they are traced, leave memory, and come
//! back. The disk has nothing of ours, and calls are missed only while a page is on its way. Pages
//! also move in memory, or are to be moved and stay.

use std::time::{Duration, Instant};

use probes::probe::Target;
use support::rich::BRD;
use support::shell::COMMAND_LIMIT;
use support::user_guest::{FSLOAD, UserGuest, UserSession};
use support::{host, rich};

/// Waits until a function was called and has returned more often.
fn wait_for_calls(traced: &UserSession<'_>, function: &str) {
    let before = traced.recorded(function);
    let deadline = Instant::now() + 4 * COMMAND_LIMIT;
    while traced.recorded(function).1 < before.1 + 2 {
        assert!(Instant::now() < deadline, "{:?}", traced.recorded(function));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_program_on_a_disk_is_traced_from_page_to_page() {
    let host = host!();
    let guest = UserGuest::of(rich::guest(host));
    let tell = |command: &str| {
        let answer = guest.shell.start(command).answer(4 * COMMAND_LIMIT);
        assert_eq!(answer.status, 0, "{command}: {answer:?}");
        answer.output.trim_end().to_owned()
    };
    // Nothing is written without a request.
    tell("echo 0 > /proc/sys/vm/dirty_writeback_centisecs");
    tell(&format!(
        "insmod {BRD} && busybox mke2fs -F /dev/ram0 > /dev/null && mkdir /tmp/disk && mount -t ext2 /dev/ram0 /tmp/disk && cp {FSLOAD} /tmp/disk/y"
    ));
    let running = guest.spawn_sleeper("/tmp/disk/y 0 50");
    let mut traced = guest.session();
    traced.enable_fsload("/tmp/disk/y");
    wait_for_calls(&traced, "one_round");

    // Its pages are written while it runs. They have their original bytes, and it is traced
    // afterwards without a new start.
    let (before, suspended) = (guest.user_sites(), guest.engine.stats().suspended);
    assert_eq!(guest.standing(&before), before);
    tell("sync");
    let stats = guest.engine.stats();
    assert!(
        stats.suspended > suspended,
        "nothing was written: {stats:?}"
    );
    wait_for_calls(&traced, "one_round");
    assert_eq!(guest.engine.stats().waiting_pages, 0);

    // They are dropped, and read from the disk again. The inode stays: otherwise the file would be
    // another to the engine.
    guest.kill(running);
    tell("echo 1 > /proc/sys/vm/drop_caches");
    assert_eq!(guest.user_sites().len(), 0);
    assert!(guest.engine.stats().waiting_pages > 0);
    assert_eq!(
        tell(&format!("busybox cmp {FSLOAD} /tmp/disk/y && echo same")),
        "same"
    );
    tell("echo 1 > /proc/sys/vm/drop_caches");
    let calls = traced.recorded("one_round");
    assert_eq!(tell("/tmp/disk/y 5 0"), "fsload: 5 rounds");
    assert_eq!(traced.recorded("one_round"), (calls.0 + 5, calls.1 + 5));
    let sites = guest.user_sites();
    traced.finish();
    guest.assert_clean(&sites);
    tell("umount /tmp/disk && echo 3 > /proc/sys/vm/drop_caches");
    guest.assert_clean(&before);
}

#[test]
fn a_program_whose_pages_move_in_memory_is_traced_on() {
    let host = host!();
    let guest = UserGuest::of(rich::guest(host));
    guest.shell.output(&format!("cp {FSLOAD} /tmp/y"));
    guest.spawn_sleeper("/tmp/y 0 50");
    let mut traced = guest.session();
    traced.enable_fsload("/tmp/y");
    wait_for_calls(&traced, "one_round");
    let offset = match &traced.probes[0].target {
        Target::User { text, .. } => text.offset,
        other => panic!("{other:?}"),
    };
    // A page that something refers to stays where it is, although it was no longer mapped.
    for (way, result) in [("", "moved"), ("held", "Device or resource busy")] {
        let before = guest.user_sites();
        assert_eq!(guest.standing(&before), before, "{result}");
        let command = format!("offline /tmp/y {offset} {way}");
        assert_eq!(guest.shell.output(&command), format!("offline: {result}"));
        wait_for_calls(&traced, "one_round");
        let after = guest.user_sites();
        assert_eq!(after.is_disjoint(&before), way.is_empty(), "{result}");
        assert_eq!(guest.engine.stats().waiting_pages, 0, "{result}");
    }
    let same = format!("busybox cmp {FSLOAD} /tmp/y && echo same");
    assert_eq!(guest.shell.output(&same), "same");
    let sites = guest.user_sites();
    traced.finish();
    guest.assert_clean(&sites);
}
