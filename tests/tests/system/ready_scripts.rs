//! The scripts that come with exotrace, run over a Linux guest that does the work that each of them
//! observes.
//!
//! Two use static probes that no program of this guest has. `icmp.bt` runs in `usdt.rs`. `usdt.bt`
//! needs a C library other than Debian's; the command's own tests check that it can be read.

use support::host;
use support::watched::Watched;

/// Returns the lines of the table, without its heading, as words; the first is the time.
fn lines(output: &str) -> Vec<Vec<&str>> {
    let rows = output.lines().skip(1);
    rows.map(|line| line.split_whitespace().collect()).collect()
}

/// Returns whether a line has these words in a row behind its time.
fn has(output: &str, words: &[&str]) -> bool {
    lines(output).iter().any(|line| {
        let rest = line.get(1..).unwrap_or_default();
        rest.windows(words.len()).any(|found| found == words)
    })
}

/// Returns the value behind `@map[key]: `.
fn entry<'o>(output: &'o str, name: &str) -> &'o str {
    let start = format!("{name}: ");
    let found = output.lines().find_map(|line| line.strip_prefix(&start));
    found.unwrap_or_else(|| panic!("no {name} in {output}"))
}

/// Returns the sum of a histogram's buckets.
fn histogram(output: &str, name: &str) -> u64 {
    let heading = format!("{name}:");
    let rows = output.lines().skip_while(|line| *line != heading).skip(1);
    let rows = rows.take_while(|line| line.starts_with(['[', '(']));
    rows.filter_map(|row| {
        row.split_once(" |")?
            .0
            .rsplit(' ')
            .next()?
            .parse::<u64>()
            .ok()
    })
    .sum()
}

/// Runs a command that must succeed.
fn must(guest: &mut Watched, command: &str) {
    let printed = guest.run(&format!("{command} && echo well"));
    assert!(printed.ends_with("well\n"), "{command}: {printed}");
}

fn number(text: &str) -> u64 {
    text.trim()
        .parse()
        .unwrap_or_else(|e| panic!("{text:?}: {e}"))
}

#[test]
fn events_are_shown_a_line_each() {
    let host = host!();
    let mut guest = Watched::new(host);
    guest.run("echo hello > /tmp/letter");
    let scripts = ["opensnoop.bt", "execsnoop.bt", "exit.bt", "signals.bt"];
    let running = scripts.map(|script| guest.trace(&[script]));
    assert_eq!(guest.run("/bin/busybox cat /tmp/letter"), "hello\n");
    guest.run("true < /nowhere");
    let printed = guest.run("sh -c 'echo $$; exit 3'");
    let exited = printed.trim();
    let printed = guest.run("sh -c 'echo $$; kill -9 $$'");
    let killed = printed.lines().next().unwrap_or_default();
    let shell = guest.run("echo $$");
    let shell = shell.trim();
    let [opens, execs, exits, signals] = running.map(|script| script.interrupt());

    assert!(opens.starts_with("TIME     PID     COMM              FD ERR      US PATH\n"));
    let opened = lines(&opens);
    let of = |path: &str| {
        let found = opened.iter().find(|line| line.last() == Some(&path));
        found.unwrap_or_else(|| panic!("no {path} in {opens}"))
    };
    let letter = of("/tmp/letter");
    assert_eq!(letter[2..5], ["busybox", "3", "0"], "{opens}");
    assert!(number(letter[5]) > 0, "{opens}");
    // ENOENT is 2.
    assert_eq!(of("/nowhere")[1..5], [shell, "sh", "-1", "2"], "{opens}");

    let expected = [
        shell,
        "sh",
        "/bin/busybox:",
        "/bin/busybox",
        "cat",
        "/tmp/letter",
    ];
    assert!(has(&execs, &expected), "{execs}");
    // The rest behind the name is the whole line.
    let exec = lines(&execs)
        .into_iter()
        .find(|line| line.get(1) == Some(&exited));
    let exec = exec.unwrap_or_else(|| panic!("no {exited} in {execs}"));
    assert_eq!(
        exec[5..],
        ["sh", "-c", "echo", "$$;", "exit", "3"],
        "{execs}"
    );

    let exit = |pid: &str| {
        let found = lines(&exits)
            .into_iter()
            .find(|line| line.get(1) == Some(&pid));
        let found = found.unwrap_or_else(|| panic!("no {pid} in {exits}"));
        (found[2..4].join(" "), found[5..].join(" "))
    };
    let parent = format!("{shell} sh");
    assert_eq!(exit(exited), (parent.clone(), "exit 3".into()), "{exits}");
    assert_eq!(exit(killed), (parent, "signal 9".into()), "{exits}");

    assert!(
        has(&signals, &[killed, "sh", "9", "KILL", killed, "sh", "sent"]),
        "{signals}"
    );
    // A process that ends signals its parent.
    assert!(
        has(&signals, &[exited, "sh", "17", "CHLD", shell, "sh"]),
        "{signals}"
    );
    guest.stop();
}

#[test]
fn system_calls_are_counted() {
    let host = host!();
    let mut guest = Watched::new(host);
    let shell = guest.run("echo $$");
    let all = guest.trace(&["syscount.bt"]);
    let of_shell = guest.trace(&["syscount.bt", shell.trim()]);
    guest
        .run("syscount 250; dd if=/dev/zero of=/tmp/x bs=10 count=37 status=none; true < /nowhere");
    let [all, of_shell] = [all, of_shell].map(|script| script.interrupt());
    assert!(
        entry(&all, "@nanoseconds[getppid]").starts_with("count 250, average "),
        "{all}"
    );
    let calls = |output: &str, call: &str| {
        let found = entry(output, &format!("@nanoseconds[{call}]"));
        number(
            found
                .trim_start_matches("count ")
                .split(',')
                .next()
                .unwrap_or_default(),
        )
    };
    // The shell writes two marks at least, syscount's own line is a few pieces, and dd writes 37
    // times.
    assert!((40..60).contains(&calls(&all, "write")), "{all}");
    assert!((2..20).contains(&calls(&of_shell, "write")), "{of_shell}");
    assert!(!of_shell.contains("@nanoseconds[getppid]"), "{of_shell}");
    assert!(
        number(entry(&of_shell, "@failed[openat]")) >= 1,
        "{of_shell}"
    );
    guest.stop();
}

#[test]
fn time_and_memory_are_told_by_program() {
    let host = host!();
    let mut guest = Watched::new(host);
    let scripts = [
        "pagefaults.bt",
        "runqlat.bt",
        "offcpu.bt",
        "mallocsizes.bt",
        "profile.bt",
    ];
    let running = scripts.map(|script| guest.trace(&[script]));
    // Names of a program are known while it runs: it runs until they are shown.
    let spinning = guest.run(
        "spin & echo $!; allocs 5 10; mkfifo /tmp/fifo; (read line < /tmp/fifo) & \
         until grep -q '^State:.S' /proc/$!/status; do :; done; sleep 0.3; echo > /tmp/fifo",
    );
    let spinning = spinning.lines().next().unwrap_or_default();
    let [faults, waits, away, sizes, samples] = running.map(|script| script.interrupt());
    guest.run(&format!("kill -9 {spinning}"));

    assert!(
        number(entry(&faults, "@faults[allocs, write, program]")) > 5,
        "{faults}"
    );
    assert!(
        number(entry(&faults, "@faults[allocs, execute, program]")) > 0,
        "{faults}"
    );
    let counted = faults.lines().filter(|line| line.starts_with("@faults["));
    let counted: u64 = counted
        .map(|line| number(line.rsplit(' ').next().unwrap_or_default()))
        .sum();
    // Each has a time; one may be in progress.
    assert!(
        counted - histogram(&faults, "@nanoseconds") <= 1,
        "{faults}"
    );

    assert!(histogram(&waits, "@microseconds") > 5, "{waits}");
    number(entry(&waits, "@longest[allocs]"));

    // The shell's read slept when another program began to wait 300 ms, and was woken behind that.
    let asleep = away
        .split("@microseconds[")
        .filter(|entry| entry.contains("\n    fifo_open+"))
        .filter_map(|entry| entry.trim().rsplit_once("\n, ")?.1.split_once("]: "))
        .filter(|(name, _)| *name == "sh")
        .map(|(_, time)| number(time));
    assert!(asleep.max() >= Some(300_000), "{away}");

    // 1, 2, 3, 4 and 5 bytes, and the C library's own blocks.
    let total = entry(&sizes, "@total[allocs]");
    assert!(total.starts_with("count 5, average 3, total 15"), "{sizes}");
    assert_eq!(histogram(&sizes, "@bytes[allocs]"), 5, "{sizes}");

    assert!(samples.contains("@samples[spin, "), "{samples}");
    assert!(samples.contains("    spin_million+"), "{samples}");
    guest.stop();
}

#[test]
fn disks_are_measured_by_kind_of_request() {
    let host = host!();
    let mut guest = Watched::new(host);
    must(
        &mut guest,
        "dd if=/dev/zero of=/tmp/disk bs=4096 count=64 status=none && losetup /dev/loop0 /tmp/disk",
    );
    let script = guest.trace(&["biolatency.bt"]);
    let copy = |from: &str, to: &str| {
        format!("dd if={from} of={to} bs=4096 count=8 conv=fsync status=none")
    };
    must(&mut guest, &copy("/dev/zero", "/dev/loop0"));
    must(&mut guest, &copy("/dev/zero", "/dev/loop0"));
    must(&mut guest, "echo 3 > /proc/sys/vm/drop_caches");
    must(&mut guest, &copy("/dev/loop0", "/tmp/back"));
    // A RAM disk has no queue of requests, and is not shown.
    must(&mut guest, "insmod /lib/brd.ko");
    must(&mut guest, &copy("/dev/zero", "/dev/ram0"));
    let found = script.interrupt();
    assert!(found.starts_with("Measuring disks. Interrupt to see them.\n"));
    // Eight pages in a row are at least one request, and at most eight.
    for (kind, requests) in [("write", 2..=16), ("read", 1..=16)] {
        let measured = histogram(&found, &format!("@microseconds[loop0, {kind}]"));
        assert!(requests.contains(&measured), "{kind}: {found}");
    }
    assert!(
        !found.contains("ram0") && !found.contains("@errors"),
        "{found}"
    );
    guest.stop();
}

#[test]
fn connections_are_shown_by_their_states() {
    const PORT: &str = "7000";
    let host = host!();
    let mut guest = Watched::new(host);
    must(&mut guest, "ifconfig lo 127.0.0.1 up");
    let script = guest.trace(&["tcpstates.bt"]);
    for address in ["127.0.0.1", "::1"] {
        let printed = guest.run(&format!(
            "nc -l -p {PORT} < /dev/null & until netstat -ltn | grep -q :{PORT}; do :; done; \
             echo hello | nc {address} {PORT}; wait $!"
        ));
        assert!(printed.contains("hello"), "{address}: {printed}");
    }
    let found = script.interrupt();
    assert!(found.starts_with("TIME     LOCAL "), "{found}");
    for address in ["127.0.0.1", "::1"] {
        // The client's port is arbitrary.
        let client: Vec<Vec<&str>> = lines(&found)
            .into_iter()
            .filter(|line| line[1] == address && line[2] != PORT)
            .collect();
        let states: Vec<[&str; 2]> = client.iter().map(|line| [line[5], line[6]]).collect();
        assert_eq!(
            states[..2],
            [["CLOSE", "SYN_SENT"], ["SYN_SENT", "ESTABLISHED"]],
            "{found}"
        );
        assert!(
            client[0][3..5] == [address, PORT] && client[0][7] == "-",
            "{found}"
        );
        number(client[1][7]);
        // A listener listens for both protocols.
        assert!(
            has(&found, &["::", PORT, "::", "0", "CLOSE", "LISTEN"]),
            "{found}"
        );
        let of_listener = if address == "::1" {
            address
        } else {
            "::ffff:127.0.0.1"
        };
        let accepted = lines(&found).iter().any(|line| {
            line[1..3] == [of_listener, PORT] && line[5..7] == ["SYN_RECV", "ESTABLISHED"]
        });
        assert!(accepted, "{found}");
    }
    guest.stop();
}

#[test]
fn who_is_killed_for_memory_is_shown() {
    let host = host!();
    let mut guest = Watched::new(host);
    let script = guest.trace(&["oom.bt"]);
    // The best candidate of the OOM killer, then a request to kill it.
    let printed = guest.run(
        "sleep 1000 & until grep -q sleep /proc/$!/comm; do :; done; echo 1000 > /proc/$!/oom_score_adj; echo $!; echo f > /proc/sysrq-trigger; wait $! 2> /dev/null",
    );
    let victim = printed.lines().next().unwrap_or_default();
    let found = script.interrupt();
    let said: Vec<&str> = found.lines().collect();
    assert_eq!(said[0], "Waiting for memory to be short.");
    assert!(said[1].ends_with(" Out of memory (machine)"), "{found}");
    assert!(
        said[2].starts_with("  asked: kworker/") && said[2].ends_with(", order -1"),
        "{found}"
    );
    let kills = format!("  kills: sleep, process {victim}, points ");
    assert!(
        said[3].starts_with(&kills) && said[3].ends_with(" pages"),
        "{found}"
    );
    let stack: Vec<&str> = said[4..].iter().map(|line| line.trim()).collect();
    assert!(
        stack.iter().any(|line| line.starts_with("out_of_memory+")),
        "{found}"
    );
    guest.stop();
}

/// Checks the kernel's packets, through the same structure as those of programs.
#[test]
fn packets_are_read_as_the_structure_that_is_the_same_everywhere() {
    const PINGS: u64 = 3;
    let host = host!();
    let mut guest = Watched::new(host);
    must(&mut guest, "ifconfig lo 127.0.0.1 up");
    let script = guest.trace(&[
        "-e",
        r#"
        kprobe:icmp_rcv:entry {
            $packet = (struct sk_buff *)arg0;
            printf("%d %d %s %s %d\n", xlate <struct icmp_hdr_dt *>($packet)->icmp_type, xlate <struct icmp_hdr_dt *>($packet)->icmp_seq,
                xlate <ipinfo_t *>($packet)->ip_saddr, xlate <ipinfo_t *>($packet)->ip_daddr, xlate <ipinfo_t *>($packet)->ip_plength);
        }"#,
    ]);
    let printed = guest.run(&format!("ping -c {PINGS} -i 0.1 -s 56 127.0.0.1"));
    assert!(printed.contains("3 packets received"), "{printed}");
    let found = script.interrupt();
    // Each echo, and its reply: eight bytes of header before the requested ones.
    let expected: Vec<String> = (0..PINGS)
        .flat_map(|n| [8, 0].map(|kind| format!("{kind} {n} 127.0.0.1 127.0.0.1 64")))
        .collect();
    assert_eq!(found.lines().collect::<Vec<_>>(), expected);
    guest.stop();
}
