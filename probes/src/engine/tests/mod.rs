//! Tests of the hit path without KVM: hits as plain values over a small memory.
#![allow(clippy::unwrap_used)]

mod probes;
mod returns;

use std::cell::Cell;
use std::sync::Arc;

use arc_swap::ArcSwap;
use introspect::kernel::symbols::SymbolsBuilder;
use introspect::kernel::task::{PreemptForm, TaskLayout};
use introspect::test_memory::{Flags, TestMemory};
use introspect::x86_64::GeneralRegisters;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::{Gpa, Gva};
use parking_lot::Mutex;
use vmm::sharded_map::{Changes, ShardedMap};
use vmm::trap::{ArmError, SiteId};

use super::budget::ExitTicks;
use super::budget::meter::{Account, Bell, meters};
use super::current::{Base, Current, Tasks};
use super::filter::{Filter, HitFilter, Match};
use super::hit::{Arm, Counters, Hit, HitPath};
use super::plan::{Capture, Enabled, ReturnPlan, SitePlan, SystemCallPlan, SystemCalls};
use super::return_sites::ReturnSites;
use super::return_targets::ReturnTargets;
use super::returns::{FunctionKey, PendingReturns};
use super::seen::At;
use super::semaphores::Semaphores;
use super::session::SessionShared;
use super::stacks::Stacks;
use super::system_call::system_call_key;
use super::user_text::UserSites;
use crate::doorbell::Doorbell;
use crate::event::{Event, EventKind};
use crate::kernel_view::KernelView;
use crate::merge::drain_in_order;
use crate::ring::Ring;
use crate::syscall_entry::SystemCallRegisters;

const READ: u64 = 0xffff_ffff_8100_1000;
const WRITE: u64 = 0xffff_ffff_8100_2000;
const CALLER: u64 = 0xffff_ffff_8100_3005;
const STACK: u64 = 0xffff_c900_0000_0000;
const PER_CPU: [u64; 2] = [0xffff_8880_0700_0000, 0xffff_8880_0710_0000];
const TASKS: [u64; 2] = [0xffff_8880_0300_0000, 0xffff_8880_0300_0800];
const PIDS: [u32; 2] = [57, 58];
/// Physical pages of the addresses above.
const STACK_PAGE: u64 = 0x18_0000;
const PER_CPU_PAGES: [u64; 2] = [0x19_0000, 0x1a_0000];
const TASK_PAGE: u64 = 0x1b_0000;
/// A program's text and stack: pages, and their addresses in two processes.
const USER_TEXT_PAGE: u64 = 0x1c_0000;
const USER_STACK_PAGE: u64 = 0x1d_0000;
const USER_TEXT: [u64; 2] = [0x40_0000, 0x7f12_3456_7000];
const USER_STACK: u64 = 0x7ffe_0000_0000;

const LAYOUT: TaskLayout = TaskLayout {
    current: 0x100,
    preempt_count: Some(0x200),
    preempt_form: PreemptForm::Int,
    pid: 0x10,
    tgid: 0x14,
    comm: 0x20,
};

/// Two CPUs that run task 0, a stack, two processes of one program, and a hit path over them.
struct Guest {
    memory: TestMemory,
    space: AddressSpace,
    processes: [AddressSpace; 2],
    path: HitPath,
    clock: Cell<u64>,
    /// Whether traps at return addresses succeed.
    can_arm: bool,
    /// The number of traps at return addresses so far.
    armed: Cell<u64>,
}

/// The rings of one session.
#[derive(Clone)]
struct Rings(Arc<SessionShared>);

impl Rings {
    fn new(slots: usize) -> Self {
        let rings = (0..2).map(|_| Ring::new(slots, 14).unwrap()).collect();
        Self(Arc::new(SessionShared {
            rings,
            skipped_ticks: Arc::default(),
            doorbell: Doorbell::new().unwrap(),
            meters: meters(2),
        }))
    }

    fn probe(&self, number: u32, kind: EventKind, filter: Filter) -> Arc<Enabled> {
        self.probe_since(number, kind, filter, 0)
    }

    fn probe_since(
        &self,
        number: u32,
        kind: EventKind,
        filter: Filter,
        since: u64,
    ) -> Arc<Enabled> {
        let (filter, capture) = (HitFilter::new(filter, None), Capture::default());
        let account = Arc::new(Account::new(self.0.clone()));
        Arc::new(Enabled::new(
            number, kind, filter, capture, None, account, since,
        ))
    }

    /// Creates a probe that captures the kernel stack.
    fn with_stack(&self, number: u32, kind: EventKind) -> Arc<Enabled> {
        let capture = Capture {
            kernel_stack: 4,
            ..Capture::default()
        };
        let filter = HitFilter::new(Filter::default(), None);
        let account = Arc::new(Account::new(self.0.clone()));
        Arc::new(Enabled::new(
            number, kind, filter, capture, None, account, 0,
        ))
    }

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        drain_in_order(
            &self.0.rings,
            || u64::MAX,
            |_, tsc, words| events.push(Event::decode(tsc, words).unwrap()),
        );
        events
    }

    /// Returns each event as (kind, probe, pc, thread, first argument).
    fn short(&self) -> Vec<(EventKind, u32, u64, Option<u32>, u64)> {
        let short = |e: &Event| (e.kind, e.probe, e.pc, e.tid, e.arguments[0]);
        self.events().iter().map(short).collect()
    }
}

/// Returns hits, filtered, recorded, dropped.
fn counts(probe: &Enabled) -> [u64; 4] {
    let counted = super::session::stats(&probe.counters);
    [
        counted.hits,
        counted.filtered,
        counted.recorded,
        counted.dropped,
    ]
}

struct ArmOf<'g>(&'g Guest);

impl ArmOf<'_> {
    fn arm(&self, address: Gva, at: Gpa) -> Result<SiteId, ArmError> {
        self.0.armed.set(self.0.armed.get() + 1);
        match self.0.can_arm {
            true => Ok(SiteId(at)),
            false => Err(ArmError::Reserved { address }),
        }
    }
}

impl Arm for ArmOf<'_> {
    fn kernel(&self, address: Gva) -> Result<SiteId, ArmError> {
        self.arm(address, Gpa(address.0))
    }

    fn user(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError> {
        let place = translate(&self.0.memory, space, address).unwrap();
        self.arm(address, place.gpa)
    }
}

/// The arguments of a call. Entries are distinguished by RDI.
const ARGUMENTS: [u64; 6] = [11, 12, 13, 14, 15, 16];

impl Guest {
    fn new() -> Self {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        let flags = Flags::default().writable();
        memory.map(space, STACK, STACK_PAGE, 4096, flags);
        memory.map(space, TASKS[0], TASK_PAGE, 4096, flags);
        for cpu in 0..2 {
            memory.map(space, PER_CPU[cpu], PER_CPU_PAGES[cpu], 4096, flags);
            let task = TASK_PAGE + 0x800 * cpu as u64;
            memory.write(task + LAYOUT.pid, &PIDS[cpu].to_le_bytes());
            memory.write(task + LAYOUT.tgid, &PIDS[cpu].to_le_bytes());
        }
        let processes = USER_TEXT.map(|text| {
            let process = memory.address_space(4);
            memory.map(process, text, USER_TEXT_PAGE, 4096, flags.user());
            memory.map(process, USER_STACK, USER_STACK_PAGE, 4096, flags.user());
            process
        });
        let bases = PER_CPU.map(|base| Some(Gva(base)));
        let changes = Changes::default();
        let kernel = KernelView::without_types(SymbolsBuilder::default().finish(None), space);
        let path = HitPath {
            plans: ShardedMap::counted_by(&changes),
            return_plans: ShardedMap::counted_by(&changes),
            timers: ArcSwap::default(),
            watchpoints: ArcSwap::default(),
            tasks: Tasks::new(Some(LAYOUT), space, 0..0, &memory, &bases),
            stacks: Stacks::new(space),
            space,
            space_lasts: true,
            returns: PendingReturns::new(1024),
            kernel_returns: ReturnSites::new(64, &changes),
            user_returns: ReturnSites::new(64, &changes),
            return_targets: ReturnTargets::new(Arc::new(kernel)),
            user_sites: UserSites::default(),
            semaphores: Semaphores::default(),
            pages: None,
            counters: Counters::default(),
            tsc_hz: 1_000_000,
            changes,
            seen: PER_CPU.map(|_| Mutex::default()).into(),
            meters: meters(2),
            exit_ticks: ExitTicks::default(),
            bell: Bell::default(),
            active: true.into(),
        };
        let guest = Self {
            memory,
            space,
            processes,
            path,
            clock: Cell::new(0),
            can_arm: true,
            armed: Cell::new(0),
        };
        guest.running(0, TASKS[0]).running(1, TASKS[0])
    }

    /// Creates a guest with probes 0 and 1 on READ, 2 and 3 on WRITE: entry and return.
    fn traced(slots: usize) -> (Self, Rings) {
        let (guest, rings) = (Self::new(), Rings::new(slots));
        guest.trace(&rings, &Filter::default());
        (guest, rings)
    }

    fn trace(&self, rings: &Rings, filter: &Filter) -> [Arc<Enabled>; 4] {
        let probes = [Entry, Return, Entry, Return];
        let functions = [READ, READ, WRITE, WRITE];
        [0, 1, 2, 3].map(|number| {
            let probe = rings.probe(number as u32, probes[number], filter.clone());
            self.enable(functions[number], &probe);
            probe
        })
    }

    fn plan(&self, site: u64, change: impl FnOnce(&mut SitePlan)) {
        let before = self.path.plans.get(site);
        let mut plan = before.map_or_else(SitePlan::default, |plan| SitePlan::clone(&plan));
        change(&mut plan);
        self.path.plans.insert(site, Arc::new(plan));
    }

    fn return_plan(&self, function: FunctionKey, probe: &Arc<Enabled>) {
        let before = self.path.return_plans.get(function);
        let mut plan = before.map_or_else(ReturnPlan::default, |plan| ReturnPlan::clone(&plan));
        plan.probes.push(probe.clone());
        self.path.return_plans.insert(function, Arc::new(plan));
    }

    /// Puts a probe at a site, or at the return of its function.
    fn enable(&self, site: u64, probe: &Arc<Enabled>) {
        if probe.kind == Return {
            self.return_plan(site, probe);
            self.plan(site, |plan| plan.returns = Some(site));
        } else {
            self.plan(site, |plan| plan.probes.push(probe.clone()));
        }
    }

    fn running(mut self, cpu: usize, task: u64) -> Self {
        self.memory
            .write(PER_CPU_PAGES[cpu] + LAYOUT.current, &task.to_le_bytes());
        self
    }

    fn preempt_count(&mut self, count: u32) {
        let counter = PER_CPU_PAGES[0] + LAYOUT.preempt_count.unwrap();
        self.memory.write(counter, &count.to_le_bytes());
    }

    fn registers(address: u64, stack: u64, result: u64) -> GeneralRegisters {
        let [rdi, rsi, rdx, rcx, r8, r9] = ARGUMENTS;
        GeneralRegisters {
            rax: result,
            rdi,
            rsi,
            rdx,
            rcx,
            r8,
            r9,
            rsp: stack,
            rip: address,
            ..GeneralRegisters::default()
        }
    }

    fn tick(&self) -> u64 {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }

    /// Dispatches a hit; in user mode if a process is given.
    fn take(&self, vcpu: usize, registers: GeneralRegisters, process: Option<usize>) {
        let mut seen = self.path.seen[vcpu].lock();
        let clock: &dyn Fn() -> u64 = &|| self.tick();
        let mut hit = self.stopped(vcpu, &registers, process);
        let at = At {
            site: hit.site,
            address: hit.address.0,
            user: hit.user,
        };
        let (spot, lists) = seen.spot(&self.path, vcpu, at);
        (hit.seen, hit.clock) = (Some(lists), Some(clock));
        self.path.dispatch(&hit, spot, &ArmOf(self));
    }

    fn stopped<'a>(
        &'a self,
        vcpu: usize,
        registers: &'a GeneralRegisters,
        process: Option<usize>,
    ) -> Hit<'a> {
        let address = Gva(registers.rip);
        let space = process.map_or(self.space, |number| self.processes[number]);
        let site = match process {
            Some(_) => translate(&self.memory, space, address).unwrap().gpa.0,
            None => address.0,
        };
        let base = Some(Gva(PER_CPU[vcpu])).filter(|_| process.is_none());
        let base = Base::Known(base);
        Hit {
            vcpu,
            site,
            address,
            user: process.is_some(),
            registers,
            known_space: Some(space),
            memory: &self.memory,
            current: Current::new(&self.path.tasks, &self.memory, vcpu, base),
            seen: None,
            clock: None,
            cpu: None,
        }
    }

    fn hit(&self, vcpu: usize, address: u64, stack: u64, result: u64) {
        self.take(vcpu, Self::registers(address, stack, result), None);
    }

    /// Enters `function` with its return address at `stack`.
    fn call(&mut self, vcpu: usize, function: u64, stack: u64, caller: u64) {
        self.memory
            .write(STACK_PAGE + (stack - STACK), &caller.to_le_bytes());
        self.hit(vcpu, function, stack, 0);
    }

    /// Returns unpaired returns, calls without return, unknown tasks, lost returns, waiting
    /// returns.
    fn counts(&self) -> [u64; 5] {
        use std::sync::atomic::Ordering::Relaxed;
        let counters = &self.path.counters;
        let returns = &self.path.returns;
        [
            counters.unpaired.load(Relaxed),
            counters.without_return.load(Relaxed),
            self.path.tasks.unknown.load(Relaxed),
            returns.lost(),
            returns.waiting(),
        ]
    }
}

use EventKind::{Entry, Point, Return, Tick};
