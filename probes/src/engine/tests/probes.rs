//! The probes at a site: several sessions, points, system calls, user text, timers, rates, counts.
#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn sessions_at_one_site_see_nothing_of_each_other() {
    let (mut guest, first, second) = (Guest::new(), Rings::new(64), Rings::new(2));
    let of = |pid| Filter {
        pids: Match::In(vec![pid]),
        ..Filter::default()
    };
    let [a_entry, a_return, ..] = guest.trace(&first, &of(PIDS[0]));
    let [b_entry, b_return, ..] = guest.trace(&second, &of(PIDS[1]));
    guest = guest.running(1, TASKS[1]);
    for _ in 0..3 {
        for (vcpu, stack) in [(0, 0x100), (1, 0x300)] {
            guest.call(vcpu, READ, STACK + stack, CALLER);
            guest.hit(vcpu, CALLER, STACK + stack + 8, 5);
        }
    }
    // Each sees both calls, and drops the records that its own rings have no room for.
    for (probe, expected) in [
        (&a_entry, [6, 3, 3, 0]),
        (&a_return, [6, 3, 3, 0]),
        (&b_entry, [6, 3, 1, 2]),
        (&b_return, [6, 3, 1, 2]),
    ] {
        assert_eq!(
            counts(probe),
            expected,
            "probe {} {:?}",
            probe.number,
            probe.kind
        );
    }
    for (rings, pid, length) in [(first, PIDS[0], 6), (second, PIDS[1], 2)] {
        let events = rings.events();
        assert_eq!(events.len(), length);
        assert!(events.iter().all(|e| e.pid == Some(pid)), "{events:?}");
    }
    assert_eq!(guest.counts(), [0; 5]);
}

#[test]
fn a_point_at_a_return_address_fires_besides_the_return() {
    let (mut guest, rings) = Guest::traced(64);
    let point = rings.probe(9, Point, Filter::default());
    guest.enable(CALLER, &point);
    guest.call(0, READ, STACK + 0x100, CALLER);
    guest.hit(0, CALLER, STACK + 0x108, 7);
    // Code that passes by without a call.
    guest.hit(0, CALLER, STACK + 0x300, 7);
    let found: Vec<_> = rings.short().into_iter().map(|e| (e.0, e.1, e.2)).collect();
    assert_eq!(
        found,
        [
            (Entry, 0, READ),
            (Return, 1, CALLER),
            (Point, 9, CALLER),
            (Point, 9, CALLER)
        ]
    );
    assert_eq!(counts(&point), [2, 0, 2, 0]);
}

/// Arms a function's trap behind the bytes that the guest patches.
#[test]
fn a_function_is_reported_at_its_first_byte_and_a_point_where_it_is() {
    let (guest, rings) = (Guest::new(), Rings::new(8));
    for (number, kind) in [(0, Entry), (1, Point)] {
        guest.enable(READ + 5, &rings.with_stack(number, kind));
    }
    guest.plan(READ + 5, |plan| plan.reported = Some(READ));
    guest.hit(0, READ + 5, STACK + 0x100, 0);
    let found: Vec<_> = rings
        .events()
        .into_iter()
        .map(|e| (e.kind, e.pc, e.kernel_stack.first().copied()))
        .collect();
    assert_eq!(
        found,
        [(Entry, READ, Some(READ)), (Point, READ + 5, Some(READ + 5))]
    );
}

/// Enables a probe when another session's probe has already seen the call.
#[test]
fn a_probe_has_no_return_of_calls_from_before_it_was_enabled() {
    let (mut guest, rings) = Guest::traced(64);
    guest.call(0, READ, STACK + 0x100, CALLER);
    let late = Rings::new(64);
    let probe = late.probe_since(0, Return, Filter::default(), guest.tick());
    guest.enable(READ, &probe);
    guest.hit(0, CALLER, STACK + 0x108, 1);
    assert!(late.events().is_empty());
    guest.call(0, READ, STACK + 0x100, CALLER);
    guest.hit(0, CALLER, STACK + 0x108, 2);
    assert_eq!(late.short(), [(Return, 0, CALLER, Some(PIDS[0]), 2)]);
    assert_eq!(rings.events().len(), 4);
    assert_eq!(counts(&probe), [1, 0, 1, 0]);
}

const OPENAT: u64 = 257;
const EXIT_GROUP: u64 = 231;
/// Offsets of arguments in `pt_regs`, with their values.
const PT_REGS: [(u64, u64); 6] = [
    (112, 0x51),
    (104, 0x52),
    (96, 0x53),
    (56, 0x54),
    (72, 0x55),
    (64, 0x56),
];

#[test]
fn system_calls_are_told_apart_by_number_and_have_their_own_arguments() {
    const FUNCTION: u64 = WRITE;
    const SAVED: u64 = 0x800;
    // The two orders of the function's parameters.
    for (registers, number) in [(0, 1), (1, 0)] {
        let (mut guest, rings) = (Guest::new(), Rings::new(64));
        for (offset, value) in PT_REGS {
            guest
                .memory
                .write(STACK_PAGE + SAVED + offset, &value.to_le_bytes());
        }
        let mut plans = vec![SystemCallPlan::default(); 512];
        for (probe, call) in [(0, OPENAT), (2, EXIT_GROUP)] {
            let entry = rings.probe(probe, Entry, Filter::default());
            let exit = rings.probe(probe + 1, Return, Filter::default());
            plans[call as usize] = SystemCallPlan {
                entries: vec![entry],
                returns: true,
            };
            guest.return_plan(system_call_key(call), &exit);
        }
        let layout = SystemCallRegisters {
            registers,
            number,
            returns_result: true,
        };
        let calls = Arc::new(SystemCalls { layout, plans });
        guest.plan(FUNCTION, |plan| plan.system_calls = Some(calls));

        let stack = STACK + 0x100;
        guest
            .memory
            .write(STACK_PAGE + 0x100, &CALLER.to_le_bytes());
        let call = |call: u64, saved: u64| {
            let mut cpu = Guest::registers(FUNCTION, stack, 0);
            // The number is an int, so its upper half has no meaning.
            let number = call | 0xdead << 32;
            (cpu.rdi, cpu.rsi) = match layout.registers {
                0 => (saved, number),
                _ => (number, saved),
            };
            guest.take(0, cpu, None);
        };
        call(OPENAT, STACK + SAVED);
        guest.hit(0, CALLER, stack + 8, 3);
        // Not probed, unknown, negative.
        for other in [0, 511, 512, 5000, 0xffff_ffff] {
            call(other, STACK + SAVED);
        }
        guest.hit(0, CALLER, stack + 8, 4);
        call(EXIT_GROUP, STACK + SAVED);
        assert_eq!(
            guest.counts(),
            [1, 0, 0, 0, 0],
            "nothing waits for exit_group"
        );
        // A wrong stack pointer means no arguments.
        call(OPENAT, 0x1234);

        let saved: Vec<u64> = PT_REGS.iter().map(|(_, value)| *value).collect();
        let found: Vec<_> = rings
            .events()
            .into_iter()
            .map(|e| (e.probe, e.pc, e.arguments))
            .collect();
        assert_eq!(
            found,
            [
                (0, FUNCTION, saved.clone()),
                (1, CALLER, vec![3]),
                (2, FUNCTION, saved),
                (0, FUNCTION, vec![0; 6]),
            ]
        );
    }
}

#[test]
fn a_programs_function_returns_wherever_its_text_is_mapped() {
    let (mut guest, rings) = (Guest::new(), Rings::new(64));
    let function = USER_TEXT_PAGE + 0x40;
    for (number, kind) in [(0, Entry), (1, Return)] {
        let probe = rings.probe(number, kind, Filter::default());
        guest.enable(function, &probe);
    }
    for process in 0..2 {
        guest = guest.running(0, TASKS[process]);
        let text = USER_TEXT[process];
        guest
            .memory
            .write(USER_STACK_PAGE + 0x100, &(text + 0x90).to_le_bytes());
        let stack = USER_STACK + 0x100;
        guest.take(0, Guest::registers(text + 0x40, stack, 0), Some(process));
        // The other process passes by on a stack at the same address.
        let other = 1 - process;
        let guest_of_other = guest.running(0, TASKS[other]);
        let passing = Guest::registers(USER_TEXT[other] + 0x90, stack + 8, 0);
        guest_of_other.take(0, passing, Some(other));
        guest = guest_of_other.running(0, TASKS[process]);
        let back = Guest::registers(text + 0x90, stack + 8, 7);
        guest.take(0, back, Some(process));
        let tid = Some(PIDS[process]);
        let expected = [
            (Entry, 0, text + 0x40, tid, 11),
            (Return, 1, text + 0x90, tid, 7),
        ];
        assert_eq!(rings.short(), expected, "process {process}");
    }
    assert_eq!(guest.counts(), [2, 0, 0, 0, 0]);
    assert_eq!(guest.armed.get(), 1, "one byte in memory, one trap");
    let sites = guest.path.user_returns.close(function);
    assert_eq!(sites, [SiteId(Gpa(USER_TEXT_PAGE + 0x90))]);
}

#[test]
fn a_return_address_in_the_other_half_gets_no_trap() {
    let (mut guest, rings) = (Guest::new(), Rings::new(8));
    let probe = rings.probe(0, Return, Filter::default());
    guest.enable(USER_TEXT_PAGE + 0x40, &probe);
    // The kernel's text, null, and a page that is not mapped.
    for address in [CALLER, 0, 0x1000] {
        guest
            .memory
            .write(USER_STACK_PAGE + 0x100, &address.to_le_bytes());
        let call = Guest::registers(USER_TEXT[0] + 0x40, USER_STACK + 0x100, 0);
        guest.take(0, call, Some(0));
    }
    assert_eq!(guest.counts(), [0, 3, 0, 0, 0]);
    assert_eq!(guest.armed.get(), 0);
}

#[test]
fn ticks_reach_the_timers_of_the_mask() {
    let (guest, rings) = (Guest::new(), Rings::new(64));
    let timers = (0..3).map(|number| Some(rings.probe(number, Tick, Filter::default())));
    let mut timers: Vec<Option<Arc<Enabled>>> = timers.collect();
    timers.insert(1, None);
    guest.path.timers.store(Arc::new(timers));
    for (mask, expected) in [
        (0, &[][..]),
        (0b0001, &[0]),
        (0b1000, &[2]),
        (0b1101, &[0, 1, 2]),
        // Timers that were stopped.
        (0b0010, &[]),
        (u64::MAX << 4, &[]),
        (u64::MAX, &[0, 1, 2]),
    ] {
        for process in [None, Some(1)] {
            let address = process.map_or(CALLER, |number| USER_TEXT[number]);
            let registers = Guest::registers(address, STACK, 0);
            let clock = || guest.tick();
            let mut hit = guest.stopped(1, &registers, process);
            hit.clock = Some(&clock);
            guest.path.sample(mask, &hit);
            let events = rings.events();
            let found: Vec<u32> = events.iter().map(|e| e.probe).collect();
            assert_eq!(found, expected, "{mask:#b}");
            for event in events {
                assert_eq!((event.kind, event.vcpu, event.pc), (Tick, 1, address));
                assert_eq!((event.pid, event.arguments), (Some(PIDS[0]), vec![]));
            }
        }
    }
}

#[test]
fn one_in_so_many_is_recorded_of_each_probe() {
    let (mut guest, rings) = (Guest::new(), Rings::new(64));
    let filter = Filter {
        one_in: 4,
        ..Filter::default()
    };
    let [entry, exit, ..] = guest.trace(&rings, &filter);
    for round in 0..10 {
        guest.call(0, READ, STACK + 0x100, CALLER);
        guest.hit(0, CALLER, STACK + 0x108, round);
    }
    assert_eq!(counts(&entry), [10, 7, 3, 0]);
    assert_eq!(counts(&exit), [10, 7, 3, 0]);
    let results = rings.short().into_iter().filter(|e| e.0 == Return);
    assert_eq!(results.map(|e| e.4).collect::<Vec<_>>(), [0, 4, 8]);
}

#[test]
fn every_hit_is_filtered_recorded_or_dropped() {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut below = |limit: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % limit
    };
    let sessions = [4, 64, 1024].map(Rings::new);
    let mut guest = Guest::new();
    let mut probes = Vec::new();
    for (number, rings) in sessions.iter().enumerate() {
        let filter = Filter {
            pids: match number {
                0 => Match::Any,
                other => Match::NotIn(vec![PIDS[other - 1]]),
            },
            one_in: number as u32,
            per_second: 50 * number as u32,
            ..Filter::default()
        };
        probes.extend(guest.trace(rings, &filter));
        let point = rings.probe(4, Point, filter);
        guest.enable(CALLER, &point);
        probes.push(point);
    }
    let mut read = [0; 3];
    for round in 0..20_000 {
        let (vcpu, function) = (below(2) as usize, [READ, WRITE][below(2) as usize]);
        let stack = STACK + 0x100 + 0x40 * below(8);
        match below(3) {
            0 => guest.call(vcpu, function, stack, CALLER),
            1 => guest.hit(vcpu, CALLER, stack + 8, 0),
            _ => guest = guest.running(vcpu, TASKS[below(2) as usize]),
        }
        if round % 64 == 0 {
            for (rings, read) in sessions.iter().zip(&mut read) {
                *read += rings.events().len() as u64;
            }
        }
    }
    for probe in &probes {
        let [hits, filtered, recorded, dropped] = counts(probe);
        assert_eq!(hits, filtered + recorded + dropped);
        assert!(recorded > 0, "probe {} {:?}", probe.number, probe.kind);
    }
    for (of_session, (rings, read)) in probes.chunks(5).zip(sessions.iter().zip(read)) {
        let recorded: u64 = of_session.iter().map(|probe| counts(probe)[2]).sum();
        assert_eq!(recorded, read + rings.events().len() as u64);
    }
    assert!(
        probes.iter().any(|probe| counts(probe)[3] > 0),
        "some are dropped"
    );
    // Every call has returned, is pending, or was lost.
    let [calls, returns] = [[0, 2], [1, 3]].map(|of| of.map(|at| counts(&probes[at])[0]));
    let [_, without, _, lost, waiting] = guest.counts();
    assert_eq!(without, 0);
    assert_eq!(
        calls.iter().sum::<u64>(),
        returns.iter().sum::<u64>() + lost + waiting
    );
}

/// Checks that rings and programs are released with their session, although vCPUs have looked their
/// probes up.
#[test]
fn what_hits_have_looked_up_is_let_go() {
    let (mut guest, rings) = Guest::traced(16);
    let session = Arc::downgrade(&rings.0);
    guest.call(0, READ, STACK, CALLER);
    for site in [READ, WRITE] {
        guest.path.plans.remove(site);
        guest.path.return_plans.remove(site);
    }
    drop(rings);
    assert!(session.upgrade().is_some());
    guest.path.let_go();
    assert!(session.upgrade().is_none());
}

/// Uses slots with room for two arguments only.
#[test]
fn arguments_that_do_not_fit_are_left_out() {
    let guest = Guest::new();
    let rings = Rings(Arc::new(SessionShared {
        rings: vec![Ring::new(4, 6).unwrap()],
        skipped_ticks: Arc::default(),
        doorbell: Doorbell::new().unwrap(),
        meters: Box::default(),
    }));
    guest.enable(READ, &rings.probe(0, Entry, Filter::default()));
    guest.hit(0, READ, STACK, 0);
    let found: Vec<_> = rings.events().into_iter().map(|e| e.arguments).collect();
    assert_eq!(found, [&ARGUMENTS[..2]]);
}
