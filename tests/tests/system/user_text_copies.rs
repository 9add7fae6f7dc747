//! Programs in a running Linux guest that have pages of their own instead of their file's, because
//! their text was written to. They are traced there, and no foreign bytes are mistaken for ours.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use introspect::x86_64::PAGE;
use probes::engine::Filter;
use probes::event::EventKind;
use probes::probe::{Probe, Target};
use support::host;
use support::shell::COMMAND_LIMIT;
use support::user_guest::{FSLOAD, UserGuest};
use vmm::trap::INT3;

/// The address of the guest's small programs, mapped as they lie in their files.
const TEXT: u64 = 0x40_0000;

#[test]
fn a_program_that_writes_its_own_text_sees_its_own_bytes() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    let untraced = shell.output("selfmod 7");
    assert!(untraced.starts_with("selfmod: 41 42 "), "{untraced}");
    // Its file is found while a process has it mapped.
    let holder = guest.spawn("selfmod 1000000000000");
    let mut traced = guest.session();
    let probes: Vec<Probe> = ["entry", "return"]
        .iter()
        .flat_map(|moment| guest.probes(&format!("uprobe:/bin/selfmod:steady:{moment}")))
        .collect();
    guest.kill(holder);
    traced.enable_all(&probes, &Filter::default());
    let hidden = guest.engine.stats().hidden;
    for _ in 0..2 {
        assert_eq!(shell.output("selfmod 7"), untraced);
    }
    // Calls while it can write to its text are not seen; calls before and after are.
    assert_eq!(traced.recorded("steady"), (28, 28));
    let stats = guest.engine.stats();
    // The first instruction, and one return address of two: the other one was not hit yet.
    assert!(stats.hidden - hidden >= 4, "{stats:?}");
    let sites = guest.user_sites();
    traced.finish();
    guest.assert_clean(&sites);
}

#[test]
fn a_program_whose_text_another_writes_has_its_own_bytes() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y")]);
    let pid = guest.spawn_sleeper("/tmp/y 0 1000");
    let mut traced = guest.session();
    traced.enable_fsload("/tmp/y");
    let sites = guest.user_sites();
    // A meaningless byte of the ELF header, as a debugger would write a breakpoint.
    let seen = shell.output(&format!(
        "printf X | dd of=/proc/{pid}/mem bs=1 seek=$((0x400009)) conv=notrunc 2> /dev/null; \
         dd if=/proc/{pid}/mem bs=64 skip=$((0x400000 / 64)) count=16 2> /dev/null | busybox sha256sum; \
         head -c 1024 {FSLOAD} > /tmp/z; printf X | dd of=/tmp/z bs=1 seek=9 conv=notrunc 2> /dev/null; \
         busybox sha256sum < /tmp/z"
    ));
    let sums: Vec<&str> = seen.lines().collect();
    assert_eq!(sums.len(), 2, "{seen}");
    assert_eq!(sums[0], sums[1]);
    // It goes on, and is seen: its page is its own, with traps of its own.
    let own = guest.sites_elsewhere(&sites);
    let functions = traced.probes.iter();
    let functions = functions.filter(|probe| probe.kind() == EventKind::Entry);
    // Return addresses, too, if it was not asleep.
    assert!(own.len() >= functions.count(), "{own:?}");
    assert_eq!(guest.standing(&own), own);
    let before = traced.recorded("one_round");
    let wait = Instant::now() + 2 * COMMAND_LIMIT;
    while traced.recorded("one_round").1 < before.1 + 2 {
        assert!(
            Instant::now() < wait,
            "{before:?} {:?}",
            guest.engine.stats()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    // Other processes have the file's page, and this one's is unused when it has ended.
    assert_eq!(shell.output("/tmp/y 3 0"), "fsload: 3 rounds");
    guest.kill(pid);
    assert_eq!(guest.user_sites().intersection(&own).count(), 0);
    assert_eq!(guest.standing(&own), BTreeSet::new());
    traced.finish();
    guest.assert_clean(&sites);
}

#[test]
fn a_breakpoint_of_another_debugger_is_hit_by_both() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y")]);
    let pid = guest.spawn_sleeper("/tmp/y 0 500");
    shell.output(&format!("kill -STOP {pid}"));
    guest.wait_until_stopped(pid);
    let mut traced = guest.session();
    traced.enable_fsload("/tmp/y");
    let of_file = guest.user_sites();
    let own = || guest.sites_elsewhere(&of_file);
    let probe = &guest.probes("uprobe:/tmp/y:one_round:entry")[0];
    let Target::User { text, .. } = &probe.target else {
        panic!("{probe:?}")
    };
    let (at, original) = (TEXT + text.offset, text.code[0]);
    let write = |byte: u8| {
        shell.output(&format!(
            "printf '\\{byte:03o}' | dd of=/proc/{pid}/mem bs=1 seek={at} conv=notrunc 2> /dev/null"
        ))
    };
    let read = || {
        shell.output(&format!(
            "dd if=/proc/{pid}/mem bs=1 skip={at} count=1 2> /dev/null | busybox od -A n -t u1"
        ))
    };
    write(original);
    let all = own();
    assert_eq!(all.len(), of_file.len(), "{all:?} {of_file:?}");
    for _ in 0..2 {
        write(INT3);
        assert_eq!(own(), all, "it is hit by both");
        assert_eq!(read().trim(), INT3.to_string());
        write(original);
        assert_eq!(own(), all);
        assert_eq!(read().trim(), original.to_string());
    }
    // Probes come and go there as in the file.
    let mut other = guest.session();
    other.enable("uprobe:/tmp/y:program:entry", &Filter::default());
    traced.finish();
    assert_eq!(own().len(), 1);
    other.enable_fsload("/tmp/y");
    assert_eq!(own(), all);
    // An unhandled breakpoint ends the program, and its last call is seen.
    let before = other.recorded("one_round");
    shell.output(&format!(
        "printf '\\{INT3:03o}' | dd of=/proc/{pid}/mem bs=1 seek={at} conv=notrunc 2> /dev/null; kill -CONT {pid}"
    ));
    guest.wait_for_process(pid, "gone", |task| task.is_none());
    assert_eq!(other.recorded("one_round"), (before.0 + 1, before.1));
    other.finish();
    // The other's own breakpoint stays in the freed page until it is reused.
    let mut ours = all;
    ours.retain(|site| site.0.0 % PAGE != at % PAGE);
    guest.assert_clean(&ours);
}

/// Checks a program's own page, and its end. In each way `moves` calls the function there once
/// before the page is written to and once after that. Then it moves, unmaps, leaves behind or dumps
/// the page. A dump concerns the traps of that program alone.
#[test]
fn a_page_that_a_program_gives_up_keeps_nothing_of_ours() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    guest.wait_until_stopped(guest.spawn("moves away"));
    guest.spawn_sleeper(&format!("{FSLOAD} 0 1000"));
    let mut traced = guest.session();
    traced.enable("uprobe:/bin/moves:far:entry", &Filter::default());
    traced.enable("uprobe:/bin/moves:far:return", &Filter::default());
    let near = traced.enable("uprobe:/bin/moves:near:entry", &Filter::default());
    let first_page = match &traced.probes[near[0] as usize].target {
        Target::User { text, .. } => text.physical.map(|place| place.0 / PAGE),
        other => panic!("{other:?}"),
    };
    let first_page = first_page.expect("it is in memory");
    let other = format!("uprobe:{FSLOAD}:one_round:entry");
    traced.enable(&other, &Filter::default());
    let entry = match &traced.probes[0].target {
        Target::User { text, .. } => text.offset,
        other => panic!("{other:?}"),
    };
    let of_file = guest.user_sites();
    // The function is alone in its page, and its returns go to another page.
    let own = || {
        let mut sites = guest.sites_elsewhere(&of_file);
        sites.retain(|site| site.0.0 % PAGE == entry % PAGE);
        sites
    };
    // The child of `fork` is traced for as long as the process that the page was made for exists.
    for (way, calls) in [
        ("away", 2..=2),
        ("gone", 2..=2),
        ("fork", 2..=3),
        ("core", 2..=2),
    ] {
        let before = traced.recorded("far").0;
        let pid = guest.spawn(&format!(
            "sh -c 'ulimit -c unlimited; cd /tmp; exec moves {way}'"
        ));
        guest.wait_until_stopped(pid);
        // Nothing is behind the function.
        let nothing = TEXT + entry + 0x200;
        shell.output(&format!(
            "printf X | dd of=/proc/{pid}/mem bs=1 seek={nothing} conv=notrunc 2> /dev/null"
        ));
        let sites = own();
        let suspended = guest.engine.stats().suspended_in_programs;
        assert_eq!(
            (sites.len(), guest.standing(&sites)),
            (1, sites.clone()),
            "{way}"
        );
        shell.output(&format!("kill -CONT {pid}"));
        let deadline = Instant::now() + COMMAND_LIMIT;
        while !own().is_empty() {
            assert!(Instant::now() < deadline, "{way}: {:?}", own());
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(guest.standing(&sites), BTreeSet::new(), "{way}");
        let seen = traced.recorded("far").0 - before;
        assert!(calls.contains(&seen), "{way}: {seen}");
        if way == "core" {
            guest.wait_for_process(pid, "dumped and gone", |task| task.is_none());
        }
        let suspended = guest.engine.stats().suspended_in_programs - suspended;
        let dumped = guest.user_sites();
        let dumped = dumped.iter().filter(|site| site.0.0 / PAGE == first_page);
        let expected = dumped.filter(|_| way == "core").count();
        assert_eq!(suspended, expected as u64, "{way}");
    }
    // Also in the file's first page, which is dumped with the program's own.
    let dumped = "for place in near far; do grep -c $place:PX /tmp/core; done";
    assert_eq!(shell.output(dumped), "1\n1");
    traced.finish();
    guest.assert_clean(&of_file);
}
