//! Records of hits in a made-up guest, and which tasks they select.
#![allow(clippy::unwrap_used)]

mod guest;

use probes::clock::Clock;
use proptest::prelude::*;

use super::super::layout::Identity;
use super::super::record::{RECORD_BYTES, Record};
use super::super::recording;
use super::*;
use EventType::{
    Admit, Dead, Edf, Expel, Inte, Ints, Name, Ready, Release, Run, Sleep, Slice, Trap, User, Yield,
};
pub(in super::super) use guest::LAYOUT;
use guest::{A, B, C, DEADLINE, Guest, RUNNING};

const REGISTERS: u64 = 0xffff_c900_0000_0000;
const TEXT: u64 = 0xffff_8880_0009_0000;
const FILE: u64 = 0xffff_8880_000a_0000;
const PORT: u64 = 0xffff_8880_000b_0000;

const INTERRUPTIBLE: u32 = 1;
const TRACED: u32 = 8;
const DEAD: u32 = 0x80;

/// State, whether on a run queue, whether it sleeps there, bits of deadline scheduling, and the
/// records of the previous task; the sleep's state.
#[test]
fn who_gives_the_cpu_away_sleeps_or_is_ready() {
    for (state, on_rq, delayed, bits, told, sleep) in [
        (0, 1, 0, 0, &[Ready][..], None),
        // Preempted on its way to sleep.
        (INTERRUPTIBLE, 1, 0, 0, &[Ready], None),
        (INTERRUPTIBLE, 0, 0, 0, &[Sleep], Some(8)),
        (INTERRUPTIBLE, 1, 1, 0, &[Sleep], Some(8)),
        (TRACED, 0, 0, 0, &[Sleep], Some(10)),
        (0, 1, 0, 1, &[Slice, Sleep], Some(12)),
        (0, 1, 0, 3, &[Yield, Sleep], Some(12)),
        (0, 1, 0, 2, &[Ready], None),
        // It waits for something else besides.
        (INTERRUPTIBLE, 0, 0, 1, &[Sleep], Some(8)),
        (DEAD, 0, 0, 0, &[], None),
    ] {
        let mut guest = Guest::tracing(&[A, B]);
        guest.write(A + RUNNING.state, &u32::to_le_bytes(state));
        guest.write(A + RUNNING.on_rq, &u32::to_le_bytes(on_rq));
        guest.write(A + RUNNING.delayed.unwrap(), &[delayed]);
        guest.write(A + DEADLINE.entity + 0x10, &[bits]);
        let seen = guest.see(EventHook::Switch, &[A, B]);
        let (next, previous) = seen.split_last().unwrap();
        assert_eq!((next.0, next.1), (41, Run));
        let events: Vec<_> = previous.iter().map(|it| it.1).collect();
        assert_eq!(events, told, "{state} {on_rq} {delayed} {bits}");
        let argument = sleep.map(|state| 0xffff_ff81_2345_6700 | state);
        let slept = previous.iter().find(|it| it.1 == Sleep);
        assert_eq!(slept.map(|it| it.2), argument, "{state} {on_rq} {bits}");
        assert!(previous.iter().all(|it| it.0 == 40));
    }
}

#[test]
fn a_switch_tells_of_those_alone_who_are_traced() {
    for (traced, told) in [
        (&[][..], &[][..]),
        (&[A], &[(40, Ready)]),
        (&[B], &[(41, Run)]),
        (&[A, B, C], &[(40, Ready), (41, Run)]),
    ] {
        assert_eq!(
            Guest::tracing(traced).short(EventHook::Switch, &[A, B]),
            told
        );
    }
    let mut all = Guest::new();
    all.context.selection.set_all(true);
    all.write(B + RUNNING.policy, &6u32.to_le_bytes());
    assert_eq!(
        all.short(EventHook::Switch, &[A, B]),
        [(40, Ready), (41, Edf)]
    );
    // An address that is no task is not recorded.
    assert_eq!(all.short(EventHook::Switch, &[0x1000, 0]), []);
    assert_eq!(all.short(EventHook::Switch, &[u64::MAX, u64::MAX - 4]), []);
}

#[test]
fn children_are_traced_with_their_parents_until_they_exit() {
    let mut guest = Guest::tracing(&[A]);
    assert!(!guest.is_selected(B));
    let made = guest.see(EventHook::Made, &[B]);
    let name = u64::from_le_bytes(*b"dd\0\0\0\0\0\0");
    assert_eq!(made, [(41, Name, name, 0), (41, Ready, 0, 0)]);
    guest.task = B;
    assert_eq!(
        guest.short(EventHook::Made, &[C]),
        [(42, Name), (42, Ready)]
    );
    assert_eq!(guest.short(EventHook::Exits, &[]), [(41, Dead)]);
    assert_eq!(guest.short(EventHook::Exits, &[]), [], "only once");
    assert!(guest.is_selected(A) && guest.is_selected(C));
    // The child of a task that is not traced.
    assert_eq!(guest.short(EventHook::Made, &[B]), []);
    // All tasks exit, and stay traced.
    guest.context.selection.set_all(true);
    assert_eq!(guest.short(EventHook::Exits, &[]), [(41, Dead)]);
    assert_eq!(guest.short(EventHook::Wakes, &[B]), [(41, Ready)]);
}

#[test]
fn children_are_followed_without_anything_being_recorded() {
    let mut guest = Guest::tracing(&[A]);
    guest.arguments = vec![B];
    assert!(!guest.context.see(EventHook::Made, &guest, false));
    assert!(guest.is_selected(B));
    assert!(!guest.context.see(EventHook::Exits, &guest, false));
    assert!(!guest.is_selected(A));
    guest.is_now(B, 40, 1040);
    guest.task = B;
    assert!(!guest.context.see(EventHook::Executes, &guest, false));
    assert!(guest.is_selected(B));
    assert_eq!(guest.put.take().len(), 0);
}

#[test]
fn another_task_at_the_same_address_is_not_traced() {
    for (pid, start, traced) in [(40, 1040, true), (99, 1040, false), (40, 2000, false)] {
        let mut guest = Guest::tracing(&[A]);
        guest.is_now(A, pid, start);
        assert_eq!(guest.is_selected(A), traced, "{pid} {start}");
        guest.see(EventHook::Made, &[B]);
        assert_eq!(guest.is_selected(B), traced, "child of {pid} {start}");
    }
}

#[test]
fn names_are_told_when_they_are_given_and_when_a_program_is_executed() {
    let mut guest = Guest::tracing(&[A]);
    guest.write(TEXT, b"busybox long\0");
    let name = |text: &[u8; 8]| vec![(40, Name, u64::from_le_bytes(*text), 0)];
    let given = guest.see(EventHook::Renamed, &[A, TEXT, 0]);
    assert_eq!(given, name(b"busybox "));
    assert_eq!(
        guest.see(EventHook::Renamed, &[A, TEXT, 1]),
        [],
        "by execution"
    );
    assert_eq!(guest.see(EventHook::Renamed, &[B, TEXT, 0]), []);
    assert_eq!(guest.see(EventHook::Executes, &[]), name(b"sh\0\0\0\0\0\0"));
    guest.task = B;
    assert_eq!(guest.see(EventHook::Executes, &[]), []);
}

/// The thread takes over number and start of its process's first thread.
#[test]
fn a_thread_that_executes_another_program_stays_traced() {
    let mut guest = Guest::tracing(&[B]);
    guest.is_now(B, 40, 1040);
    assert!(!guest.is_selected(B));
    guest.task = B;
    assert_eq!(guest.short(EventHook::Executes, &[]), [(40, Name)]);
    assert!(guest.is_selected(B));
}

#[test]
fn a_wake_up_without_a_tracepoint_is_one_of_a_task_that_waits_for_it() {
    let mut guest = Guest::tracing(&[B]);
    for (state, wanted, told) in [(1u32, 3, true), (2, 1, false), (0, 3, false)] {
        guest.write(B + RUNNING.state, &state.to_le_bytes());
        let seen = guest.short(EventHook::WakesIf, &[B, wanted]);
        assert_eq!(seen == [(41, Ready)], told, "{state} {wanted}");
        assert!(guest.short(EventHook::WakesIf, &[A, wanted]).is_empty());
    }
}

#[test]
fn traps_tell_addresses_numbers_and_vectors() {
    const ADDRESS: u64 = 0x7ffe_0000_1234;
    const FAULT: u64 = 0x1000_0000_0000_0000;
    let mut guest = Guest::tracing(&[A]);
    guest.fault_address = ADDRESS;
    guest.write(REGISTERS + 136, &[0x33]);
    guest.write(REGISTERS + 0x200 + 136, &[0x10]);
    let kernel = REGISTERS + 0x200;
    for (what, arguments, told) in [
        (EventHook::Fault, [REGISTERS, 0x4], Some(FAULT | ADDRESS)),
        (
            EventHook::Fault,
            [kernel, 0x7],
            Some(0x5000_0000_0000_0000 | ADDRESS),
        ),
        (
            EventHook::SystemCall(1),
            [REGISTERS, 59],
            Some(0x2000_0000_0000_003b),
        ),
        (
            EventHook::SystemCall(0),
            [u64::MAX, 0],
            Some(0x2000_0000_ffff_ffff),
        ),
        (EventHook::Trap(13), [REGISTERS, 0], Some(13)),
        (EventHook::Trap(13), [kernel, 0], None),
        (EventHook::Trap(6), [0, 0], None),
    ] {
        let seen = guest.see(what, &arguments);
        let expected: Vec<_> = told
            .map(|argument| (40, Trap, argument, 0))
            .into_iter()
            .collect();
        assert_eq!(seen, expected, "{what:?}");
    }
    guest.fault_address = 0xffff_ffff_8123_4567;
    let seen = guest.see(EventHook::Fault, &[kernel, 0]);
    assert_eq!(
        seen,
        [(40, Trap, 0x1fff_ffff_8123_4567, 0)],
        "the top bits are lost"
    );
    guest.task = B;
    assert_eq!(guest.see(EventHook::Fault, &[REGISTERS, 4]), []);
}

#[test]
fn interrupts_are_those_of_the_task_that_they_interrupt() {
    let mut guest = Guest::tracing(&[A]);
    let (device, timer) = (Vector::Argument, Vector::Fixed(0xec));
    for (what, told) in [
        (
            EventHook::InterruptStarts(device),
            &[(40, Ints, 0x31, 0)][..],
        ),
        (EventHook::InterruptEnds(device), &[(40, Inte, 0x31, 0)]),
        (EventHook::InterruptStarts(timer), &[(40, Ints, 0xec, 0)]),
        (
            EventHook::Interrupt(timer),
            &[(40, Ints, 0xec, 0), (40, Inte, 0xec, 0)],
        ),
    ] {
        assert_eq!(guest.see(what, &[REGISTERS, 0xf31]), told, "{what:?}");
    }
    guest.task = B;
    assert_eq!(guest.see(EventHook::Interrupt(timer), &[REGISTERS]), []);
}

#[test]
fn the_end_of_an_interrupt_is_waited_for_where_its_task_is_traced() {
    let program = AtHit {
        what: EventHook::InterruptEnds(Vector::Argument),
        context: Arc::new(Guest::tracing(&[A]).context),
        records: true,
    };
    let wanted = |task| {
        program.wants_return(TaskIdentity {
            task,
            process: None,
            thread: None,
            interrupted: true,
        })
    };
    assert_eq!([A, B, 0].map(wanted), [true, false, false]);
    program.context.selection.set_all(true);
    assert_eq!([A, B, 0].map(wanted), [true; 3]);
}

#[test]
fn programs_mark_moments_through_markers_and_trace_ports() {
    let mut guest = Guest::tracing(&[A]);
    assert_eq!(guest.short(EventHook::Marked, &[]), [(40, User)]);
    guest.write(FILE + 0x50, &PORT.to_le_bytes());
    guest.write(PORT + 0x58, &TEXT.to_le_bytes());
    for (name, told) in [
        ("trace\0", true),
        ("ptrace\0", true),
        ("tracectl\0", false),
        ("\0", false),
        ("trace of something longer\0", false),
    ] {
        guest.write(TEXT, name.as_bytes());
        assert_eq!(
            !guest.see(EventHook::WritesPort, &[FILE]).is_empty(),
            told,
            "{name}"
        );
    }
    guest.write(PORT + 0x58, &0x1000u64.to_le_bytes());
    assert_eq!(
        guest.short(EventHook::WritesPort, &[FILE]),
        [(40, User)],
        "no name"
    );
}

#[test]
fn deadline_scheduling_is_told_of_tasks_that_chose_it() {
    const TIMER: u64 = B + 0x120;
    let mut guest = Guest::tracing(&[B]);
    // Lent by another task.
    assert_eq!(guest.see(EventHook::Admitted, &[0, B]), []);
    assert_eq!(guest.see(EventHook::Expelled, &[0, B]), []);
    assert_eq!(guest.see(EventHook::Released, &[TIMER]), []);
    guest.write(B + RUNNING.policy, &6u32.to_le_bytes());
    guest.write(B + 0x100, &10_000u64.to_le_bytes());
    guest.write(B + 0x108, &50_000u64.to_le_bytes());
    assert_eq!(guest.short(EventHook::Admitted, &[0, B]), [(41, Admit)]);
    assert_eq!(guest.short(EventHook::Expelled, &[0, B]), [(41, Expel)]);
    for (bits, on_rq, told) in [
        (0u8, 1u32, &[][..]),
        (
            1,
            1,
            &[
                (41, Release, 0, 0),
                (41, EventType::Deadline, 0, 50_000),
                (41, Ready, 0, 0),
            ],
        ),
        (
            1,
            0,
            &[(41, Release, 0, 0), (41, EventType::Deadline, 0, 50_000)],
        ),
        // A server's, which belongs to no task.
        (5, 1, &[]),
    ] {
        guest.write(B + 0x110, &[bits]);
        guest.write(B + RUNNING.on_rq, &on_rq.to_le_bytes());
        assert_eq!(
            guest.see(EventHook::Released, &[TIMER]),
            told,
            "{bits} {on_rq}"
        );
    }
    assert_eq!(guest.see(EventHook::Released, &[8]), [], "no timer");
}

/// A program that is made, runs, faults and ends, byte by byte.
#[test]
fn the_records_of_a_short_life() {
    let clock = Clock {
        tsc: 0,
        unix_ns: 0x0102_0304_0506_0000,
        hz: 1_000_000_000,
    };
    let mut guest = Guest::tracing(&[A]);
    guest.fault_address = 0x40_1000;
    let mut latest = [i64::MIN; 1];
    let mut bytes = Vec::new();
    for (tsc, task, what, arguments) in [
        (1, A, EventHook::Made, [B, 0]),
        (2, A, EventHook::Switch, [A, B]),
        (3, B, EventHook::Fault, [REGISTERS, 6]),
        (4, B, EventHook::SystemCall(1), [0, 60]),
        (5, B, EventHook::Exits, [0, 0]),
    ] {
        guest.task = task;
        guest.arguments = arguments.to_vec();
        guest.context.see(what, &guest, true);
        for words in guest.put.take() {
            let record = recording::record(&clock, &mut latest, 0, tsc, &words);
            bytes.push(record.unwrap().to_bytes());
        }
    }
    let record = |pid, event: u8, tsc, argument: [u8; 8]| {
        let mut record = [0; RECORD_BYTES];
        record[0] = pid;
        record[4] = event;
        record[12..20].copy_from_slice(&[tsc, 0, 6, 5, 4, 3, 2, 1]);
        record[20..].copy_from_slice(&argument);
        record
    };
    assert_eq!(
        bytes,
        [
            record(41, 15, 1, *b"dd\0\0\0\0\0\0"),
            record(41, 4, 1, [0; 8]),
            record(40, 4, 2, [0; 8]),
            record(41, 3, 2, [0; 8]),
            record(41, 13, 3, [0, 0x10, 0x40, 0, 0, 0, 0, 0x50]),
            record(41, 13, 4, [60, 0, 0, 0, 0, 0, 0, 0x20]),
            record(41, 10, 5, [0; 8]),
        ]
    );
}

fn whats() -> impl Strategy<Value = EventHook> {
    use EventHook::*;
    let vectors = [Vector::Fixed(3), Vector::Argument];
    let vectors = vectors.into_iter();
    let mut all = vec![
        Switch,
        Wakes,
        WakesIf,
        Made,
        Exits,
        Renamed,
        Executes,
        Fault,
        SystemCall(0),
        Marked,
        WritesPort,
        Admitted,
        Expelled,
        Released,
    ];
    all.extend(vectors.flat_map(|it| [InterruptStarts(it), InterruptEnds(it), Interrupt(it)]));
    all.push(EventHook::Trap(6));
    prop::sample::select(all)
}

proptest! {
    /// Any contents of a guest's memory and registers.
    #[test]
    fn any_hit_gives_whole_records_of_known_types(
        whats in prop::collection::vec((whats(), [any::<u64>(); 3], 0usize..4), 1..40),
        tasks in prop::collection::vec(any::<u8>(), 0x200),
        all: bool,
    ) {
        let mut guest = Guest::tracing(&[A, B]);
        guest.context.selection.set_all(all);
        guest.write(C, &tasks);
        let addresses = [A, B, C, u64::MAX - 2];
        let clock = Clock { tsc: 0, unix_ns: 0, hz: 1 };
        for (what, mut arguments, place) in whats {
            guest.task = addresses[place];
            arguments[place % 3] = addresses[(place + 1) % 4];
            guest.arguments = arguments.to_vec();
            guest.context.see(what, &guest, true);
            for words in guest.put.take() {
                let record = recording::record(&clock, &mut [0; 2], 1, 5, &words).unwrap();
                prop_assert!(EventType::of(record.event).is_some());
                let bytes = record.to_bytes();
                prop_assert_eq!(bytes.len(), RECORD_BYTES);
                prop_assert_eq!(Record::parse(&bytes), record);
            }
        }
    }
}

#[test]
fn identities_are_read_from_kernel_addresses_alone() {
    let mut guest = Guest::new();
    guest.write(0x1000, &[1; 0x100]);
    assert_eq!(LAYOUT.identity(&guest, 0x1000), None);
    let known = Identity {
        pid: 40,
        start: 1040,
    };
    assert_eq!(LAYOUT.identity(&guest, A), Some(known));
}
