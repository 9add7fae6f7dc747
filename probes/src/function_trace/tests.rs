//! The hit path without KVM: hits as plain values over a small memory.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;

use introspect::kernel::task::TaskLayout;
use introspect::test_memory::{Flags, TestMemory};
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gpa, Gva};
use vmm::trap::{ArmError, SiteId};

use super::TraceOptions;
use super::hit::{Hit, HitPath, Kernel};
use crate::event::{Event, EventKind, NO_PROCESS};
use crate::merge::drain_in_order;

const READ: u64 = 0xffff_ffff_8100_1000;
const WRITE: u64 = 0xffff_ffff_8100_2000;
const CALLER: u64 = 0xffff_ffff_8100_3005;
const STACK: u64 = 0xffff_c900_0000_0000;
const PER_CPU: [u64; 2] = [0xffff_8880_0700_0000, 0xffff_8880_0710_0000];
const TASKS: [u64; 2] = [0xffff_8880_0300_0000, 0xffff_8880_0300_0800];
const PIDS: [u64; 2] = [57, 58];
/// Physical pages behind the above.
const STACK_PAGE: u64 = 0x18_0000;
const PER_CPU_PAGES: [u64; 2] = [0x19_0000, 0x1a_0000];
const TASK_PAGE: u64 = 0x1b_0000;

const LAYOUT: TaskLayout = TaskLayout {
    current: 0x100,
    preempt_count: Some(0x200),
    pid: 0x10,
    tgid: 0x14,
    comm: 0x20,
};

/// Two CPUs that run task 0, two functions, a stack.
struct Guest {
    memory: TestMemory,
    path: HitPath,
    clock: Cell<u64>,
    /// Whether traps at return addresses succeed.
    can_arm: bool,
}

impl Guest {
    fn new(options: &TraceOptions) -> Self {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        let flags = Flags::default().writable();
        memory.map(space, STACK, STACK_PAGE, 4096, flags);
        memory.map(space, TASKS[0], TASK_PAGE, 4096, flags);
        for (cpu, (gva, gpa)) in PER_CPU.into_iter().zip(PER_CPU_PAGES).enumerate() {
            memory.map(space, gva, gpa, 4096, flags);
            memory.write(
                TASK_PAGE + 0x800 * cpu as u64 + LAYOUT.pid,
                &PIDS[cpu].to_le_bytes(),
            );
        }
        let path = Self::path(space, options);
        let guest = Self {
            memory,
            path,
            clock: Cell::new(0),
            can_arm: true,
        };
        guest.running(0, TASKS[0]).running(1, TASKS[0])
    }

    fn path(space: AddressSpace, options: &TraceOptions) -> HitPath {
        let kernel = Kernel {
            tasks: Some(LAYOUT),
            space,
        };
        HitPath::new(&[(Gva(READ), 3), (Gva(WRITE), 4)], 2, kernel, options).unwrap()
    }

    fn running(mut self, cpu: usize, task: u64) -> Self {
        self.memory
            .write(PER_CPU_PAGES[cpu] + LAYOUT.current, &task.to_le_bytes());
        self
    }

    fn hit(&self, vcpu: usize, address: u64, stack: u64, result: u64) {
        let hit = Hit {
            vcpu,
            address: Gva(address),
            stack_pointer: Gva(stack),
            result,
            arguments: [11, 12, 13, 14],
            kernel_gs_base: Gva(PER_CPU[vcpu]),
            memory: &self.memory,
        };
        let clock = || {
            self.clock.set(self.clock.get() + 1);
            self.clock.get()
        };
        self.path.take(&hit, clock, |address| match self.can_arm {
            true => Ok(SiteId(Gpa(address.0))),
            false => Err(ArmError::Reserved { address }),
        });
    }

    /// A call of `function` whose return address stands at `stack`.
    fn call(&mut self, vcpu: usize, function: u64, stack: u64, caller: u64) {
        self.memory
            .write(STACK_PAGE + (stack - STACK), &caller.to_le_bytes());
        self.hit(vcpu, function, stack, 0);
    }

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        drain_in_order(&self.path.rings, || u64::MAX, &mut events);
        events
    }

    /// (kind, function, pc, pid, first argument)
    fn short(&self) -> Vec<(EventKind, u32, u64, u64, u64)> {
        let short = |e: &Event| (e.kind, e.function, e.pc, e.pid, e.arguments[0]);
        self.events().iter().map(short).collect()
    }

    /// Unpaired returns, calls without return, unknown tasks, lost returns, waiting returns.
    fn counts(&self) -> [u64; 5] {
        let counters = &self.path.counters;
        let returns = &self.path.returns;
        [
            super::load(&counters.unpaired),
            super::load(&counters.without_return),
            super::load(&counters.unknown_task),
            returns.lost(),
            returns.waiting(),
        ]
    }
}

use EventKind::{Entry, Exit};

#[test]
fn a_call_gives_its_arguments_and_then_its_result() {
    let mut guest = Guest::new(&TraceOptions::default());
    guest.call(1, READ, STACK + 0x100, CALLER);
    guest.hit(1, CALLER, STACK + 0x108, 99);
    let event = Event {
        kind: Entry,
        vcpu: 1,
        function: 0,
        pc: READ,
        tsc: 2,
        pid: PIDS[0],
        // The fourth register is not one of its three arguments.
        arguments: [11, 12, 13, 0],
    };
    let exit = Event {
        kind: Exit,
        pc: CALLER,
        tsc: 4,
        arguments: [99, 0, 0, 0],
        ..event
    };
    assert_eq!(guest.events(), [event, exit]);
    assert_eq!(guest.counts(), [0; 5]);
}

#[test]
fn nested_calls_return_from_the_inside_out() {
    let mut guest = Guest::new(&TraceOptions::default());
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
    let found: Vec<_> = guest
        .short()
        .into_iter()
        .map(|(k, f, _, _, a)| (k, f, a))
        .collect();
    let entries = [(Entry, 0, 11), (Entry, 0, 11), (Entry, 1, 11)];
    assert_eq!(
        found,
        [&entries[..], &[(Exit, 1, 1), (Exit, 0, 2), (Exit, 0, 3)]].concat()
    );
    assert_eq!(guest.counts(), [0; 5]);
}

#[test]
fn a_task_may_return_on_another_cpu() {
    let mut guest = Guest::new(&TraceOptions::default());
    guest.call(0, READ, STACK + 0x100, CALLER);
    guest = guest.running(0, TASKS[1]);
    guest.hit(1, CALLER, STACK + 0x108, 5);
    let expected = [(Entry, 0, READ, PIDS[0], 11), (Exit, 0, CALLER, PIDS[0], 5)];
    assert_eq!(guest.short(), expected);
}

#[test]
fn passers_by_at_a_return_address_are_no_returns() {
    let mut guest = Guest::new(&TraceOptions::default());
    guest.call(0, READ, STACK + 0x100, CALLER);
    let guest = guest.running(1, TASKS[1]);
    // Another task, another depth, and an address that nobody traces.
    guest.hit(1, CALLER, STACK + 0x108, 0);
    guest.hit(0, CALLER, STACK + 0x88, 0);
    guest.hit(0, CALLER + 1, STACK + 0x108, 0);
    assert_eq!(guest.counts(), [2, 0, 0, 0, 1]);
    guest.hit(0, CALLER, STACK + 0x108, 7);
    let expected = [(Entry, 0, READ, PIDS[0], 11), (Exit, 0, CALLER, PIDS[0], 7)];
    assert_eq!(guest.short(), expected);
}

#[test]
fn a_new_thread_in_the_memory_of_a_dead_one_does_not_return_for_it() {
    let mut guest = Guest::new(&TraceOptions::default());
    guest.call(0, READ, STACK + 0x100, CALLER);
    guest
        .memory
        .write(TASK_PAGE + LAYOUT.pid, &99u32.to_le_bytes());
    guest.hit(0, CALLER, STACK + 0x108, 0);
    assert_eq!(guest.short(), [(Entry, 0, READ, PIDS[0], 11)]);
    assert_eq!(guest.counts(), [1, 0, 0, 1, 0]);
}

#[test]
fn jumping_to_another_function_returns_from_both() {
    let mut guest = Guest::new(&TraceOptions::default());
    guest.call(0, READ, STACK + 0x100, CALLER);
    guest.call(0, WRITE, STACK + 0x100, CALLER);
    guest.hit(0, CALLER, STACK + 0x108, 7);
    let exits: Vec<_> = guest.short().into_iter().filter(|e| e.0 == Exit).collect();
    assert_eq!(
        exits,
        [(Exit, 1, CALLER, PIDS[0], 7), (Exit, 0, CALLER, PIDS[0], 7)]
    );
}

#[test]
fn a_function_that_starts_at_a_return_address_is_told_from_the_return() {
    let mut guest = Guest::new(&TraceOptions::default());
    // READ is called last thing before WRITE begins.
    guest.call(0, READ, STACK + 0x100, WRITE);
    guest.call(0, WRITE, STACK + 0x80, CALLER);
    guest.hit(0, WRITE, STACK + 0x108, 9);
    let found: Vec<_> = guest
        .short()
        .into_iter()
        .map(|(k, f, _, _, a)| (k, f, a))
        .collect();
    assert_eq!(found, [(Entry, 0, 11), (Entry, 1, 11), (Exit, 0, 9)]);
    assert_eq!(guest.counts()[0], 0);
}

#[test]
fn interrupts_belong_to_no_process_and_softirqs_to_the_task() {
    for (preempt_count, pid) in [
        (0u32, PIDS[0]),
        (0x8000_0002, PIDS[0]),
        (0x0000_0100, PIDS[0]),
        (0x0001_0000, NO_PROCESS),
        (0x0011_0000, NO_PROCESS),
        (0x0010_0000, NO_PROCESS),
    ] {
        let mut guest = Guest::new(&TraceOptions::default());
        let counter = PER_CPU_PAGES[0] + LAYOUT.preempt_count.unwrap();
        guest.memory.write(counter, &preempt_count.to_le_bytes());
        guest.call(0, READ, STACK + 0x100, CALLER);
        guest.hit(0, CALLER, STACK + 0x108, 0);
        let pids: Vec<u64> = guest.events().iter().map(|e| e.pid).collect();
        assert_eq!(pids, [pid, pid], "{preempt_count:#x}");
    }
}

#[test]
fn filters_leave_no_trace_of_others() {
    let all = TraceOptions::default();
    let only = |pids: &[u64]| TraceOptions {
        pids: pids.to_vec(),
        ..all.clone()
    };
    let processes = TraceOptions {
        without_process: false,
        ..all.clone()
    };
    for (options, interrupted, expected) in [
        (all.clone(), false, 2),
        (all.clone(), true, 2),
        (only(&PIDS), false, 2),
        (only(&[PIDS[1]]), false, 0),
        (only(&PIDS), true, 0),
        (processes.clone(), false, 2),
        (processes, true, 0),
    ] {
        let mut guest = Guest::new(&options);
        let counter = PER_CPU_PAGES[0] + LAYOUT.preempt_count.unwrap();
        guest
            .memory
            .write(counter, &(u32::from(interrupted) << 16).to_le_bytes());
        guest.call(0, READ, STACK + 0x100, CALLER);
        guest.hit(0, CALLER, STACK + 0x108, 0);
        assert_eq!(guest.events().len(), expected, "{options:?} {interrupted}");
        let filtered = super::load(&guest.path.counters.filtered);
        assert_eq!(filtered, u64::from(expected == 0));
        assert_eq!(
            guest.path.sites.close().len(),
            expected / 2,
            "a filtered call arms nothing"
        );
    }
}

#[test]
fn an_entry_is_kept_when_its_return_cannot_be_seen() {
    // The stack is not mapped; user space, or nothing, as return address; no trap can stand there.
    for (stack, caller, can_arm) in [
        (STACK - 0x1000, None, true),
        (STACK + 0x100, Some(0x40_0000), true),
        (STACK + 0x100, Some(0), true),
        (STACK + 0x100, Some(CALLER), false),
    ] {
        let mut guest = Guest::new(&TraceOptions::default());
        guest.can_arm = can_arm;
        match caller {
            Some(caller) => guest.call(0, READ, stack, caller),
            None => guest.hit(0, READ, stack, 0),
        }
        assert_eq!(guest.short(), [(Entry, 0, READ, PIDS[0], 11)]);
        assert_eq!(guest.counts(), [0, 1, 0, 0, 0], "{stack:#x} {caller:x?}");
    }
}

#[test]
fn a_task_that_cannot_be_read_is_no_process_and_counted() {
    for task in [0, 0x1234, TASKS[0] + 0x1000] {
        let mut guest = Guest::new(&TraceOptions::default()).running(0, task);
        guest.call(0, READ, STACK + 0x100, CALLER);
        guest.hit(0, CALLER, STACK + 0x108, 3);
        let expected = [
            (Entry, 0, READ, NO_PROCESS, 11),
            (Exit, 0, CALLER, NO_PROCESS, 3),
        ];
        assert_eq!(guest.short(), expected, "{task:#x}");
        assert_eq!(guest.counts(), [0, 0, 2, 0, 0]);
    }
}

#[test]
fn a_full_ring_loses_the_new_and_nothing_else() {
    let options = TraceOptions {
        ring_slots: 8,
        ..TraceOptions::default()
    };
    let mut guest = Guest::new(&options);
    for _ in 0..100 {
        guest.call(0, READ, STACK + 0x100, CALLER);
        guest.hit(0, CALLER, STACK + 0x108, 0);
    }
    let stats = guest.path.rings[0].stats();
    assert_eq!((stats.pushed, stats.dropped), (8, 192));
    assert_eq!(guest.counts(), [0; 5], "pairing goes on");
    assert_eq!(
        guest.events().iter().map(|e| e.tsc).max(),
        Some(16),
        "the oldest are kept"
    );
}
