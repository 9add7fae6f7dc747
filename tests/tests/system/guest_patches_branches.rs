//! The guest changes its own text while probes are armed in it: the branches and calls of its
//! tracepoints, and other jump labels. No hit is lost, and nothing of the probes is left. Its other
//! changes are in `guest_patches.rs`.

use std::collections::BTreeMap;

use introspect::Gva;
use introspect::kernel::jump_label::JumpLabelLayout;
use probes::engine::{Capture, Filter};
use probes::event::Event;
use probes::probe::{Moment, Probe, Target};
use support::traced::{Traced, events};
use support::{host, tracing};

/// Returns the numbers of the threads by the addresses of their `task_struct`s.
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
        // Another task has the memory of one that has ended.
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
            // No switch is missing, not even while the guest overwrites the NOP.
            assert!(
                last.is_none_or(|last| last == event.arguments[1]),
                "{what}: {event:x?} after {last:x?}"
            );
            last = Some(event.arguments[2]);
        }
    };
    check("before", &traced.wait_for(&mut session, SOME));
    let mut shared = Vec::new();
    traced.tell("echo 1 > events/sched/sched_switch/enable");
    // Earlier ones, too: the guest records as many of its own as are awaited.
    shared.extend(events(&mut session));
    shared.extend(traced.wait_for(&mut session, SOME));
    traced.tell("echo 0 > events/sched/sched_switch/enable");
    shared.extend(events(&mut session));
    check("while it is on", &shared);
    let guests = traced.in_buffer();
    println!("the guest's own: {guests}; {:?}", traced.engine.stats());
    assert!(
        (SOME / 2..=shared.len()).contains(&guests),
        "{guests} of {}",
        shared.len()
    );
    // The guest's records are among ours in the same order.
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
    check("after", &traced.wait_for(&mut session, SOME));
    assert_eq!(traced.engine.stats().without_arguments, 0);
    drop(session);
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
    traced.copy(10);
    // On a slow host, handling a tick of the guest's timer can take longer than a tick: there may
    // be more events than the ring holds.
    let mut seen = Vec::new();
    session.drain(|event| seen.push(event));
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

/// Checks a probe of the guest. To place it, the guest decodes the branches of all tracepoints. It
/// would mistake a trap there for an instruction of another length.
#[test]
fn the_guests_own_probe_beside_tracepoints() {
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    let mut session = traced.session(&[
        "tracepoint::sched:sched_switch",
        "tracepoint::sched:sched_waking",
    ]);
    traced.tell("echo 'p:beside vfs_read' > kprobe_events");
    traced.tell("echo > kprobe_events");
    let sites = traced.engine.machine().traps().stats();
    assert!(sites.iter().all(|site| !site.suspended), "{sites:?}");
    // Earlier events are discarded.
    session.drain(|_| ());
    traced.wait_for(&mut session, 10);
    drop(session);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

/// Checks the branch of `softirq_exit`, which is at the return address of the functions of soft
/// interrupts.
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
    let mut seen = traced.wait_for(&mut session, SOME);
    traced.tell("echo 1 > events/irq/softirq_exit/enable");
    seen.extend(traced.wait_for(&mut session, SOME));
    traced.tell("echo 0 > events/irq/softirq_exit/enable");
    seen.extend(traced.wait_for(&mut session, SOME));
    // Probes are armed one after the other, and calls may be in progress at the end: only whole
    // calls count.
    let is_entry = |event: &Event| event.probe == 2;
    let (Some(first), Some(last)) = (
        seen.iter().position(is_entry),
        seen.iter().rposition(is_entry),
    ) else {
        panic!("no timer softirq")
    };
    let of = |probe: u32| {
        let whole = seen[first..last].iter();
        whole.filter(move |event| event.probe == probe)
    };
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
    // An interrupt may come while the guest changes its text: few do, and all are counted. Before
    // the change, the sites are suspended. While the guest has an int3 there, the arguments of its
    // listeners are not known.
    let stats = traced.engine.stats();
    let lost = stats.lost_returns as usize;
    assert_eq!(entries.len(), returns.len() + lost, "entries");
    assert!(lost <= 2, "{lost} of {} are lost", entries.len());
    let unknown = stats.without_arguments.min(2) as usize;
    assert!(
        (returns.len().saturating_sub(unknown)..=returns.len()).contains(&exits.len()),
        "softirq_exit, {unknown} may lack"
    );
    drop(session);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

/// Makes a probe of one instruction.
fn point(traced: &Traced, address: Gva) -> Probe {
    let mut probe = traced.find("kprobe::schedule:0").remove(0);
    probe.target = Target::Kernel {
        address,
        moment: Moment::Point,
    };
    probe
}

/// Checks the key of the page faults' tracepoints, or in a kernel without it the tracepoint's own.
/// The call is a tracepoint's, which leads to its only listener directly.
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
        .kernel
        .btf()
        .unwrap_or_else(|| panic!("no types"));
    let layout =
        JumpLabelLayout::new(btf, &traced.view.kernel.symbols).unwrap_or_else(|e| panic!("{e}"));
    let labels = traced.look(|look| layout.read_all(look.kernel(), &[]));
    let mut session = traced.empty_session();
    // As for patterns that nothing matches yet, a listener for new files is there before any probe.
    let files = session.new_files();
    assert!(files.is_some());
    let mut enable = |probe: &Probe| tracing::enable(&mut session, probe, &Filter::default());
    let fault = traced
        .find("tracepoint:vmlinux:exceptions:page_fault_user")
        .remove(0);
    let key = traced.view.kernel.symbols.address_of("trace_pagefault_key");
    let branches: Vec<Gva> = match (key, &fault.target) {
        (Some(key), _) => {
            let entries = labels.of_key(Gva(key)).iter();
            entries
                .filter(|entry| !entry.init)
                .map(|entry| entry.code)
                .collect()
        }
        (None, Target::Tracepoint(text)) => text.sites.iter().map(|(code, _)| *code).collect(),
        (None, other) => panic!("{other:?}"),
    };
    let branches: Vec<_> = branches
        .into_iter()
        .map(|code| (code, enable(&point(&traced, code))))
        .collect();
    assert!(!branches.is_empty());
    drop(files);
    let tracepoint = traced.find("tracepoint:vmlinux:irq:softirq_exit").remove(0);
    let Target::Tracepoint(text) = &tracepoint.target else {
        panic!("{tracepoint:?}")
    };
    let target = text.sites.first().map(|(_, target)| *target);
    let way = traced.instructions(target.unwrap_or_else(|| panic!("no branch")), 128);
    let call = way
        .iter()
        .find(|i| text.calls.contains(&Gva(i.near_branch_target())));
    let call = Gva(call.unwrap_or_else(|| panic!("no call in {way:?}")).ip());
    let number = enable(&point(&traced, call));
    for trampoline in &text.calls {
        enable(&point(&traced, *trampoline));
    }
    let fault = enable(&fault);
    let standing = |at: Gva| traced.code(at, 5);
    // If calls are not overwritten in place, the jump that they go through is.
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
        traced.copy(1);
        let seen = events(&mut session);
        let hits = of_labels(&seen);
        let told = seen.iter().filter(|event| event.probe == fault).count();
        println!("{what}: {hits} hits of the label, {told} of the tracepoint");
        // Starting a program causes some faults, most of them in user mode. One may have been
        // between the two when the ring was read before.
        assert!(
            hits > 20 && told > 20 && told <= hits + 1,
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
    let mut seen = traced.wait_for(&mut session, SOME);
    traced.tell("echo 0 > events/irq/softirq_exit/enable");
    seen.extend(events(&mut session));
    assert_eq!(call_and_trampoline(), call_before);
    let calls = seen.iter().filter(|event| event.probe == number).count();
    let guests = traced.in_buffer();
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
