//! The path of one hit, on the vCPU's own thread.
//!
//! The usual path makes no system call, allocates nothing and does not wait. It holds the lock of
//! one shard of pending returns for an instant. It allocates at a return address that is new, which
//! is rare, and for functions that share a frame.
//!
//! Everything here works on a [`Hit`], which is plain values and memory, so that it can be tested
//! without KVM. [`sink`](super::sink) makes hits of the machine's traps.

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
use super::budget::ExitTicks;
use super::budget::meter::{Bell, Meter, Payers};
use super::current::{Current, Tasks};
use super::filter::HitFilter;
use super::guest_pages::GuestPages;
use super::plan::{Enabled, ReturnPlan, SitePlan, StaticPlan, TracepointPlan, count};
use super::return_sites::ReturnSites;
use super::return_targets::ReturnTargets;
use super::returns::{FunctionKey, PendingReturns};
use super::seen::{At, HitPlan, Lists, Seen};
use super::semaphores::Semaphores;
use super::stacks::Stacks;
use super::system_call::system_call_key;
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
/// CR4.LA57: five-level paging.
const CR4_LA57: u64 = 1 << 12;
/// Page tables that map nothing: there is no RAM at their address.
const NO_SPACE: AddressSpace = AddressSpace {
    root: Gpa(0x000f_ffff_ffff_f000),
    levels: 4,
};
/// Longer than any hit takes.
const MOST_OF_A_HIT: Duration = Duration::from_millis(100);
/// The code that arms return traps.
pub(crate) trait Arm {
    /// Arms a site in kernel text.
    fn kernel(&self, address: Gva) -> Result<SiteId, ArmError>;
    /// Arms a site in a program's text, mapped at `address` of `space`.
    fn user(&self, address: Gva, space: AddressSpace) -> Result<SiteId, ArmError>;
}

/// One hit. The vCPU is stopped before the instruction at `address`.
pub(crate) struct Hit<'a> {
    pub(crate) vcpu: usize,
    /// The physical address of the site's first byte.
    pub(crate) site: u64,
    pub(crate) address: Gva,
    pub(crate) user: bool,
    pub(crate) registers: &'a GeneralRegisters,
    /// The page tables in use, if known without asking the vCPU.
    pub(crate) known_space: Option<AddressSpace>,
    pub(crate) memory: &'a dyn PhysicalMemory,
    pub(crate) current: Current<'a>,
    /// The results of earlier lookups on this vCPU.
    pub(crate) seen: Option<&'a Lists>,
    /// The test's clock, if it has one.
    #[cfg(test)]
    pub(crate) clock: Option<&'a dyn Fn() -> u64>,
    /// The vCPU itself; `None` in tests.
    pub(crate) cpu: Option<&'a StoppedVcpu<'a>>,
}

impl Hit<'_> {
    /// Returns the page tables in use. Asking a vCPU for them may cost more than the rest of a hit.
    pub(crate) fn space(&self) -> AddressSpace {
        let asked = || self.cpu.map(|cpu| cpu.address_space());
        self.known_space.or_else(asked).unwrap_or(NO_SPACE)
    }

    /// Returns the registers for stack walks through `space`. GS is not known in programs' code,
    /// and is not needed for their stacks.
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

    /// Checks whether a filter admits the hit, apart from its rates.
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

    /// Returns the current time stamp counter.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        #[cfg(test)]
        if let Some(clock) = self.clock {
            return clock();
        }
        vmm::host_tsc()
    }

    /// Returns RDI, RSI, RDX, RCX, R8 and R9.
    #[inline]
    pub(crate) fn arguments(&self) -> [u64; MAX_ARGUMENTS] {
        let r = self.registers;
        [r.rdi, r.rsi, r.rdx, r.rcx, r.r8, r.r9]
    }
}

/// The counters of all probes together.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Hits of return traps by code that returned from no probed call.
    pub(crate) unpaired: AtomicU64,
    /// Calls whose return address could not get a trap.
    pub(crate) without_return: AtomicU64,
    /// The number of times that sites were suspended while the guest read or wrote its text.
    pub(crate) suspended: AtomicU64,
    /// Those of them in programs.
    pub(crate) suspended_in_programs: AtomicU64,
    /// Trap bytes that were restored in what the guest has read or copied.
    pub(crate) hidden: AtomicU64,
    /// Sites in text that the guest has freed.
    pub(crate) freed: AtomicU64,
    /// Sites in programs that were given up.
    pub(crate) given_up: AtomicU64,
    /// Hits of tracepoints and static probes whose arguments are not all known.
    pub(crate) without_arguments: AtomicU64,
}

/// The state that hits use. Immutable except for atomics and fields whose types say otherwise.
pub(crate) struct HitPath {
    /// Counts changes of `plans`, `return_plans`, `kernel_returns` and `user_returns` together.
    pub(crate) changes: Changes,
    /// By the physical address of a site's first byte.
    pub(crate) plans: ShardedMap<SitePlan>,
    pub(crate) return_plans: ShardedMap<ReturnPlan>,
    /// Timers, by their bit in a sample's mask.
    pub(crate) timers: ArcSwap<Vec<Option<Arc<Enabled>>>>,
    /// The probes of watchpoints, by their number.
    pub(crate) watchpoints: ArcSwap<Vec<Option<Arc<Enabled>>>>,
    pub(crate) tasks: Tasks,
    pub(crate) stacks: Stacks,
    /// Page tables that map the kernel.
    pub(crate) space: AddressSpace,
    /// Whether these are the kernel's own, valid as long as it runs.
    pub(crate) space_lasts: bool,
    pub(crate) returns: PendingReturns,
    pub(crate) kernel_returns: ReturnSites,
    pub(crate) user_returns: ReturnSites,
    pub(crate) return_targets: ReturnTargets,
    pub(crate) user_sites: UserSites,
    pub(crate) semaphores: Semaphores,
    pub(crate) pages: Option<Arc<GuestPages>>,
    pub(crate) counters: Counters,
    /// The frequency of the time stamp counter in Hz.
    pub(crate) tsc_hz: u64,
    /// One for each vCPU.
    pub(crate) seen: Vec<Mutex<Seen>>,
    /// The meters of all sessions together, one for each vCPU.
    pub(crate) meters: Box<[Arc<Meter>]>,
    pub(super) exit_ticks: ExitTicks,
    /// Wakes the keeper of budgets.
    pub(crate) bell: Bell,
    /// Cleared when the engine is dropped.
    pub(crate) active: AtomicBool,
}

impl HitPath {
    /// Arms a site in the kernel's text, by the kernel's own page tables if they are known.
    pub(crate) fn arm_kernel(&self, table: &TrapTable, address: Gva) -> Result<SiteId, ArmError> {
        match self.space_lasts {
            true => table.arm_kernel_by(address, self.space),
            false => table.arm_kernel(address, self.space),
        }
    }

    /// Returns the tables for arming sites on the vCPU's own thread.
    pub(crate) fn traps<'t>(&'t self, cpu: &'t StoppedVcpu<'_>) -> Traps<'t> {
        Traps {
            table: cpu.traps(),
            plans: &self.plans,
        }
    }

    /// Adds to the count of suspended sites in the kernel.
    pub(crate) fn count_suspended(&self, sites: usize) {
        let suspended = &self.counters.suspended;
        suspended.fetch_add(sites as u64, Ordering::Relaxed);
    }

    /// Adds to the count of suspended sites in programs.
    pub(crate) fn count_suspended_in_programs(&self, sites: usize) {
        self.count_suspended(sites);
        let suspended = &self.counters.suspended_in_programs;
        suspended.fetch_add(sites as u64, Ordering::Relaxed);
    }

    /// Handles one hit at `spot`.
    #[inline(always)]
    pub(crate) fn dispatch(&self, hit: &Hit<'_>, spot: &HitPlan, arm: &dyn Arm) {
        match &spot.plan {
            Some(plan) if spot.is_plain => self.on_entry(hit, spot, plan, arm),
            _ => self.dispatch_other(hit, spot, arm),
        }
    }

    /// Handles one hit at a return address, or at a site with more than probes.
    #[inline(never)]
    fn dispatch_other(&self, hit: &Hit<'_>, spot: &HitPlan, arm: &dyn Arm) {
        // If code follows a call that never returns, one address can be both.
        let is_return = spot.is_return;
        let returned = is_return && self.on_return(hit, spot);
        // A watch at the return may have armed or removed something here.
        let renewed;
        let spot = match spot.changes == self.changes.number() {
            true => spot,
            false => {
                let at = At {
                    site: hit.site,
                    address: hit.address.0,
                    user: hit.user,
                };
                renewed = self.spot(hit.vcpu, at);
                &renewed
            }
        };
        let Some(plan) = &spot.plan else {
            // Checked again: the trap may have been removed since, and its calls forgotten.
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
            // Where a call has just returned, no function is entered.
            if !returned || probe.kind != EventKind::Entry {
                self.fire_probe(hit, plan, probe);
            }
        }
        self.on_other_targets(hit, plan, returned, arm);
        if !returned {
            self.await_return(hit, spot, plan, wants_return, arm);
        }
    }

    /// Collects the actions at an address, for hits of one vCPU.
    pub(super) fn spot(&self, vcpu: usize, at: At) -> HitPlan {
        let changes = self.changes.number();
        let known = match at.user {
            true => self.user_returns.functions_at(at.site),
            false => self.kernel_returns.functions_at(at.address),
        };
        let returning = known.first().copied();
        let plan = self.plans.get(at.site);
        let returns = |function| self.return_plans.get(function);
        let entered = plan.as_ref().and_then(|plan| returns(plan.returns?));
        let payers = self.payers(vcpu, plan.as_deref(), entered.as_deref(), &known);
        HitPlan {
            changes,
            site: at.site,
            is_return: returning.is_some(),
            returns_to: Cell::default(),
            is_plain: returning.is_none() && plan.as_ref().is_some_and(|plan| plan.is_plain()),
            plan,
            entered,
            returning: returning.and_then(|function| Some((function, returns(function)?))),
            payers,
        }
    }

    /// Collects the payers of a hit where `plan` is, the function `entered` begins, and the
    /// functions in `returning` return.
    fn payers(
        &self,
        vcpu: usize,
        plan: Option<&SitePlan>,
        entered: Option<&ReturnPlan>,
        returning: &[FunctionKey],
    ) -> Payers {
        let mut payers = Payers::new(self.meters.get(vcpu));
        if let Some(plan) = plan {
            plan.add_payers(vcpu, &mut payers);
            // A system call's return is expected where all are entered.
            let calls = plan.system_calls.iter();
            for number in calls.flat_map(|calls| calls.returning()) {
                if let Some(plan) = self.return_plans.get(system_call_key(number)) {
                    plan.add_payers(vcpu, &mut payers);
                }
            }
        }
        if let Some(plan) = entered {
            plan.add_payers(vcpu, &mut payers);
        }
        for function in returning {
            if let Some(plan) = self.return_plans.get(*function) {
                plan.add_payers(vcpu, &mut payers);
            }
        }
        payers
    }

    /// Checks whether a return trap is at the hit's address.
    fn is_return(&self, hit: &Hit<'_>) -> bool {
        match hit.user {
            true => self.user_returns.is_armed(hit.site),
            false => self.kernel_returns.is_armed(hit.address.0),
        }
    }

    /// Counts a program's site that was given up, for each probe there.
    pub(crate) fn give_up(&self, site: SiteId) {
        count(&self.counters.given_up);
        let at = At {
            site: site.0.0,
            address: site.0.0,
            user: true,
        };
        let spot = self.spot(0, at);
        let here = spot.plan.iter().flat_map(|plan| &plan.probes);
        let returning = spot.returning.iter().flat_map(|(_, plan)| &plan.probes);
        for probe in here.chain(returning) {
            count(&probe.counters.given_up);
        }
        for plan in spot.plan.iter().flat_map(|plan| &plan.statics) {
            count(&plan.probe.counters.given_up);
        }
    }

    /// Releases what lists still hold of removed plans. A vCPU with a hit in progress for longer
    /// does so itself, at its next hit.
    pub(super) fn let_go(&self) {
        for seen in &self.seen {
            if let Some(mut seen) = seen.try_lock_for(MOST_OF_A_HIT) {
                seen.clear();
            }
        }
    }

    /// Handles a timer's tick on one vCPU, at any address.
    /// Returns its payers.
    pub(crate) fn sample(&self, mask: u64, hit: &Hit<'_>) -> Payers {
        self.fire_numbered(&self.timers.load(), mask, hit)
    }

    /// Handles an access to watched memory, behind its instruction. Returns its payers.
    pub(crate) fn watched(&self, number: u8, hit: &Hit<'_>) -> Payers {
        self.fire_numbered(&self.watchpoints.load(), 1 << number, hit)
    }

    /// Fires the probes whose numbers are in a mask.
    fn fire_numbered(&self, probes: &[Option<Arc<Enabled>>], mask: u64, hit: &Hit<'_>) -> Payers {
        let mut payers = Payers::new(self.meters.get(hit.vcpu));
        for (bit, probe) in probes.iter().enumerate().take(u64::BITS as usize) {
            if mask >> bit & 1 == 1
                && let Some(probe) = probe
            {
                self.fire(hit, probe, &HitData::at(hit.address.0));
                payers.add(hit.vcpu, &probe.account);
            }
        }
        payers
    }

    /// Fires the probes at a site, and expects the return of the function that begins there.
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
        // A point keeps its address, even if a function's trap is behind its first byte.
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

    /// Handles everything at a site except its own probes.
    #[inline(never)]
    fn on_other_targets(&self, hit: &Hit<'_>, plan: &SitePlan, returned: bool, arm: &dyn Arm) {
        let pc = plan.reported.unwrap_or(hit.address.0);
        for place in &plan.statics {
            self.fire_static(hit, place);
        }
        // Calls often return to a tracepoint's branch.
        for (tracepoint, target) in &plan.tracepoints {
            self.fire_tracepoint(hit, tracepoint, *target, pc);
        }
        if let Some(calls) = plan.system_calls.as_ref().filter(|_| !returned) {
            self.enter_system_call(hit, calls, pc, arm);
        }
    }

    /// Handles a branch to a tracepoint's call. Speculation decides whether the kernel would reach
    /// the call, and with which arguments. If it fails, the tracepoint is reported without
    /// arguments.
    fn fire_tracepoint(&self, hit: &Hit<'_>, plan: &TracepointPlan, target: Gva, pc: u64) {
        let Some(cpu) = hit.cpu else { return };
        let probe = &plan.probe;
        // The filter comes first, since most of the work follows.
        if !self.admits(hit, probe) {
            return;
        }
        let found = tracepoint::call(cpu, &plan.text, hit.address, target);
        let (arguments, call) = match found {
            Ok(Some(call)) => (call.arguments, Some(call)),
            // The kernel would have called no listener.
            Ok(None) => return,
            Err(error) => {
                log::debug!("tracepoint at {}: {error}", hit.address);
                count(&self.counters.without_arguments);
                ([0; MAX_ARGUMENTS], None)
            }
        };
        let call = Cell::new(call);
        let record = || {
            let record = call.take()?.record(plan.text.record.as_ref()?);
            match record {
                Ok(record) => Some(record),
                Err(error) => {
                    log::debug!("record of the tracepoint at {}: {error}", hit.address);
                    None
                }
            }
        };
        let record: &dyn Fn() -> Option<Vec<u8>> = &record;
        let fired = HitData {
            arguments: &arguments,
            record: plan.text.record.is_some().then_some(record),
            ..HitData::at(pc)
        };
        self.fire_admitted(hit, probe, &fired);
    }

    /// Handles a static probe's site. Its arguments are in registers and in the program's memory.
    /// An unreadable one is 0, and counted.
    fn fire_static(&self, hit: &Hit<'_>, plan: &StaticPlan) {
        let probe = &plan.probe;
        // The filter comes first, since page walks are expensive.
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
