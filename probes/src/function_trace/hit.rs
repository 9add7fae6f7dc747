//! What happens at one hit, on the vCPU's own thread.
//!
//! No allocation and no waiting on the usual path; the lock of one shard of pending returns is held for an instant. A
//! trap at a return address that was not met before is the exception: it is rare, and allocates.
//!
//! Everything here but [`Sink`] is written over a [`Hit`], plain values and memory, so that it can be tested without KVM.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use introspect::kernel::task::{PerCpu, PreemptCount, TaskLayout};
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use introspect::{CpuRegisters, Gva, PhysicalMemory};
use vmm::trap::{ArmError, SiteId, StoppedCpu, Trap, TrapKind, TrapSink};

use super::TraceOptions;
use super::return_sites::{ReturnSite, ReturnSites};
use super::returns::{Call, Key, PendingReturns};
use crate::event::{Event, EventKind, NO_PROCESS};
use crate::ring::{Ring, RingSizeError, Visit};

/// Bytes of a return address.
const RETURN_ADDRESS: u64 = 8;

/// One hit: the vCPU stands before the instruction at `address`.
#[derive(Debug)]
pub(super) struct Hit<'a, M> {
    pub(super) vcpu: usize,
    pub(super) address: Gva,
    pub(super) stack_pointer: Gva,
    /// RAX.
    pub(super) result: u64,
    /// RDI, RSI, RDX, RCX.
    pub(super) arguments: [u64; 4],
    pub(super) kernel_gs_base: Gva,
    pub(super) memory: &'a M,
}

/// What the hit path knows of one function, and counts.
#[derive(Debug)]
pub(super) struct FunctionCounts {
    /// Argument registers to keep.
    pub(super) arguments: usize,
    pub(super) entries: AtomicU64,
    pub(super) exits: AtomicU64,
}

/// Counts of all functions together.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) filtered: AtomicU64,
    pub(super) unpaired: AtomicU64,
    pub(super) without_return: AtomicU64,
    pub(super) unknown_task: AtomicU64,
}

/// Everything that hits of one tracer touch. Immutable but for atomics and what says otherwise.
pub(super) struct HitPath {
    by_address: HashMap<u64, u32>,
    pub(super) functions: Vec<FunctionCounts>,
    /// One per vCPU; each is pushed to by its vCPU's thread alone.
    pub(super) rings: Vec<Ring>,
    /// One per vCPU: its per-CPU base, and where its variables stand.
    per_cpu: Vec<OnceLock<(Gva, PerCpu)>>,
    tasks: Option<TaskLayout>,
    space: AddressSpace,
    /// Ascending; empty for all.
    pids: Vec<u64>,
    without_process: bool,
    pub(super) returns: PendingReturns,
    pub(super) sites: ReturnSites,
    pub(super) counters: Counters,
    /// Cleared when the tracer is gone without having been stopped.
    pub(super) active: AtomicBool,
}

/// Who runs at a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Context {
    /// Address of the task, 0 if not known.
    task: u64,
    /// Its thread's number, also while it is interrupted.
    thread: u64,
    /// As events show it.
    pid: u64,
}

impl Context {
    const NOBODY: Self = Self {
        task: 0,
        thread: NO_PROCESS,
        pid: NO_PROCESS,
    };
}

/// The kernel that hits happen in.
pub(super) struct Kernel {
    pub(super) tasks: Option<TaskLayout>,
    pub(super) space: AddressSpace,
}

impl HitPath {
    /// For functions given as (address, argument registers to keep), numbered in their order.
    pub(super) fn new(
        functions: &[(Gva, usize)],
        vcpus: usize,
        kernel: Kernel,
        options: &TraceOptions,
    ) -> Result<Self, RingSizeError> {
        let rings = (0..vcpus)
            .map(|_| Ring::new(options.ring_slots))
            .collect::<Result<_, _>>()?;
        let mut pids: Vec<u64> = options.pids.clone();
        pids.sort_unstable();
        let counts = |arguments| FunctionCounts {
            arguments,
            entries: AtomicU64::new(0),
            exits: AtomicU64::new(0),
        };
        Ok(Self {
            by_address: functions
                .iter()
                .zip(0..)
                .map(|((address, _), id)| (address.0, id))
                .collect(),
            functions: functions
                .iter()
                .map(|(_, arguments)| counts(*arguments))
                .collect(),
            rings,
            per_cpu: (0..vcpus).map(|_| OnceLock::new()).collect(),
            tasks: kernel.tasks,
            space: kernel.space,
            pids,
            without_process: options.without_process,
            returns: PendingReturns::new(options.max_pending_returns),
            sites: ReturnSites::new(options.max_return_sites),
            counters: Counters::default(),
            active: AtomicBool::new(true),
        })
    }

    /// Records one hit. `arm` puts a trap at a return address.
    pub(super) fn take<M: PhysicalMemory>(
        &self,
        hit: &Hit<'_, M>,
        clock: impl Fn() -> u64,
        arm: impl FnOnce(Gva) -> Result<SiteId, ArmError>,
    ) {
        let Some(ring) = self.rings.get(hit.vcpu) else {
            return;
        };
        let visit = ring.visit(clock);
        let function = self.by_address.get(&hit.address.0).copied();
        let is_return = self.sites.get(hit.address) == Some(ReturnSite::Armed);
        if function.is_none() && !is_return {
            // Another user of the machine's traps.
            return;
        }
        let context = self.context(hit);
        // Where code follows a call that never returns, one address can be both.
        if is_return && self.exit(&visit, hit, context) {
            return;
        }
        match function {
            Some(function) => self.enter(&visit, hit, context, function, arm),
            None => count(&self.counters.unpaired),
        }
    }

    fn enter<M: PhysicalMemory>(
        &self,
        visit: &Visit<'_>,
        hit: &Hit<'_, M>,
        context: Context,
        id: u32,
        arm: impl FnOnce(Gva) -> Result<SiteId, ArmError>,
    ) {
        let Some(function) = self.functions.get(id as usize) else {
            return;
        };
        count(&function.entries);
        if !self.is_wanted(context.pid) {
            count(&self.counters.filtered);
            return;
        }
        let mut arguments = hit.arguments;
        arguments
            .iter_mut()
            .skip(function.arguments)
            .for_each(|argument| *argument = 0);
        visit.push(event(EventKind::Entry, hit, context, id, arguments));
        let Some(return_address) = self.return_address(hit) else {
            count(&self.counters.without_return);
            return;
        };
        if self.sites.ensure(return_address, arm) == ReturnSite::Refused {
            count(&self.counters.without_return);
            return;
        }
        let stack = hit.stack_pointer.0.wrapping_add(RETURN_ADDRESS);
        let key = Key {
            task: context.task,
            stack,
        };
        let call = Call {
            thread: context.thread,
            return_address: return_address.0,
            function: id,
            tsc: visit.tsc(),
        };
        self.returns.enter(key, call);
    }

    /// Whether this hit was the return of calls that wait for it.
    fn exit<M>(&self, visit: &Visit<'_>, hit: &Hit<'_, M>, context: Context) -> bool {
        let key = Key {
            task: context.task,
            stack: hit.stack_pointer.0,
        };
        let Some(frame) = self.returns.take(key, context.thread, hit.address.0) else {
            return false;
        };
        for id in frame.functions() {
            if let Some(function) = self.functions.get(id as usize) {
                count(&function.exits);
            }
            visit.push(event(
                EventKind::Exit,
                hit,
                context,
                id,
                [hit.result, 0, 0, 0],
            ));
        }
        true
    }

    /// The return address on the stack, if it can be one: a guest that is not Linux, or is hostile, may have anything
    /// there, and a trap goes to nobody's memory but the kernel's.
    fn return_address<M: PhysicalMemory>(&self, hit: &Hit<'_, M>) -> Option<Gva> {
        let found = read_u64(hit.memory, self.space, hit.stack_pointer).ok()?;
        let same_half = found >> 63 == hit.address.0 >> 63;
        (same_half && found != 0).then_some(Gva(found))
    }

    fn is_wanted(&self, pid: u64) -> bool {
        match self.pids.is_empty() {
            true => self.without_process || pid != NO_PROCESS,
            // No process is in no list.
            false => self.pids.binary_search(&pid).is_ok(),
        }
    }

    fn context<M: PhysicalMemory>(&self, hit: &Hit<'_, M>) -> Context {
        let Some(tasks) = &self.tasks else {
            return Context::NOBODY;
        };
        self.task(tasks, hit).unwrap_or_else(|| {
            count(&self.counters.unknown_task);
            Context::NOBODY
        })
    }

    fn task<M: PhysicalMemory>(&self, tasks: &TaskLayout, hit: &Hit<'_, M>) -> Option<Context> {
        let per_cpu = self.per_cpu(tasks, hit)?;
        let current = tasks
            .current_thread_at(hit.memory, self.space, &per_cpu)
            .ok()?;
        let nesting = tasks.preempt_count(hit.memory, &per_cpu).ok()?;
        let interrupted = nesting.is_some_and(is_interrupt);
        let thread = u64::from(current.pid.cast_unsigned());
        let pid = if interrupted { NO_PROCESS } else { thread };
        Some(Context {
            task: current.task.0,
            thread,
            pid,
        })
    }

    /// Where the vCPU's variables stand: the same for as long as the guest runs.
    fn per_cpu<M: PhysicalMemory>(&self, tasks: &TaskLayout, hit: &Hit<'_, M>) -> Option<PerCpu> {
        let base = hit.kernel_gs_base;
        let known = self.per_cpu.get(hit.vcpu)?;
        match known.get() {
            Some((at, per_cpu)) if *at == base => Some(*per_cpu),
            _ => {
                let found = tasks.per_cpu(hit.memory, self.space, base).ok()?;
                // Kept once: the base changes only when the guest starts another kernel, and is then looked up
                // at every hit.
                let _ = known.set((base, found));
                Some(found)
            }
        }
    }
}

fn is_interrupt(nesting: PreemptCount) -> bool {
    nesting.in_hard_interrupt() || nesting.in_nmi()
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn event<M>(
    kind: EventKind,
    hit: &Hit<'_, M>,
    context: Context,
    function: u32,
    arguments: [u64; 4],
) -> Event {
    Event {
        kind,
        vcpu: u16::try_from(hit.vcpu).unwrap_or(u16::MAX),
        function,
        pc: hit.address.0,
        // The visit's.
        tsc: 0,
        pid: context.pid,
        arguments,
    }
}

/// The hit path as the machine calls it.
pub(super) struct Sink(pub(super) Arc<HitPath>);

impl TrapSink for Sink {
    fn trap(&self, trap: &Trap, cpu: &StoppedCpu<'_>) {
        if trap.kind != TrapKind::Kernel || !self.0.active.load(Ordering::Relaxed) {
            return;
        }
        let regs = cpu.regs();
        let hit = Hit {
            vcpu: trap.vcpu,
            address: trap.address,
            stack_pointer: Gva(regs.rsp),
            result: regs.rax,
            arguments: [regs.rdi, regs.rsi, regs.rdx, regs.rcx],
            kernel_gs_base: cpu.kernel_gs_base(),
            memory: cpu.ram(),
        };
        let arm = |address| cpu.traps().arm_kernel(address, self.0.space);
        self.0.take(&hit, || cpu.tsc(), arm);
    }
}
