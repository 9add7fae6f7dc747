//! The demo's machine is like any other: commands for running machines work on it.

use support::command::{World, words};
use support::host;
use support::shell::{BOOT_LIMIT, COMMAND_LIMIT};

#[test]
fn the_machine_of_the_demo_has_the_trace_devices() {
    let _ = host!();
    let world = World::new();
    let mut demo = world.start(words("demo --for 1000"));
    demo.wait_until("trace", BOOT_LIMIT, |_, stderr| {
        stderr.contains("each line is a call")
    });
    let configuration = world.run(words("ctl"), COMMAND_LIMIT);
    assert_eq!(configuration.status, 0, "{configuration:?}");
    assert!(
        configuration.stdout.contains("logsize"),
        "{configuration:?}"
    );
    let read = world.run(
        words("read dt kprobe:vfs_read:entry --for 0.5"),
        COMMAND_LIMIT,
    );
    assert_eq!(read.status, 0, "{read:?}");
    assert_eq!(world.run(words("stop"), COMMAND_LIMIT).status, 0);
    let ended = demo.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    assert!(
        ended.stderr.contains("nothing was left behind"),
        "{ended:?}"
    );
}
