//! A session's enabled probes, in units that rest and watch together.
//!
//! The session's owner enables and disables them, and the keeper of budgets lets them rest: each
//! holds the list's lock meanwhile. The engine's lock is taken under it. No vCPU takes either.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::arming::Resting;
use super::budget::meter::Account;
use super::budget::policy::{Policy, Reading};
use super::budget::{Cost, Share, Unwatched};
use super::plan::Enabled;
use super::program::Program;
use super::session::SessionShared;
use super::{ArmedAt, Engine};
use crate::probe::{Probe, Target};

/// The part of a session that its owner shares with the keeper of budgets.
pub(crate) struct Watched {
    /// The session's number in its engine.
    pub(super) number: u64,
    pub(super) shared: Arc<SessionShared>,
    pub(super) list: Mutex<Watchlist>,
    /// The time stamp counter when the session was made.
    began: u64,
    /// The same when its probes were disabled; 0 before.
    ended: AtomicU64,
}

/// An enabled probe with its sites.
pub(super) struct Active {
    pub(super) enabled: Arc<Enabled>,
    /// Empty while it rests.
    pub(super) places: Vec<ArmedAt>,
    /// The probe, if it may have to rest.
    pub(super) probe: Option<Box<Probe>>,
    /// The parts by which it is armed again, if it rests.
    pub(super) resting: Option<Resting>,
    unit: usize,
}

/// The reasons for which a unit can rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// The session's own budget.
    Session,
    /// The budget of all sessions.
    Machine,
}

/// Probes that rest and watch together.
struct Unit {
    account: Arc<Account>,
    members: Vec<usize>,
    may_rest: bool,
    causes: [bool; 2],
    /// When it began to rest, if it does.
    since: Option<u64>,
    times: u64,
    ticks: u64,
}

/// The reason why probes are a unit: the same trap in the guest, or one program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Kernel(u64),
    User(u64, u64),
    SystemCalls,
    /// Probes whose programs share their variables.
    Together(u64),
    Alone(usize),
}

/// The probes of a session.
#[derive(Default)]
pub(super) struct Watchlist {
    pub(super) active: Vec<Option<Active>>,
    units: Vec<Unit>,
    by_key: HashMap<Key, usize>,
    pub(super) budget: Option<Policy>,
    /// Whether no probe may rest.
    is_exempt: bool,
    pub(super) label: String,
}

impl Watched {
    pub(super) fn new(number: u64, shared: Arc<SessionShared>) -> Self {
        Self {
            number,
            shared,
            list: Mutex::default(),
            began: vmm::host_tsc(),
            ended: AtomicU64::new(0),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Watchlist> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the session's own budget, or none. What rested for the last one watches again.
    pub(super) fn set_budget(&self, engine: &Engine, share: Option<Share>) {
        let (hz, now) = (engine.tsc_hz(), vmm::host_tsc());
        let spent = self.shared.meters.iter().map(|meter| meter.ticks());
        let mut list = self.lock();
        list.wake_all(engine, Cause::Session);
        list.budget = share.map(|share| Policy::new(share, hz, now, spent));
    }

    /// Ends the time that the session's cost is compared with, if it has not ended before.
    pub(super) fn end(&self) {
        let now = vmm::host_tsc();
        let _ = self
            .ended
            .compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Returns the session's time stamp counter: the current one, or that of its end.
    fn now(&self) -> u64 {
        match self.ended.load(Ordering::Relaxed) {
            0 => vmm::host_tsc(),
            ended => ended,
        }
    }

    /// Returns the session's cost so far.
    pub(super) fn cost(&self) -> Cost {
        let passed = self.now().saturating_sub(self.began);
        Cost::of(&self.shared.meters, passed)
    }

    /// Returns how long the unit of an enabled probe has not watched.
    pub(super) fn unwatched(&self, number: usize) -> Option<Unwatched> {
        let now = self.now();
        let list = self.lock();
        let unit = list.active.get(number)?.as_ref()?.unit;
        let unit = list.units.get(unit)?;
        let resting = unit.since.map_or(0, |since| now.saturating_sub(since));
        Some(Unwatched {
            times: unit.times,
            ticks: unit.ticks.saturating_add(resting),
            passed: now.saturating_sub(self.began),
        })
    }
}

impl Watchlist {
    /// Returns the account for a probe that is about to be enabled as `number`, and its unit.
    pub(super) fn account(
        &mut self,
        shared: &Arc<SessionShared>,
        number: usize,
        probe: &Probe,
        program: Option<&dyn Program>,
    ) -> (Arc<Account>, usize) {
        let key = key(number, probe, program);
        let units = &mut self.units;
        let unit = *self.by_key.entry(key).or_insert_with(|| {
            units.push(Unit {
                account: Arc::new(Account::new(shared.clone())),
                members: Vec::new(),
                may_rest: true,
                causes: [false; 2],
                since: None,
                times: 0,
                ticks: 0,
            });
            units.len() - 1
        });
        let account = self.units.get_mut(unit).map(|unit| {
            // A clock gives a script its time, and a held machine costs nothing.
            let is_timer = matches!(probe.target, Target::Timer { .. });
            unit.may_rest &= !is_timer && !program.is_some_and(Program::may_hold);
            unit.account.clone()
        });
        let account = account.unwrap_or_else(|| Arc::new(Account::new(shared.clone())));
        (account, unit)
    }

    /// Adds an enabled probe. It rests at once if its unit does.
    pub(super) fn push(
        &mut self,
        engine: &Engine,
        unit: usize,
        enabled: Arc<Enabled>,
        places: Vec<ArmedAt>,
        probe: Option<Box<Probe>>,
    ) {
        let number = self.active.len();
        let mut active = Active {
            enabled,
            places,
            probe,
            resting: None,
            unit,
        };
        if let Some(unit) = self.units.get_mut(unit) {
            unit.members.push(number);
            unit.may_rest &= active.probe.is_some();
            if unit.since.is_some() {
                engine.rest(&mut [&mut active]);
            }
        }
        self.active.push(Some(active));
    }

    /// Removes a probe and returns it.
    pub(super) fn take(&mut self, number: usize) -> Option<Active> {
        let active = self.active.get_mut(number)?.take()?;
        if let Some(unit) = self.units.get_mut(active.unit) {
            unit.members.retain(|member| *member != number);
        }
        Some(active)
    }

    /// Keeps all probes watching from now on, whatever the budget.
    pub(super) fn exempt(&mut self) {
        self.is_exempt = true;
    }

    /// Returns what a policy needs to know of the units that have spent anything.
    pub(super) fn readings(&self, base: u64) -> impl Iterator<Item = Reading> {
        let units = self.units.iter().zip(base..);
        units.filter_map(|(unit, number)| {
            let ticks = unit.account.ticks();
            (ticks > 0).then_some(Reading {
                unit: number,
                ticks,
                may_rest: unit.may_rest && !self.is_exempt && !unit.members.is_empty(),
            })
        })
    }

    /// Takes back a reason for units to rest.
    pub(super) fn wake_all(&mut self, engine: &Engine, cause: Cause) {
        for unit in 0..self.units.len() {
            self.set_resting(engine, unit, cause, false);
        }
    }

    /// Lets a unit rest, or takes back a reason for it to rest. Nothing happens if it rests for
    /// another reason.
    pub(super) fn set_resting(&mut self, engine: &Engine, unit: usize, cause: Cause, rests: bool) {
        let Some(unit) = self.units.get_mut(unit) else {
            return;
        };
        if let Some(set) = unit.causes.get_mut(cause as usize) {
            *set = rests;
        }
        let is_wanted = unit.causes.contains(&true);
        if unit.since.is_some() == is_wanted {
            return;
        }
        let members = std::mem::take(&mut unit.members);
        let mut probes = chosen(&mut self.active, &members);
        unit.members = members;
        let now = vmm::host_tsc();
        match unit.since.take() {
            Some(since) => {
                unit.ticks = unit.ticks.saturating_add(now.saturating_sub(since));
                engine.wake(&mut probes);
            }
            None => {
                (unit.since, unit.times) = (Some(now), unit.times + 1);
                engine.rest(&mut probes);
            }
        }
    }
}

/// Returns the probes with these numbers, which are in rising order.
fn chosen<'a>(active: &'a mut [Option<Active>], numbers: &[usize]) -> Vec<&'a mut Active> {
    let (mut rest, mut at) = (active, 0);
    let mut found = Vec::with_capacity(numbers.len());
    for number in numbers {
        let Some((one, behind)) = number
            .checked_sub(at)
            .and_then(|skip| rest.get_mut(skip..))
            .and_then(<[_]>::split_first_mut)
        else {
            break;
        };
        (rest, at) = (behind, number + 1);
        found.extend(one);
    }
    found
}

fn key(number: usize, probe: &Probe, program: Option<&dyn Program>) -> Key {
    let together = program.and_then(Program::shares);
    match (&probe.target, together) {
        (Target::Timer { .. }, _) => Key::Alone(number),
        (_, Some(group)) => Key::Together(group),
        (target, None) => of_target(number, target),
    }
}

fn of_target(number: usize, target: &Target) -> Key {
    match target {
        Target::Kernel { address, .. } => Key::Kernel(address.0),
        Target::User { text, .. } => Key::User(text.file.mapping.0, text.offset),
        Target::SystemCall { .. } => Key::SystemCalls,
        Target::Static(_)
        | Target::Tracepoint(_)
        | Target::Timer { .. }
        | Target::Watchpoint(_) => Key::Alone(number),
    }
}
