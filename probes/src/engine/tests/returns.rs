//! Calls and their returns, tasks, interrupts, full rings.
#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn a_call_gives_its_arguments_and_then_its_result() {
    let (mut guest, rings) = Guest::traced(64);
    guest.call(1, READ, STACK + 0x100, CALLER);
    guest.hit(1, CALLER, STACK + 0x108, 99);
    let events = rings.events();
    assert!(events.is_sorted_by(|a, b| a.tsc < b.tsc), "{events:?}");
    let entry = Event {
        probe: 0,
        kind: Entry,
        vcpu: 1,
        tsc: events[0].tsc,
        pid: Some(PIDS[0]),
        tid: Some(PIDS[0]),
        pc: READ,
        arguments: ARGUMENTS.to_vec(),
        comm: None,
        kernel_stack: Vec::new(),
        user_stack: Vec::new(),
        strings: Vec::new(),
    };
    let exit = Event {
        probe: 1,
        kind: Return,
        pc: CALLER,
        tsc: events[1].tsc,
        arguments: vec![99],
        ..entry.clone()
    };
    assert_eq!(events, [entry, exit]);
    assert_eq!(guest.counts(), [0; 5]);
}

/// Removes a probe while the guest runs on: a call enters and returns at each step of the removal.
#[test]
fn taking_a_return_probe_off_counts_no_running_call_astray() {
    let (mut guest, _rings) = Guest::traced(64);
    let stack = STACK + 0x100;
    guest.call(0, READ, stack, CALLER);
    guest.hit(0, CALLER, stack + 8, 1);
    let (guest, standing) = (guest, Cell::new(true));
    let call = || {
        guest.hit(0, READ, stack, 0);
        if standing.get() {
            guest.hit(0, CALLER, stack + 8, 1);
        }
    };
    let disarm = |site| {
        assert_eq!(site, SiteId(Gpa(CALLER)));
        call();
        standing.set(false);
        call();
    };
    let stop = || {
        call();
        guest.plan(READ, |plan| plan.returns = None);
        call();
    };
    guest.path.end_returns(READ, disarm, stop);
    assert!(!standing.get(), "the trap is gone");
    assert_eq!(guest.counts(), [0; 5]);
}

#[test]
fn nested_calls_return_from_the_inside_out() {
    let (mut guest, rings) = Guest::traced(64);
    guest.call(0, READ, STACK + 0x200, CALLER);
    guest.call(0, READ, STACK + 0x180, READ + 0x40);
    guest.call(0, WRITE, STACK + 0x100, READ + 0x60);
    for (address, stack, result) in [
        (READ + 0x60, 0x108, 1),
        (READ + 0x40, 0x188, 2),
        (CALLER, 0x208, 3),
    ] {
        guest.hit(0, address, STACK + stack, result);
    }
    let found = rings
        .short()
        .into_iter()
        .map(|(_, probe, .., a)| (probe, a));
    assert_eq!(
        found.collect::<Vec<_>>(),
        [(0, 11), (0, 11), (2, 11), (3, 1), (1, 2), (1, 3)]
    );
    assert_eq!(guest.counts(), [0; 5]);
}

#[test]
fn a_task_may_return_on_another_cpu() {
    let (mut guest, rings) = Guest::traced(64);
    guest.call(0, READ, STACK + 0x100, CALLER);
    guest = guest.running(0, TASKS[1]);
    guest.hit(1, CALLER, STACK + 0x108, 5);
    let tid = Some(PIDS[0]);
    let expected = [(Entry, 0, READ, tid, 11), (Return, 1, CALLER, tid, 5)];
    assert_eq!(rings.short(), expected);
}

#[test]
fn passers_by_at_a_return_address_are_no_returns() {
    let (mut guest, rings) = Guest::traced(64);
    guest.call(0, READ, STACK + 0x100, CALLER);
    let guest = guest.running(1, TASKS[1]);
    // Another task, another depth, and an address without a return trap.
    guest.hit(1, CALLER, STACK + 0x108, 0);
    guest.hit(0, CALLER, STACK + 0x88, 0);
    guest.hit(0, CALLER + 1, STACK + 0x108, 0);
    assert_eq!(guest.counts(), [2, 0, 0, 0, 1]);
    guest.hit(0, CALLER, STACK + 0x108, 7);
    let tid = Some(PIDS[0]);
    let expected = [(Entry, 0, READ, tid, 11), (Return, 1, CALLER, tid, 7)];
    assert_eq!(rings.short(), expected);
}

#[test]
fn a_new_thread_in_the_memory_of_a_dead_one_does_not_return_for_it() {
    let (mut guest, rings) = Guest::traced(64);
    guest.call(0, READ, STACK + 0x100, CALLER);
    guest
        .memory
        .write(TASK_PAGE + LAYOUT.pid, &99u32.to_le_bytes());
    guest.hit(0, CALLER, STACK + 0x108, 0);
    assert_eq!(rings.short(), [(Entry, 0, READ, Some(PIDS[0]), 11)]);
    assert_eq!(guest.counts(), [1, 0, 0, 1, 0]);
}

#[test]
fn jumping_to_another_function_returns_from_both() {
    let (mut guest, rings) = Guest::traced(64);
    guest.call(0, READ, STACK + 0x100, CALLER);
    guest.call(0, WRITE, STACK + 0x100, CALLER);
    guest.hit(0, CALLER, STACK + 0x108, 7);
    let exits: Vec<_> = rings.short().split_off(2);
    let tid = Some(PIDS[0]);
    assert_eq!(
        exits,
        [(Return, 3, CALLER, tid, 7), (Return, 1, CALLER, tid, 7)]
    );
}

#[test]
fn a_function_that_starts_at_a_return_address_is_told_from_the_return() {
    let (mut guest, rings) = Guest::traced(64);
    // The last instruction of the function before WRITE calls READ, so the return address is WRITE
    // itself.
    guest.call(0, READ, STACK + 0x100, WRITE);
    guest.call(0, WRITE, STACK + 0x80, CALLER);
    guest.hit(0, WRITE, STACK + 0x108, 9);
    let found = rings
        .short()
        .into_iter()
        .map(|(_, probe, .., a)| (probe, a));
    assert_eq!(found.collect::<Vec<_>>(), [(0, 11), (2, 11), (1, 9)]);
    assert_eq!(guest.counts()[0], 0);
}

#[test]
fn interrupts_belong_to_no_process_and_softirqs_to_the_task() {
    for (preempt_count, pid) in [
        (0u32, Some(PIDS[0])),
        (0x8000_0002, Some(PIDS[0])),
        (0x0000_0100, Some(PIDS[0])),
        (0x0001_0000, None),
        (0x0011_0000, None),
        (0x0010_0000, None),
    ] {
        let (mut guest, rings) = Guest::traced(64);
        guest.preempt_count(preempt_count);
        guest.call(0, READ, STACK + 0x100, CALLER);
        guest.hit(0, CALLER, STACK + 0x108, 0);
        let pids: Vec<_> = rings.events().iter().map(|e| (e.pid, e.tid)).collect();
        assert_eq!(pids, [(pid, pid); 2], "{preempt_count:#x}");
    }
}

#[test]
fn filters_leave_no_trace_of_others() {
    let any = Filter::default;
    let only = |pids: &[u32]| Filter {
        pids: Match::In(pids.to_vec()),
        ..any()
    };
    let processes = Filter {
        processes_only: true,
        ..any()
    };
    for (filter, interrupted, expected) in [
        (any(), false, 2),
        (any(), true, 2),
        (only(&PIDS), false, 2),
        (only(&[PIDS[1]]), false, 0),
        (only(&PIDS), true, 0),
        (processes.clone(), false, 2),
        (processes, true, 0),
        (
            Filter {
                vcpus: Match::In(vec![1]),
                ..any()
            },
            false,
            0,
        ),
    ] {
        let (mut guest, rings) = (Guest::new(), Rings::new(64));
        let probes = guest.trace(&rings, &filter);
        guest.preempt_count(u32::from(interrupted) << 16);
        guest.call(0, READ, STACK + 0x100, CALLER);
        guest.hit(0, CALLER, STACK + 0x108, 0);
        let told = format!("{filter:?} {interrupted}");
        assert_eq!(rings.events().len(), expected, "{told}");
        assert_eq!(counts(&probes[0])[1], u64::from(expected == 0), "{told}");
        assert_eq!(guest.armed.get(), expected as u64 / 2, "{told}");
        let sites = guest.path.kernel_returns.close(READ).len();
        assert_eq!(sites, expected / 2, "a filtered call arms nothing");
    }
}

#[test]
fn an_entry_is_kept_when_its_return_cannot_be_seen() {
    // The stack is not mapped; the return address is in user space, or null; no trap can be armed
    // there.
    for (stack, caller, can_arm) in [
        (STACK - 0x1000, None, true),
        (STACK + 0x100, Some(0x40_0000), true),
        (STACK + 0x100, Some(0), true),
        (STACK + 0x100, Some(CALLER), false),
    ] {
        let (mut guest, rings) = Guest::traced(64);
        guest.can_arm = can_arm;
        match caller {
            Some(caller) => guest.call(0, READ, stack, caller),
            None => guest.hit(0, READ, stack, 0),
        }
        assert_eq!(rings.short(), [(Entry, 0, READ, Some(PIDS[0]), 11)]);
        assert_eq!(guest.counts(), [0, 1, 0, 0, 0], "{stack:#x} {caller:x?}");
    }
}

#[test]
fn a_task_that_cannot_be_read_is_no_process_and_counted() {
    for task in [0, 0x1234, TASKS[0] + 0x1000] {
        let (guest, rings) = Guest::traced(64);
        let mut guest = guest.running(0, task);
        guest.call(0, READ, STACK + 0x100, CALLER);
        guest.hit(0, CALLER, STACK + 0x108, 3);
        let expected = [(Entry, 0, READ, None, 11), (Return, 1, CALLER, None, 3)];
        assert_eq!(rings.short(), expected, "{task:#x}");
        assert_eq!(guest.counts(), [0, 0, 2, 0, 0]);
    }
}

#[test]
fn a_full_ring_loses_the_new_and_nothing_else() {
    let (mut guest, rings) = (Guest::new(), Rings::new(8));
    let [entry, exit, ..] = guest.trace(&rings, &Filter::default());
    for round in 0..100 {
        guest.call(0, READ, STACK + 0x100, CALLER);
        guest.hit(0, CALLER, STACK + 0x108, round);
    }
    assert_eq!(counts(&entry), [100, 0, 4, 96]);
    assert_eq!(counts(&exit), [100, 0, 4, 96]);
    assert_eq!(guest.counts(), [0; 5], "pairing goes on");
    let kept = rings.short().into_iter().filter(|e| e.0 == Return);
    let results: Vec<u64> = kept.map(|e| e.4).collect();
    assert_eq!(results, [0, 1, 2, 3], "the oldest are kept");
}
