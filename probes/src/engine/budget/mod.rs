//! The cost of tracing for the guest, and budgets for it.
//!
//! Each hit is metered: from the exit of its vCPU to the end of its work, by the host's time stamp
//! counter. The time of a trap on this host at which nothing is done is added, for the exit and the
//! entry ([`vmm::host::HostProfile`]). Every session with a probe at a hit pays all of it, so
//! sessions that share a site may pay more together than the guest has lost.
//!
//! A session's share, or that of all sessions together, is of each vCPU's time by the clock, idle
//! time included. [`policy`] decides which probes rest. [`keeper`] is the thread that carries it
//! out. A probe that rests has no trap of its own in the guest, so its misses cannot be counted.
//! The time for which it rested is exact ([`Unwatched`]).

pub(super) mod keeper;
pub(super) mod meter;
pub(super) mod policy;
mod share;

pub use keeper::SessionCost;
pub use share::{Share, ShareError};

use std::sync::Arc;

use super::hit::HitPath;
use meter::{Meter, Payers};

/// What a session, or all sessions, have cost the guest. Times are ticks of the host's time stamp
/// counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// The number of hits.
    pub hits: u64,
    /// The ticks that all vCPUs have spent at these hits.
    pub ticks: u64,
    /// The ticks of the vCPU that has spent most.
    pub busiest: u64,
    /// The ticks that have passed.
    pub passed: u64,
}

impl Cost {
    pub(super) fn of(meters: &[Arc<Meter>], passed: u64) -> Self {
        let ticks = || meters.iter().map(|meter| meter.ticks());
        Self {
            hits: meters.iter().map(|meter| meter.hits()).sum(),
            ticks: ticks().sum(),
            busiest: ticks().max().unwrap_or_default(),
            passed,
        }
    }
}

/// How long a probe has not watched because of a budget. Times are ticks of the host's time stamp
/// counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unwatched {
    /// The number of times that it was stopped.
    pub times: u64,
    /// The ticks for which it was stopped.
    pub ticks: u64,
    /// The ticks since it was enabled.
    pub passed: u64,
}

impl HitPath {
    /// Charges a hit of a vCPU that left the guest at `exited` to its payers.
    #[inline(always)]
    pub(super) fn charge(&self, payers: &Payers, exited: u64, user: bool) {
        let exit = match user {
            true => self.exit_ticks.user,
            false => self.exit_ticks.kernel,
        };
        let ticks = vmm::host_tsc().saturating_sub(exited).wrapping_add(exit);
        if payers.charge(ticks) {
            self.bell.ring();
        }
    }
}

/// The ticks of a trap in each mode at which nothing is done.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ExitTicks {
    kernel: u64,
    user: u64,
}

impl ExitTicks {
    pub(super) fn of(profile: &vmm::host::HostProfile, hz: u64) -> Self {
        let ticks = |ns: u64| {
            let ticks = u128::from(ns) * u128::from(hz) / 1_000_000_000;
            let ticks = u64::try_from(ticks).unwrap_or(u64::MAX);
            // The measured loop finds KVM and its own code in the CPU's caches. A guest does not.
            ticks.saturating_add(ticks / 4)
        };
        Self {
            kernel: ticks(profile.trap_kernel_ns),
            user: ticks(profile.trap_user_ns),
        }
    }
}
