//! Calls whose return is probed: from a function's entry, where its return address gets a trap, to
//! the hit there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use introspect::Gva;
use introspect::x86_64::paging;
use introspect::x86_64::virtual_memory::read_u64;
use vmm::trap::SiteId;

use super::super::plan::{ReturnPlan, count};
use super::super::program::TaskIdentity;
use super::super::return_sites::ReturnSite;
use super::super::returns::{Call, FunctionKey, Key, Returning};
use super::super::seen::{HitPlan, look_up};
use super::super::system_call::SYSTEM_CALL_RESULT;
use super::{Arm, Hit, HitData, HitPath};
use crate::event::MAX_ARGUMENTS;

/// The size of a return address in bytes.
const RETURN_ADDRESS: u64 = 8;
/// The reach of a call in either direction, in bytes.
const CALL_REACH: u64 = 1 << 31;

impl HitPath {
    /// Ends the probing of a function's return while the guest runs. The return traps are removed
    /// first, by `disarm`: a call is recorded as long as its return meets one. Then `stop` changes
    /// the entry's plan.
    pub(in crate::engine) fn end_returns(
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

    pub(in crate::engine) fn return_plan(
        &self,
        hit: &Hit<'_>,
        function: FunctionKey,
    ) -> Option<Arc<ReturnPlan>> {
        let seen = hit.seen.map(|seen| &seen.return_plans);
        look_up(&self.return_plans, seen, function, |plan| plan.cloned())
    }

    /// Expects the return of the function that was entered, and arms a trap at its return address.
    /// `spot` has the return address of the previous call.
    #[inline(never)]
    pub(in crate::engine) fn expect_return(
        &self,
        hit: &Hit<'_>,
        function: FunctionKey,
        arguments: &[u64; MAX_ARGUMENTS],
        spot: Option<&HitPlan>,
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
        // The trap may have been removed since the spot was looked up.
        let is_known = spot.is_some_and(|spot| {
            spot.returns_to.get() == Some(waits_at) && spot.changes == self.changes.number()
        });
        if !is_known {
            if !self.is_armed_for(hit, function, return_address, waits_at, arm) {
                return;
            }
            if let Some(spot) = spot {
                spot.returns_to.set(Some(waits_at));
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

    /// Checks whether a trap is at a return address, or arms one. A failure is counted.
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

    /// Checks whether this hit is the return of pending calls, and handles it.
    #[inline]
    pub(super) fn on_return(&self, hit: &Hit<'_>, spot: &HitPlan) -> bool {
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
            self.return_elsewhere(hit, call);
        }
        match &spot.returning {
            Some((function, plan)) if *function == frame.first().function => {
                self.return_call(hit, plan, frame.first());
            }
            _ => self.return_elsewhere(hit, frame.first()),
        }
        true
    }

    /// Handles the return of a call whose plan is not in the spot.
    #[inline(never)]
    fn return_elsewhere(&self, hit: &Hit<'_>, call: &Returning) {
        if let Some(plan) = self.return_plan(hit, call.function) {
            self.return_call(hit, &plan, call);
        }
    }

    #[inline(always)]
    fn return_call(&self, hit: &Hit<'_>, plan: &ReturnPlan, call: &Returning) {
        let stack = hit.registers.rsp;
        for watch in &plan.watches {
            watch.on_return(self, hit, call, Gva(stack));
        }
        let result = match plan.result_in_memory {
            false => hit.registers.rax,
            true => {
                let at = Gva(stack.wrapping_add(SYSTEM_CALL_RESULT));
                read_u64(hit.memory, self.space, at).unwrap_or_default()
            }
        };
        for probe in &plan.probes {
            // The call belongs to another probe: this one was enabled later.
            if probe.since.load(Ordering::Relaxed) > call.entered || !self.admits(hit, probe) {
                continue;
            }
            match probe.is_usual {
                true => self.record(hit, probe, hit.address.0, move |_| [result]),
                false => {
                    let fired = HitData {
                        arguments: &call.arguments,
                        returned: Some(result),
                        ..HitData::at(hit.address.0)
                    };
                    self.fire_admitted(hit, probe, &fired);
                }
            }
        }
    }

    /// Returns the word on top of the stack if its value can be a return address. It must be in the
    /// function's half of the address space, and in the kernel within a call's reach. The code
    /// there is checked when a trap is armed
    /// ([`ReturnTargets`](super::super::return_targets::ReturnTargets)).
    fn return_address(&self, hit: &Hit<'_>) -> Option<Gva> {
        let space = if hit.user { hit.space() } else { self.space };
        let found = read_u64(hit.memory, space, Gva(hit.registers.rsp)).ok()?;
        let is_near = hit.user || found.abs_diff(hit.address.0) < CALL_REACH;
        let same_half = found >> 63 == hit.address.0 >> 63;
        (same_half && is_near && found != 0).then_some(Gva(found))
    }
}

/// Checks whether any probe of a function's return may want the return of the call that begins
/// here.
#[inline]
pub(in crate::engine) fn return_is_wanted(hit: &Hit<'_>, plan: &ReturnPlan) -> bool {
    for probe in &plan.probes {
        let program = probe.program.as_ref();
        if hit.is_admitted_by(&probe.filter)
            && program.is_none_or(|program| program.wants_return(TaskIdentity::at(hit)))
        {
            return true;
        }
    }
    false
}
