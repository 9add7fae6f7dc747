//! Users' errors: each is answered by one line that names the error, and leaves nothing behind.
#![allow(clippy::unwrap_used)]

mod support;

use support::{Ended, World, has_kvm};

/// Checks for one line on standard error that starts with our name and has all `parts`, and for no
/// standard output.
fn check(world: &World, line: &str, ended: &Ended, status: i32, parts: &[&str]) {
    assert_eq!(ended.status, status, "{line}: {ended:?}");
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("exotrace: "), "{line}: {ended:?}");
    for part in parts {
        assert!(last.contains(part), "{line}: {part:?} is not in: {last}");
    }
    assert_eq!(ended.stdout, "", "{line}");
    assert_eq!(world.registered(), Vec::<String>::new(), "{line}");
}

#[test]
fn usage_errors_have_status_2() {
    let world = World::new();
    for (line, parts) in [
        ("run", &["--kernel"][..]),
        ("brew", &["'brew'"]),
        (
            "run --kernel micro --memory lots",
            &["invalid size \"lots\"", "256M"],
        ),
        ("run --kernel micro --memory 128", &["did you mean 128M?"]),
        ("run --kernel micro --memory 99999999999G", &["512G"]),
        ("run --kernel micro --cpus many", &["'many'", "--cpus"]),
        (
            "run --kernel micro --name a/b",
            &["\"a/b\" cannot name a machine"],
        ),
        ("run --kernel micro --for soon", &["invalid time \"soon\""]),
        ("run --kernel micro -o trace", &["--trace"]),
        ("run --restore d --memory 64M", &["--memory", "--restore"]),
        ("run --kernel micro --format xml", &["'xml'", "text"]),
    ] {
        let ended = world.run(line);
        check(&world, line, &ended, 2, parts);
        assert_eq!(ended.stderr.lines().count(), 1, "{line}: {ended:?}");
    }
}

#[test]
fn files_that_are_no_kernels_are_told_by_what_they_are() {
    let world = World::new();
    world.write("text", b"hello, world");
    world.write("empty", b"");
    let micro = guest::micro::elf();
    world.write("cut", &micro[..300]);
    let mut arm = micro;
    arm[18] = 183;
    world.write("arm", &arm);
    let mut bzimage = vec![0; 0x400];
    bzimage[0x202..0x206].copy_from_slice(b"HdrS");
    world.write("bzimage", &bzimage);
    for (kernel, parts) in [
        ("missing", &["missing", "No such file"][..]),
        (".", &["kernel ."]),
        (
            "text",
            &["text", "neither an ELF nor a bzImage", "68 65 6c 6c"],
        ),
        ("empty", &["empty", "0 bytes"]),
        ("cut", &["cut", "truncated"]),
        ("arm", &["arm", "183", "x86-64"]),
        ("bzimage", &["bzimage"]),
    ] {
        let line = format!("run --kernel {kernel} --serial out");
        let ended = world.run(&line);
        check(&world, &line, &ended, 1, parts);
        assert!(!world.path("out").exists(), "{line} left its serial file");
    }
}

#[test]
fn images_that_boot_nothing_are_listed_and_told() {
    let world = World::new();
    let line = "image none";
    let parts = ["disk none", "No such file"];
    check(&world, line, &world.run(line), 1, &parts);

    let mut xfs = vec![0x11; 4096];
    xfs[..4].copy_from_slice(b"XFSB");
    world.write("xfs", &xfs);
    let ended = world.run("image xfs");
    assert_eq!(ended.status, 1, "{ended:?}");
    assert_eq!(
        ended.stdout,
        "no partition table\n the disk  xfs (not read)  11111111-1111-1111-1111-111111111111\n"
    );
    assert!(ended.stderr.contains("give --kernel"), "{ended:?}");
}

/// The kernel of these tests is an ELF file like a program.
#[test]
fn probes_of_a_file_are_listed_without_a_machine() {
    let world = World::new();
    let ended = world.run("list --file micro uprobe::micro_leaf:");
    assert_eq!(
        (ended.status, ended.stdout.as_str()),
        (
            0,
            "uprobe:micro:micro_leaf:entry\nuprobe:micro:micro_leaf:return\n"
        ),
        "{ended:?}"
    );
    let ended = world.run("list --count --file micro");
    assert!(ended.stdout.starts_with("uprobe "), "{ended:?}");
    for (line, part) in [
        ("list --file missing", "No such file"),
        (
            "list --file micro uprobe::micro_laef:",
            "no probe uprobe::micro_laef: in",
        ),
    ] {
        check(&world, line, &world.run(line), 1, &[part]);
    }
}

#[test]
fn a_function_that_does_not_exist_is_told_before_anything_starts() {
    let world = World::new();
    let line = "run --kernel micro --trace micro_leaf,micro_laef -o trace";
    let ended = world.run(line);
    check(
        &world,
        line,
        &ended,
        1,
        &["no function \"micro_laef\"", "micro_leaf"],
    );
    assert!(!world.path("trace").exists());
}

#[test]
fn machines_that_cannot_be_made_are_told_and_leave_nothing() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    world.write("big", &vec![0; 8 << 20]);
    world.write("old", b"old contents");
    for (options, parts) in [
        ("--memory 1M", &["1048576", "2M"][..]),
        ("--memory 5000001", &["5000001", "multiple of 4096"]),
        ("--memory 2T", &["2199023255552", "512G"]),
        ("--memory 4M --cpus 0", &["0 vCPUs", "1 to 64"]),
        ("--memory 4M --cpus 65", &["65 vCPUs", "1 to 64"]),
        (
            "--memory 4M --initramfs big",
            &["initramfs of 8388608 bytes", "--memory"],
        ),
        (
            "--memory 4M --initramfs none",
            &["initramfs none", "No such file"],
        ),
        ("--memory 4M --entry pvh", &["PVH"]),
        (
            "--memory 4M --trace micro_leaf -o no/such/file",
            &["no/such/file"],
        ),
    ] {
        let line = format!("run --kernel micro --serial serial {options}");
        let ended = world.run(&line);
        check(&world, &line, &ended, 1, parts);
        assert!(
            !world.path("serial").exists(),
            "{line} left its serial file"
        );
    }
    let line = "run --kernel micro --serial old --memory 1M";
    check(&world, line, &world.run(line), 1, &["1048576"]);
    assert_eq!(std::fs::read(world.path("old")).unwrap(), b"old contents");
}

#[test]
fn snapshots_that_are_none_are_refused() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    std::fs::create_dir(world.path("dir")).unwrap();
    let line = "run --restore dir";
    check(
        &world,
        line,
        &world.run(line),
        1,
        &["dir/state", "exotrace snapshot"],
    );
    world.write("dir/state", b"something else entirely");
    check(&world, line, &world.run(line), 1, &["not a snapshot"]);
}

#[test]
fn machines_that_do_not_run_cannot_be_asked() {
    let world = World::new();
    for command in ["stop", "stat", "snapshot s"] {
        check(
            &world,
            command,
            &world.run(command),
            1,
            &["no machine runs", "exotrace run"],
        );
        let line = format!("{command} --vm web");
        check(
            &world,
            &line,
            &world.run(&line),
            1,
            &["no machine named web runs"],
        );
    }
    assert_eq!(world.run("vms").status, 0);
}
