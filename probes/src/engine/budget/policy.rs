//! The policy of a budget: which units of a trace rest, and which watch.
//!
//! It is a state machine over numbers that the caller reads: the time, the time that each vCPU has
//! spent at the trace's sites, and that of each unit. It knows no clock, thread or trap.
//!
//! Each vCPU has a purse. It fills with the budget's share of the time that passes, up to the share
//! of one window, and empties by the time that is spent. Once a purse is empty, the costliest
//! units rest until the others fit. Debts are paid: a unit that was stopped late rests longer. When
//! all purses are half full again, the unit that has rested longest is woken.

use std::collections::{HashMap, HashSet};

use super::Share;

/// A vCPU may spend the share of a window at once: of 100 ms.
const WINDOWS_PER_SECOND: f64 = 10.0;
/// The largest debt, in full purses. One hit that lasts for minutes does not blind a trace for
/// hours.
const MOST_DEBT: f64 = 20.0;
/// The most steps in a window, but for those at a limit.
pub(super) const STEPS_PER_WINDOW: u32 = 10;

/// The caller's reading of a unit: of probes that rest and watch together. A new unit has spent
/// nothing before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reading {
    /// The unit's number.
    pub(crate) unit: u64,
    /// The ticks spent at its sites so far, on all vCPUs.
    pub(crate) ticks: u64,
    /// Whether the unit may be stopped at all.
    pub(crate) may_rest: bool,
}

/// A change that the caller is to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Take the unit's traps away.
    Rest(u64),
    /// Put them back.
    Wake(u64),
}

#[derive(Debug, Clone, Copy)]
struct Purse {
    /// The ticks spent as of the last step.
    spent: u64,
    /// The ticks that may be spent; negative for a debt.
    balance: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Unit {
    /// The ticks spent as of the last step.
    ticks: u64,
    /// The part of the time that it spends while it watches, as a mean of the recent past.
    rate: f64,
    /// When it began to rest, if it does.
    rests_since: Option<u64>,
}

/// A budget's state. All times are in ticks of one clock.
#[derive(Debug)]
pub(crate) struct Policy {
    share: Share,
    /// A full purse.
    full: f64,
    /// The time that rates are a mean of.
    memory: f64,
    purses: Vec<Purse>,
    units: HashMap<u64, Unit>,
    /// The time of the last step.
    at: u64,
}

impl Policy {
    /// Creates the state of a budget that begins at `now`, for vCPUs that have `spent` so much
    /// before. `hz` is the number of ticks in a second.
    pub(crate) fn new(share: Share, hz: u64, now: u64, spent: impl Iterator<Item = u64>) -> Self {
        let window = hz as f64 / WINDOWS_PER_SECOND;
        let full = (share.fraction() * window).max(1.0);
        let purse = |spent| Purse {
            spent,
            balance: full,
        };
        Self {
            share,
            full,
            memory: window / 2.0,
            purses: spent.map(purse).collect(),
            units: HashMap::new(),
            at: now,
        }
    }

    /// Returns the share.
    pub(crate) fn share(&self) -> Share {
        self.share
    }

    /// Takes from all purses what a change of the traps has taken, for which the guest may have
    /// waited.
    pub(crate) fn charge(&mut self, ticks: u64) {
        let least = -MOST_DEBT * self.full;
        for purse in &mut self.purses {
            purse.balance = (purse.balance - ticks as f64).max(least);
        }
    }

    /// Returns for each vCPU the spent ticks at which its purse is empty. In debt there is nothing
    /// to watch for.
    pub(crate) fn limits(&self) -> impl Iterator<Item = u64> {
        self.purses.iter().map(|purse| match purse.balance > 0.0 {
            true => purse.spent.saturating_add(purse.balance as u64),
            false => u64::MAX,
        })
    }

    /// Returns the part of a window after which the next step is due, if no limit is reached
    /// before: 1, or less while a unit rests or there is a debt.
    pub(crate) fn pause(&self) -> f64 {
        let balances = self.purses.iter().map(|purse| purse.balance);
        let least = balances.fold(self.full, f64::min);
        let shortest = 1.0 / f64::from(STEPS_PER_WINDOW);
        if least <= 0.0 && self.watching() > self.share.fraction() {
            // The next step stops more.
            return shortest;
        }
        match self.units.values().any(|unit| unit.rests_since.is_some()) {
            // Nothing can be woken before the purse is half full.
            true => (0.5 - least / self.full).clamp(shortest, 1.0),
            false => 1.0,
        }
    }

    /// Takes in the ticks that each vCPU has `spent` by `now`, and those of each unit. Returns what
    /// is to be done. Units that are not among the readings are forgotten.
    pub(crate) fn step(
        &mut self,
        now: u64,
        spent: impl Iterator<Item = u64>,
        readings: &[Reading],
    ) -> Vec<Change> {
        let passed = now.saturating_sub(self.at) as f64;
        self.at = now;
        let (mut all, mut most) = (0, 0);
        for (purse, spent) in self.purses.iter_mut().zip(spent) {
            let since = spent.saturating_sub(purse.spent);
            purse.spent = spent;
            let balance = (purse.balance + self.share.fraction() * passed).min(self.full);
            purse.balance = (balance - since as f64).max(-self.full * MOST_DEBT);
            all += since;
            most = most.max(since);
        }
        self.take_in(readings, passed);
        let balances = self.purses.iter().map(|purse| purse.balance);
        match balances.fold(self.full, f64::min) {
            least if least <= 0.0 => {
                // The part of the time at sites that the busiest vCPU has.
                let busiest = if all > 0 {
                    most as f64 / all as f64
                } else {
                    1.0
                };
                self.rest(busiest, readings)
            }
            least if least >= self.full / 2.0 => self.wake(least),
            _ => Vec::new(),
        }
    }

    fn take_in(&mut self, readings: &[Reading], passed: f64) {
        for reading in readings {
            let unit = self.units.entry(reading.unit).or_default();
            let since = reading.ticks.saturating_sub(unit.ticks) as f64;
            unit.ticks = reading.ticks;
            if unit.rests_since.is_none() && passed > 0.0 {
                unit.rate = (unit.rate * self.memory + since) / (self.memory + passed);
            }
        }
        if readings.len() < self.units.len() {
            let known: HashSet<u64> = readings.iter().map(|reading| reading.unit).collect();
            self.units.retain(|unit, _| known.contains(unit));
        }
    }

    /// Returns the part of the time that the watching units spend.
    fn watching(&self) -> f64 {
        let units = self.units.values();
        let watching = units.filter(|unit| unit.rests_since.is_none());
        watching.map(|unit| unit.rate).sum()
    }

    /// Stops the costliest units until the busiest vCPU, which has the part `busiest` of the time
    /// at sites, spends no more than its share.
    fn rest(&mut self, busiest: f64, readings: &[Reading]) -> Vec<Change> {
        let mut excess = self.watching() * busiest - self.share.fraction();
        let mut costly: Vec<(f64, u64)> = readings
            .iter()
            .filter(|reading| reading.may_rest)
            .filter_map(|reading| {
                let unit = self.units.get(&reading.unit)?;
                let watches = unit.rests_since.is_none() && unit.rate > 0.0;
                watches.then_some((unit.rate, reading.unit))
            })
            .collect();
        costly.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut changes = Vec::new();
        for (rate, number) in costly {
            if excess <= 0.0 {
                break;
            }
            // If it was another vCPU's time, the next step stops one more.
            excess -= rate;
            if let Some(unit) = self.units.get_mut(&number) {
                unit.rests_since = Some(self.at);
            }
            changes.push(Change::Rest(number));
        }
        changes
    }

    /// Wakes the unit that has rested longest, and further ones as long as all of them can be paid
    /// for until the next step.
    fn wake(&mut self, least: f64) -> Vec<Change> {
        let mut resting: Vec<(u64, u64)> = self
            .units
            .iter()
            .filter_map(|(number, unit)| Some((unit.rests_since?, *number)))
            .collect();
        resting.sort_unstable();
        let per_step = 2.0 * self.memory / f64::from(STEPS_PER_WINDOW);
        let mut cost = 0.0;
        let mut changes = Vec::new();
        for (_, number) in resting {
            let Some(unit) = self.units.get_mut(&number) else {
                continue;
            };
            cost += unit.rate * per_step;
            if !changes.is_empty() && cost > least / 2.0 {
                break;
            }
            unit.rests_since = None;
            changes.push(Change::Wake(number));
        }
        changes
    }
}

#[cfg(test)]
mod tests;
