//! Scripts as a user types them: alone, and over a running machine of the micro guest.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs::File;

use rustix::process::Signal;
use support::{Ended, Running, World, has_kvm};

/// Starts a machine whose guest calls `micro_leaf` until it is stopped.
fn calling(world: &World) -> Running {
    world.start("calls 1000000000", "--serial null")
}

/// Runs `exotrace trace` with these options and this script.
fn trace(world: &World, options: &str, script: &str) -> Ended {
    Ended::from(command(world, options, script).output().unwrap())
}

/// Runs a script on the machine until each of so many traps was hit that often.
fn trace_until(world: &World, options: &str, script: &str, traps: usize, least: u64) -> Ended {
    let running = Running::of(command(world, options, script));
    world.wait_for_traps(|hits| hits.len() >= traps && hits.iter().all(|hits| *hits > least));
    running.signal(Signal::INT);
    running.finish()
}

fn command(world: &World, options: &str, script: &str) -> std::process::Command {
    let mut words = vec!["trace"];
    words.extend(options.split_whitespace());
    words.extend(["-e", script]);
    world.command_of(&words)
}

/// Returns the kinds of the JSON lines of its output.
fn kinds(ended: &Ended) -> Vec<String> {
    let lines = json(ended);
    let kinds = lines.iter().map(|line| line["type"].as_str().unwrap());
    kinds.map(str::to_owned).collect()
}

fn json(ended: &Ended) -> Vec<serde_json::Value> {
    let lines = ended.stdout.lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_script_of_begin_and_end_needs_no_machine() {
    let world = World::new();
    let script = r#"BEGIN { printf("%s %d of %d\n", str($1), $2 + 1, $#); @a["x"] = 5; errorf("told"); } END { printf("end\n"); }"#;
    world.write(
        "args.bt",
        format!("#!/usr/bin/env -S exotrace trace\n/* comment */\n{script}\n").as_bytes(),
    );
    let expected = "one 42 of 2\nend\n\n\n@a[x]: 5\n";
    let by_word = Ended::from(
        world
            .command_of(&["trace", "-e", script, "one", "41"])
            .output()
            .unwrap(),
    );
    let by_file = world.run("trace args.bt one 41");
    let by_path = world.run("trace ./args.bt one 41");
    let mut piped = world.command("trace - one 41");
    piped.stdin(File::open(world.path("args.bt")).unwrap());
    let piped = Ended::from(piped.output().unwrap());
    for (ended, place) in [
        (by_word, "exotrace:1:68-81"),
        (by_file, "args.bt:3:68-81"),
        (by_path, "./args.bt:3:68-81"),
        (piped, "-:3:68-81"),
    ] {
        assert_eq!(
            (ended.status, ended.stdout.as_str(), ended.stderr.as_str()),
            (0, expected, format!("{place}: ERROR: told\n").as_str()),
            "{ended:?}"
        );
    }
    // A missing argument is 0, or empty text.
    let without = world.run("trace args.bt");
    assert!(without.stdout.starts_with(" 1 of 0\n"), "{without:?}");

    let ended = trace(&world, "-o file", script);
    assert_eq!((ended.status, ended.stdout.as_str()), (0, ""), "{ended:?}");
    assert_eq!(
        std::fs::read_to_string(world.path("file")).unwrap(),
        " 1 of 0\nend\n\n\n@a[x]: 5\n"
    );

    let ended = trace(&world, "--format json", script);
    assert_eq!(kinds(&ended), ["printf", "printf", "map"], "{ended:?}");
    assert_eq!(json(&ended)[2]["data"]["@a"]["x"], 5);
}

#[test]
fn a_script_is_only_read_if_that_is_asked_for() {
    let world = World::new();
    for script in [
        r#"BEGIN { printf("no\n"); }"#,
        "kprobe:anything:entry { @ = count(); }",
    ] {
        let ended = trace(&world, "-n", script);
        assert_eq!(
            (ended.status, ended.stdout.as_str(), ended.stderr.as_str()),
            (0, "", ""),
            "{script}"
        );
    }
    let ended = trace(&world, "-n", "BEGIN { @x = }");
    let expected =
        "exotrace:1:14: expected an expression, found '}':\nBEGIN { @x = }\n             ^\n";
    assert_eq!((ended.status, ended.stderr.as_str()), (1, expected));
}

#[test]
fn options_that_mean_nothing_are_refused() {
    let world = World::new();
    for (line, told) in [
        (
            "trace -n --strict vfs_read",
            "exotrace: -n, --strict: not for a trace of probes\n",
        ),
        (
            "trace --format collapsed vfs_read",
            "exotrace: --format collapsed: not for a trace of probes\n",
        ),
        (
            "run --kernel micro --trace micro_leaf --format collapsed",
            "exotrace: --format collapsed: not for a trace of probes\n",
        ),
        (
            "trace --ustack 5 opensnoop.bt",
            "exotrace: --ustack: not for a script\n",
        ),
        (
            "trace -l kprobe:a* kprobe:b*",
            "exotrace: \"kprobe:b*\": probes are listed of one pattern at a time\n",
        ),
    ] {
        let ended = world.run(line);
        assert_eq!(
            (ended.status, ended.stdout.as_str(), ended.stderr.as_str()),
            (2, "", told),
            "{line}"
        );
    }
}

#[test]
fn the_strict_language_is_that_of_bt() {
    let world = World::new();
    // bt(5) prints no map of one value at the end.
    let script = r#"BEGIN { @x["k"] = 3; @n = 1; printf("%d\n", 7 + 1); }"#;
    for (options, expected) in [
        ("", "8\n\n\n@x[k]: 3\n@n: 1\n"),
        ("--strict", "8\n@x[k]: 3\n"),
    ] {
        let ended = trace(&world, options, script);
        assert_eq!(
            (ended.status, ended.stdout.as_str()),
            (0, expected),
            "{ended:?}"
        );
    }
    for script in [
        "BEGIN { while (1) { } }",
        "BEGIN { $x = avg(1); }",
        "BEGIN { @x = 1 ? 2 : 3; }",
    ] {
        let ended = trace(&world, "--strict", script);
        assert_eq!(
            (ended.status, ended.stdout.as_str()),
            (1, ""),
            "{script}: {ended:?}"
        );
        assert!(ended.stderr.contains("syntax error"), "{script}: {ended:?}");
    }
    for (options, script, expected) in [
        ("--strict -n", "END { } END { }", (0, "", "")),
        (
            "--strict",
            "END { } END { }",
            (
                1,
                "",
                "exotrace: Cannot register multiple probes of the same type: 'END'\n",
            ),
        ),
        (
            "--strict",
            "BEGIN { @m[1] = 2; @x = 1; print(3); zero(@x); } END { print(4); }",
            (1, "3\n", "exotrace: invalid variable type for zero(@x)\n"),
        ),
        // No terminal is there to obey a line.
        (
            "--strict",
            "BEGIN { \x01 }",
            (
                1,
                "",
                "exotrace:1:9: syntax error:\nBEGIN { \x01 }\n        ^\n",
            ),
        ),
    ] {
        let ended = trace(&world, options, script);
        let found = (ended.status, ended.stdout.as_str(), ended.stderr.as_str());
        assert_eq!(found, expected, "{script}");
    }
}

#[test]
fn ready_scripts_are_listed_and_shown() {
    let world = World::new();
    let listed = world.run("scripts");
    assert_eq!(
        (listed.status, listed.stdout.lines().count()),
        (0, 48),
        "{listed:?}"
    );
    assert!(
        listed
            .stdout
            .contains("opensnoop.bt     files that programs open"),
        "{listed:?}"
    );
    for line in listed.stdout.lines() {
        let name = line.split(' ').next().unwrap();
        let shown = world.run(&format!("scripts {name}"));
        assert!(
            shown
                .stdout
                .starts_with("#!/usr/bin/env -S exotrace trace\n"),
            "{name}"
        );
        // It can be read with any guest.
        assert_eq!(world.run(&format!("trace -n {name}")).status, 0, "{name}");
        let short = world.run(&format!("scripts {}", name.trim_end_matches(".bt")));
        assert_eq!(short.stdout, shown.stdout);
    }
    let unknown = world.run("scripts nothing");
    assert_eq!(unknown.status, 1);
    assert!(
        unknown
            .stderr
            .contains("no script \"nothing\"; there are bashreadline.bt, "),
        "{unknown:?}"
    );
    let unknown = world.run("trace nothing.bt");
    assert_eq!((unknown.status, unknown.stdout.as_str()), (1, ""));
    assert!(
        unknown.stderr.contains("nothing.bt: No such file"),
        "{unknown:?}"
    );
}

#[test]
fn maps_are_printed_when_a_script_ends() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _machine = calling(&world);
    let script = r#"
        BEGIN { printf("begin\n"); }
        kprobe:micro_leaf:entry { @calls = count(); @last[func] = arg0; }
        kprobe:micro_leaf:return { @odd[retval & 1] = count(); @low = lhist(retval & 7, 0, 8, 4); }
        END { printf("end\n"); }"#;
    let ended = trace_until(&world, "-v", script, 2, 20);
    assert_eq!(ended.status, 0, "{ended:?}");
    assert!(
        ended.stdout.starts_with("begin\nend\n\n\n@calls: "),
        "{ended:?}"
    );
    let value = |name: &str| -> u64 {
        let start = format!("{name}: ");
        let line = ended
            .stdout
            .lines()
            .find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("{name}: {ended:?}"))
            .parse()
            .unwrap()
    };
    let calls = value("@calls");
    assert!(calls > 10, "{ended:?}");
    // Not every call has returned: not the last. Returns of calls from before the second probe was
    // armed are not seen.
    let returns = value("@odd[0]") + value("@odd[1]");
    assert!((10..=calls).contains(&returns), "{ended:?}");
    assert!(ended.stdout.contains("@low:\n[0, 4) "), "{ended:?}");
    assert!(
        ended.stderr.starts_with("exotrace: attached 2 probes\n"),
        "{ended:?}"
    );
    assert!(
        ended.stderr.contains(&format!(
            "exotrace: {} events read, 0 filtered, ",
            calls + returns
        )),
        "{ended:?}"
    );
    assert!(
        ended
            .stderr
            .contains(&format!("{calls:>10} kprobe:vmlinux:micro_leaf:entry\n")),
        "{ended:?}"
    );
    assert_eq!(world.traps().len(), 0);

    // The same for programs.
    let ended = trace_until(&world, "--format json", script, 2, 20);
    assert_eq!(ended.status, 0, "{ended:?}");
    assert_eq!(
        kinds(&ended),
        ["printf", "printf", "map", "map", "map", "hist"],
        "{ended:?}"
    );

    // And stacks for flame graphs, callers first.
    let script = "kprobe:micro_leaf:entry { @[kstack] = count(); }";
    let ended = trace_until(&world, "--format collapsed", script, 1, 20);
    let (stack, count) = ended.stdout.trim_end().rsplit_once(' ').unwrap();
    assert_eq!(stack, "micro_call_loop;micro_leaf", "{ended:?}");
    assert!(count.parse::<u64>().unwrap() > 10, "{ended:?}");
}

#[test]
fn what_ends_a_script_ends_the_command() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _machine = calling(&world);
    let ended = trace(
        &world,
        "",
        "kprobe:micro_leaf:entry { @n++; if (@n == 3) { exit(); } }",
    );
    assert_eq!(
        (ended.status, ended.stdout.as_str()),
        (0, "\n\n@n: 3\n"),
        "{ended:?}"
    );
    assert_eq!(world.traps().len(), 0);
    let script = "kprobe:micro_leaf:entry { @n = count(); }";
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let running = Running::of(command(&world, "", script));
        world.wait_for_hits();
        running.signal(signal);
        let ended = running.finish();
        if signal != Signal::KILL {
            assert_eq!(ended.status, 0, "{ended:?}");
            assert!(ended.stdout.starts_with("\n\n@n: "), "{ended:?}");
        }
        world.wait_for_no_traps();
    }
}

#[test]
fn two_scripts_at_once_count_for_themselves() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _machine = calling(&world);
    let scripts = [
        "kprobe:micro_leaf:entry { @n++; if (@n == 100) { exit(); } }",
        "kprobe:micro_leaf:entry /arg0 & 1/ { @odd++; if (@odd == 100) { exit(); } }",
    ];
    let both = scripts.map(|script| Running::of(command(&world, "", script)));
    let [first, second] = both.map(Running::finish);
    assert_eq!(
        (first.status, first.stdout.as_str()),
        (0, "\n\n@n: 100\n"),
        "{first:?}"
    );
    assert_eq!(
        (second.status, second.stdout.as_str()),
        (0, "\n\n@odd: 100\n"),
        "{second:?}"
    );
    assert_eq!(world.traps().len(), 0);
}

#[test]
fn what_is_wrong_is_told_with_its_place() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _machine = calling(&world);
    for (script, told) in [
        (
            "kprobe:micro_laef:entry { @n = count(); }",
            "\
exotrace:1:1: no probe kprobe:micro_laef:entry:
kprobe:micro_laef:entry { @n = count(); }
^~~~~~~~~~~~~~~~~~~~~~~
did you mean: micro_leaf, micro_exec, micro_main?
",
        ),
        (
            "kprobe:micro_leaf:entry { prinft(\"x\"); }",
            "\
exotrace:1:27: unknown function 'prinft':
kprobe:micro_leaf:entry { prinft(\"x\"); }
                          ^~~~~~
did you mean: printf, print?
",
        ),
        (
            "kprobe:micro_leaf:entry { @ = args.n; }",
            "\
exotrace:1:36: the names of this probe's arguments are not known; use arg0, arg1 ...:
kprobe:micro_leaf:entry { @ = args.n; }
                                   ^
",
        ),
        (
            "struct s { int a; } kprobe:micro_leaf:entry { @ = ((struct s *)arg0)->b; }",
            "\
exotrace:1:71: struct s has no member \"b\":
struct s { int a; } kprobe:micro_leaf:entry { @ = ((struct s *)arg0)->b; }
                                                                      ^
did you mean: a?
",
        ),
    ] {
        let ended = trace(&world, "", script);
        assert_eq!(
            (ended.status, ended.stdout.as_str(), ended.stderr.as_str()),
            (1, "", told),
            "{script}"
        );
        assert_eq!(world.traps().len(), 0, "{script}");
    }
    // An error in a file is reported with the file and its line.
    world.write(
        "wrong.bt",
        b"BEGIN { @x = 1; }\n\nkprobe:micro_leaf:entry\n{\n\tprinft(\"x\");\n}\n",
    );
    let ended = world.run("trace wrong.bt");
    assert!(ended.stderr.starts_with("wrong.bt:5:"), "{ended:?}");
}

#[test]
fn probes_are_listed_for_scripts() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let _machine = calling(&world);
    for (pattern, expected) in [
        (
            "kprobe:micro_l??f:entry",
            "kprobe:vmlinux:micro_leaf:entry\n",
        ),
        ("profile:hz:99", "profile::hz:99 ()\n"),
        (
            "syscall:openat:entry",
            "syscall::openat:entry (int dfd, const char *filename, int flags, umode_t mode)\n",
        ),
    ] {
        let short = world.run(&format!("trace -l {pattern}"));
        assert_eq!(
            (short.status, short.stdout.as_str()),
            (0, expected),
            "{pattern}: {short:?}"
        );
        assert_eq!(
            world.run(&format!("list {pattern}")).stdout,
            expected,
            "{pattern}"
        );
    }
    let unknown = world.run("trace -l kprobe:nothing_like*");
    assert_eq!(
        (unknown.status, unknown.stdout.as_str()),
        (1, ""),
        "{unknown:?}"
    );
    assert!(
        unknown.stderr.contains("no probe kprobe:nothing_like*"),
        "{unknown:?}"
    );
}

#[test]
fn a_machine_runs_a_script_until_it_exits() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let script = "kprobe:micro_leaf:entry { @n++; if (@n == 5) { printf(\"five\\n\"); exit(); } }";
    world.write("five.bt", script.as_bytes());
    for option in [["-e", script], ["-f", "five.bt"]] {
        let mut command = world.micro_command("calls 1000000000", "--serial null");
        command.args(option);
        let ended = Ended::from(command.output().unwrap());
        assert_eq!(
            (ended.status, ended.stdout.as_str()),
            (0, "five\n\n\n@n: 5\n"),
            "{ended:?}"
        );
    }
    // Any other end of the machine ends the script.
    let mut command = world.micro_command("calls 1000000000", "--serial null --for 0.5");
    command.args([
        "-e",
        "kprobe:micro_leaf:entry { @n = count(); } END { printf(\"end\\n\"); }",
    ]);
    let ended = Ended::from(command.output().unwrap());
    assert_eq!(ended.status, 0, "{ended:?}");
    assert!(ended.stdout.starts_with("end\n\n\n@n: "), "{ended:?}");
    assert_eq!(world.registered(), Vec::<String>::new());
}
