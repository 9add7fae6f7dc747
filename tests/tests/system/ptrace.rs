//! ptrace(3) of Linux guests: records agree with the guest kernels' own counters, they are of the
//! selected tasks only, and the guest is unchanged.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use probes::engine::{Capture, Filter, RingSize};
use probes::event::{Event, EventKind};
use probes::provider;
use support::ptrace::{
    FAULT_HANDLERS, Traced, assert_in_order, count, is, is_fault, is_run, made, shell_pid, taken,
    unhandled,
};
use support::shell::COMMAND_LIMIT;
use support::{host, rich, tracing, two_cpus};
use trace_devices::port::ControlPort;
use trace_devices::ptrace::record::{
    EventType, Record, SleepState, TRAP_MASK, TRAP_SYSTEM_CALL, TRAP_WRITE, name_of, sleep_parts,
};

/// Checks that each task runs in turn with others, and waits or is ready in between.
fn assert_one_runs(records: &[Record]) {
    let mut running: Option<u32> = None;
    for record in records {
        if is_run(record) {
            running = Some(record.pid);
        } else if is(record, EventType::Trap)
            && let Some(pid) = running
        {
            assert_eq!(record.pid, pid, "{record:?}");
        }
    }
}

/// Returns the page faults among `records` that are not those at `addresses`, each with the records
/// before and after it.
fn faults_beyond(records: &[Record], addresses: impl Iterator<Item = u64>) -> Vec<&[Record]> {
    const BESIDE: usize = 4;
    let mut addresses = addresses.peekable();
    let mut beyond = Vec::new();
    for (at, record) in records.iter().enumerate().filter(|it| is_fault(it.1)) {
        let address = record.argument & TRAP_MASK;
        if addresses.next_if_eq(&address).is_none() {
            let end = records.len().min(at + BESIDE);
            beyond.extend(records.get(at.saturating_sub(BESIDE)..end));
        }
    }
    beyond
}

/// Divides calls of `handle_mm_fault`, entries and returns, into those that completed and the
/// number of those that are retried.
fn fault_calls(events: Vec<Event>) -> (Vec<Event>, usize) {
    /// `VM_FAULT_RETRY` (include/linux/mm_types.h).
    const RETRY: u64 = 0x400;
    let (mut done, mut retried) = (Vec::new(), 0);
    let mut open = BTreeMap::<Option<u32>, Event>::new();
    for event in events {
        match event.kind {
            EventKind::Return if event.arguments.first().is_some_and(|r| r & RETRY != 0) => {
                retried += usize::from(open.remove(&event.tid).is_some());
            }
            EventKind::Return => done.extend(open.remove(&event.tid)),
            _ => done.extend(open.insert(event.tid, event)),
        }
    }
    // In progress when the guest was paused.
    done.extend(open.into_values());
    done.sort_by_key(|event| event.tsc);
    (done, retried)
}

#[test]
fn switches_forks_and_faults_are_those_that_the_guest_counts() {
    let host = host!();
    let traced = Traced::small(host);
    let linux = &traced.shell.linux;
    let hash = linux.text_hash(&traced.view);
    let shell = shell_pid(&traced.shell);
    // Callers of the function that counts page faults, of which exceptions are one.
    let handled = ["entry", "return"]
        .map(|moment| tracing::probe(&traced.view, &format!("kprobe::handle_mm_fault:{moment}")));
    let capture = Capture {
        kernel_stack: 2,
        ..Capture::default()
    };
    let size = RingSize::for_capture(tracing::SLOTS, &capture);
    let session = traced.engine.session(size);
    let mut session = session.unwrap_or_else(|e| panic!("{e}"));
    traced.command("trace all 1");
    let paused = traced.pause();
    for probe in &handled {
        let enabled = session.enable(probe, Filter::default(), capture.clone());
        enabled.unwrap_or_else(|e| panic!("{e}"));
    }
    let before = traced.counters(shell);
    let mut reader = traced.open();
    drop(paused);
    let lines = [
        "syscount 20 | cat | cat > /dev/null",
        "forks 3",
        "sleep 0.1",
    ];
    traced.shell.type_lines(&lines);
    let paused = traced.pause();
    let counted = traced.counters(shell).since(&before);
    session.disable_all();
    let records = taken(reader.as_mut());
    let told = ["produced", "consumed", "dropped"].map(|name| traced.told(name));
    assert_eq!(told, [records.len() as u64, records.len() as u64, 0]);
    drop((reader, paused));
    let of = |event| count(&records, |record| is(record, event));
    println!(
        "{} records: {} runs, {} sleeps, {} ready, {} traps, {} interrupts; {counted:?}",
        records.len(),
        of(EventType::Run),
        of(EventType::Sleep),
        of(EventType::Ready),
        of(EventType::Trap),
        of(EventType::Ints),
    );
    assert_eq!(count(&records, is_run), counted.switches, "ctxt");
    let own = |record: &Record| record.pid == shell && is_run(record);
    assert_eq!(
        count(&records, own),
        counted.given_away,
        "switches of the shell"
    );
    // A child's name is its parent's, and then its program's.
    let new: BTreeSet<u32> = made(&records).into_iter().collect();
    assert_eq!(new.len() as u64, counted.forks, "processes");
    // The kernel makes workers when it needs some, and they stay.
    let workers: BTreeSet<u32> = linux.look(|look| {
        let tasks = look.processes().expect("the guest has a task list");
        let workers = tasks.items.iter().filter(|task| task.is_kernel_thread());
        workers.map(|task| task.pid.unsigned_abs()).collect()
    });
    for pid in new.difference(&workers) {
        assert_eq!(
            count(&records, |it| it.pid == *pid && is(it, EventType::Dead)),
            1,
            "{pid} has ended"
        );
    }
    let interrupts = [EventType::Ints, EventType::Inte].map(of);
    // The guest may be paused in one.
    assert!(
        interrupts[0] > 0 && interrupts[0] - interrupts[1] <= 1,
        "{interrupts:?}"
    );
    assert_in_order(&records);
    assert_one_runs(&records);

    // Faults: those of the counter that come from the exception, and no others.
    let mut by_exception = Vec::new();
    let (done, retried) = fault_calls(tracing::all_events(&mut session));
    let mut others = BTreeMap::<String, u64>::new();
    for event in &done {
        let caller = event.kernel_stack.get(1).copied().unwrap_or_default();
        let caller = traced
            .view
            .kernel
            .symbols
            .resolve(caller)
            .map(|it| it.0.name);
        match caller {
            Some(name) if FAULT_HANDLERS.contains(&name) => {
                let time = traced.clock.unix_ns(event.tsc);
                let time = i64::try_from(time).unwrap_or(i64::MAX);
                by_exception.push((event.tid, time));
            }
            other => *others.entry(other.unwrap_or("?").to_owned()).or_default() += 1,
        }
    }
    let faults: Vec<&Record> = records.iter().filter(|it| is_fault(it)).collect();
    let alone = unhandled(&faults, &by_exception, i64::MAX);
    println!(
        "{} page faults, {} handled, others by {others:?}; not handled: {alone:x?}",
        faults.len(),
        by_exception.len()
    );
    // Linux 6.4 and later, which have per-VMA locks, do not count a retried fault.
    let counts_retried = traced
        .view
        .kernel
        .symbols
        .address_of("lock_vma_under_rcu")
        .is_none();
    let calls = done.len() + if counts_retried { retried } else { 0 };
    assert_eq!(calls as u64, counted.faults, "pgfault, {retried} retried");
    assert_eq!(faults.len() - alone.len(), by_exception.len());
    // A fault that the kernel fixes or refuses before it looks for a mapping is not counted: few in
    // a healthy guest.
    assert!(20 * alone.len() <= faults.len(), "{alone:x?}");
    assert!(
        others.keys().all(|name| !name.contains("fault_addr")),
        "{others:?}"
    );
    drop(session);
    assert_eq!(
        linux.text_hash(&traced.view),
        hash,
        "the guest's text is as it was"
    );
}

#[test]
fn a_pipeline_is_traced_with_its_children_and_nobody_else() {
    let host = host!();
    let traced = Traced::small(host);
    let shell = shell_pid(&traced.shell);
    traced.command(&format!("trace {shell} 1"));
    assert!(
        traced
            .device
            .configuration()
            .contains(&format!("\ntrace {shell} 1\n"))
    );
    let mut reader = traced.open();
    traced.shell.type_lines(&["syscount 5 | cat > /dev/null"]);
    let records = taken(reader.as_mut());
    assert_in_order(&records);
    let first = records.first().copied();
    let first = first.filter(|it| it.pid == shell && is(it, EventType::Name));
    assert!(
        first.is_some_and(|it| name_of(it.argument) == b"sh"),
        "{first:?}"
    );
    let mut names = BTreeMap::<u32, Vec<String>>::new();
    for record in records.iter().filter(|it| is(it, EventType::Name)) {
        let name = String::from_utf8_lossy(&name_of(record.argument)).into_owned();
        names.entry(record.pid).or_default().push(name);
    }
    let children: Vec<_> = names.iter().filter(|(pid, _)| **pid != shell).collect();
    let of_children: BTreeSet<_> = children.iter().map(|it| it.1.join(" ")).collect();
    assert_eq!(
        of_children,
        BTreeSet::from(["sh exe cat".to_owned(), "sh syscount".to_owned()])
    );
    assert!(
        records.iter().all(|it| names.contains_key(&it.pid)),
        "somebody else"
    );
    for (pid, name) in children {
        let own: Vec<Record> = records
            .iter()
            .filter(|it| it.pid == *pid)
            .copied()
            .collect();
        let last = own.last().copied();
        assert!(
            last.is_some_and(|it| is(&it, EventType::Dead)),
            "{name:?} ends with {last:?}"
        );
        let call = |number: u64| {
            let wanted = TRAP_SYSTEM_CALL | number;
            count(&own, |it| is(it, EventType::Trap) && it.argument == wanted)
        };
        // execve, exit or exit_group; getppid.
        assert_eq!((call(59), call(60) + call(231)), (1, 1), "{name:?}");
        let expected = if name.contains(&"syscount".to_owned()) {
            5
        } else {
            0
        };
        assert_eq!(call(110), expected, "{name:?}");
        let writes = count(&own, |it| is_fault(it) && it.argument & TRAP_WRITE != 0);
        assert!(
            writes > 0 && writes < count(&own, is_fault),
            "{name:?}: reads and writes"
        );
        let faults = own.iter().filter(|it| is_fault(it));
        assert!(
            faults.clone().all(|it| it.argument & TRAP_MASK != 0),
            "{name:?}"
        );
    }
    // The shell has waited for its children, in the function that does so.
    let sleeps: BTreeSet<(u8, &str)> = records
        .iter()
        .filter(|it| it.pid == shell && is(it, EventType::Sleep))
        .map(|it| {
            let (state, pc) = sleep_parts(it.argument);
            (
                state,
                traced
                    .view
                    .kernel
                    .symbols
                    .resolve(pc)
                    .map_or("?", |found| found.0.name),
            )
        })
        .collect();
    println!("sleeps of the shell: {sleeps:?}");
    let wakeme = SleepState::Wakeme as u8;
    assert!(sleeps.contains(&(wakeme, "do_wait")), "{sleeps:?}");

    // Selected while the port is open; children that are made while it is closed.
    traced.command(&format!("trace {shell} 0"));
    taken(reader.as_mut());
    traced.shell.type_lines(&["syscount 5"]);
    assert_eq!(taken(reader.as_mut()), [], "nobody is traced");
    drop(reader);
    traced.command(&format!("trace {shell}"));
    let answer = traced.shell.output("sleep 1000 & echo $!");
    let pid: u32 = answer
        .lines()
        .last()
        .unwrap_or_default()
        .parse()
        .unwrap_or_else(|e| panic!("{answer:?}: {e}"));
    assert!(
        traced
            .device
            .configuration()
            .contains(&format!("\ntrace {pid} 1\n")),
        "followed"
    );
    // A shell at a terminal ignores SIGTERM, and so does its copy until that has executed another
    // program.
    traced
        .shell
        .type_lines(&[&format!("kill -9 {pid}; wait {pid}; true")]);
    assert!(
        !traced
            .device
            .configuration()
            .contains(&format!("\ntrace {pid} 1\n")),
        "it has ended"
    );
}

#[test]
fn commands_and_opens_are_those_of_the_manual_page() {
    let host = host!();
    let traced = Traced::small(host);
    let told = |traced: &Traced| traced.device.configuration();
    assert!(told(&traced).starts_with("opens 0\nsize 65536\nproduced 0\nconsumed 0\ndropped 0\n"));
    let shell = shell_pid(&traced.shell);
    for (command, error) in [
        ("size 3", "wrong size. use a power of two."),
        ("trace 3999999 1", "process exited"),
        ("trace 0 1", "process exited"),
        ("trace", "bad process or channel control request"),
        ("start", "unknown control message \"start\""),
        ("", "empty control message"),
    ] {
        let refused = traced.device.command(command).map_err(|e| e.to_string());
        assert_eq!(refused, Err(error.to_owned()), "{command}");
    }
    traced.command("size 0");
    assert_eq!(traced.refusal(), "must set trace size first");
    traced.command("size 64");
    traced.command("size 16");
    assert_eq!(traced.told("size"), 64, "it only grows");
    traced.command("trace all 1");
    traced.command(&format!("trace {shell} 1"));
    let reader = traced.open();
    assert_eq!(traced.refusal(), "device or object already in use");
    // A reader that does not read loses the newest records, and the drops are counted.
    traced.shell.type_lines(&["syscount 200"]);
    let deadline = Instant::now() + COMMAND_LIMIT;
    while traced.told("dropped") == 0 {
        assert!(Instant::now() < deadline, "{}", told(&traced));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((traced.told("opens"), traced.told("produced")), (1, 64));
    assert!(
        told(&traced).contains("\ntrace all 1\n"),
        "{}",
        told(&traced)
    );
    drop(reader);
    assert_eq!((traced.told("opens"), traced.told("produced")), (0, 0));
    // Features that the kernel lacks are reported, and nothing else.
    let lost: Vec<String> = told(&traced)
        .lines()
        .filter(|l| l.starts_with('#'))
        .map(str::to_owned)
        .collect();
    assert_eq!(lost, [] as [String; 0]);
    traced.command("trace all 0");
    assert!(!told(&traced).contains("trace"), "{}", told(&traced));
    drop(traced.open());
}

/// Checks against the kernel's own tracepoints, of which the device uses one. Another session sees
/// them over the same time.
#[test]
fn events_are_as_many_as_the_kernels_tracepoints_have() {
    const EVENTS: [&str; 7] = [
        "sched_switch",
        "sched_wakeup",
        "sched_wakeup_new",
        "sched_process_exit",
        "task_rename",
        "page_fault_user",
        "page_fault_kernel",
    ];
    const DEAD: u64 = 0x80;
    let host = host!();
    let traced = Traced::new(rich::guest(host));
    let mut session = tracing::session(&traced.engine, tracing::SLOTS);
    let tracefs = "mount -t tracefs t /sys/kernel/tracing";
    traced.shell.type_lines(&[tracefs]);
    traced.command("trace all 1");
    let shell = shell_pid(&traced.shell);
    let paused = traced.pause();
    // Kernels before Linux 5.18 do not pass the state, and keep it in the task alone.
    let mut state_is_told = false;
    for event in EVENTS {
        let pattern = tracing::pattern(&format!("tracepoint:vmlinux:*:{event}"));
        let found = provider::find(&traced.shell.linux.vm.traceable(&traced.view), &pattern);
        let found = found.unwrap_or_else(|e| panic!("{event}: {e}"));
        let [probe] = found.as_slice() else {
            panic!("{event}: {found:?}")
        };
        let arguments = probe.signature.iter().flat_map(|it| it.arguments.iter());
        state_is_told |= arguments.into_iter().any(|it| it.name == "prev_state");
        tracing::enable(&mut session, probe, &Filter::default());
    }
    let before = traced.counters(shell);
    let mut reader = traced.open();
    drop(paused);
    let lines = [
        "syscount 5 | cat > /dev/null; forks 2",
        "workers 2 3 & sleep 0.5; kill $!",
        "sleep 0.1",
        "echo mark > /sys/kernel/tracing/trace_marker",
    ];
    traced.shell.type_lines(&lines);
    let paused = traced.pause();
    let counted = traced.counters(shell).since(&before);
    session.disable_all();
    let records = taken(reader.as_mut());
    let told = traced.device.configuration();
    assert_eq!(traced.told("dropped"), 0);
    assert!(!told.contains('#'), "this kernel gives all events: {told}");
    drop((reader, paused));

    let events = tracing::all_events(&mut session);
    let of_kernel = |number: usize| {
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        events.iter().filter(move |event| event.probe == number)
    };
    let [switches, wakeups, made, ended, renamed, user, kernel] =
        [0, 1, 2, 3, 4, 5, 6].map(|number| of_kernel(number).count() as u64);
    let of_switches = |wanted: fn(bool, u64) -> bool| {
        let arguments = of_kernel(0).map(|event| (event.arguments[0] & 1 == 1, event.arguments[3]));
        arguments
            .filter(|it| wanted(it.0, it.1 & 0xffff_ffff))
            .count() as u64
    };
    let still_ready = of_switches(|preempted, state| preempted || state == 0);
    let dead = of_switches(|_, state| state & DEAD != 0);
    println!(
        "{} records; {switches} switches, {still_ready} still ready, {dead} dead, {wakeups} wake-ups, {made} made, \
         {ended} ended, {renamed} renamed, {user} and {kernel} page faults; {counted:?}",
        records.len()
    );
    assert!(switches > 20 && wakeups > 10 && user > 50 && kernel > 0);
    let of = |event| count(&records, |record| is(record, event));
    assert_eq!(
        (count(&records, is_run), switches),
        (counted.switches, counted.switches)
    );
    assert_eq!(of(EventType::Dead), ended);
    if state_is_told {
        assert_eq!(of(EventType::Sleep), switches - still_ready - dead);
        assert_eq!(of(EventType::Ready), wakeups + made + still_ready);
    } else {
        // A task that is switched from sleeps, stays ready or is dead.
        let left = of(EventType::Sleep) + of(EventType::Ready) + ended;
        assert_eq!(left, switches + wakeups + made);
        assert!(of(EventType::Sleep) > 10 && of(EventType::Ready) > wakeups);
    }
    let of_tracepoints = events.iter().filter(|event| matches!(event.probe, 5 | 6));
    let of_tracepoints = of_tracepoints.map(|event| event.arguments[0] & TRAP_MASK);
    assert_eq!(
        count(&records, is_fault),
        user + kernel,
        "without a tracepoint: {:#?}",
        faults_beyond(&records, of_tracepoints)
    );
    let marks: Vec<_> = records
        .iter()
        .filter(|it| is(it, EventType::User))
        .collect();
    assert!(
        matches!(marks.as_slice(), [mark] if mark.pid == shell),
        "{marks:?}"
    );
    // Beside the records of existing tasks and of children.
    let first = records
        .iter()
        .position(|record| !is(record, EventType::Name));
    let names = of(EventType::Name) - first.unwrap_or_default() as u64;
    assert_eq!(names, renamed + made);
    let sleeps = records.iter().filter(|record| is(record, EventType::Sleep));
    let states: BTreeSet<u8> = sleeps
        .map(|record| sleep_parts(record.argument).0)
        .collect();
    println!("states of sleeps: {states:?}");
    assert!(states.contains(&(SleepState::Wakeme as u8)));
    assert_in_order(&records);
}

/// Checks two CPUs: tasks wake each other across them, and migrate between them.
#[test]
fn switches_of_two_cpus_are_those_that_the_guest_counts() {
    let host = host!();
    let traced = Traced::new(two_cpus::guest(host));
    let shell = shell_pid(&traced.shell);
    traced.command("trace all 1");
    let paused = traced.pause();
    let before = traced.counters(shell);
    let mut reader = traced.open();
    drop(paused);
    let lines = [
        "syscount 20 | cat | cat > /dev/null",
        "forks 3 & forks 3; wait",
    ];
    traced.shell.type_lines(&lines);
    let paused = traced.pause();
    let counted = traced.counters(shell).since(&before);
    let records = taken(reader.as_mut());
    assert_eq!(traced.told("dropped"), 0);
    drop((reader, paused));
    println!("{} records, {counted:?}", records.len());
    assert_eq!(count(&records, is_run), counted.switches, "ctxt");
    let own = |record: &Record| record.pid == shell && is_run(record);
    assert_eq!(count(&records, own), counted.given_away);
    let ended = count(&records, |record| is(record, EventType::Dead));
    assert_eq!(ended, counted.forks);
    let machines: BTreeSet<u32> = records.iter().map(|record| record.machine).collect();
    assert_eq!(machines, BTreeSet::from([0, 1]));
    assert_in_order(&records);
}

/// Checks a machine that ends under a reader.
#[test]
fn nothing_hangs_when_the_machine_ends() {
    let host = host!();
    let traced = Traced::small(host);
    traced.command("trace all 1");
    let mut reader = traced.open();
    traced.shell.type_line("exit");
    traced.shell.linux.end(COMMAND_LIMIT);
    let records = taken(reader.as_mut());
    assert!(count(&records, |it| is(it, EventType::Dead)) > 0);
    assert!(!reader.wait(Duration::from_millis(1)));
    drop(reader);
    drop(traced.open());
    traced.command("trace all 0");
}
