//! Busy seconds of a Linux guest, recorded by ptrace(3) and by the guest's own /proc, which must
//! agree.
//!
//! The guest reads its counters by grep(1), before and after. A counter has the value at the
//! read(2) of that grep which took it. The guest has one CPU and a kernel that is not preempted, so
//! nothing else comes between that system call's record and the value. It matters which read(2)
//! that is, because grep itself faults between one and the next.

use std::sync::atomic::{AtomicBool, Ordering};

use probes::engine::{Engine, Filter, Session};
use probes::event::Event;
use probes::kernel_view::KernelView;
use support::ptrace::{
    FAULT_HANDLERS, QUIET, Traced, count, is, is_fault, is_run, made, parsed, shell_pid, unhandled,
};
use support::shell::COMMAND_LIMIT;
use support::{busy, host, tracing};
use trace_devices::port::ControlPort;
use trace_devices::ptrace::record::{EventType, Record, TRAP_MASK, TRAP_SYSTEM_CALL, name_of};

/// The system calls of one round of its work, by syscount.
const CALLS: u64 = 20;
/// The numbers of read(2) and getppid(2).
const READ: u64 = 0;
const GETPPID: u64 = 110;
/// The guest's readings, in this order, before and after, with the read(2) of a grep that takes the
/// value. Most files are generated whole by the first. The counts of /proc/vmstat are taken anew by
/// each (vmstat_start() in mm/vmstat.c), and the line of this one begins behind the 1024 bytes that
/// the C library reads at once.
const COUNTERS: [(&str, &str, usize); 4] = [
    ("ctxt", "/proc/stat", 0),
    ("processes", "/proc/stat", 0),
    ("pgfault", "/proc/vmstat", 1),
    ("ctxt_switches", "/proc/$$/status", 0),
];

fn is_call(record: &Record, number: u64) -> bool {
    is(record, EventType::Trap) && record.argument == TRAP_SYSTEM_CALL | number
}

/// Returns the positions at which each grep has taken its value.
fn readings(records: &[Record]) -> Vec<usize> {
    let greps = records
        .iter()
        .filter(|record| is(record, EventType::Name) && name_of(record.argument) == b"grep");
    let mut taken: Vec<usize> = greps
        .zip(COUNTERS.iter().cycle())
        .filter_map(|(grep, (_, _, read))| {
            let mut reads = records
                .iter()
                .enumerate()
                .filter(|(_, it)| it.pid == grep.pid && is_call(it, READ));
            reads.nth(*read).map(|(at, _)| at)
        })
        .collect();
    taken.dedup();
    taken
}

/// Makes a session of returns of the page fault handlers, which identify the caller.
fn fault_session(engine: &Engine, view: &KernelView) -> Session {
    let mut session = tracing::session(engine, tracing::SLOTS);
    let probe = tracing::probe(view, "kprobe::handle_mm_fault:return");
    tracing::enable(&mut session, &probe, &Filter::default());
    session
}

#[test]
fn busy_seconds_are_what_the_guest_counts() {
    let host = host!();
    let traced = Traced::small(host);
    let Traced { shell, view, .. } = &traced;
    let own = shell_pid(shell);
    traced.command("size 524288");
    traced.command("trace all 1");
    let mut session = fault_session(&traced.engine, view);
    let mut reader = traced.open();
    let is_over = AtomicBool::new(false);
    let greps = COUNTERS
        .map(|(name, file, _)| format!("grep {name} {file}"))
        .join("; ");
    let seconds = busy::time().as_secs();
    let line = format!(
        "{greps}; n=0; end=$(($(date +%s)+{seconds})); while [ $(date +%s) -lt $end ]; do syscount {CALLS} | cat | cat > /dev/null; \
         n=$((n+1)); done; {greps}; echo rounds $n"
    );
    let (output, records, faults) = std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            let (mut records, mut faults) = (Vec::new(), Vec::new());
            let mut ended = false;
            while !ended {
                // The guest's timer continues: only records up to now count.
                ended = is_over.load(Ordering::SeqCst);
                if ended {
                    std::thread::sleep(QUIET);
                }
                reader.wait(QUIET);
                records.extend(parsed(&reader.read(usize::MAX)));
                session.drain(|event| faults.push(event));
            }
            session.disable_all();
            session.drain(|event| faults.push(event));
            (records, faults)
        });
        let answer = shell.start(&line).answer(10 * COMMAND_LIMIT);
        is_over.store(true, Ordering::SeqCst);
        let taken = taking.join();
        let (records, faults) = taken.unwrap_or_else(|_| panic!("the reader panicked"));
        (answer.output, records, faults)
    });
    let told = traced.device.configuration();
    assert!(told.contains("\ndropped 0\n"), "{told}");
    assert_eq!(session.stats().probes.dropped, 0);
    let numbers: Vec<u64> = output
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    // Switches of a process are two lines: voluntary and not.
    let [c1, p1, f1, v1, n1, c2, p2, f2, v2, n2, rounds] = numbers[..] else {
        panic!("{output}")
    };
    let readings = readings(&records);
    let [ctxt, processes, pgfault, status] = [0, 1, 2, 3].map(|at| match readings[..] {
        [_, _, _, _, _, _, _, _] => (readings[at], readings[at + 4]),
        _ => panic!("{} readings, 8 were made: {output}", readings.len()),
    });
    let between = |(from, to): (usize, usize)| &records[from..to];

    let switches = count(between(ctxt), is_run);
    println!("{rounds} rounds, {} records", records.len());
    println!("switches: {switches}, ctxt {}", c2 - c1);
    assert_eq!(switches, c2 - c1, "ctxt");

    let made = made(between(processes)).len() as u64;
    let died = count(between(processes), |it| is(it, EventType::Dead));
    println!(
        "processes made: {made}, processes {}; died: {died}",
        p2 - p1
    );
    assert_eq!(made, p2 - p1, "processes");
    // The first grep dies in between, the last one was made there.
    assert_eq!(died, made, "deaths");

    let of_shell = count(between(status), |it| it.pid == own && is_run(it));
    println!(
        "switches of the shell: {of_shell}, status {}",
        v2 + n2 - v1 - n1
    );
    assert_eq!(of_shell, v2 + n2 - v1 - n1, "switches of the shell");

    let calls = count(&records, |it| is_call(it, GETPPID));
    println!("system calls of syscount: {calls}, made {}", rounds * CALLS);
    assert_eq!(calls, rounds * CALLS, "getppid");

    // The counter counts calls of handle_mm_fault. Each is of an exception, or the kernel's own on
    // behalf of a program. An exception has one, unless nothing is mapped at its address.
    let exceptions: Vec<&Record> = between(pgfault).iter().filter(|it| is_fault(it)).collect();
    let [from, to] = [pgfault.0, pgfault.1].map(|at| records[at].time);
    let time = |event: &Event| i64::try_from(traced.clock.unix_ns(event.tsc)).unwrap_or(i64::MAX);
    let caller = |event: &Event| {
        let symbol = view.kernel.symbols.resolve(event.pc);
        symbol.map_or("?", |(symbol, _)| symbol.name)
    };
    let handled: Vec<&Event> = faults
        .iter()
        .filter(|event| (from..to).contains(&time(event)))
        .collect();
    let is_exceptions = |event: &&&Event| FAULT_HANDLERS.contains(&caller(event));
    let of_exceptions: Vec<(Option<u32>, i64)> = handled
        .iter()
        .filter(is_exceptions)
        .map(|event| (event.tid, time(event)))
        .collect();
    let others: Vec<&str> = handled
        .iter()
        .map(|event| caller(event))
        .filter(|name| !FAULT_HANDLERS.contains(name))
        .collect();
    let alone = unhandled(&exceptions, &of_exceptions, to);
    println!(
        "page faults: {} exceptions, {} of them not handled, {} without an exception; pgfault {}",
        exceptions.len(),
        alone.len(),
        others.len(),
        f2 - f1
    );
    for record in &alone {
        println!(
            "not handled: {:#x} of {}",
            record.argument & TRAP_MASK,
            record.pid
        );
    }
    assert_eq!(handled.len() as u64, f2 - f1, "pgfault");
    assert_eq!(exceptions.len() - alone.len() + others.len(), handled.len());
    assert!(
        others
            .iter()
            .all(|name| name.contains("get_user_pages") || name.contains("gup")),
        "{others:?}"
    );
    // A program whose stack has come to its end, a wild pointer: few in a healthy guest.
    assert!(100 * alone.len() <= exceptions.len(), "{alone:?}");
}
