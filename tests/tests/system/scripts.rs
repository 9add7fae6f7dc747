//! Scripts in the bt language at the hits of a Linux guest: their output matches the guest's work,
//! and the guest is unchanged.
//!
//! Scripts of a table run at the same time, over one run of a command: they do not disturb each
//! other.

use exotrace::{Request, ScriptCounts, ScriptRequest};
use support::host;
use support::scripts::{Ran, ScriptGuest, unix_ns};
use support::shell::COMMAND_LIMIT;
use support::traced::Traced;
use support::user_guest::{FOR_EVER, UserGuest};

/// A script, and the lines of its output. `$1` in those is the first word that the command prints,
/// and so on.
type Case = (&'static str, &'static [&'static str]);

/// A command whose `$1` is the shell, and `$2` the process that calls getppid(2) ten times.
const CALLS: &str = "echo $$; syscount 10 > /dev/null & echo $!; wait $!";
/// A command for files in /tmp, each of which is written, read, stat'ed, renamed and removed: of 1,
/// 38 and 75 letters x. At last it prints a line of 17 letters.
const FILES: &str = "fsload 3 0 > /dev/null";

const AT_CALLS: &[Case] = &[
    (
        r#"syscall::getppid:entry /@n++ == 0/ { printf("%d %d %d %s %s %s\n", pid, tid, cpu, comm, probe, func); }"#,
        &["$2 $2 0 syscount syscall::getppid:entry getppid", "@n: 10"],
    ),
    (
        r#"syscall::getppid:entry /@n++ == 0/ {
            printf("%s %d %d %d", curtask->comm, curtask->tgid, curtask->real_parent->tgid, ppid);
            printf(" %d %d\n", uid, gid);
        }"#,
        &["syscount $2 $1 $1 0 0", "@n: 10"],
    ),
    (
        "syscall::getppid:entry { if (@last) { @later[nsecs > @last, elapsed > 0] = count(); } @last = nsecs; }
         END { clear(@last); }",
        &["@later[true, true]: 9"],
    ),
    (
        "syscall::getppid:return { @[comm, retval] = count(); }",
        &["@[syscount, $1]: 10"],
    ),
    (
        r#"syscall::getppid:entry /++@n == 1/ {
            $s = 0; for ($i : 1..5) { $s += $i; }
            $j = 3; while ($j) { $s += 100; $j--; if ($s > 300) { break; } }
            unroll (2) { $s += 1000; }
            printf("%d %d\n", $s, $j);
        }"#,
        &["2310 0", "@n: 10"],
    ),
    (
        r#"tracepoint:syscalls:sys_enter_getppid /@n++ == 0/ {
            printf("%s %d %d\n", probe, args.__syscall_nr, usermode);
        }"#,
        &["tracepoint:syscalls:sys_enter_getppid 110 0", "@n: 10"],
    ),
    (
        "t:syscalls:sys_exit_getppid { @[probe, args.ret] = count(); }",
        &["@[tracepoint:syscalls:sys_exit_getppid, $1]: 10"],
    ),
    (
        r#"tracepoint:raw_syscalls:sys_enter /args.id == 110 && comm == "syscount"/ { @ = count(); }"#,
        &["@: 10"],
    ),
    (
        "fentry:__x64_sys_getppid { @[probe] = count(); } fexit:vmlinux:__x64_sys_getppid { @[probe] = count(); }",
        &[
            "@[kprobe:__x64_sys_getppid]: 10",
            "@[kretprobe:__x64_sys_getppid]: 10",
        ],
    ),
    (
        r#"macro first(task) { str(&task->comm[3]) }
        syscall::getppid:entry /@n++ == 0/ {
            printf("%d %d %d %d\n", pid(curr_ns), tid(curr_ns), pid(init), ncpus);
            printf("%s %d %s %d\n", comm(curtask), ppid(curtask), first(curtask), jiffies > 0);
        }"#,
        &["$2 $2 $2 1", "syscount $1 count 1", "@n: 10"],
    ),
    (
        "syscall::getppid:entry { if (++@n == 5) { exit(); } }",
        &["@n: 5"],
    ),
    (
        r#"syscall::getppid:entry { printf("a"); }
           syscall::getppid:entry /@n++ % 5 == 0/ { printf("b"); }
           syscall::getppid:entry { printf("c\n"); }"#,
        &[
            "abc", "ac", "ac", "ac", "ac", "abc", "ac", "ac", "ac", "ac", "@n: 10",
        ],
    ),
    (
        r#"syscall::getppid:entry /@n++ == 9/ {
            @a[1] = 5; @a[2] = 6; @a[3] = 7;
            delete(@a[2]);
            printf("%d %d %d %d\n", len(@a), has_key(@a, 2), has_key(@a, 3), @a[3]);
            for ($kv : @a) { printf("%d is %d\n", $kv.0, $kv.1); }
            zero(@a); print(@a); clear(@a); printf("%d\n", len(@a));
        }
        END { clear(@n); }"#,
        &["2 0 1 7", "1 is 5", "3 is 7", "@a[1]: 0", "@a[3]: 0", "0"],
    ),
    (
        r#"BEGIN { printf("begin\n"); } END { printf("end %d\n", @n); clear(@n); } syscall::getppid:entry { @n++; }"#,
        &["begin", "end 10"],
    ),
    // Calls of another process are not seen.
    (
        r#"syscall::getppid:entry /comm == "sh"/ { @ = count(); }"#,
        &["@: 0"],
    ),
];

const AT_FILES: &[Case] = &[
    (
        r#"syscall::open:entry /comm == "fsload"/ {
            printf("%s %d %d %d\n", str(args.filename), args.filename == arg0, arg1, args.flags);
        }"#,
        &[
            "/tmp/fsload.0 1 577 577",
            "/tmp/fsload.0 1 0 0",
            "/tmp/fsload.1 1 577 577",
            "/tmp/fsload.1 1 0 0",
            "/tmp/fsload.2 1 577 577",
            "/tmp/fsload.2 1 0 0",
        ],
    ),
    (
        r#"syscall::write:return /comm == "fsload"/ { printf("%d\n", retval); }"#,
        &["1", "38", "75", "17"],
    ),
    (
        r#"syscall::rename:entry { printf("%s to %s\n", str(arg0), str(arg1, 5)); }"#,
        &[
            "/tmp/fsload.0 to /tmp/",
            "/tmp/fsload.1 to /tmp/",
            "/tmp/fsload.2 to /tmp/",
        ],
    ),
    // The same file by the system call's path and by the kernel's own structures.
    (
        r#"kprobe:vfs_write:entry /comm == "fsload"/ {
            @[str(((struct file *)arg0)->f_path.dentry->d_name.name), args.count] = count();
        }"#,
        &[
            "@[fsload.0, 1]: 1",
            "@[fsload.1, 38]: 1",
            "@[fsload.2, 75]: 1",
            "@[null, 17]: 1",
        ],
    ),
    // All threads, while the guest is paused.
    (
        r#"iter:task /pid == 1 && tid == pid/ {
            printf("%d %s\n", ctx.task->pid, ctx.task == curtask && ctx.task->comm == comm ? probe : "no");
        }"#,
        &["1 iter:task"],
    ),
    (
        r#"kprobe:vfs_write:entry /comm == "fsload"/ { @[path(args.file->f_path)] = sum(args.count); }"#,
        &[
            "@[/tmp/fsload.0]: 1",
            "@[/dev/null]: 17",
            "@[/tmp/fsload.1]: 38",
            "@[/tmp/fsload.2]: 75",
        ],
    ),
    // A structure as a value, and a number of one of the kernel's enums.
    (
        r#"kprobe:vfs_write:entry /comm == "fsload" && arg2 == 38/ {
            $name = args.file->f_path.dentry->d_name;
            printf("%d %s\n", $name.len, str($name.name));
            printf("%d %s\n", PIDTYPE_TGID, PIDTYPE_TGID);
            print(is_ptr(args.file));
        }"#,
        &["8 fsload.1", "1 PIDTYPE_TGID", "true"],
    ),
    (
        r#"kprobe:vfs_write:entry /comm == "fsload"/ {
            $d = args.file->f_path.dentry;
            @[str($d->d_name.name, $d->d_name.len)] = sum(args.count);
        }"#,
        &[
            "@[fsload.0]: 1",
            "@[null]: 17",
            "@[fsload.1]: 38",
            "@[fsload.2]: 75",
        ],
    ),
    (
        r#"kprobe:vfs_write:entry /comm == "fsload" && arg2 == 38/ {
            $p = (uint8 *)arg1;
            printf("%c%c %x %d %d %s\n", $p[0], $p[37], *(uint32 *)arg1, (int8)200, (uint8)(arg2 + 256), buf(arg1, 3));
        }"#,
        &["xx 78787878 -56 38 xxx"],
    ),
    (
        r#"kprobe:vfs_write:entry /comm == "fsload"/ {
            @n = count(); @sum = sum(arg2); @min = min(arg2); @max = max(arg2); @avg = avg(arg2); @stats = stats(arg2);
            @tuple[(comm, arg2 > 20)] = count();
        }"#,
        &[
            "@n: 4",
            "@sum: 131",
            "@min: 1",
            "@max: 75",
            "@avg: 32",
            "@stats: count 4, average 32, total 131",
            "@tuple[fsload, false]: 2",
            "@tuple[fsload, true]: 2",
        ],
    ),
    (
        r#"kprobe:vfs_write:entry /comm == "fsload"/ { @power = hist(arg2); @even = lhist(arg2, 10, 70, 20); }"#,
        &[
            "@power:",
            "[1]                    1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|",
            "[2, 4)                 0 |                                                    |",
            "[4, 8)                 0 |                                                    |",
            "[8, 16)                0 |                                                    |",
            "[16, 32)               1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|",
            "[32, 64)               1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|",
            "[64, 128)              1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|",
            "@even:",
            "(..., 10)              1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|",
            "[10, 30)               1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|",
            "[30, 50)               1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|",
            "[50, 70)               0 |                                                    |",
            "[70, ...)              1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|",
        ],
    ),
    (
        r#"kprobe:vfs_write:entry /comm == "fsload"/ { @[ksym(pc), kstack(1), kaddr("vfs_write") == pc] = count(); }"#,
        &["@[vfs_write, ", "    vfs_write+0", ", true]: 4"],
    ),
    (
        r#"kprobe:vfs_*:entry /comm == "fsload"/ { @[func] = count(); }
           END { printf("%d %d %d %d\n", @["vfs_rename"], @["vfs_unlink"], @["vfs_open"], @["vfs_write"]); clear(@); }"#,
        &["3 3 6 4"],
    ),
    (
        r#"syscall::write:entry /comm == "fsload"/ { @start[tid] = nsecs; }
           syscall::write:return /@start[tid]/ { @took[comm, nsecs > @start[tid]] = count(); delete(@start[tid]); }"#,
        &["@took[fsload, true]: 4"],
    ),
];

/// Returns the lines with the words that the command has printed filled in.
fn filled(expected: &[&str], printed: &str) -> Vec<String> {
    let line = |line: &&str| {
        let words = printed.split_whitespace().zip(1..);
        words.fold((*line).to_owned(), |line, (word, number)| {
            line.replace(&format!("${number}"), word)
        })
    };
    expected.iter().map(line).collect()
}

/// Runs all of a table at the same time, while a command runs; nothing is left in the guest.
fn check(cases: &[Case], command: &str) {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    let before = guest.shell.linux.text_hash(&guest.view);
    let running: Vec<_> = cases.iter().map(|case| scripts.start(case.0)).collect();
    let answer = guest.shell.start(command).answer(4 * COMMAND_LIMIT);
    let ran: Vec<Ran> = running.into_iter().map(|script| script.finish()).collect();
    assert_eq!(answer.status, 0, "{answer:?}");
    let mut wrong = String::new();
    for ((script, expected), ran) in cases.iter().zip(&ran) {
        ran.assert_whole();
        let expected = filled(expected, &answer.output);
        if ran.lines() != expected {
            wrong += &format!("{script}\n  {:#?}\n  expected {expected:#?}\n", ran.lines());
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert_eq!(
        guest.shell.linux.text_hash(&guest.view),
        before,
        "something was left in the kernel's text"
    );
    assert_eq!(guest.shell.output("echo well"), "well");
}

#[test]
fn scripts_tell_what_a_program_calls() {
    check(AT_CALLS, CALLS);
}

#[test]
fn scripts_tell_what_happens_to_files() {
    check(AT_FILES, FILES);
}

/// Checks also with a filter by process, as -p sets it: its rejected hits are counted as those of
/// predicates are.
#[test]
fn every_hit_either_runs_a_rule_or_is_counted_as_filtered() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    let size = r#"syscall::write:entry /comm == "fsload" && arg2 == 38/ { @ = count(); }"#;
    let (ran, _) = scripts.run(size, FILES);
    ran.assert_whole();
    assert_eq!(ran.lines(), ["@: 1"]);
    assert_eq!(ran.counts.ran, 1, "{ran:?}");
    assert!(ran.counts.filtered >= 3, "{ran:?}");

    // A rule without a predicate runs at all hits.
    let both =
        "syscall::getppid:entry /0/ { @never = count(); } syscall::getppid:entry { @ = count(); }";
    let (ran, _) = scripts.run(both, CALLS);
    ran.assert_whole();
    assert_eq!(
        (ran.lines(), ran.counts.filtered),
        (vec!["@never: 0", "@: 10"], 0)
    );

    let pids = [guest.spawn("fsload 0 0"), guest.spawn("fsload 0 0")];
    let mut running = pids.map(|pid| {
        let script =
            r#"syscall::rename:return { @[pid] = count(); if (++@n == 3) { printf("three\n"); } }"#;
        scripts.start(ScriptRequest {
            whose: Request {
                pids: vec![pid],
                ..Request::default()
            },
            ..ScriptRequest::from(script)
        })
    });
    for script in &mut running {
        script.wait("three renames", |out| out.contains("three"));
    }
    for (script, pid) in running.into_iter().zip(pids) {
        let ran = script.finish();
        ran.assert_whole();
        let counts = &ran.counts;
        assert_eq!(ran.number(&format!("@[{pid}]")), counts.ran, "{ran:?}");
        assert_eq!(ran.number("@n"), counts.ran, "{ran:?}");
        assert!(counts.filtered > 0, "the other does as much: {ran:?}");
    }
    pids.iter().for_each(|pid| guest.kill(*pid));
}

#[test]
fn what_goes_wrong_in_a_script_is_counted_and_the_guest_goes_on() {
    const NOTHING_THERE: &str = r#"syscall::getppid:entry {
        printf("[%s] [%s] %d %d\n", str(0xdead0000), str(0), *(uint32 *)0xdead0000, ((struct file *)0x10)->f_flags);
        printf("%s %d\n", str(((struct file *)0)->f_path.dentry->d_name.name), 1 / (uint32)arg9);
    }"#;
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    for (script, lines, faults) in [
        (
            "syscall::getppid:entry { while (1) { } @never = 1; }",
            vec![],
            ScriptCounts {
                endless: 2,
                ..Default::default()
            },
        ),
        (
            "syscall::getppid:entry { $i = 0; while (1) { $i++; @i = $i; if ($i == 1000) { break; } } }",
            vec!["@i: 1000"],
            ScriptCounts::default(),
        ),
        (
            r#"syscall::getppid:entry { $zero = arg0; printf("%d %d\n", 7 / $zero, 7 % $zero); }"#,
            vec!["1 1", "1 1"],
            ScriptCounts {
                divisions_by_zero: 4,
                ..Default::default()
            },
        ),
    ] {
        let (ran, answer) = scripts.run(script, "syscount 2");
        assert_eq!(answer.output, "syscount: 2\n");
        assert_eq!(ran.lines(), lines, "{script}: {ran:?}");
        assert_eq!(ran.faults(), faults, "{script}");
        assert_eq!((ran.counts.hits, ran.counts.ran), (2, 2), "{script}");
    }
    let (ran, answer) = scripts.run(NOTHING_THERE, "syscount 1");
    assert_eq!(answer.output, "syscount: 1\n");
    assert_eq!(ran.lines(), ["[] [] 0 0", " 1"], "{ran:?}");
    assert!(ran.counts.failed_reads >= 3, "{ran:?}");
    assert_eq!(guest.shell.output("echo well"), "well");
}

#[test]
fn functions_of_a_program_run_scripts_at_their_entry_and_return() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    // A process has the file mapped.
    let sleeper = guest.spawn_sleeper(&format!("fsload 1 {FOR_EVER}"));
    let running = scripts.start(
        r#"uprobe:/bin/fsload:write_file:entry { @size[arg1] = count(); @inside[tid] = 1; }
           uretprobe:/bin/fsload:write_file { @bad[retval] = count(); delete(@inside[tid]); }
           uprobe:/bin/fsload:create_file { printf("%s %s %d\n", func, str(arg0), len(ustack)); }
           uprobe:/bin/fsload:one_round { printf("%s %lx\n", usym(pc), pc); }
           syscall::write:entry /@inside[tid]/ { @writes = count(); }"#,
    );
    let answer = guest.shell.start(FILES).answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.status, 0, "{answer:?}");
    let ran = running.finish();
    ran.assert_whole();
    let lines = ran.lines();
    let (rounds, rest): (Vec<&str>, Vec<&str>) =
        lines.iter().partition(|line| line.starts_with("0x"));
    assert_eq!(rounds.len(), 3, "{ran:?}");
    for round in rounds {
        // The process is gone before its output is taken: nobody knows its names any more.
        let (name, pc) = round.split_once(' ').unwrap_or_default();
        assert_eq!(name, format!("0x{pc}"));
    }
    // create_file is called by one_round, that by program. Besides them only the start function is
    // on the stack.
    let created = |number: u32| format!("create_file /tmp/fsload.{number} 4");
    let [a, b, c] = [0, 1, 2].map(created);
    assert_eq!(
        rest,
        [
            &a,
            &b,
            &c,
            "@size[1]: 1",
            "@size[38]: 1",
            "@size[75]: 1",
            "@bad[0]: 3",
            "@writes: 3"
        ]
    );
    guest.kill(sleeper);
}

#[test]
fn timers_run_scripts_and_see_whole_counts() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    let mut running =
        scripts.start(r#"interval:ms:5 { @t++; if (@t == 3) { printf("three\n"); exit(); } }"#);
    running.wait_for_exit();
    assert_eq!(running.finish().lines(), ["three", "@t: 3"]);

    // Values that are printed and cleared are neither counted twice nor lost.
    let mut running = scripts.start(
        "syscall::getppid:entry { @n = count(); } interval:ms:5 /@n/ { print(@n); clear(@n); }",
    );
    let answer = guest.shell.start("syscount 300").answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.output, "syscount: 300\n");
    running.wait("a count", |out| out.contains("@n"));
    let ran = running.finish();
    ran.assert_whole();
    let counts = ran.lines().into_iter().map(|line| {
        let count = line.strip_prefix("@n: ").map(str::parse::<u64>);
        count.unwrap_or_else(|| panic!("{ran:?}"))
    });
    let counts: Result<Vec<u64>, _> = counts.collect();
    let counts = counts.unwrap_or_else(|e| panic!("{ran:?}: {e}"));
    assert_eq!(counts.iter().sum::<u64>(), 300, "{counts:?}");

    let spinning = guest.spawn("spin");
    let mut running = scripts.start(
        r#"profile:hz:99 { @[comm, cpu] = count(); if (comm == "spin" && @n++ == 3) { printf("four\n"); } }"#,
    );
    running.wait("four samples", |out| out.contains("four"));
    let ran = running.finish();
    assert!(ran.number("@[spin, 0]") >= 4, "{ran:?}");
    guest.kill(spinning);

    let before = unix_ns();
    let running =
        scripts.start(r#"BEGIN { printf("%d\n", nsecs); } END { printf("%d\n", nsecs); }"#);
    let ran = running.finish();
    let told: Vec<u64> = ran.lines().iter().filter_map(|l| l.parse().ok()).collect();
    assert!(told.len() == 2 && told.is_sorted(), "{ran:?}");
    let off = told.iter().map(|told| told.abs_diff(before));
    assert!(off.max() < Some(60_000_000_000), "{ran:?}, at {before}");
}

#[test]
fn a_wrong_script_is_refused_before_the_guest_is_touched() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    for (script, expected) in [
        ("kprobe:vfs_raed:entry { @ = count(); }", "vfs_read"),
        (
            "kprobe:vfs_read:entry { @[args.cuont] = count(); }",
            "count",
        ),
        (
            "kprobe:vfs_read:entry { @ = ((struct file *)arg0)->f_flaggs; }",
            "f_flags",
        ),
        (
            "kprobe:vfs_read:entry { @ = ((struct fiile *)arg0)->f_flags; }",
            "fiile",
        ),
        (
            "kprobe:vfs_read:entry { @ = kaddr(\"vfs_raed\"); }",
            "vfs_read",
        ),
    ] {
        let tried = scripts.try_start(script);
        let Err(said) = tried else {
            panic!("{script} runs")
        };
        let said = said.to_string();
        assert!(said.contains(expected), "{script}: {said}");
        assert_eq!(guest.shell.linux.machine().traps().hits(), [], "{script}");
    }
}

#[test]
fn tracepoints_of_the_rich_kernel_run_scripts_with_their_arguments() {
    let host = host!();
    let traced = Traced::new(host, &[]);
    let scripts = ScriptGuest::from(&traced);
    let before = traced.hash();
    let cases: &[Case] = &[
        (
            r#"tracepoint:sched:sched_switch { @[args.prev->comm] = count(); }
               END { printf("%d %d\n", @["syscount"] > 0, @["sh"] > 0); clear(@); }"#,
            &["1 1"],
        ),
        (
            r#"tracepoint:sched:sched_switch /args.next->pid == args.prev->pid/ { @same = count(); }
               tracepoint:sched:sched_switch /args.prev->pid != curtask->pid/ { @other = count(); }"#,
            &["@same: 0", "@other: 0"],
        ),
        (
            r#"tracepoint:sched:sched_wakeup_new { printf("%s %d\n", args.p->comm, args.p->tgid); }"#,
            &["sh $2"],
        ),
        (
            r#"tracepoint:sched:sched_process_exec { printf("%s\n", str(args.bprm->filename)); }"#,
            &["/bin/syscount"],
        ),
    ];
    let running: Vec<_> = cases.iter().map(|case| scripts.start(case.0)).collect();
    let answer = traced.shell.start(CALLS).answer(4 * COMMAND_LIMIT);
    let ran: Vec<Ran> = running.into_iter().map(|script| script.finish()).collect();
    assert_eq!(answer.status, 0, "{answer:?}");
    for ((script, expected), ran) in cases.iter().zip(&ran) {
        ran.assert_whole();
        let expected = filled(expected, &answer.output);
        assert_eq!(ran.lines(), expected, "{script}");
    }
    assert_eq!(
        traced.hash(),
        before,
        "something was left in the kernel's text"
    );
    traced.assert_well();
}
