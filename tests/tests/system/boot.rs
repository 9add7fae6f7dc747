//! Kernels that boot in other ways than the fixture: through PVH, on two vCPUs.

use probes::engine::Filter;
use support::linux::BootOptions;
use support::shell::{BOOT_LIMIT, COMMAND_LIMIT, full_initramfs};
use support::tracing::SLOTS;
use support::{Kernel, Linux, Shell, Tracing, host};
use vmm::boot::EntryProtocol;

#[test]
fn the_small_kernel_enters_through_pvh() {
    let host = host!();
    let linux = Linux::boot(
        host,
        &BootOptions {
            kernel: Kernel::small(),
            initramfs: None,
            command_line: "console=ttyS0 panic=-1 reboot=k",
            cpus: 1,
            protocol: Some(EntryProtocol::Pvh),
            virtio: Default::default(),
        },
    );
    linux.wait_for("Linux version 6.1", BOOT_LIMIT);
    // The memory map and the command line were passed, too.
    linux.wait_for("Command line: ", BOOT_LIMIT);
    linux.wait_for("panic=-1 reboot=k", BOOT_LIMIT);
}

#[test]
fn two_vcpus_boot_work_and_are_traced() {
    let host = host!();
    const COPIES: u64 = 100;
    let initramfs = full_initramfs();
    let options = BootOptions {
        kernel: Kernel::small(),
        initramfs: Some(&initramfs),
        command_line: &format!("nokaslr {}", guest::build::kernel::cmdline()),
        cpus: 2,
        protocol: None,
        virtio: Default::default(),
    };
    let shell = Shell::at_prompt(Linux::boot(host, &options));
    let linux = &shell.linux;
    assert_eq!(shell.output("grep -c ^processor /proc/cpuinfo"), "2");
    let stats = linux.machine().stats();
    if host.profile.kernel_mode.is_interpreted() {
        // The kernel tests its own int3 when it boots, and every system call arrives as a fault.
        assert!(
            stats.guest_int3 >= 1 && stats.syscalls_repaired > 0,
            "{stats:?}"
        );
    }

    let view = linux.view();
    assert_eq!(view.slide(), 0);
    let before = linux.text_hash(&view);
    let engine = linux.engine(&view);
    let none = engine.stats();
    let names = ["vfs_read", "vfs_write"];
    let tracing = Tracing::new(linux, &engine, &names, &Filter::default(), SLOTS);
    // One on each vCPU.
    let copy = |mask, name| {
        format!("taskset {mask} dd if=/dev/zero of=/tmp/{name} bs=1k count={COPIES} 2> /dev/null")
    };
    let both = format!(
        "sh -c '{} & {} & wait'; wc -c < /tmp/a; wc -c < /tmp/b",
        copy(1, "a"),
        copy(2, "b")
    );
    let answer = shell.start(&both).answer(4 * COMMAND_LIMIT);
    let (events, _) = tracing.finish(&none);
    let bytes = 1024 * COPIES;
    assert_eq!(answer.output, format!("{bytes}\n{bytes}\n"));

    let blocks = events
        .iter()
        .filter(|e| e.probe == 2 && e.arguments[2] == 1024)
        .count();
    assert_eq!(blocks as u64, 2 * COPIES, "vfs_write of a block");
    for vcpu in 0..2 {
        assert!(
            events.iter().any(|e| e.vcpu == vcpu),
            "nothing on vCPU {vcpu}"
        );
    }
    assert_eq!(linux.text_hash(&view), before);

    // Both vCPUs survive being saved.
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let saved = folder.path().join("saved");
    shell.save(&saved);
    drop(engine);
    drop(shell);
    let shell = Shell::restore(host, Kernel::small(), &saved);
    let answer = shell.run("sh -c 'forks 20 & forks 20 & wait'");
    assert_eq!(answer.output, "forks: 20\nforks: 20\n");
    shell.type_line("reboot -f");
    let end = shell.linux.end(COMMAND_LIMIT);
    assert!(end.is_orderly(), "{end}");
}
