//! Scripts over a Linux guest from the command line: its types, its processes, its text afterwards,
//! and a restored machine that ends with its script.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::command::World;
use support::shell::COMMAND_LIMIT;
use support::watched::Watched;
use support::{host, rich};

/// Returns the line of `stat --hash` about the kernel's text.
fn text_hash(guest: &Watched) -> String {
    let stat = guest.ask(&["stat", "--hash"]);
    let line = stat
        .stdout
        .lines()
        .find(|line| line.starts_with("kernel text"));
    let line = line.unwrap_or_else(|| panic!("{stat:?}"));
    assert!(!line.contains("not"), "{stat:?}");
    line.to_owned()
}

#[test]
fn scripts_know_the_guests_types_and_leave_its_text_alone() {
    let host = host!();
    let mut guest = Watched::new(host);
    let before = text_hash(&guest);

    let wrong = "kprobe:vfs_read:entry { @[curtask->cmm, curtask->mm->onwer->pid] = count(); }";
    // Consequences of a mistake are not reported as further mistakes.
    let told = "\
exotrace:1:36: struct task_struct has no member \"cmm\":
kprobe:vfs_read:entry { @[curtask->cmm, curtask->mm->onwer->pid] = count(); }
                                   ^~~
did you mean: comm, mm?
exotrace:1:54: struct mm_struct has no member \"onwer\":
kprobe:vfs_read:entry { @[curtask->cmm, curtask->mm->onwer->pid] = count(); }
                                                     ^~~~~
";
    let ended = guest.ask(&["trace", "-e", wrong]);
    assert_eq!(
        (ended.status, ended.stdout.as_str(), ended.stderr.as_str()),
        (1, "", told)
    );
    assert_eq!(text_hash(&guest), before);

    // Of one process: hits of others are filtered out.
    let shell = guest.run("echo $$");
    let counting = "kprobe:ksys_write:entry { @[pid, comm, curtask->comm] = count(); }";
    let script = guest.trace(&["-v", "-p", shell.trim(), "-e", counting]);
    guest.run("syscount 1");
    let counted = script.interrupt();
    let start = format!("@[{}, sh, sh]: ", shell.trim());
    assert!(
        counted.trim_start().starts_with(&start) && counted.trim().lines().count() == 1,
        "{counted}"
    );
    assert_eq!(text_hash(&guest), before);

    // Also if the command is killed.
    let mut killed = guest.trace(&["-e", "syscall:::entry { @[probe] = count(); }"]);
    assert_ne!(text_hash(&guest), before);
    killed.running().signal(Signal::KILL);
    assert_eq!(killed.finish().status, -1);
    let deadline = Instant::now() + COMMAND_LIMIT;
    while text_hash(&guest) != before {
        assert!(
            Instant::now() < deadline,
            "the guest's text is not as it was"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    guest.stop();
}

#[test]
fn a_script_waits_for_programs_that_nobody_runs_yet() {
    let host = host!();
    let mut guest = Watched::new(host);
    guest.run("cp /bin/fsload /tmp/y && ln -s y /tmp/link");
    let listed = guest.ask(&["list", "uprobe:/tmp/link:one_round:"]);
    assert_eq!(
        listed.stdout,
        "uprobe:/tmp/y:one_round:entry\nuprobe:/tmp/y:one_round:return\n"
    );
    // Files that are known have what they have.
    for (pattern, why) in [
        (
            "uprobe:/tmp/y:one_rond",
            "no function \"one_rond\" in /tmp/y",
        ),
        (
            "uprobe:/tmp/link:one_round:retrun",
            "no function \"one_round\" in /tmp/y",
        ),
        (
            "usdt:/bin/statics:statics:nonesuch",
            "no such static probe in /bin/statics",
        ),
        (
            "uprobe:/tmp/later:one_round:retrun",
            "no process has a program or library \"/tmp/later\" mapped",
        ),
    ] {
        let wrong = guest.ask(&["trace", "-e", &format!("{pattern} {{ }}")]);
        assert_eq!(wrong.status, 1, "{wrong:?}");
        assert!(wrong.stderr.contains(why), "{wrong:?}");
    }

    let waiting = guest.trace(&[
        "-e",
        r"
        uprobe:/tmp/link:one_round { @entries = count(); @probe[probe] = count(); }
        uprobe:y:one_* /arg0 == 1/ { @second = count(); }
        uretprobe:/tmp/y:one_round { @returns = count(); }
        uprobe:/tmp/later:one_round { @later = count(); }
        usdt:/bin/statics:statics:in-registers { @widths = (sizeof(args[0]), sizeof(args[2])); }
        uprobe:/tmp/never:one_round { @never = count(); }",
    ]);
    // The second run of a program, and a file that is made while the script waits.
    guest.run("/tmp/y 3 0; /tmp/y 2 0; cp /bin/fsload /tmp/later; /tmp/later 4 0; statics 1 0");
    let ended = waiting.interrupted();
    let counted: Vec<&str> = ended.stdout.lines().filter(|l| !l.is_empty()).collect();
    assert_eq!(
        counted,
        [
            "@entries: 5",
            "@probe[uprobe:/tmp/y:one_round]: 5",
            "@second: 2",
            "@returns: 5",
            "@later: 4",
            "@widths: (8, 2)",
            "@never: 0",
        ],
        "{ended:?}"
    );
    // A process's own program, by its folder in /proc.
    let pid =
        guest.run("/tmp/y 0 100 > /dev/null & until grep -qx y /proc/$!/comm; do :; done; echo $!");
    let listed = guest.ask(&[
        "list",
        &format!("uprobe:/proc/{}/exe:one_round:entry", pid.trim()),
    ]);
    assert_eq!(
        listed.stdout, "uprobe:/tmp/y:one_round:entry\n",
        "{listed:?}"
    );
    let link = format!("uprobe:/proc/{}/root/tmp/link:one_round:entry", pid.trim());
    assert_eq!(guest.ask(&["list", &link]).stdout, listed.stdout);
    let nobody = guest.ask(&["trace", "-e", "uprobe:/proc/99999/exe:one_round { }"]);
    assert_eq!(nobody.status, 1, "{nobody:?}");
    let never =
        "exotrace: uprobe:/tmp/never:one_round: no process has it mapped; waiting for one\n";
    assert!(ended.stderr.contains(never), "{ended:?}");
    guest.stop();
}

/// The message of a script that has no probes but BEGIN.
const ATTACHED: &str = "exotrace: attached 0 probes\n";

#[test]
fn files_of_the_guest_are_printed_as_the_guest_prints_them() {
    let host = host!();
    let mut guest = Watched::new(host);
    let own = guest.run("echo $$").trim().to_owned();
    guest.run("mkdir /tmp/of && echo first > /tmp/of/one && ln -s of/one /tmp/link");
    for path in [
        "/tmp/of/one",
        "/tmp/link",
        "/proc/version",
        "/proc/cmdline",
        &format!("/proc/{own}/comm"),
        &format!("/proc/{own}/cmdline"),
        &format!("/proc/{own}/environ"),
        &format!("/proc/{own}/maps"),
    ] {
        let guests = guest.run(&format!("tr '\\0' ' ' < {path}"));
        let script = format!(r#"BEGIN {{ cat("%s", "{path}"); }}"#);
        let ended = guest.ask(&["trace", "-e", &script]);
        let printed = ended.stdout.replace('\0', " ");
        assert_eq!(
            (ended.status, printed.trim(), ended.stderr.as_str()),
            (0, guests.trim(), ATTACHED),
            "{path}"
        );
    }

    // Averages change, and the kernel may have begun threads.
    let load = guest.ask(&["trace", "-e", r#"BEGIN { cat("/proc/loadavg"); }"#]);
    let words: Vec<&str> = load.stdout.split_whitespace().collect();
    let [one, five, fifteen, tasks, last] = words.as_slice() else {
        panic!("{load:?}");
    };
    let averages = [one, five, fifteen].map(|average| average.parse::<f64>());
    assert!(averages.iter().all(Result::is_ok), "{load:?}");
    let tasks = tasks.split_once('/').map_or("", |(_, all)| all);
    let number = |text: &str| text.parse::<u32>().unwrap_or_default();
    assert!(
        number(tasks) > 10 && number(last) >= number(&own),
        "{load:?}"
    );

    // It is the time of the last tick.
    let seconds = |text: &str| {
        let first = text.split_whitespace().next().unwrap_or_default();
        let found = first.parse::<f64>();
        found.unwrap_or_else(|e| panic!("{text}: {e}"))
    };
    let before = seconds(&guest.run("cat /proc/uptime"));
    let uptime = guest.ask(&["trace", "-e", r#"BEGIN { cat("/proc/uptime"); }"#]);
    let after = seconds(&guest.run("cat /proc/uptime"));
    let printed = seconds(&uptime.stdout);
    assert!(
        before - 1.0 < printed && printed <= after,
        "{before} {uptime:?} {after}"
    );
    assert_eq!(uptime.stdout.split_whitespace().count(), 2, "{uptime:?}");

    // A script that has only BEGIN knows the guest's symbols and types, too.
    let script = r#"BEGIN { printf("%d %s", kaddr("_stext") != 0, typeinfo(curtask->comm).1); }"#;
    let ended = guest.ask(&["trace", "-e", script]);
    assert_eq!(
        (ended.stdout.as_str(), ended.stderr.as_str()),
        ("1 string", ATTACHED)
    );

    let script = r#"config = { max_cat_bytes = 3 } BEGIN { cat("/tmp/of/one"); cat("/tmp/of/none"); cat("/proc/1/fd"); }"#;
    let told = "\
cat /tmp/of/none: not in the guest's memory, which has only files that were used lately
cat /proc/1/fd: of /proc only loadavg, uptime, version, cmdline, and of a process auxv, cmdline, comm, environ and maps are read
";
    let ended = guest.ask(&["trace", "-e", script]);
    assert_eq!(
        (ended.status, ended.stdout.as_str(), ended.stderr.as_str()),
        (0, "fir", &[ATTACHED, told].concat()[..])
    );
    guest.stop();
}

#[test]
fn a_restored_machine_ends_with_its_script() {
    let host = host!();
    let world = World::new();
    let script = "kprobe:vfs_write:entry /comm == \"sh\"/ { printf(\"%s writes %d\\n\", comm, args.count); exit(); }";
    let mut line: Vec<OsString> = ["run", "-e", script].map(Into::into).into();
    line.extend(rich::restore(host));
    let mut machine = world.start(line);
    machine.wait_until("attached probes", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("exotrace: attached 1 probe\n")
    });
    machine.type_line("echo hello");
    let ended = machine.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    assert!(ended.stdout.starts_with("sh writes "), "{ended:?}");
    assert_eq!(ended.stdout.lines().count(), 1, "{ended:?}");
}

#[test]
fn the_busiest_calls_and_a_scripts_maps_are_shown() {
    let host = host!();
    let mut guest = Watched::new(host);
    guest.run("(while :; do syscount 50; done) > /dev/null 2>&1 & true");
    let script = "syscall::getppid:entry { @calls[comm] = count(); }";
    for (words, titles, row) in [
        (
            ["top", "--by", "calls", "--for", "1", "--lines", "1000"].as_slice(),
            ["CALL", "CALLS/s", "MEAN", "us", "FAILED/s"].as_slice(),
            "getppid",
        ),
        (
            &["top", "--for", "1", "-e", script],
            &["KEY", "@calls"],
            "syscount",
        ),
    ] {
        // The guest's programs may not have run in the first second.
        let deadline = Instant::now() + COMMAND_LIMIT;
        loop {
            let ended = guest.ask(words);
            assert_eq!(ended.status, 0, "{ended:?}");
            let mut lines = ended.stdout.lines();
            let first: Vec<&str> = lines
                .next()
                .unwrap_or_default()
                .split_whitespace()
                .collect();
            assert_eq!(first, titles, "{ended:?}");
            let row = lines.find(|line| line.split_whitespace().next() == Some(row));
            let number = row.and_then(|row| row.split_whitespace().nth(1)?.parse::<u64>().ok());
            if number.is_some_and(|number| number > 0) {
                break;
            }
            assert!(Instant::now() < deadline, "{ended:?}");
        }
    }
}
