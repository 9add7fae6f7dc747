//! A restored Linux guest as its user finds it: the shell answers, copies are separate, time
//! continues, and it ends as requested.

use std::fs;
use std::time::{Duration, Instant};

use support::shell::COMMAND_LIMIT;
use support::{Kernel, Shell, host};
use vmm::RunEnd;

#[test]
fn the_shell_answers() {
    let host = host!();
    let shell = Shell::new(host);
    for (command, output, status) in [
        ("echo 6*7=$((6*7))", "6*7=42\n", 0),
        (
            "for i in 1 2 3; do echo $i | sed s/^/n/; done",
            "n1\nn2\nn3\n",
            0,
        ),
        ("sh -c 'kill -9 $$'", "Killed\n", 137),
        (
            "cat /nothing",
            "cat: can't open '/nothing': No such file or directory\n",
            1,
        ),
        ("forks 20", "forks: 20\n", 0),
        ("syscount 300", "syscount: 300\n", 0),
        ("fsload 5 0", "fsload: 5 rounds\n", 0),
    ] {
        let answer = shell.run(command);
        assert_eq!(
            (answer.output.as_str(), answer.status),
            (output, status),
            "{command}"
        );
    }
}

#[test]
fn copies_of_one_snapshot_run_side_by_side_and_share_nothing() {
    let host = host!();
    let copies = [Shell::new(host), Shell::new(host)];
    for (index, copy) in copies.iter().enumerate() {
        copy.output(&format!("echo {index} > /tmp/own{index}"));
    }
    for (index, copy) in copies.iter().enumerate() {
        assert_eq!(copy.output("cat /tmp/own*"), index.to_string());
        assert_eq!(copy.output("ls /tmp"), format!("own{index}"));
    }
    let later = Shell::new(host);
    assert_eq!(later.output("ls /tmp"), "", "the snapshot has changed");
}

/// Returns the seconds since boot and since 1970, by the guest's clocks.
fn times(shell: &Shell) -> (f64, u64) {
    let text = shell.output("cat /proc/uptime; date +%s");
    let mut numbers = text.split_whitespace();
    let uptime = numbers.next().and_then(|n| n.parse().ok());
    let date = numbers.nth(1).and_then(|n| n.parse().ok());
    let (Some(uptime), Some(date)) = (uptime, date) else {
        panic!("uptime and date: {text:?}")
    };
    (uptime, date)
}

#[test]
fn time_stands_still_between_save_and_restore_and_goes_on_after() {
    let host = host!();
    const AWAY: Duration = Duration::from_secs(5);
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let saved = folder.path().join("saved");
    let shell = Shell::new(host);
    let running = Instant::now();
    let (uptime, date) = times(&shell);
    shell.save(&saved);
    drop(shell);
    let ran_before = running.elapsed();
    std::thread::sleep(AWAY);
    let running = Instant::now();
    let shell = Shell::restore(host, Kernel::small(), &saved);
    let (later, later_date) = times(&shell);
    let ran = (ran_before + running.elapsed()).as_secs_f64();
    // The time that passes for the guest is its run time: here as long as the commands take.
    let passed = later - uptime;
    assert!(
        (0.0..ran + 0.5).contains(&passed),
        "{passed} s passed in the guest, which ran {ran} s"
    );
    assert!(later_date >= date, "{date} before, {later_date} after");
    // Timers armed by the restored guest fire, and its clocks agree on the elapsed time.
    let answer = shell.start("sleep 1").answer(COMMAND_LIMIT);
    assert_eq!(answer.status, 0);
    let (end, _) = times(&shell);
    // `later` was read while this copy ran.
    let most = running.elapsed().as_secs_f64() + 0.5;
    assert!(
        (1.0..most).contains(&(end - later)),
        "sleep 1 took {} s of the guest's time within {most} s",
        end - later
    );
}

#[test]
fn a_timer_that_was_armed_when_the_guest_was_saved_fires() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let saved = folder.path().join("saved");
    // Longer each time, for a host that is too busy to save the guest within the sleep.
    for seconds in [3, 10, 30] {
        let shell = Shell::new(host);
        shell.type_line(&format!("echo go; sleep {seconds}; echo awake=$((1+1))"));
        shell.linux.wait_for("go\r\n", COMMAND_LIMIT);
        // Time to start `sleep`, not to end it.
        std::thread::sleep(Duration::from_secs(1));
        shell.save(&saved);
        if !shell.linux.serial.since(0).contains("awake=2") {
            break;
        }
        assert!(seconds < 30, "{}", shell.linux.situation());
        fs::remove_dir_all(&saved).unwrap_or_else(|e| panic!("{e}"));
    }
    let shell = Shell::restore(host, Kernel::small(), &saved);
    shell.linux.wait_for("awake=2", COMMAND_LIMIT);
}

#[test]
fn the_guest_ends_the_way_it_is_told() {
    let host = host!();
    for (command, reset) in [
        ("reboot -f", true),
        // Without ACPI there is no power switch: Linux halts.
        ("busybox poweroff -f", false),
        ("busybox halt -f", false),
        // init waits only for the shell.
        ("exit", true),
    ] {
        let shell = Shell::new(host);
        shell.type_line(command);
        let end = shell.linux.end(COMMAND_LIMIT);
        match (&end, reset) {
            (RunEnd::Reset { .. }, true) | (RunEnd::Halted, false) => {}
            _ => panic!("{command}: {end}\n{}", shell.linux.situation()),
        }
        assert!(end.is_orderly());
        let told = shell
            .linux
            .serial
            .since(0)
            .contains("exotrace: sh ended with status 0");
        assert_eq!(told, command == "exit", "{}", shell.linux.serial.since(0));
    }
}
