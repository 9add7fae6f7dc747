//! Functions of a running Linux kernel, probed from outside: exact events, exact counts, an
//! unchanged guest.

use std::sync::Arc;
use std::time::Duration;

use introspect::Gva;
use introspect::x86_64::paging::translate;
use probes::engine::{Capture, Engine, Filter, Match, RingSize, StringArgument};
use probes::event::{Event, EventKind};
use probes::kernel_view::KernelView;
use probes::name::ProbeName;
use probes::probe::{Moment, Probe, Target};
use probes::provider;
use support::shell::COMMAND_LIMIT;
use support::tracing::{self, SLOTS, is_entry};
use support::user_guest::{FOR_EVER, UserGuest};
use support::{Host, Shell, Tracing, host, rich, tiny_program};
use vmm::trap::ArmError;

const WRITES: usize = 200;
const BLOCK: u64 = 0x400;

fn traced_shell(host: &Host) -> (Shell, Arc<KernelView>, Engine) {
    let shell = Shell::new(host);
    let view = shell.linux.view();
    let engine = shell.linux.engine(&view);
    (shell, view, engine)
}

/// Checks that data of the kernel gets no trap.
#[test]
fn no_trap_stands_where_the_kernel_executes_nothing() {
    let host = host!();
    let (shell, view, _) = traced_shell(host);
    let data = view.kernel.symbols.address_of("init_task");
    let data = data.unwrap_or_else(|| panic!("no init_task"));
    let traps = shell.linux.machine().traps();
    let ram = shell.linux.machine().ram();
    // Not every host supports no-execute pages for its guests.
    let place = translate(ram, view.kernel.space, Gva(data)).unwrap_or_else(|e| panic!("{e}"));
    let armed = traps.arm_kernel(Gva(data), view.kernel.space);
    match &armed {
        Ok(site) => assert!(traps.disarm(*site)),
        Err(ArmError::NotExecutable { address }) => assert_eq!(address.0, data),
        Err(error) => panic!("{error}"),
    }
    assert_eq!(armed.is_err(), place.no_execute);
}

/// Returns the line that makes a program and runs it. Its page faults leave the kernel with a
/// number of its choice in R15. The kernel's way out to programs begins where all registers lie on
/// the stack, R15 on top.
fn fault_with(r15: u64) -> String {
    const PAGES: u32 = 64;
    let area = tiny_program::BASE as u32 + 0x1000;
    let mut code = vec![0x49, 0xbf]; // mov $r15, %r15
    code.extend(r15.to_le_bytes());
    code.push(0xbf); // mov $area, %edi
    code.extend(area.to_le_bytes());
    code.push(0xb9); // mov $PAGES, %ecx
    code.extend(PAGES.to_le_bytes());
    code.extend([0xc6, 0x07, 1]); // again: movb $1, (%rdi)
    code.extend([0x81, 0xc7, 0, 0x10, 0, 0]); // add $4096, %edi
    code.extend([0xff, 0xc9, 0x75, 0xf3]); // dec %ecx; jnz again
    code.extend(tiny_program::EXIT);
    let file = tiny_program::elf(&code, PAGES.into());
    let made = tiny_program::line_that_makes("/tmp/faults", &file);
    format!("{made} && /tmp/faults && rm /tmp/faults")
}

/// Checks jumps: code that is jumped to has no return address. The value that its caller left on
/// the stack may be a number chosen by a program.
#[test]
fn a_program_does_not_choose_where_traps_for_returns_stand() {
    let host = host!();
    let (shell, view, engine) = traced_shell(host);
    let linux = &shell.linux;
    let before = linux.text_hash(&view);
    let symbol = |name| {
        let address = view.kernel.symbols.address_of(name);
        Gva(address.unwrap_or_else(|| panic!("no {name}")))
    };
    let table = linux.machine().traps();
    let way_out = "kprobe::swapgs_restore_regs_and_return_to_usermode:return";
    let mut session = tracing::session(&engine, SLOTS);
    tracing::enable(
        &mut session,
        &tracing::probe(&view, way_out),
        &Filter::default(),
    );
    // Data; and text where no call ends: behind the first instruction of a function.
    for chosen in [symbol("linux_banner"), Gva(symbol("vfs_write").0 + 1)] {
        let place = translate(linux.machine().ram(), view.kernel.space, chosen);
        let place = place.unwrap_or_else(|e| panic!("{chosen}: {e}")).gpa;
        let byte = linux.byte(place);
        let refused = engine.stats().without_return;
        let answer = shell.run(&fault_with(chosen.0));
        assert_eq!(answer.status, 0, "{answer:?}");
        assert!(engine.stats().without_return > refused, "{chosen}");
        assert_eq!(linux.byte(place), byte, "{chosen}");
        assert!(table.stats().iter().all(|site| site.address != chosen));
    }
    session.disable_all();
    assert_eq!(linux.text_hash(&view), before);
}

/// Checks functions in boot-only memory, which the guest may use for anything afterwards.
#[test]
fn functions_that_the_kernel_has_freed_are_not_offered() {
    let host = host!();
    let shell = Shell::new(host);
    let view = shell.linux.view();
    let exact = tracing::pattern("kprobe::start_kernel:entry");
    assert!(provider::kernel_probes(&view, &exact).probes.is_empty());
    let all = tracing::pattern("kprobe:::entry");
    let found = provider::kernel_probes(&view, &all).probes;
    assert!(found.len() > 1000, "{}", found.len());
    for probe in found {
        let Target::Kernel { address, .. } = probe.target else {
            panic!("{probe:?}")
        };
        let place = translate(shell.linux.machine().ram(), view.kernel.space, address);
        assert!(place.is_ok_and(|place| !place.no_execute), "{probe:?}");
    }
}

#[test]
fn every_write_of_dd_is_seen_with_its_process_arguments_and_result() {
    let host = host!();
    let (shell, view, engine) = traced_shell(host);
    let linux = &shell.linux;
    let before = linux.text_hash(&view);
    let names = ["vfs_read", "vfs_write", "vfs_open", "do_filp_open"];
    let none = engine.stats();
    let tracing = Tracing::new(linux, &engine, &names, &Filter::default(), SLOTS);
    assert_ne!(
        linux.text_hash(&view),
        before,
        "the hash does not see traps"
    );
    let probes = tracing.probes().to_vec();
    let addresses = [0, 2, 4, 6].map(|probe| tracing.address(probe));
    let known: Vec<_> = probes
        .iter()
        .map(|probe| {
            let signature = probe.signature.as_ref()?;
            Some((signature.arguments.len(), signature.returns.as_deref()))
        })
        .collect();
    assert_eq!(
        known,
        [
            Some((4, None)),
            Some((4, Some("ssize_t"))),
            Some((4, None)),
            Some((4, Some("ssize_t"))),
            Some((2, None)),
            Some((2, Some("int"))),
            Some((3, None)),
            Some((3, Some("struct file *"))),
        ],
        "arguments by BTF"
    );

    let line = format!("sh -c 'echo pid=$$; exec dd if=/dev/zero of=/tmp/x bs=1k count={WRITES}'");
    let answer = shell.start(&line).answer(4 * COMMAND_LIMIT);
    let (events, _) = tracing.finish(&none);
    assert!(answer.output.contains("200+0 records out"), "{answer:?}");
    let pid = answer
        .output
        .lines()
        .find_map(|l| l.strip_prefix("pid=")?.parse::<u32>().ok());
    assert!(pid.is_some(), "no pid: {answer:?}");

    // One task, and none of these functions calls another of them but do_filp_open: calls and
    // returns alternate.
    let of = |function: usize| {
        let own = events
            .iter()
            .filter(move |e| e.pid == pid && e.tid == pid && e.probe as usize / 2 == function);
        own.collect::<Vec<_>>()
    };
    let calls = |function: usize, size: u64| {
        let own = of(function);
        let mut found = 0;
        for pair in own.chunks(2) {
            let [entry, exit] = pair else {
                panic!("{} has no return: {pair:?}", names[function])
            };
            assert_eq!(
                (entry.kind, exit.kind),
                (EventKind::Entry, EventKind::Return),
                "{pair:?}"
            );
            assert_eq!(entry.pc, addresses[function]);
            assert!(entry.tsc < exit.tsc, "{pair:?}");
            assert_eq!(exit.arguments.len(), 1, "{pair:?}");
            if entry.arguments[2] == size {
                assert_eq!(exit.arguments, [size], "{pair:?}");
                found += 1;
            }
        }
        found
    };
    assert_eq!(calls(1, BLOCK), WRITES, "vfs_write");
    assert_eq!(calls(0, BLOCK), WRITES, "vfs_read");

    for (function, arguments) in [(2, 2), (3, 3)] {
        let entries: Vec<_> = of(function).into_iter().filter(|e| is_entry(e)).collect();
        assert!(entries.len() >= 2, "{}: {entries:?}", names[function]);
        for entry in entries {
            assert!(entry.arguments[arguments - 1] != 0, "{entry:?}");
        }
    }
    assert_eq!(
        linux.text_hash(&view),
        before,
        "something was left in the kernel's text"
    );
    assert_eq!(shell.output("echo well"), "well");
}

/// Checks probes by the number alone, as in the kernel's own table: the calls of one program, with
/// the name of the file that it opens.
#[test]
fn system_calls_of_a_program_are_seen_with_arguments_strings_and_results() {
    const WRITE: u32 = 1;
    const EXIT_GROUP: u32 = 231;
    const OPENAT: u32 = 257;
    let host = host!();
    let (shell, view, engine) = traced_shell(host);
    let before = shell.linux.text_hash(&view);
    let capture = Capture {
        comm: true,
        strings: vec![StringArgument {
            argument: 1,
            length: 64,
        }],
        ..Capture::default()
    };
    let filter = Filter {
        comms: Match::In(vec![b"dd".to_vec()]),
        ..Filter::default()
    };
    let size = RingSize::for_capture(SLOTS, &capture);
    let mut session = engine.session(size).unwrap_or_else(|e| panic!("{e}"));
    for number in [WRITE, OPENAT, EXIT_GROUP] {
        for moment in [Moment::Entry, Moment::Return] {
            let probe = Probe {
                name: ProbeName::new("syscall", "", &number.to_string(), moment.name()),
                signature: None,
                target: Target::SystemCall { number, moment },
            };
            let enabled = session.enable(&probe, filter.clone(), capture.clone());
            enabled.unwrap_or_else(|e| panic!("{e}"));
        }
    }
    let line = format!("dd if=/dev/zero of=/tmp/x bs=1k count={WRITES} 2> /dev/null");
    let answer = shell.start(&line).answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.status, 0, "{answer:?}");
    let paused = shell.linux.machine().pause();
    let stats: Vec<_> = (0..6)
        .map(|n| session.probe_stats(n).unwrap_or_default())
        .collect();
    session.disable_all();
    drop(paused);
    let mut events = Vec::new();
    session.drain(|event| events.push(event));
    assert!(events.iter().all(|e| e.comm() == b"dd"), "{events:?}");
    let of = |probe: u32| events.iter().filter(move |e| e.probe == probe);
    let blocks = of(0).filter(|e| e.arguments[2] == BLOCK).count();
    let written = of(1).filter(|e| e.arguments == [BLOCK]).count();
    assert_eq!((blocks, written), (WRITES, WRITES));
    let opened = |probe| -> Vec<_> {
        let texts = of(probe).flat_map(|e| &e.strings);
        texts
            .map(|text| String::from_utf8_lossy(&text.bytes))
            .collect()
    };
    for probe in [2, 3] {
        let opened = opened(probe);
        assert!(
            opened.iter().any(|path| path == "/tmp/x"),
            "{probe}: {opened:?}"
        );
        assert!(
            opened.iter().any(|path| path == "/dev/zero"),
            "{probe}: {opened:?}"
        );
    }
    assert_eq!(of(2).count(), of(3).count());
    assert!(
        of(3).all(|e| e.arguments[0] < 16),
        "descriptors: {events:?}"
    );
    assert_eq!(
        (of(4).count(), of(5).count()),
        (1, 0),
        "exit_group does not come back"
    );
    assert!(
        stats
            .iter()
            .all(|s| s.hits == s.filtered + s.recorded && s.dropped == 0),
        "{stats:?}"
    );
    drop(session);
    assert_eq!(shell.linux.text_hash(&view), before);
}

#[test]
fn only_the_chosen_process_is_recorded_and_the_others_are_counted() {
    let host = host!();
    let (shell, _, engine) = traced_shell(host);
    let linux = &shell.linux;
    shell.type_line("fsload 0 5 > /dev/null & echo load=$!");
    let pid = linux.wait("pid of fsload", 0, COMMAND_LIMIT, |printed| {
        let digits = printed.rsplit_once("load=")?.1.split_once("\r\n")?.0;
        digits.parse::<u32>().ok()
    });
    let filter = Filter {
        pids: Match::In(vec![pid]),
        ..Filter::default()
    };
    let none = engine.stats();
    let tracing = Tracing::new(linux, &engine, &["vfs_write"], &filter, SLOTS);
    // The shell and this cat write, too.
    let version = shell.output("cat /proc/version");
    assert!(version.starts_with("Linux version 6.1"), "{version}");
    tracing.wait_for_hit();
    let (events, [entries, _]) = tracing.finish(&none);
    assert!(entries.filtered > 0 && !events.is_empty(), "{entries:?}");
    assert!(events.iter().all(|e| e.pid == Some(pid)), "{events:?}");
}

#[test]
fn calls_that_have_not_returned_are_counted_at_the_end() {
    const FUNCTION: &str = "kprobe:hrtimer_nanosleep";
    let host = host!();
    let guest = UserGuest::new(host);
    let [entry, exit] = ["entry", "return"].map(|moment| format!("{FUNCTION}:{moment}"));
    let trace = guest.shell.linux.vm.trace([entry.as_str(), exit.as_str()]);
    let trace = trace.unwrap_or_else(|e| panic!("{e}"));
    let sleeper = guest.spawn_sleeper(&format!("fsload 1 {FOR_EVER}"));
    let counts = trace.finish();
    assert_eq!(
        (counts.entries, counts.exits, counts.waiting_returns),
        (1, 0, 1),
        "{counts:?}"
    );
    guest.kill(sleeper);
}

#[test]
fn a_full_ring_drops_events_and_counts_each() {
    let host = host!();
    let (shell, _, engine) = traced_shell(host);
    let none = engine.stats();
    let names = ["vfs_read", "vfs_write"];
    let tracing = Tracing::new(&shell.linux, &engine, &names, &Filter::default(), 64);
    shell.output("dd if=/dev/zero of=/tmp/x bs=1k count=100 2> /dev/null");
    let (events, [entries, returns]) = tracing.finish(&none);
    assert_eq!(events.len(), 64);
    assert!(
        entries.dropped + returns.dropped >= 400 - 64,
        "{entries:?} {returns:?}"
    );
}

#[test]
fn attaching_and_detaching_time_and_again_leaves_a_busy_guest_as_it_was() {
    let host = host!();
    const ROUNDS: usize = 20;
    let (shell, view, engine) = traced_shell(host);
    let linux = &shell.linux;
    shell.type_line("fsload 0 1 &");
    let before = linux.text_hash(&view);
    let names = [
        "vfs_read",
        "vfs_write",
        "vfs_open",
        "vfs_rename",
        "vfs_unlink",
        "schedule",
    ];
    for round in 0..ROUNDS {
        let none = engine.stats();
        let tracing = Tracing::new(linux, &engine, &names, &Filter::default(), SLOTS);
        // At once, after some time, or once the workload has hit a trap.
        match round % 3 {
            0 => {}
            1 => std::thread::sleep(Duration::from_millis(4 * round as u64)),
            _ => tracing.wait_for_hit(),
        }
        tracing.finish(&none);
        assert_eq!(linux.text_hash(&view), before, "round {round}");
        assert!(linux.machine().traps().hits().is_empty(), "round {round}");
    }
    assert_eq!(shell.output("kill $!; echo $((40+2))"), "42");
    let log = shell.output("dmesg | grep -c -i -e bug -e oops -e stall || true");
    assert_eq!(log, "0", "{}", shell.output("dmesg | tail -n 20"));
}

#[test]
fn functions_of_a_loaded_module_are_traced_by_name() {
    let host = host!();
    let shell = rich::guest(host);
    let linux = &shell.linux;
    let names = ["brd_submit_bio", "vfs_write"];
    let pattern = tracing::pattern("kprobe::brd_submit_bio:entry");
    let unloaded = provider::kernel_probes(&linux.view(), &pattern);
    assert!(unloaded.probes.is_empty(), "{unloaded:?}");
    assert!(!unloaded.nearest.is_empty(), "names that look like it");

    shell.type_lines(&[&format!("insmod {}", rich::BRD)]);
    let view = linux.view();
    let found = provider::kernel_probes(&view, &pattern).probes;
    let module: Vec<_> = found.iter().map(|p| p.name.module.as_str()).collect();
    assert_eq!(module, ["brd"]);
    let engine = linux.engine(&view);
    let none = engine.stats();
    let tracing = Tracing::new(linux, &engine, &names, &Filter::default(), SLOTS);
    let address = tracing.address(0);
    let line = "dd if=/dev/zero of=/dev/ram0 bs=4k count=5 conv=fsync";
    let answer = shell.start(line).answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.status, 0, "{answer:?}");
    let (events, _) = tracing.finish(&none);
    let of_module = events.iter().filter(|e| e.probe < 2);
    let (entries, exits): (Vec<&Event>, Vec<&Event>) = of_module.partition(|e| is_entry(e));
    assert!(!entries.is_empty(), "{answer:?}");
    assert_eq!(entries.len(), exits.len());
    let module = view.modules.modules().first();
    let module = module.unwrap_or_else(|| panic!("no module is known"));
    assert!(
        module.module.range_of(address).is_some(),
        "{address:x?} in {:?}",
        module.module
    );
    assert!(entries.iter().all(|e| e.pc == address), "{entries:?}");
}
