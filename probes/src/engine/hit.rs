//! What happens at one hit, on the vCPU's own thread.
//!
//! No system call, no allocation and no waiting on the usual path; the lock of one shard of pending returns is held for an instant. A
//! trap at a return address that was not met before is the exception: it is rare, and allocates. So do functions that share a frame.
//!
//! Everything here is written over a [`Hit`], plain values and memory, so that it can be tested without KVM; [`sink`](super::sink) makes hits
//! of what the machine tells.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use introspect::x86_64::paging::{self, AddressSpace};
use introspect::x86_64::virtual_memory::read_u64;
use introspect::x86_64::{CpuState, GeneralRegisters};
use introspect::{Gpa, Gva, PhysicalMemory};
use parking_lot::Mutex;
use vmm::sharded_map::{Changes, ShardedMap};
use vmm::trap::{ArmError, SiteId, StoppedCpu, TrapTable};

use super::arguments::Arguments;
use super::current::{Current, Tasks};
use super::filter::HitFilter;
use super::guest_pages::GuestPages;
use super::plan::{Enabled, ReturnPlan, SitePlan, StaticPlan, TracepointPlan, count};
use super::program::{Frames, ProbeHit, Ran, Who};
use super::return_sites::{ReturnSite, ReturnSites};
use super::returns::{Call, FunctionKey, Key, PendingReturns, Returning};
use super::seen::{At, Lists, Seen, Spot, look_up};
use super::semaphores::Semaphores;
use super::stacks::Stacks;
use super::system_call::SYSTEM_CALL_RESULT;
use super::user_text::{Traps, UserSites};
use super::{strings, tracepoint};
use crate::event::{EventKind, Header, MAX_ARGUMENTS, MAX_FRAMES, Recorder};

/// Selectors of Linux's 64-bit code (arch/x86/include/asm/segment.h).
const KERNEL_CS: u16 = 0x10;
const USER_CS: u16 = 0x33;
/// CR4.LA57: paging has five levels.
const CR4_LA57: u64 = 1 << 12;
/// Page tables that map nothing: no RAM is at their address.
const NO_SPACE: AddressSpace = AddressSpace {
    root: Gpa(0x000f_ffff_ffff_f000),
    levels: 4,
};
/// Bytes of a return address.
const RETURN_ADDRESS: u64 = 8;
/// What puts traps at return addresses.
pub(crate) trait Arm {
    /// A site in kernel text.
    fn kernel(&self, address: Gva) -> Result<SiteId, ArmError>;
    /// A site in a program's text, mapped at `address` of `space`.
    fn user(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError>;
}

/// One hit: the vCPU stands before the instruction at `address`.
pub(crate) struct Hit<'a> {
    pub(crate) vcpu: usize,
    /// The site's physical byte.
    pub(crate) site: u64,
    pub(crate) address: Gva,
    pub(crate) user: bool,
    pub(crate) registers: &'a GeneralRegisters,
    /// The page tables in use, where they are known without the vCPU being asked.
    pub(crate) known_space: Option<AddressSpace>,
    pub(crate) memory: &'a dyn PhysicalMemory,
    pub(crate) current: Current<'a>,
    /// Results of earlier lookups on this vCPU.
    pub(crate) seen: Option<&'a Lists>,
    /// Time as the test has it, if it does.
    #[cfg(test)]
    pub(crate) clock: Option<&'a dyn Fn() -> u64>,
    /// The vCPU itself. None in tests.
    pub(crate) cpu: Option<&'a StoppedCpu<'a>>,
}

impl Hit<'_> {
    /// The page tables in use. Asking a vCPU for them may cost more than the rest of a hit.
    pub(crate) fn space(&self) -> AddressSpace {
        let asked = || self.cpu.map(|cpu| cpu.address_space());
        self.known_space.or_else(asked).unwrap_or(NO_SPACE)
    }

    /// The registers as stack walks take them that look through `space`. GS is not known in programs' code, and not needed for their stacks.
    pub(crate) fn cpu_state(&self, space: AddressSpace) -> CpuState {
        let gs_base = self.current.base().map_or(0, |base| base.0);
        CpuState {
            general: *self.registers,
            cs: if self.user { USER_CS } else { KERNEL_CS },
            gs_base,
            swapped_gs_base: gs_base,
            cr3: space.root.0,
            cr4: if space.levels == 5 { CR4_LA57 } else { 0 },
            ..CpuState::default()
        }
    }

    /// Whether a filter lets the hit through, its rates aside.
    #[inline]
    fn is_admitted_by(&self, filter: &HitFilter) -> bool {
        let root = || self.space().root;
        filter.admits(
            self.vcpu,
            root,
            || self.current.identity(),
            || self.current.comm(),
        )
    }

    /// The time stamp counter now.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        #[cfg(test)]
        if let Some(clock) = self.clock {
            return clock();
        }
        vmm::host_tsc()
    }

    /// RDI, RSI, RDX, RCX, R8, R9.
    pub(crate) fn arguments(&self) -> [u64; MAX_ARGUMENTS] {
        let r = self.registers;
        [r.rdi, r.rsi, r.rdx, r.rcx, r.r8, r.r9]
    }
}

/// Counts of all probes together.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Hits of return addresses by code that returned from no probed call.
    pub(crate) unpaired: AtomicU64,
    /// Calls whose return address could not get a trap.
    pub(crate) without_return: AtomicU64,
    /// Times that sites were taken out of the guest's way while it read or wrote its text.
    pub(crate) lifted: AtomicU64,
    /// Bytes of ours that were put right in what the guest has read or copied.
    pub(crate) hidden: AtomicU64,
    /// Sites in text that the guest has freed.
    pub(crate) freed: AtomicU64,
    /// Tracepoints whose arguments could not be found.
    pub(crate) without_arguments: AtomicU64,
}

/// Everything that hits touch. Immutable but for atomics and what says otherwise.
pub(crate) struct HitPath {
    /// Of `plans`, `return_plans`, `kernel_returns` and `user_returns` together.
    pub(crate) changes: Changes,
    /// By a site's physical byte.
    pub(crate) plans: ShardedMap<SitePlan>,
    pub(crate) return_plans: ShardedMap<ReturnPlan>,
    /// Timers, by the bit of a sample's mask.
    pub(crate) timers: ArcSwap<Vec<Option<Arc<Enabled>>>>,
    pub(crate) tasks: Tasks,
    pub(crate) stacks: Stacks,
    /// Page tables that map the kernel.
    pub(crate) space: AddressSpace,
    /// Whether they are its own, and stay as long as it runs.
    pub(crate) space_lasts: bool,
    pub(crate) returns: PendingReturns,
    pub(crate) kernel_returns: ReturnSites,
    pub(crate) user_returns: ReturnSites,
    pub(crate) user_sites: UserSites,
    pub(crate) semaphores: Semaphores,
    pub(crate) pages: Option<Arc<GuestPages>>,
    pub(crate) counters: Counters,
    /// Ticks of the time stamp counter in a second.
    pub(crate) tsc_hz: u64,
    /// One per vCPU.
    pub(crate) seen: Vec<Mutex<Seen>>,
    /// Cleared when the engine is gone.
    pub(crate) active: AtomicBool,
}

impl HitPath {
    /// Arms a site in the kernel's text, by the kernel's own page tables where they are known.
    pub(crate) fn arm_kernel(&self, table: &TrapTable, address: Gva) -> Result<SiteId, ArmError> {
        match self.space_lasts {
            true => table.arm_kernel_by(address, self.space),
            false => table.arm_kernel(address, self.space),
        }
    }

    /// Where sites are put, on the vCPU's own thread.
    pub(crate) fn traps<'t>(&'t self, cpu: &'t StoppedCpu<'_>) -> Traps<'t> {
        Traps {
            table: cpu.traps(),
            plans: &self.plans,
        }
    }

    /// So many sites were taken out of the guest's way.
    pub(crate) fn count_lifted(&self, sites: usize) {
        let lifted = &self.counters.lifted;
        lifted.fetch_add(sites as u64, Ordering::Relaxed);
    }

    /// Records one hit, at `spot`.
    #[inline(always)]
    pub(crate) fn take(&self, hit: &Hit<'_>, spot: &Spot, arm: &dyn Arm) {
        // Where code follows a call that never returns, one address can be both.
        let returned = spot.is_return && self.leave(hit, spot);
        if let Some(plan) = &spot.plan {
            return self.reach(hit, spot, plan, returned, arm);
        }
        // Asked again: the trap may have been taken away since, and its calls forgotten.
        if spot.is_return && !returned && self.is_return(hit) {
            count(&self.counters.unpaired);
        }
    }

    /// Puts together what is to be done at a place.
    pub(super) fn spot(&self, at: At) -> Spot {
        let returning = match at.user {
            true => self.user_returns.function_at(at.site),
            false => self.kernel_returns.function_at(at.address),
        };
        let plan = self.plans.get(at.site);
        let returns = |function| self.return_plans.get(function);
        let entered = plan.as_ref().and_then(|plan| returns(plan.returns?));
        Spot {
            site: at.site,
            is_return: returning.is_some(),
            returns_to: Cell::default(),
            is_plain: plan.as_ref().is_some_and(|plan| plan.is_plain()),
            plan,
            entered,
            returning: returning.and_then(|function| Some((function, returns(function)?))),
        }
    }

    /// Returns whether a trap for returns stands where the hit is.
    fn is_return(&self, hit: &Hit<'_>) -> bool {
        match hit.user {
            true => self.user_returns.is_armed(hit.site),
            false => self.kernel_returns.is_armed(hit.address.0),
        }
    }

    /// Lets go of what lists still hold of plans that are no more. A vCPU that is at a hit does so by itself, at its next.
    pub(super) fn let_go(&self) {
        for seen in &self.seen {
            if let Some(mut seen) = seen.try_lock() {
                seen.clear();
            }
        }
    }

    /// Ends the probing of a function's return, while the guest runs. The traps at its return addresses
    /// go first, by `disarm`: a call is recorded for as long as its return meets one. Then `stop` changes
    /// what happens at the entry.
    pub(super) fn end_returns(
        &self,
        function: FunctionKey,
        disarm: impl Fn(SiteId),
        stop: impl FnOnce(),
    ) {
        for sites in [&self.kernel_returns, &self.user_returns] {
            for site in sites.close(function) {
                disarm(site);
            }
        }
        self.return_plans.remove(function);
        stop();
        self.returns.forget(function);
    }

    /// A timer's turn on one vCPU, wherever that is.
    pub(crate) fn sample(&self, mask: u64, hit: &Hit<'_>) {
        let timers = self.timers.load();
        for (bit, timer) in timers.iter().enumerate().take(u64::BITS as usize) {
            if mask >> bit & 1 == 1
                && let Some(probe) = timer
            {
                self.fire(hit, probe, &Fired::at(hit.address.0));
            }
        }
    }

    /// What stands at the site. Where a call has just `returned` to it no function is entered.
    #[inline(always)]
    fn reach(&self, hit: &Hit<'_>, spot: &Spot, plan: &SitePlan, returned: bool, arm: &dyn Arm) {
        let wants_return = !spot.is_plain && !returned && self.enter_watched(hit, plan);
        for probe in &plan.probes {
            let fires = !returned || probe.kind != EventKind::Entry;
            if fires && self.admits(hit, probe) {
                // A point is where it is, also where a function's trap stands behind its first byte.
                let pc = plan.reported.filter(|_| probe.kind != EventKind::Point);
                let pc = pc.unwrap_or(hit.address.0);
                match probe.is_usual {
                    true => self.record(hit, probe, pc, &hit.arguments()),
                    false => {
                        let fired = Fired {
                            arguments: &hit.arguments(),
                            ..Fired::at(pc)
                        };
                        self.fire_admitted(hit, probe, &fired);
                    }
                }
            }
        }
        if !spot.is_plain {
            self.reach_others(hit, plan, returned, arm);
        }
        let Some(function) = plan.returns.filter(|_| !returned) else {
            return;
        };
        let entered = spot.entered.as_deref();
        if wants_return || entered.is_some_and(|plan| return_is_wanted(hit, plan)) {
            self.expect_return(hit, function, &hit.arguments(), Some(&spot.returns_to), arm);
        }
    }

    /// Tells the engine's own probes of the function that is entered; whether any wants its return.
    #[inline(never)]
    fn enter_watched(&self, hit: &Hit<'_>, plan: &SitePlan) -> bool {
        let mut wants_return = false;
        for watch in &plan.watches {
            wants_return |= watch.enter(self, hit);
        }
        wants_return
    }

    /// What stands at the site besides probes of its own.
    #[inline(never)]
    fn reach_others(&self, hit: &Hit<'_>, plan: &SitePlan, returned: bool, arm: &dyn Arm) {
        let pc = plan.reported.unwrap_or(hit.address.0);
        for place in &plan.statics {
            self.reach_static(hit, place);
        }
        // A branch of a tracepoint is often what calls return to.
        for (tracepoint, target) in &plan.tracepoints {
            self.reach_tracepoint(hit, tracepoint, *target, pc);
        }
        if let Some(calls) = plan.system_calls.as_ref().filter(|_| !returned) {
            self.enter_system_call(hit, calls, pc, arm);
        }
    }

    /// The branch to a tracepoint's call stands here. Whether the kernel would come to the call, and with what, is seen by following its
    /// code; where that cannot be followed the tracepoint is told without arguments.
    fn reach_tracepoint(&self, hit: &Hit<'_>, plan: &TracepointPlan, target: Gva, pc: u64) {
        let Some(cpu) = hit.cpu else { return };
        let probe = &plan.probe;
        // Most of the work is behind the filter.
        if !self.admits(hit, probe) {
            return;
        }
        let found = tracepoint::arguments(cpu, &plan.text, hit.address, target);
        let arguments = match found {
            Ok(Some(arguments)) => arguments,
            // The kernel would not have called anyone.
            Ok(None) => return,
            Err(error) => {
                log::debug!("tracepoint at {}: {error}", hit.address);
                count(&self.counters.without_arguments);
                [0; MAX_ARGUMENTS]
            }
        };
        let fired = Fired {
            arguments: &arguments,
            ..Fired::at(pc)
        };
        self.fire_admitted(hit, probe, &fired);
    }

    /// A site of a static probe: its arguments are in registers and in the program's memory. One that cannot be read is 0, and counted.
    fn reach_static(&self, hit: &Hit<'_>, plan: &StaticPlan) {
        let probe = &plan.probe;
        // Page walks are for those who want them.
        if !self.admits(hit, probe) {
            return;
        }
        let mut complete = true;
        let arguments = Arguments::of_site(hit, &plan.place, &mut complete);
        if !complete && probe.capture.arguments > 0 {
            count(&self.counters.without_arguments);
        }
        let fired = Fired {
            arguments: &arguments,
            ..Fired::at(hit.address.0)
        };
        self.fire_admitted(hit, probe, &fired);
    }

    pub(super) fn return_plan(
        &self,
        hit: &Hit<'_>,
        function: FunctionKey,
    ) -> Option<Arc<ReturnPlan>> {
        let seen = hit.seen.map(|seen| &seen.return_plans);
        look_up(&self.return_plans, seen, function, |plan| plan.cloned())
    }

    /// Waits for the return of the function that is entered, whose return address gets a trap. `last` is the address that
    /// the spot's last call returns to: it has one.
    #[inline(never)]
    pub(super) fn expect_return(
        &self,
        hit: &Hit<'_>,
        function: FunctionKey,
        arguments: &[u64; MAX_ARGUMENTS],
        last: Option<&Cell<u64>>,
        arm: &dyn Arm,
    ) {
        let Some(return_address) = self.return_address(hit) else {
            count(&self.counters.without_return);
            return;
        };
        let waits_at = match hit.user {
            false => return_address.0,
            true => match paging::translate(hit.memory, hit.space(), return_address) {
                Ok(place) => place.gpa.0,
                Err(_) => return count(&self.counters.without_return),
            },
        };
        if last.is_none_or(|last| last.get() != waits_at) {
            if !self.is_armed_for(hit, function, return_address, waits_at, arm) {
                return;
            }
            if let Some(last) = last {
                last.set(waits_at);
            }
        }
        let task = hit.current.task();
        let key = Key {
            task: task.address,
            stack: hit.registers.rsp.wrapping_add(RETURN_ADDRESS),
        };
        let call = Call {
            thread: task.thread,
            return_address: waits_at,
            function,
            arguments: *arguments,
            tsc: hit.now(),
        };
        self.returns.enter(key, &call);
    }

    /// Whether a trap stands at a return address, or is put there now; that it cannot be is counted.
    #[inline(never)]
    fn is_armed_for(
        &self,
        hit: &Hit<'_>,
        function: FunctionKey,
        address: Gva,
        waits_at: u64,
        arm: &dyn Arm,
    ) -> bool {
        let site = match hit.user {
            false => {
                let arm = || arm.kernel(address);
                let seen = hit.seen.map(|seen| &seen.kernel_returns);
                self.kernel_returns.ensure(waits_at, function, seen, arm)
            }
            true => {
                let arm = || arm.user(address, hit.space());
                let seen = hit.seen.map(|seen| &seen.user_returns);
                self.user_returns.ensure(waits_at, function, seen, arm)
            }
        };
        if site == ReturnSite::Refused {
            count(&self.counters.without_return);
        }
        site == ReturnSite::Armed
    }

    /// Whether this hit was the return of calls that wait for it.
    #[inline]
    fn leave(&self, hit: &Hit<'_>, spot: &Spot) -> bool {
        let task = hit.current.task();
        let key = Key {
            task: task.address,
            stack: hit.registers.rsp,
        };
        let waits_at = if hit.user { hit.site } else { hit.address.0 };
        let Some(frame) = self.returns.take(key, task.thread, waits_at) else {
            return false;
        };
        // The last entered first.
        for call in frame.later() {
            self.leave_other(hit, call);
        }
        match &spot.returning {
            Some((function, plan)) if *function == frame.first().function => {
                self.leave_call(hit, plan, frame.first());
            }
            _ => self.leave_other(hit, frame.first()),
        }
        true
    }

    /// The return of a call that the spot does not tell of.
    #[inline(never)]
    fn leave_other(&self, hit: &Hit<'_>, call: &Returning) {
        if let Some(plan) = self.return_plan(hit, call.function) {
            self.leave_call(hit, &plan, call);
        }
    }

    #[inline]
    fn leave_call(&self, hit: &Hit<'_>, plan: &ReturnPlan, call: &Returning) {
        let stack = hit.registers.rsp;
        for watch in &plan.watches {
            watch.leave(self, hit, call, Gva(stack));
        }
        let result = match plan.result_in_memory {
            false => hit.registers.rax,
            true => {
                let at = Gva(stack.wrapping_add(SYSTEM_CALL_RESULT));
                read_u64(hit.memory, self.space, at).unwrap_or_default()
            }
        };
        for probe in &plan.probes {
            // Another probe's call: this one was not there yet.
            if probe.since > call.entered || !self.admits(hit, probe) {
                continue;
            }
            match probe.is_usual {
                true => self.record(hit, probe, hit.address.0, &[result]),
                false => {
                    let fired = Fired {
                        arguments: &call.arguments,
                        returned: Some(result),
                        pc: hit.address.0,
                    };
                    self.fire_admitted(hit, probe, &fired);
                }
            }
        }
    }

    /// The return address on the stack, if it can be one: a guest that is not Linux, or is hostile, may have anything
    /// there, and a trap goes to nobody's memory but that of the half of the address space that was called.
    fn return_address(&self, hit: &Hit<'_>) -> Option<Gva> {
        let space = if hit.user { hit.space() } else { self.space };
        let found = read_u64(hit.memory, space, Gva(hit.registers.rsp)).ok()?;
        let same_half = found >> 63 == hit.address.0 >> 63;
        (same_half && found != 0).then_some(Gva(found))
    }

    /// Records what `probe` wants of a hit, if its filter lets it through.
    pub(super) fn fire(&self, hit: &Hit<'_>, probe: &Enabled, fired: &Fired<'_>) {
        if self.admits(hit, probe) {
            self.fire_admitted(hit, probe, fired);
        }
    }

    /// Whether the filter of `probe` lets a hit through, its rates aside; one that it does not is counted here.
    #[inline]
    fn admits(&self, hit: &Hit<'_>, probe: &Enabled) -> bool {
        let admitted = hit.is_admitted_by(&probe.filter);
        if !admitted {
            count(&probe.counters.filtered);
        }
        admitted
    }

    /// Counts and records a hit that [`admits`](Self::admits) has let through, with nothing but numbers.
    #[inline(always)]
    fn record<const N: usize>(
        &self,
        hit: &Hit<'_>,
        probe: &Enabled,
        pc: u64,
        arguments: &[u64; N],
    ) {
        let Some(ring) = probe.session.rings.get(hit.vcpu) else {
            return count(&probe.counters.filtered);
        };
        let visit = ring.visit(|| hit.now());
        let header = Header::of(hit, probe, pc);
        let pushed = visit.push_with(|slot| {
            let mut record = Recorder::new(slot, &header);
            record.arguments(arguments, probe.capture.arguments);
            record.finish();
        });
        match pushed {
            true => count(&probe.counters.recorded),
            false => count(&probe.counters.dropped),
        }
    }

    /// Counts and records a hit that [`admits`](Self::admits) has let through, if there are not too many.
    #[inline(never)]
    fn fire_admitted(&self, hit: &Hit<'_>, probe: &Enabled, fired: &Fired<'_>) {
        let admitted = probe.filter.admits_rate(|| hit.now(), self.tsc_hz);
        let ring = probe.session.rings.get(hit.vcpu).filter(|_| admitted);
        let Some(ring) = ring else {
            count(&probe.counters.filtered);
            return;
        };
        // The time first: reading the rest may take a while.
        let visit = ring.visit(|| hit.now());
        if let Some(program) = &probe.program {
            let ran = program.run(&ProbeHit {
                path: self,
                hit,
                probe,
                fired,
                visit: &visit,
            });
            return count(match ran {
                Ran::Taken => &probe.counters.recorded,
                Ran::Filtered => &probe.counters.filtered,
            });
        }
        let header = Header::of(hit, probe, fired.pc);
        let pushed = visit.push_with(|slot| {
            let mut record = Recorder::new(slot, &header);
            let arguments = probe.capture.arguments;
            match fired.returned {
                Some(value) => record.arguments(&[value], arguments),
                None if probe.kind == EventKind::Tick => {}
                None => record.arguments(fired.arguments, arguments),
            }
            self.capture(hit, probe, fired, &mut record);
            record.finish();
        });
        match pushed {
            true => count(&probe.counters.recorded),
            false => count(&probe.counters.dropped),
        }
    }

    /// What is kept of a hit besides its arguments.
    fn capture(
        &self,
        hit: &Hit<'_>,
        probe: &Enabled,
        fired: &Fired<'_>,
        record: &mut Recorder<'_, '_>,
    ) {
        let capture = &probe.capture;
        if capture.comm
            && let Some(comm) = hit.current.comm()
        {
            record.comm(comm);
        }
        if capture.kernel_stack > 0 && !hit.user {
            let mut room: Frames = [0; MAX_FRAMES];
            let frames = first(&mut room, capture.kernel_stack);
            let found = self.stacks.kernel(hit, frames);
            record.kernel_stack(frames.get(..found).unwrap_or_default());
        }
        if capture.user_stack > 0 {
            let entered = probe.kind == EventKind::Entry;
            let mut room: Frames = [0; MAX_FRAMES];
            let frames = first(&mut room, capture.user_stack);
            let found = self.stacks.user(hit, entered, frames);
            record.user_stack(frames.get(..found).unwrap_or_default());
        }
        for wanted in &capture.strings {
            if let Some(address) = fired.arguments.get(wanted.argument) {
                let space = hit.space();
                strings::read(hit.memory, space, Gva(*address), wanted, record);
            }
        }
    }
}

impl Header {
    #[inline]
    fn of(hit: &Hit<'_>, probe: &Enabled, pc: u64) -> Self {
        let identity = hit.current.identity();
        Self {
            probe: probe.number,
            kind: probe.kind,
            vcpu: hit.vcpu,
            pid: identity.pid,
            tid: identity.tid,
            pc,
        }
    }
}

/// Whether any probe of a function's return may want the one of the call that begins here.
#[inline]
pub(super) fn return_is_wanted(hit: &Hit<'_>, plan: &ReturnPlan) -> bool {
    plan.probes.iter().any(|probe| {
        let program = probe.program.as_ref();
        hit.is_admitted_by(&probe.filter)
            && program.is_none_or(|program| program.wants_return(Who::at(hit)))
    })
}

/// The first so many places for frames.
fn first(room: &mut Frames, most: usize) -> &mut [u64] {
    room.get_mut(..most.min(MAX_FRAMES)).unwrap_or_default()
}

/// What a probe fires with.
pub(crate) struct Fired<'a> {
    pub(super) pc: u64,
    pub(super) arguments: &'a [u64],
    /// At a return: RAX.
    pub(super) returned: Option<u64>,
}

impl Fired<'_> {
    pub(super) fn at(pc: u64) -> Self {
        Self {
            pc,
            arguments: &[0; MAX_ARGUMENTS],
            returned: None,
        }
    }
}
