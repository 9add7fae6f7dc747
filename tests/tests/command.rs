//! The command and a Linux guest: a panic told with its place, and a running machine saved, restored and traced.

use std::ffi::OsString;

use support::command::World;
use support::shell::{BOOT_LIMIT, COMMAND_LIMIT, snapshot_folder};
use support::{Kernel, host};

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

#[test]
fn a_kernel_panic_is_told_with_registers_and_the_place() {
    let _ = host!();
    let world = World::new();
    let mut line = words("run --memory 64M --serial null --cmdline");
    line.extend([guest::kernel::cmdline().into(), "--kernel".into()]);
    line.push(Kernel::small().path.clone().into());
    // Without an initramfs there is no root file system to be found.
    let ended = world.run(line, BOOT_LIMIT);
    assert_eq!((ended.status, ended.stdout.as_str()), (1, ""), "{ended:?}");
    for part in ["rip is 0x", " panic\n", "rax ", "cr3 "] {
        assert!(ended.stderr.contains(part), "{part}: {ended:?}");
    }
    let last = ended.stderr.lines().last().unwrap_or_default();
    for part in [
        "exotrace: guest kernel panic on vCPU 0: VFS: Unable to mount root",
        "called from 0x",
        "mount_block_root",
    ] {
        assert!(last.contains(part), "{part}: {last}");
    }
}

#[test]
fn a_running_linux_is_saved_restored_and_traced() {
    let host = host!();
    let world = World::new();
    let saved = world.path("saved");
    let mut line = words("run --name web --restore");
    line.push(snapshot_folder(host).into());
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        world
            .run(words("vms"), COMMAND_LIMIT)
            .stdout
            .contains("web")
    });
    machine.type_line("x=6; echo made=$((x*7))");
    machine.wait_until("answer", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("made=42")
    });

    let mut line = words("snapshot --vm web");
    line.push(saved.clone().into());
    let snapshot = world.run(line, COMMAND_LIMIT);
    assert_eq!(snapshot.status, 0, "{snapshot:?}");
    machine.type_line("echo still=$((x*2))");
    machine.wait_until("answer after the snapshot", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("still=12")
    });
    assert_eq!(world.run(words("stop --vm web"), COMMAND_LIMIT).status, 0);
    let ended = machine.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");

    let mut line = words("run --name again --trace vfs_read --restore");
    line.push(saved.into());
    let mut machine = world.start(line);
    // The shell's own variable is still there.
    machine.type_line("dd if=/proc/version of=/tmp/v bs=1k; echo again=$((x*3))");
    machine.wait_until("answer of the traced guest", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("again=18")
    });
    assert_eq!(world.run(words("stop --vm again"), COMMAND_LIMIT).status, 0);
    let ended = machine.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    assert!(ended.stderr.contains(" 0 dropped"), "{ended:?}");
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert!(lines.iter().all(|line| line.len() == 120), "{ended:?}");
    let address = Kernel::small()
        .image
        .symbols()
        .ok()
        .and_then(|s| s.address_of("vfs_read"));
    let entry = format!("E {:016x} ", address.unwrap_or_default());
    assert!(
        lines.iter().filter(|line| line.starts_with(&entry)).count() >= 2,
        "{ended:?}"
    );
    assert!(lines.iter().any(|line| line.starts_with("X ")), "{ended:?}");
}
