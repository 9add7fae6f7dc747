//! The function tracer: an event when a kernel function is entered, and one when it returns.
//!
//! The caller owns the machine, keeps it longer than the tracer, drains the tracer often enough, and stops it. The
//! tracer takes the machine's one [`vmm::trap::TrapSink`] for itself. It solves entries, arguments, returns by return address
//! (so that mitigated kernels, recursion and jumps to other functions come out right), tasks, and exact counts. It
//! does not trace user programs, and inlined functions have no entry to trap.
//!
//! Returns: at an entry the return address gets a trap of its own, which stays until the tracer is stopped. A hit
//! there counts as a return only if the same task, with the same stack pointer, waits for it; other code that passes by is
//! counted and forgotten. So there is no return from calls entered before the tracer was armed, from `__switch_to` (the
//! current task changes inside), and from an `execve` by which a thread takes over its leader's number.

mod hit;
mod return_sites;
mod returns;
mod select;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmm::Machine;
use vmm::trap::SiteId;

pub use select::{
    ArmFunctionsError, RefusedFunction, RefusedReason, TracedFunction, UnknownFunction,
    unknown_functions,
};

use crate::event::Event;
use crate::kernel_view::KernelView;
use crate::merge::drain_in_order;
use crate::ring::DEFAULT_SLOTS;
use hit::{HitPath, Kernel, Sink};

/// How functions are traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceOptions {
    /// Threads to trace, by the kernel's pid; empty for all. Others are filtered before anything is recorded, and
    /// so is what belongs to no process.
    pub pids: Vec<u64>,
    /// Whether hits in interrupt context, and where the task is not known, are recorded when `pids` is empty.
    pub without_process: bool,
    /// Events that each vCPU's ring holds: a power of two. An event takes 64 bytes.
    pub ring_slots: usize,
    /// Most functions.
    pub max_functions: usize,
    /// Most return addresses that get a trap.
    pub max_return_sites: usize,
    /// About as many calls may wait for their return at a time; 1024 at least.
    pub max_pending_returns: usize,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self {
            pids: Vec::new(),
            without_process: true,
            ring_slots: DEFAULT_SLOTS,
            max_functions: 4096,
            max_return_sites: 1 << 14,
            max_pending_returns: 1 << 15,
        }
    }
}

/// What a tracer has counted. Exact while the machine is paused or stopped; then
/// `entries - filtered + returns = pushed + dropped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TraceStats {
    /// Hits of function entries.
    pub entries: u64,
    /// Returns that were paired with their entry.
    pub returns: u64,
    /// Entries that the filter left out.
    pub filtered: u64,
    /// Events that found room in a ring.
    pub pushed: u64,
    /// Events lost to a full ring.
    pub dropped: u64,
    /// Events drained.
    pub read: u64,
    /// Hits of return addresses by code that returned from no traced call.
    pub unpaired_returns: u64,
    /// Calls whose return will not be seen: they never returned, or too many waited.
    pub lost_returns: u64,
    /// Calls whose return address could not get a trap.
    pub without_return: u64,
    /// Calls that have not returned yet.
    pub waiting_returns: u64,
    /// Hits at which the kernel's current task could not be read; they belong to no process.
    pub unknown_task: u64,
}

/// Counts of one function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionStats {
    /// Times it was entered, filtered ones included.
    pub entries: u64,
    /// Returns paired.
    pub exits: u64,
}

/// A running tracer. Dropping it without [`stop`](Self::stop) ends the recording and leaves its traps in the guest.
pub struct FunctionTracer {
    path: Arc<HitPath>,
    functions: Vec<TracedFunction>,
    entries: Vec<SiteId>,
    stopped: bool,
}

impl FunctionTracer {
    /// Puts a trap at the entry of each of `functions` in the guest's kernel, running or paused. The first call
    /// may come before the last is armed. Of a name that several functions have, all are traced; see
    /// [`functions`](Self::functions) for what that came to.
    ///
    /// # Errors
    /// If a name is unknown or a function cannot be trapped; all of them are told, and no trap is left behind.
    pub fn arm(
        machine: &Machine,
        view: &KernelView,
        functions: &[String],
        options: &TraceOptions,
    ) -> Result<Self, ArmFunctionsError> {
        let functions = select::select(view, functions, options)?;
        let kept: Vec<_> = functions
            .iter()
            .map(|f| (f.address, f.arguments.unwrap_or(4)))
            .collect();
        let kernel = Kernel {
            tasks: view.tasks,
            space: view.space,
        };
        let path = Arc::new(HitPath::new(&kept, machine.vcpus(), kernel, options)?);
        let mut tracer = Self {
            path,
            functions,
            entries: Vec::new(),
            stopped: false,
        };
        // Before the first trap, so that no hit goes by uncounted.
        machine.set_sink(Some(Box::new(Sink(tracer.path.clone()))));
        let mut refused = Vec::new();
        for function in &tracer.functions {
            let armed = match select::own_use(machine.profile(), &function.name) {
                Some(why) => Err(RefusedReason::OwnUse { why }),
                None => machine
                    .traps()
                    .arm_kernel(function.address, view.space)
                    .map_err(RefusedReason::Arm),
            };
            match armed {
                Ok(site) => tracer.entries.push(site),
                Err(reason) => refused.push(RefusedFunction {
                    name: function.name.clone(),
                    address: function.address,
                    reason,
                }),
            }
        }
        if refused.is_empty() {
            return Ok(tracer);
        }
        tracer.stop(machine);
        Err(ArmFunctionsError::Refused { functions: refused })
    }

    /// What is traced; a position here is [`Event::function`].
    #[must_use]
    pub fn functions(&self) -> &[TracedFunction] {
        &self.functions
    }

    /// Counts of each of [`functions`](Self::functions), in the same order.
    #[must_use]
    pub fn function_stats(&self) -> Vec<FunctionStats> {
        let counts = self.path.functions.iter();
        counts
            .map(|f| FunctionStats {
                entries: load(&f.entries),
                exits: load(&f.exits),
            })
            .collect()
    }

    /// Counts of all functions together.
    #[must_use]
    pub fn stats(&self) -> TraceStats {
        let counters = &self.path.counters;
        let mut stats = TraceStats {
            filtered: load(&counters.filtered),
            unpaired_returns: load(&counters.unpaired),
            without_return: load(&counters.without_return),
            unknown_task: load(&counters.unknown_task),
            lost_returns: self.path.returns.lost(),
            waiting_returns: self.path.returns.waiting(),
            ..TraceStats::default()
        };
        for function in &self.path.functions {
            stats.entries += load(&function.entries);
            stats.returns += load(&function.exits);
        }
        for ring in self.path.rings.iter().map(|ring| ring.stats()) {
            stats.pushed += ring.pushed;
            stats.dropped += ring.dropped;
            stats.read += ring.read;
        }
        stats
    }

    /// Appends what was recorded since the last time, in time order (see [`crate::merge`]); gives how many.
    /// Never waits.
    pub fn drain(&mut self, events: &mut Vec<Event>) -> usize {
        drain_in_order(&self.path.rings, vmm::host_tsc, events)
    }

    /// Takes all traps away, with the machine paused for it, and gives up the machine's sink. What was recorded can
    /// still be drained. Again, it does nothing.
    pub fn stop(&mut self, machine: &Machine) {
        if std::mem::replace(&mut self.stopped, true) {
            return;
        }
        // No vCPU is in the hit path then, so none arms another return address afterwards.
        let paused = machine.pause();
        let sites = self.entries.drain(..).chain(self.path.sites.close());
        for site in sites {
            machine.traps().disarm(site);
        }
        machine.set_sink(None);
        drop(paused);
    }
}

impl Drop for FunctionTracer {
    fn drop(&mut self) {
        if !self.stopped {
            self.path.active.store(false, Ordering::Relaxed);
            log::warn!(
                "a function tracer was dropped without being stopped: its traps stay in the guest"
            );
        }
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
