//! Keeps budgets: a thread that reads the meters, asks the policies, and lets probes rest.
//!
//! It runs from an engine's first budget on, and ends with the engine. A hit that empties a purse
//! wakes it. Otherwise it looks at its own pace.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::super::session::SessionShared;
use super::super::watchlist::{Cause, Watched};
use super::super::{Engine, Inner};
use super::meter::Meter;
use super::policy::{Change, Policy, Reading};
use super::{Cost, Share};

/// The longest time between two looks: a policy's window.
const WINDOW: Duration = Duration::from_millis(100);
/// The place of a session's number in a unit's, for the budget of all sessions.
const SESSION_SHIFT: u32 = 32;

/// The sessions of an engine, and the budget of all of them together.
#[derive(Default)]
pub(in crate::engine) struct Keeper(Mutex<State>);

#[derive(Default)]
struct State {
    sessions: Vec<Weak<Watched>>,
    next: u64,
    /// The budget of all sessions, and its state while the keeper does not use it.
    share: Option<Share>,
    machine: Option<Policy>,
    is_running: bool,
}

/// The cost of a session, as an entry of a list of all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionCost {
    /// The session's number among those of its engine, from 1.
    pub number: u64,
    /// The session's name; empty if it has none.
    pub label: String,
    /// Its cost.
    pub cost: Cost,
    /// Its own budget.
    pub budget: Option<Share>,
    /// The number of its enabled probes.
    pub probes: usize,
    /// The number of those that do not watch now.
    pub resting: usize,
}

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// Sets the share of each vCPU's time that all sessions together may cost, or none. Sessions
    /// whose probes are enabled from now on keep to it.
    pub fn set_budget(&self, share: Option<Share>) {
        let spent = self.0.path.meters.iter().map(|meter| meter.ticks());
        let (hz, now) = (self.tsc_hz(), vmm::host_tsc());
        let policy = share.map(|share| Policy::new(share, hz, now, spent));
        let mut state = self.0.keeper.lock();
        (state.share, state.machine) = (share, policy);
        drop(state);
        for session in self.sessions() {
            session.lock().wake_all(self, Cause::Machine);
        }
        if share.is_some() {
            self.keep_budgets();
        }
    }

    /// Returns what all sessions together have cost the guest since the engine was made.
    #[must_use]
    pub fn cost(&self) -> Cost {
        let passed = vmm::host_tsc().saturating_sub(self.0.began);
        Cost::of(&self.0.path.meters, passed)
    }

    /// Returns the budget of all sessions together.
    #[must_use]
    pub fn budget(&self) -> Option<Share> {
        self.0.keeper.lock().share
    }

    /// Returns what each session costs that still has probes.
    #[must_use]
    pub fn session_costs(&self) -> Vec<SessionCost> {
        let cost = |session: Arc<Watched>| {
            let cost = session.cost();
            let list = session.lock();
            let active = || list.active.iter().flatten();
            SessionCost {
                number: session.number,
                label: list.label.clone(),
                cost,
                budget: list.budget.as_ref().map(Policy::share),
                probes: active().count(),
                resting: active().filter(|probe| probe.resting.is_some()).count(),
            }
        };
        let costs = self.sessions().into_iter().map(cost);
        costs.filter(|session| session.probes > 0).collect()
    }

    pub(in crate::engine) fn has_budget(&self) -> bool {
        self.0.keeper.lock().share.is_some()
    }

    /// Makes the shared part of a new session, and keeps its budgets.
    pub(in crate::engine) fn watch_session(&self, shared: &Arc<SessionShared>) -> Arc<Watched> {
        let mut state = self.0.keeper.lock();
        state.next += 1;
        let watched = Arc::new(Watched::new(state.next, shared.clone()));
        state.sessions.retain(|session| session.strong_count() > 0);
        state.sessions.push(Arc::downgrade(&watched));
        watched
    }

    fn sessions(&self) -> Vec<Arc<Watched>> {
        let state = self.0.keeper.lock();
        state.sessions.iter().filter_map(Weak::upgrade).collect()
    }

    /// Starts the keeper's thread, if it does not run.
    pub(in crate::engine) fn keep_budgets(&self) {
        let mut state = self.0.keeper.lock();
        if state.is_running {
            return;
        }
        let weak = Arc::downgrade(&self.0);
        let started = std::thread::Builder::new()
            .name("budget".into())
            .spawn(move || run(&weak));
        match started {
            Ok(keeper) => {
                self.0.path.bell.belongs_to(keeper.thread().clone());
                state.is_running = true;
            }
            Err(error) => log::error!("no thread for budgets, which are not kept: {error}"),
        }
    }

    /// Reads the meters once, and does what the policies want. Returns the part of a window
    /// after which to look again.
    fn keep(&self) -> f64 {
        let sessions = self.sessions();
        let pauses = sessions.iter().map(|session| self.keep_session(session));
        pauses.fold(self.keep_machine(&sessions), f64::min)
    }

    fn keep_session(&self, session: &Watched) -> f64 {
        let mut list = session.lock();
        let Some(mut policy) = list.budget.take() else {
            return 1.0;
        };
        let readings: Vec<_> = list.readings(0).collect();
        let pause = step(
            &mut policy,
            &session.shared.meters,
            &readings,
            |unit, rests| {
                let unit = usize::try_from(unit).unwrap_or(usize::MAX);
                list.set_resting(self, unit, Cause::Session, rests);
            },
        );
        list.budget = Some(policy);
        pause
    }

    fn keep_machine(&self, sessions: &[Arc<Watched>]) -> f64 {
        let Some(mut policy) = self.0.keeper.lock().machine.take() else {
            return 1.0;
        };
        let mut readings = Vec::new();
        for session in sessions {
            readings.extend(session.lock().readings(session.number << SESSION_SHIFT));
        }
        let meters = &self.0.path.meters;
        let pause = step(&mut policy, meters, &readings, |number, rests| {
            let owner = number >> SESSION_SHIFT;
            let unit = usize::try_from(number & u64::from(u32::MAX)).unwrap_or(usize::MAX);
            if let Some(session) = sessions.iter().find(|session| session.number == owner) {
                let mut list = session.lock();
                list.set_resting(self, unit, Cause::Machine, rests);
            }
        });
        let mut state = self.0.keeper.lock();
        // Another budget may have been set meanwhile.
        if state.share == Some(policy.share()) {
            state.machine.get_or_insert(policy);
        }
        pause
    }
}

/// Makes one step of a policy. `set_resting` is called with each unit that changes, and whether it
/// is to rest. Returns the part of a window after which the next step is due.
fn step(
    policy: &mut Policy,
    meters: &[Arc<Meter>],
    readings: &[Reading],
    mut set_resting: impl FnMut(u64, bool),
) -> f64 {
    let began = vmm::host_tsc();
    let spent = meters.iter().map(|meter| meter.ticks());
    for change in policy.step(began, spent, readings) {
        match change {
            Change::Rest(unit) => set_resting(unit, true),
            Change::Wake(unit) => set_resting(unit, false),
        }
    }
    policy.charge(vmm::host_tsc().saturating_sub(began));
    for (meter, limit) in meters.iter().zip(policy.limits()) {
        meter.set_limit(limit);
    }
    policy.pause()
}

fn run(engine: &Weak<Inner>) {
    while let Some(inner) = engine.upgrade() {
        let pause = Engine(inner).keep();
        std::thread::park_timeout(WINDOW.mul_f64(pause));
    }
}
