//! Arms and disarms probes: sites and their plans, returns, timers, watchpoints.
//!
//! One mutex orders all changes. Within a change, a site's plan is in place before its trap, and is
//! removed only after the trap.

mod calls;
mod rest;
mod statics;
mod user;
mod watches;

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use introspect::x86_64::paging;
use introspect::{Gpa, Gva};
use vmm::host::{HostProfile, Int3};
use vmm::machine::WatchError;
use vmm::trap::{ArmError, SiteId, Suspended};

pub(crate) use rest::Resting;

use super::Engine;
use super::plan::{Enabled, ReturnPlan, SitePlan, SystemCallPlan};
use super::returns::FunctionKey;
use crate::probe::{Moment, Probe, SemaphoreText, Target, UserText};

/// The number of system calls with a slot of their own.
const MAX_SYSTEM_CALLS: usize = 1024;

/// The reason that a probe cannot be enabled. Nothing is armed then.
#[derive(Debug, thiserror::Error)]
pub enum EnableError {
    /// A trap cannot be armed.
    #[error("{probe}: {source}")]
    Arm {
        /// The probe.
        probe: String,
        /// The reason.
        source: ArmError,
    },
    /// The address is used by this host's assists.
    #[error("{probe}: on this host exotrace's own trap is there: {why}")]
    OwnUse {
        /// The probe.
        probe: String,
        /// The purpose of that use.
        why: &'static str,
    },
    /// The kernel has no function at which system calls can be seen.
    #[error(
        "{probe}: the guest's kernel has neither x64_sys_call nor do_syscall_64, where system calls are seen"
    )]
    NoSystemCalls {
        /// The probe.
        probe: String,
    },
    /// The system call's number is out of range.
    #[error("{probe}: there is no system call {number}")]
    SystemCallNumber {
        /// The probe.
        probe: String,
        /// The number.
        number: u32,
    },
    /// A tracepoint without a branch to it.
    #[error(
        "{probe}: no branch in the kernel's code leads to it: the kernel was built without its users, without jump labels, or reaches it \
         only after more was turned on in the guest"
    )]
    NoBranch {
        /// The probe.
        probe: String,
    },
    /// The CPU cannot watch the memory.
    #[error("{probe}: {source}")]
    Watch {
        /// The probe.
        probe: String,
        /// The reason.
        source: WatchError,
    },
    /// All timers are in use.
    #[error("{probe}: 64 timers tick already; disable one first")]
    Timers {
        /// The probe.
        probe: String,
    },
}

/// A place that an enabled probe holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ArmedAt {
    /// A site.
    Site(KernelSite),
    /// The return of the function that begins at the site.
    Return(KernelSite, FunctionKey),
    /// A site in a program's text.
    User(Box<UserText>, Moment, FunctionKey),
    /// A site of a static probe.
    Static(Box<UserText>),
    /// A raised semaphore.
    Semaphore(Box<SemaphoreText>),
    /// A system call.
    SystemCall { number: usize, moment: Moment },
    /// A site at a branch to a tracepoint's call.
    Tracepoint(KernelSite),
    /// A timer on the host's clock.
    Timer { bit: usize },
    /// A watchpoint of the machine.
    Watchpoint { number: u8 },
}

/// A site in kernel text, with the address that events report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelSite {
    address: Gva,
    /// The physical address when it was armed; `None` if it was not mapped.
    physical: Option<Gpa>,
    reported: Gva,
}

/// Everything that is armed. Guarded by the engine's mutex.
#[derive(Default)]
pub(crate) struct Armed {
    /// By the physical byte, as in the machine's table.
    sites: HashMap<u64, SiteId>,
    system_calls: Option<(KernelSite, Vec<SystemCallPlan>)>,
    /// The number of enabled probes.
    active: usize,
    /// Watches on the guest's changes of its text, while any probe is enabled.
    text_watches: Vec<KernelSite>,
    /// Sites suspended for a change of the guest's text that had begun before the watches were
    /// armed.
    kept_free: Suspended,
    /// Watches on files that are mapped, if there is a listener.
    file_watches: Vec<KernelSite>,
    /// Watches on modules that are loaded, if there is a listener.
    module_watches: Vec<KernelSite>,
    /// Watches on the start and end of processes, if a filter follows them.
    process_watches: Vec<KernelSite>,
    /// The number of probes in user text. While it is above 0, the machine holds user traps.
    user_probes: usize,
    /// Watches on the guest's handling of pages of programs' text, meanwhile.
    page_watches: Vec<KernelSite>,
}

impl Engine {
    fn armed(&self) -> MutexGuard<'_, Armed> {
        self.0.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arms the places of `enabled`. Returns what it then holds.
    pub(super) fn arm(
        &self,
        probe: &Probe,
        enabled: &Arc<Enabled>,
    ) -> Result<Vec<ArmedAt>, EnableError> {
        let mut armed = self.armed();
        self.one_more(&mut armed);
        let places = self.place(&mut armed, probe, enabled);
        if places.is_err() {
            self.one_less(&mut armed);
        }
        places
    }

    /// Counts one enabled probe or listener more. With the first one the guest's changes of its
    /// text are watched.
    fn one_more(&self, armed: &mut Armed) {
        if armed.active == 0 {
            self.watch_text(armed);
        }
        armed.active += 1;
    }

    /// Counts one enabled probe fewer. With the last one the watches are removed.
    fn one_less(&self, armed: &mut Armed) {
        armed.active = armed.active.saturating_sub(1);
        if armed.active == 0 {
            let watches = std::mem::take(&mut armed.text_watches);
            let processes = std::mem::take(&mut armed.process_watches);
            let files = std::mem::take(&mut armed.file_watches);
            let modules = std::mem::take(&mut armed.module_watches);
            let listeners = files.into_iter().chain(modules);
            for spot in watches.into_iter().chain(processes).chain(listeners) {
                self.unwatch(armed, spot);
            }
            self.resume_kept(armed);
        }
    }

    fn place(
        &self,
        armed: &mut Armed,
        probe: &Probe,
        enabled: &Arc<Enabled>,
    ) -> Result<Vec<ArmedAt>, EnableError> {
        let named = || probe.name.to_string();
        let refused = |source| EnableError::Arm {
            probe: named(),
            source,
        };
        let place = match &probe.target {
            Target::Kernel { address, moment } => {
                self.refuse_own_use(&probe.name.function, named)?;
                let spot = self.kernel_spot(*address, *moment);
                self.arm_at(armed, spot, *moment, address.0, enabled)
                    .map_err(refused)?
            }
            Target::User { text, moment } => self
                .arm_user(armed, text, *moment, enabled)
                .map_err(refused)?,
            Target::SystemCall { number, moment } => {
                let plan = usize::try_from(*number)
                    .ok()
                    .filter(|n| *n < MAX_SYSTEM_CALLS);
                let Some(number) = plan else {
                    let (probe, number) = (named(), *number);
                    return Err(EnableError::SystemCallNumber { probe, number });
                };
                self.arm_system_call(armed, number, *moment, enabled, named)?
            }
            Target::Static(text) => {
                return self.arm_static(armed, text, enabled, named);
            }
            Target::Tracepoint(text) => {
                return self.arm_tracepoint(armed, text, enabled, named);
            }
            Target::Timer { period, every_vcpu } => {
                let bit = self
                    .timer_bit(enabled)
                    .ok_or_else(|| EnableError::Timers { probe: named() })?;
                let skipped = enabled.session.skipped_ticks.clone();
                self.0.ticker.start(bit, *period, *every_vcpu, skipped);
                ArmedAt::Timer { bit }
            }
            Target::Watchpoint(watchpoint) => {
                let machine = &self.0.machine;
                let checked = machine.profile().check_watchpoint(watchpoint);
                let number = checked.and_then(|()| machine.watch(*watchpoint));
                let number = number.map_err(|source| EnableError::Watch {
                    probe: named(),
                    source,
                })?;
                let probes = &self.0.path.watchpoints;
                set_numbered(probes, usize::from(number), Some(enabled.clone()));
                ArmedAt::Watchpoint { number }
            }
        };
        Ok(vec![place])
    }

    /// Releases the places of an enabled probe.
    pub(super) fn disarm(&self, enabled: &Arc<Enabled>, places: &[ArmedAt]) {
        let mut armed = self.armed();
        self.release(&mut armed, enabled, places);
        self.one_less(&mut armed);
    }

    /// Releases the places of an enabled probe and arms those of `probe` for it. After an error it
    /// holds none, and is still counted as enabled.
    pub(super) fn rearm(
        &self,
        probe: &Probe,
        enabled: &Arc<Enabled>,
        places: &[ArmedAt],
    ) -> Result<Vec<ArmedAt>, EnableError> {
        let mut armed = self.armed();
        self.release(&mut armed, enabled, places);
        self.place(&mut armed, probe, enabled)
    }

    fn release(&self, armed: &mut Armed, enabled: &Arc<Enabled>, places: &[ArmedAt]) {
        // In reverse order: semaphores are lowered before the watches are removed that keep their
        // counts out of files.
        for place in places.iter().rev() {
            match place {
                ArmedAt::Site(spot) => {
                    self.change(armed, *spot, |plan| {
                        plan.probes.retain(|probe| !Arc::ptr_eq(probe, enabled));
                    })
                    .ok();
                }
                ArmedAt::Return(spot, function) => {
                    self.remove_return(armed, *spot, *function, enabled);
                }
                ArmedAt::User(text, moment, function) => {
                    self.disarm_user(armed, text, *moment, *function, enabled);
                }
                ArmedAt::Static(text) => self.disarm_static(armed, text, enabled),
                ArmedAt::Semaphore(text) => self.lower(text),
                ArmedAt::Tracepoint(spot) => {
                    let _ = self.change(armed, *spot, |plan| {
                        plan.tracepoints
                            .retain(|(plan, _)| !Arc::ptr_eq(&plan.probe, enabled));
                    });
                }
                ArmedAt::SystemCall { number, moment } => {
                    self.disarm_system_call(armed, *number, *moment, enabled);
                }
                ArmedAt::Timer { bit } => {
                    self.0.ticker.stop(*bit);
                    set_numbered(&self.0.path.timers, *bit, None);
                }
                ArmedAt::Watchpoint { number } => {
                    self.0.machine.unwatch(*number);
                    set_numbered(&self.0.path.watchpoints, usize::from(*number), None);
                }
            }
        }
    }

    fn refuse_own_use(
        &self,
        function: &str,
        probe: impl Fn() -> String,
    ) -> Result<(), EnableError> {
        match own_use(self.0.machine.profile(), function) {
            Some(why) => {
                let probe = probe();
                Err(EnableError::OwnUse { probe, why })
            }
            None => Ok(()),
        }
    }

    /// Returns the site of a kernel probe.
    fn kernel_spot(&self, address: Gva, moment: Moment) -> KernelSite {
        let place = match moment {
            Moment::Point => address,
            Moment::Entry | Moment::Return => self.behind_patched_entry(address),
        };
        self.kernel_spot_at(place, address)
    }

    fn kernel_spot_at(&self, address: Gva, reported: Gva) -> KernelSite {
        let found = paging::translate(self.0.machine.ram(), self.0.view.kernel.space, address);
        KernelSite {
            address,
            physical: found.ok().map(|found| found.gpa),
            reported,
        }
    }

    fn arm_at(
        &self,
        armed: &mut Armed,
        spot: KernelSite,
        moment: Moment,
        function: FunctionKey,
        enabled: &Arc<Enabled>,
    ) -> Result<ArmedAt, ArmError> {
        if moment != Moment::Return {
            self.change(armed, spot, |plan| plan.probes.push(enabled.clone()))?;
            return Ok(ArmedAt::Site(spot));
        }
        self.add_return(function, |plan| plan.probes.push(enabled.clone()));
        let entered = self.change(armed, spot, |plan| plan.returns = Some(function));
        if let Err(error) = entered {
            self.remove_return(armed, spot, function, enabled);
            return Err(error);
        }
        Ok(ArmedAt::Return(spot, function))
    }

    fn add_return(&self, function: FunctionKey, add: impl FnOnce(&mut ReturnPlan)) {
        let path = &self.0.path;
        let mut plan = path
            .return_plans
            .get(function)
            .map_or_else(ReturnPlan::default, |p| ReturnPlan::clone(&p));
        add(&mut plan);
        path.return_plans.insert(function, Arc::new(plan));
        path.kernel_returns.open(function);
        path.user_returns.open(function);
    }

    /// Removes a probe from a function's return. With the last one its return traps are removed.
    fn remove_return(
        &self,
        armed: &mut Armed,
        spot: KernelSite,
        function: FunctionKey,
        enabled: &Arc<Enabled>,
    ) {
        self.less_at_return(
            function,
            |plan| plan.forget(enabled),
            |last| {
                if last {
                    let _ = self.change(armed, spot, |plan| plan.returns = None);
                }
            },
        );
    }

    /// Removes something from a function's return by `remove`, then changes its entry by
    /// `at_entry`. The latter's argument is true if nothing is left that needs the return.
    fn less_at_return(
        &self,
        function: FunctionKey,
        remove: impl FnOnce(&mut ReturnPlan),
        at_entry: impl FnOnce(bool),
    ) {
        let path = &self.0.path;
        let Some(plan) = path.return_plans.get(function) else {
            return at_entry(true);
        };
        let mut plan = ReturnPlan::clone(&plan);
        remove(&mut plan);
        if !plan.is_empty() {
            path.return_plans.insert(function, Arc::new(plan));
            return at_entry(false);
        }
        let disarm = |site| {
            self.0.machine.traps().disarm(site);
        };
        path.end_returns(function, disarm, || at_entry(true));
    }

    /// Changes the plan of a site, and arms or disarms it accordingly.
    fn change(
        &self,
        armed: &mut Armed,
        spot: KernelSite,
        change: impl FnOnce(&mut SitePlan),
    ) -> Result<(), ArmError> {
        let (path, machine) = (&self.0.path, &self.0.machine);
        let KernelSite {
            address, reported, ..
        } = spot;
        let physical = match spot.physical {
            Some(physical) => physical,
            // The trap table returns the reason.
            None => path.arm_kernel(machine.traps(), address).map(|site| {
                machine.traps().disarm(site);
                site.0
            })?,
        };
        let reported = Some(reported.0).filter(|at| *at != address.0);
        // Another function has replaced a module's.
        if let Some(site) = armed.sites.get(&physical.0).copied()
            && machine.traps().is_gone(site)
        {
            machine.traps().disarm(site);
            armed.sites.remove(&physical.0);
            path.plans.remove(physical.0);
        }
        let before = path.plans.get(physical.0);
        let mut plan = before
            .as_ref()
            .map_or_else(SitePlan::default, |plan| SitePlan::clone(plan));
        plan.reported = reported.or(plan.reported);
        change(&mut plan);
        if plan.is_empty() {
            if let Some(site) = armed.sites.remove(&physical.0) {
                machine.traps().disarm(site);
            }
            path.plans.remove(physical.0);
            return Ok(());
        }
        path.plans.insert(physical.0, Arc::new(plan));
        if armed.sites.contains_key(&physical.0) {
            return Ok(());
        }
        match path.arm_kernel(machine.traps(), address) {
            Ok(site) => {
                armed.sites.insert(physical.0, site);
                Ok(())
            }
            Err(error) => {
                match before {
                    Some(before) => path.plans.insert(physical.0, before),
                    None => path.plans.remove(physical.0),
                };
                Err(error)
            }
        }
    }

    fn timer_bit(&self, enabled: &Arc<Enabled>) -> Option<usize> {
        let timers = self.0.path.timers.load();
        let free =
            (0..u64::BITS as usize).find(|bit| !matches!(timers.get(*bit), Some(Some(_))))?;
        drop(timers);
        set_numbered(&self.0.path.timers, free, Some(enabled.clone()));
        Some(free)
    }

    /// Returns the first instruction of a function that the kernel's own tracing does not write
    /// over. It is behind the tracer's call, or the NOP in its place.
    fn behind_patched_entry(&self, address: Gva) -> Gva {
        crate::provider::kprobe::behind_patched_entry(&self.0.machine, &self.0.view, address)
    }
}

/// Returns the reason that a trap must not be at the function `name` of a Linux guest on this host,
/// if there is one.
fn own_use(profile: &HostProfile, name: &str) -> Option<&'static str> {
    match name {
        "asm_exc_int3" if profile.int3_user == Int3::GuestHandler => {
            Some("traps in user programs arrive at the guest's int3 entry; probe exc_int3 instead")
        }
        "asm_exc_page_fault" if !profile.user_syscall => {
            Some("system calls are repaired at the page fault entry; probe exc_page_fault instead")
        }
        "entry_SYSCALL_64" if !profile.user_syscall => {
            Some("system calls are sent there by hand; probe do_syscall_64 instead")
        }
        _ => None,
    }
}

/// Replaces the probe with a number in a list of the hit path.
fn set_numbered(
    list: &ArcSwap<Vec<Option<Arc<Enabled>>>>,
    number: usize,
    probe: Option<Arc<Enabled>>,
) {
    let mut probes = Vec::clone(&list.load());
    if probes.len() <= number {
        probes.resize(number + 1, None);
    }
    if let Some(place) = probes.get_mut(number) {
        *place = probe;
    }
    list.store(Arc::new(probes));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hosts_that_stand_on_entries_refuse_them() {
        let (hardware, interpreted) = (
            HostProfile::hardware_example(),
            HostProfile::interpreted_example(),
        );
        for (name, refused) in [
            ("asm_exc_int3", true),
            ("asm_exc_page_fault", true),
            ("entry_SYSCALL_64", true),
            ("exc_int3", false),
            ("exc_page_fault", false),
            ("do_syscall_64", false),
        ] {
            assert_eq!(own_use(&interpreted, name).is_some(), refused, "{name}");
            assert_eq!(own_use(&hardware, name), None, "{name}");
        }
    }
}
