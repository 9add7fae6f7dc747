//! The guest changes its own text while probes stand in it: its tracepoints, tracers, probes and modules. It finds what it looks for, no
//! hit goes astray, and nothing of the probes is left.

use std::collections::BTreeMap;

use std::time::{Duration, Instant};

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};
use introspect::kernel::jump_label::JumpLabelLayout;
use introspect::{Gpa, Gva, PhysicalMemory};
use probes::engine::{Capture, Filter, Session};
use probes::event::{Event, EventKind};
use probes::probe::{Moment, Probe, Target};
use support::host;
use support::shell::COMMAND_LIMIT;
use support::traced::{Traced, events};
use vmm::trap::INT3;

/// A size of reads and writes that nothing else in the guest has.
const SIZE: u64 = 999;

/// Reads and writes `count` times [`SIZE`] bytes.
fn copy(traced: &Traced, count: usize) {
    traced.tell(&format!(
        "dd if=/dev/zero of=/dev/null bs={SIZE} count={count} 2> /dev/null"
    ));
}

/// Numbers of the threads by the addresses of their `task_struct`s.
fn threads(traced: &Traced) -> BTreeMap<u64, i32> {
    traced.look(|look| {
        let processes = look.processes().unwrap_or_else(|e| panic!("{e}"));
        let mut found = BTreeMap::new();
        for process in &processes.items {
            let threads = look.threads_of(process).unwrap_or_else(|e| panic!("{e}"));
            found.extend(
                threads
                    .items
                    .iter()
                    .map(|thread| (thread.address.0, thread.pid)),
            );
        }
        found
    })
}

/// Waits until the session has recorded as many events; all it has.
fn wait_for(traced: &Traced, session: &mut Session, most: usize) -> Vec<Event> {
    let deadline = Instant::now() + COMMAND_LIMIT;
    let mut found = Vec::new();
    while found.len() < most {
        assert!(
            Instant::now() < deadline,
            "{}",
            traced.shell.linux.situation()
        );
        std::thread::sleep(Duration::from_millis(20));
        found.extend(events(session));
    }
    found
}

/// Events in the guest's own trace buffer.
fn in_buffer(traced: &Traced) -> usize {
    let stats = traced.tell("cat per_cpu/cpu0/stats");
    let field = |name: &str| -> usize {
        let line = stats.lines().find_map(|line| line.strip_prefix(name));
        let value = line.and_then(|value| value.trim().parse().ok());
        value.unwrap_or_else(|| panic!("{name} in {stats:?}"))
    };
    assert_eq!(field("overrun:"), 0, "{stats}");
    field("entries:")
}

#[test]
fn the_guests_own_tracepoint_and_ours() {
    const SOME: usize = 60;
    let host = host!();
    let traced = Traced::new(host, &["echo 0 > events/sched/sched_switch/enable"]);
    let before = traced.hash();
    let known = threads(&traced);
    let mut session = traced.session(&["tracepoint:vmlinux:sched:sched_switch"]);
    assert_ne!(traced.hash(), before);
    let mut last = None;
    let mut check = |what: &str, events: &[Event]| {
        // The memory of one that has ended is another's by now.
        let now = threads(&traced);
        let stays = |task: &u64| known.get(task).filter(|pid| now.get(task) == Some(pid));
        let ours = events
            .iter()
            .filter(|event| stays(&event.arguments[1]).is_some());
        println!(
            "{what}: {} events, {} of known threads",
            events.len(),
            ours.clone().count()
        );
        assert!(events.len() >= 5, "{what}: {}", events.len());
        for event in ours {
            let prev = stays(&event.arguments[1]).map(|pid| pid.cast_unsigned());
            assert_eq!(prev, event.tid, "{what}: {event:x?}");
        }
        for event in events {
            // No switch is missing, not even while the guest writes over the NOP.
            assert!(
                last.is_none_or(|last| last == event.arguments[1]),
                "{what}: {event:x?} after {last:x?}"
            );
            last = Some(event.arguments[2]);
        }
    };
    check("before", &wait_for(&traced, &mut session, SOME));
    let mut shared = Vec::new();
    traced.tell("echo 1 > events/sched/sched_switch/enable");
    shared.extend(wait_for(&traced, &mut session, SOME));
    traced.tell("echo 0 > events/sched/sched_switch/enable");
    shared.extend(events(&mut session));
    check("while it is on", &shared);
    let guests = in_buffer(&traced);
    println!("the guest's own: {guests}; {:?}", traced.engine.stats());
    assert!(
        (SOME / 2..=shared.len()).contains(&guests),
        "{guests} of {}",
        shared.len()
    );
    // What the guest has recorded, among ours in the same order.
    let lines = traced.tell("grep -m 12 sched_switch: trace");
    let number = |line: &str, name: &str| -> Option<i32> {
        line.split_once(name)?.1.split(' ').next()?.parse().ok()
    };
    let told: Vec<_> = lines
        .lines()
        .map(|line| (number(line, "prev_pid="), number(line, "next_pid=")))
        .collect();
    assert_eq!(told.len(), 12, "{lines}");
    let ours: Vec<_> = shared
        .iter()
        .map(|event| [1, 2].map(|argument: usize| known.get(&event.arguments[argument]).copied()))
        .collect();
    let alike = |window: &[[Option<i32>; 2]]| {
        // A thread that was made since is not known by its address.
        window.iter().zip(&told).all(|(ours, told)| {
            ours[0].is_none_or(|pid| Some(pid) == told.0 || pid == 0)
                && ours[1].is_none_or(|pid| Some(pid) == told.1 || pid == 0)
        })
    };
    assert!(
        ours.windows(told.len()).any(alike),
        "{told:?} is not in {ours:?}"
    );
    check("after", &wait_for(&traced, &mut session, SOME));
    assert_eq!(traced.engine.stats().without_arguments, 0);
    drop(session);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

/// What probes of `vfs_read`'s and `vfs_write`'s entries and returns have seen of [`copy`].
fn copies(events: &[Event]) -> Vec<usize> {
    let mut counts = vec![0; 4];
    for event in events {
        let of_copy = match event.kind {
            EventKind::Return => event.arguments.first() == Some(&SIZE),
            _ => event.arguments.get(2) == Some(&SIZE),
        };
        if let Some(count) = counts.get_mut(event.probe as usize) {
            *count += usize::from(of_copy);
        }
    }
    counts
}

/// The numbers that the guest's function tracer knows the functions at `addresses` by, as many behind each included: asking it by
/// name would have it format the names of all functions.
fn tracer_numbers(traced: &Traced, addresses: &[Gva], more: usize) -> String {
    let kernel = traced.shell.linux.kernel;
    let linked = kernel.image.symbols().unwrap_or_else(|e| panic!("{e}"));
    let bound = |name: &str| linked.address_of(name).unwrap_or_else(|| panic!("{name}"));
    let (start, end) = (bound("__start_mcount_loc"), bound("__stop_mcount_loc"));
    let table = kernel.image.read_at_vaddr(start, (end - start) as usize);
    let table = table.unwrap_or_else(|| panic!("no table of functions"));
    let mut functions: Vec<u64> = table
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word))
        .collect();
    functions.sort_unstable();
    let slide = traced.view.slide();
    let mut numbers = Vec::new();
    for address in addresses {
        let place = functions.binary_search(&address.0.wrapping_sub(slide));
        let place = place.unwrap_or_else(|_| panic!("{address} is not traced")) + 1;
        numbers.extend((place..=place + more).map(|number| number.to_string()));
    }
    numbers.join(" ")
}

fn address(traced: &Traced, name: &str) -> Gva {
    let address = traced.view.symbols.address_of(name);
    Gva(address.unwrap_or_else(|| panic!("no {name}")))
}

#[test]
fn function_tracers_over_armed_probes() {
    const COPIES: usize = 20;
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    let mut session = traced.session(&[
        "kprobe::vfs_read:entry",
        "kprobe::vfs_read:return",
        "kprobe::vfs_write:entry",
        "kprobe::vfs_write:return",
        // What the tracer itself writes over.
        "kprobe::vfs_read:0",
        "kprobe::ksys_read:0",
    ]);
    let mut round = |what: &str| {
        copy(&traced, COPIES);
        let seen = events(&mut session);
        println!("{what}: {:?}, {:?}", copies(&seen), traced.engine.stats());
        assert_eq!(copies(&seen), [COPIES; 4], "{what}");
        let first = seen
            .iter()
            .filter(|event| event.probe == 4 && event.arguments[2] == SIZE);
        assert_eq!(first.count(), COPIES, "{what}");
    };
    round("no tracer");
    let names = ["vfs_read", "vfs_write"].map(|name| address(&traced, name));
    traced.tell(&format!(
        "echo {} > set_ftrace_filter",
        tracer_numbers(&traced, &names, 25)
    ));
    assert_eq!(traced.tell("head -n 1 set_ftrace_filter"), "vfs_read");
    traced.tell("echo function > current_tracer");
    round("function");
    traced.tell("echo function_graph > current_tracer");
    round("function_graph");
    traced.tell("echo nop > current_tracer");
    round("nop");
    drop(session);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

/// The instructions of a function's start, as they are without probes.
fn instructions(traced: &Traced, start: Gva, bytes: usize) -> Vec<Instruction> {
    let code = code(traced, start, bytes);
    Decoder::with_ip(64, &code, start.0, DecoderOptions::NONE)
        .into_iter()
        .collect()
}

/// Kernel text as it is without probes of ours.
fn code(traced: &Traced, start: Gva, bytes: usize) -> Vec<u8> {
    let mut code = vec![0; bytes];
    let physical = introspect::x86_64::paging::translate(
        traced.shell.linux.machine.ram(),
        traced.view.space,
        start,
    );
    let physical = physical.unwrap_or_else(|e| panic!("{e}")).gpa;
    let traps = traced.engine.machine().traps();
    traps
        .read_unpatched(physical, &mut code)
        .unwrap_or_else(|e| panic!("{e}"));
    code
}

/// First byte of a jump over what the guest probes.
const JUMP: u8 = 0xe9;

/// Waits until the guest has put `wanted` there, or neither a jump nor an int3: it does so in its own time.
fn wait_for_instruction(traced: &Traced, at: Gva, wanted: Option<u8>) {
    let deadline = Instant::now() + 4 * COMMAND_LIMIT;
    loop {
        let found = code(traced, at, 1).first().copied().unwrap_or_default();
        let is_there = wanted.map_or(![JUMP, INT3].contains(&found), |wanted| wanted == found);
        if is_there {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{found:#x} stays, {wanted:x?} is wanted"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_guests_own_probes_where_ours_stand() {
    const COPIES: usize = 20;
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    let function = address(&traced, "vfs_read");
    let straight: Vec<u64> = instructions(&traced, function, 48)
        .iter()
        .take_while(|i| i.flow_control() == FlowControl::Next)
        .map(|i| i.ip() - function.0)
        .collect();
    println!("vfs_read: {straight:x?}");
    // Behind the tracer's NOP: where the entry's trap stands, and further.
    let [entry, same, inside, ..] = straight.get(1..).unwrap_or_default() else {
        panic!("{straight:?}")
    };
    let mut session = traced.session(&[
        "kprobe::vfs_read:entry",
        "kprobe::vfs_read:return",
        &format!("kprobe::vfs_read:{same}"),
        &format!("kprobe::vfs_read:{inside}"),
    ]);
    let mut round = |what: &str, expected: Option<[usize; 2]>| {
        copy(&traced, COPIES);
        let counts = copies(&events(&mut session));
        println!("{what}: {counts:?}, {:?}", traced.engine.stats());
        assert_eq!(counts[..2], [COPIES; 2], "{what}");
        assert!(
            expected.is_none_or(|expected| counts[2..] == expected),
            "{what}: {counts:?}, not {expected:?}"
        );
    };
    round("alone", Some([COPIES; 2]));
    for (name, offset) in [("mine0", 0), ("mine1", *entry), ("mine2", *same)] {
        traced.tell(&format!(
            "echo 'p:{name} vfs_read+{offset} count=%dx' > kprobe_events"
        ));
        traced.tell(&format!("echo 'count=={SIZE}' > events/kprobes/{name}/filter; echo 1 > events/kprobes/{name}/enable"));
        // On the tracer's call the guest uses that; elsewhere it has an int3 at first, and a jump in the end.
        let optimised = offset > 0;
        if optimised {
            round("by its int3, or already by its jump", None);
            wait_for_instruction(&traced, Gva(function.0 + offset), Some(JUMP));
        }
        let suspended: Vec<u64> = traced
            .engine
            .machine()
            .traps()
            .stats()
            .iter()
            .filter(|site| site.suspended)
            .map(|site| site.address.0.wrapping_sub(function.0))
            .collect();
        println!("suspended: {suspended:x?}");
        // What the guest has written its jump over is not executed where it stood.
        let passed = |at: u64| optimised && (offset + 1..offset + 5).contains(&at);
        let times = |at: u64| if passed(at) { 0 } else { COPIES };
        for at in [*same, *inside] {
            assert_eq!(
                suspended.contains(&at),
                passed(at),
                "{name}: {at:#x} in {suspended:x?}"
            );
        }
        round(name, Some([times(*same), times(*inside)]));
        let rounds = if optimised { 2 } else { 1 };
        assert_eq!(
            in_buffer(&traced),
            rounds * COPIES,
            "{name}: the guest's own"
        );
        traced.tell(&format!(
            "echo 0 > events/kprobes/{name}/enable; echo > kprobe_events; echo > trace"
        ));
        wait_for_instruction(&traced, Gva(function.0 + offset), None);
        round("after", Some([COPIES; 2]));
    }
    drop(session);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

#[test]
fn modules_come_and_go_under_armed_probes() {
    let host = host!();
    let traced = Traced::new(host, &["insmod /lib/brd.ko"]);
    let before = traced.hash();
    let machine = traced.engine.machine().clone();
    let mut session = traced.session(&["kprobe:brd:*:entry", "kprobe:brd:*:return"]);
    let write = "dd if=/dev/zero of=/dev/ram0 bs=4096 count=2 conv=fsync 2> /dev/null";
    traced.tell(write);
    let seen = events(&mut session);
    let of = |kind| seen.iter().filter(|event| event.kind == kind).count();
    assert!(of(EventKind::Entry) > 0);
    assert_eq!(of(EventKind::Entry), of(EventKind::Return));
    let module = traced
        .view
        .modules
        .modules()
        .first()
        .unwrap_or_else(|| panic!("no module"));
    let sites: Vec<_> = machine
        .traps()
        .stats()
        .into_iter()
        .filter(|site| module.module.range_of(site.address.0).is_some())
        .collect();
    println!("{} sites in the module", sites.len());
    let byte = |gpa: Gpa| {
        let mut byte = [0];
        machine
            .ram()
            .read_physical(gpa, &mut byte)
            .unwrap_or_else(|e| panic!("{e}"));
        byte[0]
    };
    assert!(sites.len() > 6 && sites.iter().all(|site| byte(site.site.0) == INT3));
    traced.tell("rmmod brd");
    let stats = traced.engine.stats();
    println!("{stats:?}");
    assert!(stats.freed >= sites.len() as u64, "{stats:?}");
    let left: Vec<_> = sites
        .iter()
        .filter(|site| byte(site.site.0) == INT3)
        .collect();
    assert!(left.is_empty(), "{left:?}");
    // The same memory again, maybe, and nobody's traps in it.
    traced.tell("insmod /lib/brd.ko");
    traced.tell(write);
    let again = traced
        .look(|look| look.modules().map(|modules| modules.items))
        .unwrap_or_else(|e| panic!("{e}"));
    println!(
        "{:x?} then {:x?}",
        module.module.base(),
        again.iter().map(|module| module.base()).collect::<Vec<_>>()
    );
    // Probes of the new one, while the old ones have not been disabled.
    let view = traced.shell.linux.view();
    let mut second = traced.empty_session();
    let pattern = probes::name::ProbePattern::parse("kprobe:brd:brd_submit_bio:entry")
        .unwrap_or_else(|e| panic!("{e}"));
    for probe in probes::provider::find(&view, &pattern).probes {
        second
            .enable(&probe, Filter::default(), Capture::default())
            .unwrap_or_else(|e| panic!("{e}"));
    }
    events(&mut session);
    traced.tell(write);
    let (new, old) = (events(&mut second), events(&mut session));
    assert!(!new.is_empty() && old.is_empty(), "{new:?} {old:?}");
    let memory = || {
        let _paused = machine.pause();
        sites
            .iter()
            .map(|site| byte(site.site.0))
            .collect::<Vec<_>>()
    };
    drop(second);
    let was = memory();
    drop(session);
    assert_eq!(memory(), was);
    assert_eq!(machine.traps().stats(), []);
    traced.tell(write);
    traced.tell("rmmod brd");
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

#[test]
fn every_tracepoint_at_once() {
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    let all = traced.find("tracepoint:::");
    let mut session = traced.empty_session();
    let (mut names, mut refused) = (BTreeMap::new(), BTreeMap::<String, Vec<String>>::new());
    for probe in &all {
        match session.enable(probe, Filter::default(), Capture::default()) {
            Ok(number) => {
                names.insert(number, probe.name.to_string());
            }
            Err(error) => {
                let why = error.to_string().replace(&probe.name.to_string(), "");
                refused
                    .entry(why)
                    .or_default()
                    .push(probe.name.name.clone());
            }
        }
    }
    println!("{} of {} tracepoints are armed", names.len(), all.len());
    for (why, names) in &refused {
        println!("{} refused{why}: {}", names.len(), names.join(" "));
    }
    copy(&traced, 10);
    let seen = events(&mut session);
    let stats = traced.engine.stats();
    let mut counts = BTreeMap::<&str, (usize, usize)>::new();
    for event in &seen {
        let count = counts.entry(&names[&event.probe]).or_default();
        count.0 += 1;
        count.1 += usize::from(event.arguments.iter().all(|argument| *argument == 0));
    }
    println!(
        "{} events of {} tracepoints (all zero): {counts:?}; {stats:?}",
        seen.len(),
        counts.len()
    );
    drop(session);
    assert_eq!(traced.hash(), before);
    assert!(
        names.len() * 10 > all.len() * 7,
        "{} of {}",
        names.len(),
        all.len()
    );
    assert!(counts.len() > 20, "{counts:?}");
    assert_eq!(stats.without_arguments, 0, "{stats:?}");
    traced.assert_well();
}

/// The branch of `softirq_exit` stands where the functions of soft interrupts return to.
#[test]
fn a_tracepoint_where_calls_return() {
    const TIMER: u64 = 1;
    const SOME: usize = 40;
    let host = host!();
    let traced = Traced::new(host, &["echo 0 > events/irq/softirq_exit/enable"]);
    let before = traced.hash();
    let mut session = traced.session(&[
        "kprobe::run_timer_softirq:return",
        "tracepoint:vmlinux:irq:softirq_exit",
        "kprobe::run_timer_softirq:entry",
    ]);
    let mut seen = wait_for(&traced, &mut session, SOME);
    traced.tell("echo 1 > events/irq/softirq_exit/enable");
    seen.extend(wait_for(&traced, &mut session, SOME));
    traced.tell("echo 0 > events/irq/softirq_exit/enable");
    seen.extend(wait_for(&traced, &mut session, SOME));
    let of = |probe: u32| seen.iter().filter(move |event| event.probe == probe);
    let [returns, exits, entries] = [0, 1, 2].map(|probe| {
        let timers = of(probe).filter(|event| probe != 1 || event.arguments[0] == TIMER);
        timers.collect::<Vec<_>>()
    });
    println!(
        "{} entries, {} returns, {} softirq_exit; {:?}",
        entries.len(),
        returns.len(),
        exits.len(),
        traced.engine.stats()
    );
    let place = |events: &[&Event]| events.first().map(|event| event.pc);
    assert_eq!(
        place(&returns),
        place(&exits),
        "the test is about one place"
    );
    assert!(returns.len() >= 5, "{}", returns.len());
    // Those armed a moment earlier or later may have seen one more.
    for (left, right) in [(&returns, &exits), (&returns, &entries)] {
        assert!(
            left.len().abs_diff(right.len()) <= 1,
            "{} and {}",
            left.len(),
            right.len()
        );
    }
    drop(session);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

/// A probe of one instruction.
fn point(traced: &Traced, address: Gva) -> Probe {
    let mut probe = traced.find("kprobe::schedule:0").remove(0);
    probe.target = Target::Kernel {
        address,
        moment: Moment::Point,
    };
    probe
}

/// The key is that of the page faults' tracepoints, which they stand behind; the call is a tracepoint's, which leads to its only listener directly.
#[test]
fn other_jump_labels_and_static_calls() {
    const SOME: usize = 40;
    let host = host!();
    let traced = Traced::new(
        host,
        &[
            "echo 0 > events/irq/softirq_exit/enable",
            "echo 0 > events/exceptions/page_fault_user/enable",
        ],
    );
    let before = traced.hash();
    let btf = traced
        .view
        .btf
        .as_ref()
        .unwrap_or_else(|| panic!("no types"));
    let layout = JumpLabelLayout::new(btf, &traced.view.symbols).unwrap_or_else(|e| panic!("{e}"));
    let labels = traced.look(|look| layout.read_all(look.kernel(), &[]));
    let mut session = traced.empty_session();
    let mut enable = |address: Gva| {
        let enabled = session.enable(
            &point(&traced, address),
            Filter::default(),
            Capture::default(),
        );
        enabled.unwrap_or_else(|e| panic!("{address}: {e}"))
    };
    let branches: Vec<_> = labels
        .of_key(address(&traced, "trace_pagefault_key"))
        .iter()
        .filter(|entry| !entry.init)
        .map(|entry| (entry.code, enable(entry.code)))
        .collect();
    assert!(!branches.is_empty());
    let tracepoint = traced.find("tracepoint:vmlinux:irq:softirq_exit").remove(0);
    let Target::Tracepoint(text) = &tracepoint.target else {
        panic!("{tracepoint:?}")
    };
    let target = text.sites.first().map(|(_, target)| *target);
    let way = instructions(&traced, target.unwrap_or_else(|| panic!("no branch")), 128);
    let call = way
        .iter()
        .find(|i| text.calls.contains(&Gva(i.near_branch_target())));
    let call = Gva(call.unwrap_or_else(|| panic!("no call in {way:?}")).ip());
    let number = enable(call);
    let fault = traced
        .find("tracepoint:vmlinux:exceptions:page_fault_user")
        .remove(0);
    for trampoline in &text.calls {
        enable(*trampoline);
    }
    let fault = session
        .enable(&fault, Filter::default(), Capture::default())
        .unwrap_or_else(|e| panic!("{e}"));
    let standing = |at: Gva| code(&traced, at, 5);
    // Where calls are not written over in their place, the jump is that they go through.
    let call_and_trampoline = || {
        [call]
            .iter()
            .chain(&text.calls)
            .map(|at| standing(*at))
            .collect::<Vec<_>>()
    };
    let (labels_before, call_before) = (standing(branches[0].0), call_and_trampoline());

    let of_labels = |events: &[Event]| {
        events
            .iter()
            .filter(|event| branches.iter().any(|(_, number)| event.probe == *number))
            .count()
    };
    let mut faults = |what: &str| {
        copy(&traced, 1);
        let seen = events(&mut session);
        let hits = of_labels(&seen);
        let told = seen.iter().filter(|event| event.probe == fault).count();
        println!("{what}: {hits} hits of the label, {told} of the tracepoint");
        // Starting a program takes some, most of them in user mode.
        assert!(
            hits > 20 && told > 20 && told <= hits,
            "{what}: {hits} {told}"
        );
    };
    faults("off");
    traced.tell("echo 1 > events/exceptions/page_fault_user/enable");
    assert_ne!(standing(branches[0].0), labels_before);
    faults("on");
    traced.tell("echo 0 > events/exceptions/page_fault_user/enable; echo > trace");
    assert_eq!(standing(branches[0].0), labels_before);
    faults("off again");

    traced.tell("echo 1 > events/irq/softirq_exit/enable");
    assert_ne!(call_and_trampoline(), call_before);
    let mut seen = wait_for(&traced, &mut session, SOME);
    traced.tell("echo 0 > events/irq/softirq_exit/enable");
    seen.extend(events(&mut session));
    assert_eq!(call_and_trampoline(), call_before);
    let calls = seen.iter().filter(|event| event.probe == number).count();
    let guests = in_buffer(&traced);
    println!(
        "{} labels; {calls} calls, {guests} in the guest's buffer; {:?}",
        branches.len(),
        traced.engine.stats()
    );
    // The guest calls before it records, and stops recording before it stops calling.
    assert!(
        guests > 10 && (guests..guests + 20).contains(&calls),
        "{calls} and {guests}"
    );
    drop(session);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}
