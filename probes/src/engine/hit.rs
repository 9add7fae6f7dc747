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
use std::time::Duration;

use arc_swap::ArcSwap;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::{CpuState, GeneralRegisters};
use introspect::{Gpa, Gva, PhysicalMemory};
use parking_lot::Mutex;
use vmm::StoppedVcpu;
use vmm::sharded_map::{Changes, ShardedMap};
use vmm::trap::{ArmError, SiteId, TrapTable};

use super::arguments::Arguments;
use super::current::{Current, Tasks};
use super::filter::HitFilter;
use super::guest_pages::GuestPages;
use super::plan::{Enabled, ReturnPlan, SitePlan, StaticPlan, TracepointPlan, count};
use super::return_sites::ReturnSites;
use super::return_targets::ReturnTargets;
use super::returns::PendingReturns;
use super::seen::{At, HitPlan, Lists, Seen};
use super::semaphores::Semaphores;
use super::stacks::Stacks;
use super::tracepoint;
use super::user_text::{Traps, UserSites};
use crate::event::{EventKind, MAX_ARGUMENTS};

mod recording;
mod returning;

pub(crate) use recording::HitData;
pub(super) use returning::return_is_wanted;

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
/// Longer than hits take.
const MOST_OF_A_HIT: Duration = Duration::from_millis(100);
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
    pub(crate) cpu: Option<&'a StoppedVcpu<'a>>,
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
    #[inline]
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
    pub(crate) suspended: AtomicU64,
    /// Bytes of ours that were put right in what the guest has read or copied.
    pub(crate) hidden: AtomicU64,
    /// Sites in text that the guest has freed.
    pub(crate) freed: AtomicU64,
    /// Sites in programs that the machine has given up.
    pub(crate) given_up: AtomicU64,
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
    pub(crate) return_targets: ReturnTargets,
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
    pub(crate) fn traps<'t>(&'t self, cpu: &'t StoppedVcpu<'_>) -> Traps<'t> {
        Traps {
            table: cpu.traps(),
            plans: &self.plans,
        }
    }

    /// So many sites were taken out of the guest's way.
    pub(crate) fn count_suspended(&self, sites: usize) {
        let suspended = &self.counters.suspended;
        suspended.fetch_add(sites as u64, Ordering::Relaxed);
    }

    /// Records one hit, at `spot`.
    #[inline(always)]
    pub(crate) fn dispatch(&self, hit: &Hit<'_>, spot: &HitPlan, arm: &dyn Arm) {
        match &spot.plan {
            Some(plan) if spot.is_plain => self.on_entry(hit, spot, plan, arm),
            _ => self.dispatch_other(hit, spot, arm),
        }
    }

    /// Records one hit where calls return, or where more than probes stands.
    #[inline(never)]
    fn dispatch_other(&self, hit: &Hit<'_>, spot: &HitPlan, arm: &dyn Arm) {
        // Where code follows a call that never returns, one address can be both.
        let is_return = spot.is_return;
        let returned = is_return && self.on_return(hit, spot);
        // A watch of the call may have armed or removed what stands here.
        let renewed;
        let spot = match spot.changes == self.changes.number() {
            true => spot,
            false => {
                renewed = self.spot(At {
                    site: hit.site,
                    address: hit.address.0,
                    user: hit.user,
                });
                &renewed
            }
        };
        let Some(plan) = &spot.plan else {
            // Asked again: the trap may have been taken away since, and its calls forgotten.
            if is_return && !returned && self.is_return(hit) {
                count(&self.counters.unpaired);
            }
            return;
        };
        let mut wants_return = false;
        if !returned {
            for watch in &plan.watches {
                wants_return |= watch.on_entry(self, hit);
            }
        }
        for probe in &plan.probes {
            // Where a call has just returned to no function is entered.
            if !returned || probe.kind != EventKind::Entry {
                self.fire_probe(hit, plan, probe);
            }
        }
        self.on_other_targets(hit, plan, returned, arm);
        if !returned {
            self.await_return(hit, spot, plan, wants_return, arm);
        }
    }

    /// Puts together what is to be done at a place.
    pub(super) fn spot(&self, at: At) -> HitPlan {
        let changes = self.changes.number();
        let returning = match at.user {
            true => self.user_returns.function_at(at.site),
            false => self.kernel_returns.function_at(at.address),
        };
        let plan = self.plans.get(at.site);
        let returns = |function| self.return_plans.get(function);
        let entered = plan.as_ref().and_then(|plan| returns(plan.returns?));
        HitPlan {
            changes,
            site: at.site,
            is_return: returning.is_some(),
            returns_to: Cell::default(),
            is_plain: returning.is_none() && plan.as_ref().is_some_and(|plan| plan.is_plain()),
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

    /// Counts a program's site that stands no more, for each probe that was hit there.
    pub(crate) fn give_up(&self, site: SiteId) {
        count(&self.counters.given_up);
        let spot = self.spot(At {
            site: site.0.0,
            address: site.0.0,
            user: true,
        });
        let here = spot.plan.iter().flat_map(|plan| &plan.probes);
        let returning = spot.returning.iter().flat_map(|(_, plan)| &plan.probes);
        for probe in here.chain(returning) {
            count(&probe.counters.given_up);
        }
        for plan in spot.plan.iter().flat_map(|plan| &plan.statics) {
            count(&plan.probe.counters.given_up);
        }
    }

    /// Lets go of what lists still hold of plans that are no more. A vCPU that is at a hit for longer does so by itself,
    /// at its next.
    pub(super) fn let_go(&self) {
        for seen in &self.seen {
            if let Some(mut seen) = seen.try_lock_for(MOST_OF_A_HIT) {
                seen.clear();
            }
        }
    }

    /// A timer's turn on one vCPU, wherever that is.
    pub(crate) fn sample(&self, mask: u64, hit: &Hit<'_>) {
        let timers = self.timers.load();
        for (bit, timer) in timers.iter().enumerate().take(u64::BITS as usize) {
            if mask >> bit & 1 == 1
                && let Some(probe) = timer
            {
                self.fire(hit, probe, &HitData::at(hit.address.0));
            }
        }
    }

    /// The probes at a site, and the return of the function that is entered there.
    #[inline(always)]
    fn on_entry(&self, hit: &Hit<'_>, spot: &HitPlan, plan: &SitePlan, arm: &dyn Arm) {
        for probe in &plan.probes {
            self.fire_probe(hit, plan, probe);
        }
        self.await_return(hit, spot, plan, false, arm);
    }

    #[inline(always)]
    fn fire_probe(&self, hit: &Hit<'_>, plan: &SitePlan, probe: &Enabled) {
        if !self.admits(hit, probe) {
            return;
        }
        // A point is where it is, also where a function's trap stands behind its first byte.
        let pc = plan.reported.filter(|_| probe.kind != EventKind::Point);
        let pc = pc.unwrap_or(hit.address.0);
        match probe.is_usual {
            true => self.record(hit, probe, pc, |hit: &Hit<'_>| hit.arguments()),
            false => self.fire_entered(hit, probe, pc),
        }
    }

    #[inline(never)]
    fn fire_entered(&self, hit: &Hit<'_>, probe: &Enabled, pc: u64) {
        let fired = HitData {
            arguments: &hit.arguments(),
            ..HitData::at(pc)
        };
        self.fire_admitted(hit, probe, &fired);
    }

    #[inline(always)]
    fn await_return(
        &self,
        hit: &Hit<'_>,
        spot: &HitPlan,
        plan: &SitePlan,
        is_wanted: bool,
        arm: &dyn Arm,
    ) {
        let Some(function) = plan.returns else { return };
        let entered = spot.entered.as_deref();
        if is_wanted || entered.is_some_and(|plan| return_is_wanted(hit, plan)) {
            self.expect_return(hit, function, &hit.arguments(), Some(spot), arm);
        }
    }

    /// What stands at the site besides probes of its own.
    #[inline(never)]
    fn on_other_targets(&self, hit: &Hit<'_>, plan: &SitePlan, returned: bool, arm: &dyn Arm) {
        let pc = plan.reported.unwrap_or(hit.address.0);
        for place in &plan.statics {
            self.fire_static(hit, place);
        }
        // A branch of a tracepoint is often what calls return to.
        for (tracepoint, target) in &plan.tracepoints {
            self.fire_tracepoint(hit, tracepoint, *target, pc);
        }
        if let Some(calls) = plan.system_calls.as_ref().filter(|_| !returned) {
            self.enter_system_call(hit, calls, pc, arm);
        }
    }

    /// The branch to a tracepoint's call stands here. Whether the kernel would come to the call, and with what, is seen by following its
    /// code; where that cannot be followed the tracepoint is told without arguments.
    fn fire_tracepoint(&self, hit: &Hit<'_>, plan: &TracepointPlan, target: Gva, pc: u64) {
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
        let fired = HitData {
            arguments: &arguments,
            ..HitData::at(pc)
        };
        self.fire_admitted(hit, probe, &fired);
    }

    /// A site of a static probe: its arguments are in registers and in the program's memory. One that cannot be read is 0, and counted.
    fn fire_static(&self, hit: &Hit<'_>, plan: &StaticPlan) {
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
        let fired = HitData {
            arguments: &arguments,
            ..HitData::at(hit.address.0)
        };
        self.fire_admitted(hit, probe, &fired);
    }
}
