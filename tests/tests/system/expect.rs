//! Expectations of a guest, as CI uses them: exit status, messages and reports, for guests that
//! meet them, fail them, and crash.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;

use rustix::process::Signal;
use support::command::{Ended, Running, World};
use support::shell::{BOOT_LIMIT, COMMAND_LIMIT, snapshot_folder};
use support::{Kernel, host};

/// Runs a program of the micro guest, with a report of each form.
fn micro(world: &World, program: &str, options: &[&str]) -> Running {
    let kernel = world.path("micro");
    fs::write(&kernel, guest::micro::elf()).unwrap_or_else(|e| panic!("micro guest: {e}"));
    let words = ["run", "--kernel", "micro", "--memory", "4M", "--serial"];
    let words = words.into_iter().chain(["null", "--cmdline", program]);
    let words = words.chain(["--report", "r.xml", "--report", "r.json"]);
    world.start(words.chain(options.iter().copied()))
}

fn ended(world: &World, program: &str, options: &[&str]) -> Ended {
    micro(world, program, options).finish(COMMAND_LIMIT)
}

/// Returns the reports, as XML and as JSON.
fn reports(world: &World) -> (String, String) {
    let [xml, json] = ["r.xml", "r.json"].map(|name| {
        let path = world.path(name);
        fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    });
    (xml, json)
}

fn assert_parts(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing:\n{text}");
    }
}

#[test]
fn a_guest_that_does_what_is_expected_ends_with_status_0() {
    let _ = host!();
    let world = World::new();
    let options = [
        "--expect",
        "micro_leaf==50",
        "--expect",
        "micro_leaf/arg0 >= 40/==10",
        "--expect",
        "kprobe:micro_leaf:return > 49",
        "--expect",
        "kprobe:micro_*:entry/func == \"micro_exec\"/<1",
    ];
    let ended = ended(&world, "calls 50", &options);
    assert_eq!(ended.status, 0, "{ended:?}");
    assert_parts(&ended.stderr, &["exotrace: 4 expectations met in "]);
    let (xml, json) = reports(&world);
    assert_parts(
        &xml,
        &[
            "<testsuites name=\"exotrace\" tests=\"5\" failures=\"0\" errors=\"0\" time=\"",
            "<testcase classname=\"exotrace.expect\" name=\"micro_leaf==50\" time=\"",
            "name=\"micro_leaf/arg0 &gt;= 40/==10\"",
            "<testcase classname=\"exotrace.guest\" name=\"guest did not panic\"",
            "<system-out>micro: calls 50\nmicro: count 50\nmicro: done\n</system-out>",
        ],
    );
    assert!(
        !xml.contains("<failure") && !xml.contains("<error"),
        "{xml}"
    );
    assert_parts(
        &json,
        &[
            "\"passed\": true",
            "\"kind\": \"guest\"",
            "\"predicate\": \"arg0 >= 40\"",
            "\"seen\": 50,",
            "\"seen\": 10,",
            "\"micro: count 50\"",
        ],
    );
    // The last hits, each once, however many expectations count it.
    assert_eq!(json.matches("\"unix_ns\"").count(), 50, "{json}");
}

#[test]
fn a_guest_that_does_not_is_told_in_a_table_and_the_reports() {
    let _ = host!();
    let world = World::new();
    let options = [
        "--expect",
        "micro_leaf",
        "--expect",
        "micro_leaf/arg0 == 3/==0",
    ];
    let ended = ended(&world, "calls 20", &options);
    assert_eq!((ended.status, ended.stdout.as_str()), (1, ""), "{ended:?}");
    assert_parts(
        &ended.stderr,
        &[
            "          probe                                expected  seen\n",
            "  ok      kprobe:micro_leaf:entry              >= 1      20\n",
            "  FAILED  kprobe:micro_leaf:entry /arg0 == 3/  == 0      1\n",
            "exotrace: 1 of 2 expectations do not hold\n",
        ],
    );
    let (xml, json) = reports(&world);
    assert_parts(
        &xml,
        &[
            " failures=\"1\" errors=\"0\"",
            "<failure type=\"count\" message=\"expected == 0, seen 1\">",
        ],
    );
    assert_parts(&json, &["\"passed\": false", "\"holds\": false"]);
}

#[test]
fn the_time_is_taken_unless_all_has_come() {
    let _ = host!();
    let world = World::new();
    let calls = "calls 1000000000";
    for (options, status, kind) in [
        (
            &["--expect", "micro_leaf>100", "--for", "3"][..],
            0,
            "time-up",
        ),
        (
            &["--expect", "micro_leaf>100", "--until-met", "--for", "100"],
            0,
            "met",
        ),
        (
            // Further hits would break it.
            &[
                "--expect",
                "micro_leaf<1000000",
                "--until-met",
                "--for",
                "0.5",
            ],
            0,
            "time-up",
        ),
        (&["--expect", "micro_leaf<=100", "--for", "3"], 1, "time-up"),
    ] {
        let ended = ended(&world, calls, options);
        assert_eq!(ended.status, status, "{options:?}: {ended:?}");
        let (_, json) = reports(&world);
        assert_parts(&json, &[&format!("\"kind\": \"{kind}\"")]);
    }
}

#[test]
fn what_cannot_be_counted_fails_and_says_why() {
    let _ = host!();
    let world = World::new();
    for (expected, told) in [
        (
            "micro_laef",
            "--expect:1:1: no probe kprobe:micro_laef:entry:\nkprobe:micro_laef:entry\n^~~~~~~~~~~~~~~~~~~~~~~\n\
             did you mean: micro_leaf, micro_exec, micro_main?\n",
        ),
        (
            "micro_leaf /args.n == 3/ >= 2",
            "--expect:1:31: the names of this probe's arguments are not known; use arg0, arg1 ...:\n\
             kprobe:micro_leaf:entry /args.n == 3/\n",
        ),
    ] {
        let ended = ended(
            &world,
            "calls 50",
            &["--expect", "micro_leaf", "--expect", expected],
        );
        assert_eq!((ended.status, ended.stdout.as_str()), (1, ""), "{ended:?}");
        assert_parts(&ended.stderr, &[told]);
        let (xml, json) = reports(&world);
        let first = told.lines().next().unwrap_or_default();
        assert_parts(
            &xml,
            &[
                " failures=\"0\" errors=\"3\"",
                "<error type=\"run\" message=\"not counted: --expect:1:",
                "<testcase classname=\"exotrace.run\" name=\"run was whole\"",
            ],
        );
        assert_parts(
            &json,
            &[
                "\"kind\": \"not-counted\"",
                &format!("\"text\": \"{}\"", first.trim_end_matches(':')),
                "\"seen\": null",
            ],
        );
    }
    // An error in the text is a usage error, and nothing is made then.
    for (expected, part) in [
        ("micro_leaf=3", "unknown comparison \"=\""),
        ("BEGIN", "BEGIN is not a probe of the guest"),
        ("micro_leaf /pid ==/", "expected an expression"),
    ] {
        let world = World::new();
        let ended = ended(&world, "calls 50", &["--expect", expected]);
        assert_eq!(ended.status, 2, "{ended:?}");
        assert_parts(&ended.stderr, &[part]);
        assert!(!world.path("r.xml").exists());
    }
}

#[test]
fn a_run_that_is_cut_short_is_no_success() {
    let _ = host!();
    let world = World::new();
    let options = ["--expect", "micro_leaf", "--for", "1000"];
    let mut running = micro(&world, "calls 1000000000", &options);
    running.wait_until("machine", COMMAND_LIMIT, |_, _| {
        let stat = world.run(["stat"], COMMAND_LIMIT);
        stat.stdout.contains("micro_leaf")
    });
    running.signal(Signal::TERM);
    let ended = running.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 1, "{ended:?}");
    assert_parts(
        &ended.stderr,
        &[
            "  ok  kprobe:micro_leaf:entry  >= 1 ",
            "exotrace: the run was not whole: ended by a signal before its time, after ",
        ],
    );
    let (xml, json) = reports(&world);
    assert_parts(
        &xml,
        &[
            "name=\"run was whole\"",
            "<error type=\"run\" message=\"ended by a signal",
        ],
    );
    assert_parts(
        &json,
        &[
            "\"kind\": \"cut-short\"",
            "\"passed\": false",
            "\"holds\": true",
        ],
    );
}

#[test]
fn a_report_that_cannot_be_written_is_a_failure() {
    let _ = host!();
    let world = World::new();
    let full = world.path("full.xml");
    symlink("/dev/full", &full).unwrap_or_else(|e| panic!("{e}"));
    let options = ["--expect", "micro_leaf==5", "--report", "full.xml"];
    let ended = ended(&world, "calls 5", &options);
    assert_eq!(ended.status, 1, "{ended:?}");
    assert_parts(
        &ended.stderr,
        &["exotrace: the report cannot be written to full.xml: "],
    );
    // The other reports are written.
    assert_parts(&reports(&world).1, &["\"passed\": true"]);
    let options = ["--expect", "micro_leaf==5", "--report", "no/such.json"];
    let refused = micro(&world, "calls 5", &options).finish(COMMAND_LIMIT);
    assert_eq!(refused.status, 1, "{refused:?}");
    assert_parts(&refused.stderr, &["no/such.json"]);
}

#[test]
fn a_crash_of_any_kind_fails() {
    let host = host!();
    let world = World::new();
    let ended = ended(&world, "triple", &["--expect", "micro_leaf==0"]);
    assert_eq!(ended.status, 1, "{ended:?}");
    assert_parts(
        &ended.stderr,
        &[
            "exotrace: the console's last lines:\n  micro: triple 1\n",
            "exotrace: the last events: none\n",
        ],
    );
    // A host that resets the vCPU before it reports the fault reports no place.
    let (stack, place) = match host.profile.triple_fault_keeps_registers {
        true => (" micro_triple+0x", " at 0x"),
        false => ("innermost first: none\n", "; its place is not known"),
    };
    assert_parts(&ended.stderr, &[stack]);
    let message = format!("<failure type=\"crash\" message=\"triple fault on vCPU 0{place}");
    let (xml, _) = reports(&world);
    assert_parts(&xml, &[&message]);
}

#[test]
fn a_restored_linux_is_judged_by_what_its_processes_do() {
    let host = host!();
    let world = World::new();
    let mut line: Vec<OsString> = [
        "run",
        "--expect",
        "syscall:openat/comm == \"cat\" && str(arg1) == \"/proc/version\"/==2",
        "--expect",
        "kprobe:vfs_unlink:entry==0",
        "-e",
        "syscall:openat:entry /comm == \"cat\"/ { @opens = count(); }",
        "-o",
        "script",
        "--report",
        "r.xml",
        "--report",
        "r.json",
        "--restore",
    ]
    .map(Into::into)
    .into();
    line.push(snapshot_folder(host).into());
    let mut machine = world.start(line);
    machine.wait_until("attached probes", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("exotrace: attached 1 probe\n")
    });
    machine.type_line(
        "cat /proc/version; cat /proc/version > /tmp/v; cat /tmp/v; echo six=$((2*3)); exit",
    );
    let ended = machine.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    assert_parts(&ended.stderr, &["exotrace: 2 expectations met in "]);
    let (xml, json) = reports(&world);
    assert_parts(&xml, &[" tests=\"3\" failures=\"0\" errors=\"0\"", "six=6"]);
    assert_parts(
        &json,
        &[
            "\"kind\": \"guest\"",
            "\"probe\": \"syscall::openat:entry\",\n      \"comm\": \"cat\",\n      \"pid\": ",
        ],
    );
    assert_eq!(json.matches("\"unix_ns\"").count(), 2, "{json}");
    let script = fs::read_to_string(world.path("script")).unwrap_or_default();
    assert!(script.starts_with("\n\n@opens: "), "{script}");
    assert_parts(&json, &["\"trace\": [\n", "    \"@opens: "]);
}

#[test]
fn a_panic_is_told_with_its_place_registers_console_stack_and_last_events() {
    let _ = host!();
    let world = World::new();
    let words = [
        "run",
        "--memory",
        "64M",
        "--serial",
        "null",
        "--expect",
        "vfs_mknod>=1",
        "--trace",
        "vfs_mknod",
        "-o",
        "trace",
        "--report",
        "r.xml",
        "--report",
        "r.json",
        "--for",
        "1000",
        "--cmdline",
    ];
    let mut line: Vec<OsString> = words.map(Into::into).into();
    // The kernel waits before it makes the root file system's device: on a fast host it would be
    // past it when the trace begins.
    let command_line = format!("{} rootdelay=3", guest::build::kernel::cmdline());
    line.extend([command_line.into(), "--kernel".into()]);
    line.push(Kernel::small().path.clone().into());
    // Without an initramfs there is no root file system to be found.
    let ended = world.run(line, BOOT_LIMIT);
    assert_eq!((ended.status, ended.stdout.as_str()), (1, ""), "{ended:?}");
    let (xml, json) = reports(&world);
    let told = [
        "  Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)\n",
        " panic\n",
        " mount_block_root+0x",
        " kernel_init+0x",
        "swapper/0       kprobe:vmlinux:vfs_mknod:entry\n",
    ];
    assert_parts(&ended.stderr, &told);
    assert_parts(&ended.stderr, &["rip is 0x", "rax ", "cr3 "]);
    assert_parts(&xml, &told);
    assert_parts(
        &xml,
        &[
            "<failure type=\"panic\" message=\"guest kernel panic on vCPU 0: VFS: Unable to mount root",
        ],
    );
    assert_parts(
        &json,
        &[
            "\"kind\": \"panic\"",
            "\"passed\": false",
            "\"holds\": true",
            "Kernel panic - not syncing: VFS: Unable to mount root fs",
            " mount_block_root+0x",
            "\"comm\": \"swapper/0\"",
        ],
    );
    let trace = fs::read_to_string(world.path("trace")).unwrap_or_default();
    let line = trace.lines().last().unwrap_or_default();
    assert!(line.starts_with("X ffffffff"), "{trace}");
    assert_parts(&xml, &["Last lines of the trace:\n  E ffffffff", line]);
    assert_parts(&json, &[&format!("    \"{line}\"\n  ],\n  \"events\"")]);
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert_parts(
        last,
        &[
            "exotrace: guest kernel panic on vCPU 0: VFS: Unable to mount root fs on unknown-block(0,0), ",
            "called from 0x",
            "mount_block_root",
        ],
    );
}
