//! The command and a running Linux guest: it is saved, restored, traced and looked into.

use support::command::{Ended, World, words};
use support::crowd;
use support::shell::{COMMAND_LIMIT, Shell, snapshot_folder};
use support::{Kernel, host, rich};
use vmm::snapshot::{self, KernelHash, KernelReference, SnapshotInfo};

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

/// The private memory of a machine, without its guest's memory, which it shares with others of the
/// same snapshot.
#[test]
fn a_restored_machine_takes_little_memory_of_its_own() {
    // A release build has 4 MiB, and one without optimization 6, of which 2 are its own relocated
    // data.
    const MOST_KIB: u64 = 8 << 10;
    let host = host!();
    let world = World::new();
    let mut line = words("run --name small --serial null --restore");
    line.push(snapshot_folder(host).into());
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        let vms = world.run(words("vms"), COMMAND_LIMIT);
        vms.stdout.contains("small")
    });
    let status = std::fs::read_to_string(format!("/proc/{}/status", machine.pid()));
    let status = status.unwrap_or_else(|e| panic!("{e}"));
    let anonymous = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = anonymous.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    assert!(kib.is_some_and(|kib| kib <= MOST_KIB), "{status}");
    world.stop("small", machine);
}

#[test]
fn whoever_traces_a_guest_is_told_of_its_crash() {
    let host = host!();
    let world = World::new();
    let mut line = words("run --name rich");
    line.extend(rich::restore(host));
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        let vms = world.run(words("vms"), COMMAND_LIMIT);
        vms.stdout.contains("rich")
    });
    let mut script = words("trace --vm rich -e");
    script.push("syscall:sync:entry { @ = count(); }".into());
    let clients = [words("trace --vm rich syscall:sync:entry"), script];
    let mut clients = clients.map(|line| world.start(line));
    for client in &mut clients {
        client.wait_until("trace", COMMAND_LIMIT, |_, stderr| {
            stderr.contains("end with Ctrl-C") || stderr.contains("attached")
        });
    }
    let device = world.start(words("read --vm rich dt kprobe:vfs_fsync_range:entry"));
    machine.wait_until("trap of the device", COMMAND_LIMIT, |_, _| {
        let stat = world.run(words("stat --json --vm rich"), COMMAND_LIMIT);
        stat.stdout.contains("vfs_fsync_range")
    });
    machine.type_line("echo c > /proc/sysrq-trigger");
    let told = "guest kernel panic on vCPU 0: sysrq triggered crash";
    for client in clients.into_iter().chain([device]) {
        let ended = client.finish(COMMAND_LIMIT);
        assert_eq!(ended.status, 1, "{ended:?}");
        let last = ended.stderr.lines().last().unwrap_or_default();
        let expected = format!("exotrace: the machine has ended: {told}");
        assert!(last.starts_with(&expected), "{ended:?}");
    }
    let ended = machine.finish(COMMAND_LIMIT);
    assert!(
        ended.status == 1 && ended.stderr.contains(told),
        "{ended:?}"
    );
}

/// Returns the number in the JSON line of the first process that `ps` finds with all of `parts` in
/// its line.
fn pid_of(ps: &Ended, parts: &[&str]) -> String {
    let line = ps
        .stdout
        .lines()
        .find(|line| parts.iter().all(|part| line.contains(part)));
    let pid = line.and_then(|line| line.strip_prefix("{\"pid\":")?.split_once(','));
    pid.unwrap_or_else(|| panic!("no process with {parts:?}: {ps:?}"))
        .0
        .to_owned()
}

#[test]
fn a_running_guest_is_looked_into_from_another_terminal() {
    let host = host!();
    let world = World::new();
    let mut line = words("run --name crowd --serial null --restore");
    line.push(crowd::snapshot_folder(host).into());
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        let vms = world.run(words("vms"), COMMAND_LIMIT);
        vms.stdout.contains("crowd")
    });
    let ask = |line: &str| world.run(words(line), COMMAND_LIMIT);

    let ps = ask("ps --json");
    assert_eq!(ps.status, 0, "{ps:?}");
    assert!(
        ps.stderr.contains("crowd: the guest was paused for "),
        "{ps:?}"
    );
    assert!(ps.stdout.lines().count() >= 20, "{ps:?}");
    let pid = pid_of(&ps, &["\"arguments\":[\"workers\",\"4\",\"20\"]"]);
    let text = ask("ps -T");
    for part in [
        "[kthreadd]\n",
        " workers 4 20\n",
        " {worker-1} workers 4 20\n",
    ] {
        assert!(text.stdout.contains(part), "{part:?}: {text:?}");
    }

    let maps = ask(&format!("maps -p {pid}"));
    for part in [" /bin/workers\n", "libc.so.6\n", " [stack]\n", " [vdso]\n"] {
        assert!(maps.stdout.contains(part), "{part:?}: {maps:?}");
    }
    let stack = ask(&format!("stack -p {pid}"));
    assert_eq!(stack.status, 0, "{stack:?}");
    assert_eq!(
        stack.stdout.matches(" descend+").count(),
        80,
        "four threads, 20 calls deep: {stack:?}"
    );
    for part in [" do_syscall_64+", " pipe_read+", " main+", "worker-2 (S)"] {
        assert!(stack.stdout.contains(part), "{part:?}: {stack:?}");
    }
    assert!(!stack.stdout.contains("ends here"), "{stack:?}");

    // A name, its address, and back.
    let named = ask("sym vfs_read");
    let address = named.stdout.split(' ').next().unwrap_or_default();
    let back = ask(&format!("sym {address}"));
    assert_eq!(
        (named.status, &named.stdout),
        (0, &back.stdout),
        "{named:?}"
    );
    let user = ask(&format!("sym -p {pid} descend malloc"));
    for part in [" descend [/bin/workers]\n", " malloc [/lib/"] {
        assert!(user.stdout.contains(part), "{part:?}: {user:?}");
    }

    // An invalid request is reported, and changes nothing.
    for (line, part) in [
        (
            "stack -p workers",
            "2 processes are called \"workers\"; name one by its pid: ",
        ),
        ("maps -p nobody", "no process called \"nobody\""),
        ("maps -p 99999", "no process 99999"),
        ("maps -p kthreadd", "it is a thread of the kernel"),
        ("sym vfs_raed", "did you mean vfs_read"),
        ("sym 0x10", "has no function at 0x10"),
        ("trace -p 99999 vfs_read", "no process 99999"),
        ("trace -p nobody vfs_read", "no process called \"nobody\""),
        (
            "trace vfs_read:entry",
            "did you mean kprobe:vfs_read:entry?",
        ),
        ("trace sycall:open", "did you mean syscall:open?"),
        (
            "trace tracepoint:sched:sched_switch",
            "the guest's kernel has no tracepoints",
        ),
        ("trace opensnoop", "exotrace trace opensnoop.bt"),
        ("list uprobe:/bin/busybox:main:", "/bin/busybox is stripped"),
    ] {
        let refused = ask(line);
        assert_eq!(
            (refused.status, refused.stdout.as_str()),
            (1, ""),
            "{line}: {refused:?}"
        );
        assert!(refused.stderr.contains(part), "{line}: {refused:?}");
    }
    // A thread of the kernel makes no system calls; others do.
    let none = ask("trace --for 0.5 -p kthreadd syscall:::entry");
    assert!(
        none.status == 0 && none.stderr.contains(" 0 events: "),
        "{none:?}"
    );
    let partly = ask("sym vfs_raed vfs_read no_such_thing");
    assert_eq!(
        (partly.status, &partly.stdout),
        (1, &named.stdout),
        "{partly:?}"
    );
    for part in ["did you mean vfs_read", "\"no_such_thing\""] {
        assert!(partly.stderr.contains(part), "{part}: {partly:?}");
    }
    assert_eq!(ask("stop").status, 0);
    assert_eq!(machine.finish(COMMAND_LIMIT).status, 0);
}

#[test]
fn without_the_kernels_file_its_symbols_come_from_the_guests_memory() {
    let host = host!();
    let world = World::new();
    let saved = world.path("saved");
    let symbol = {
        let shell = Shell::new(host);
        let machine = shell.linux.machine();
        let info = SnapshotInfo {
            command_line: shell.linux.vm.command_line().to_owned(),
            kernel: Some(KernelReference {
                path: "/nowhere/vmlinux".into(),
                // Tables that an earlier run has kept are found by the hash.
                hash: KernelHash([7; 32]),
                ..Kernel::small().reference.clone()
            }),
        };
        let done = snapshot::save(&host.kvm, machine, &info, &saved);
        done.unwrap_or_else(|e| panic!("{e}"));
        let view = shell.linux.view();
        view.kernel
            .symbols
            .address_of("vfs_read")
            .unwrap_or_default()
    };
    let mut line = words("run --name orphan --serial null --restore");
    line.push(saved.into());
    let mut machine = world.start(line);
    machine.wait_until("word of the missing file", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("/nowhere/vmlinux") && stderr.contains("guest's memory")
    });
    let ask = |line: &str| world.run(words(line), COMMAND_LIMIT);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        ask("vms").stdout.contains("orphan")
    });
    let found = ask("sym vfs_read");
    assert_eq!(
        (found.status, found.stdout),
        (0, format!("{symbol:016x} T vfs_read\n"))
    );
    // This kernel describes its types only in its file.
    let refused = ask("ps");
    assert_eq!(
        (refused.status, refused.stdout.as_str()),
        (1, ""),
        "{refused:?}"
    );
    assert!(
        refused.stderr.contains("processes cannot be read: "),
        "{refused:?}"
    );
    assert!(refused.stderr.contains("BTF"), "{refused:?}");
    assert_eq!(ask("stop").status, 0);
    assert_eq!(machine.finish(COMMAND_LIMIT).status, 0);
}
