//! The policy over a simulated guest: units with a rate each, and a clock that the test moves.
#![allow(clippy::unwrap_used)]

use super::*;

const HZ: u64 = 1_000_000;
const WINDOW: u64 = HZ / 10;

/// A guest whose units spend a part of a vCPU's time each while they watch.
struct Guest {
    policy: Policy,
    now: u64,
    spent: Vec<u64>,
    /// (part of the time, vCPU, may rest, rests, ticks, ticks watched)
    units: Vec<(f64, usize, bool, bool, u64, u64)>,
    rests: usize,
}

impl Guest {
    fn new(share: &str, vcpus: usize, units: &[(f64, usize)]) -> Self {
        let spent = vec![0; vcpus];
        let policy = Policy::new(share.parse().unwrap(), HZ, 0, spent.iter().copied());
        let units = units.iter().map(|u| (u.0, u.1, true, false, 0, 0));
        Self {
            policy,
            now: 0,
            spent,
            units: units.collect(),
            rests: 0,
        }
    }

    /// Runs for `ticks`, with a step when it is due, and one when a purse is empty.
    fn run(&mut self, ticks: u64) {
        let end = self.now + ticks;
        while self.now < end {
            let limits: Vec<u64> = self.policy.limits().collect();
            let from = self.now;
            let pause = (self.policy.pause() * WINDOW as f64) as u64;
            while self.now < from + pause {
                self.now += 100;
                for (rate, vcpu, _, rests, total, watched) in &mut self.units {
                    if !*rests {
                        let cost = (*rate * 100.0) as u64;
                        self.spent[*vcpu] += cost;
                        *total += cost;
                        *watched += 100;
                    }
                }
                if self.spent.iter().zip(&limits).any(|(s, l)| s >= l) {
                    break;
                }
            }
            self.step();
        }
    }

    fn step(&mut self) {
        let readings: Vec<Reading> = self
            .units
            .iter()
            .zip(0..)
            .map(|(unit, number)| Reading {
                unit: number,
                ticks: unit.4,
                may_rest: unit.2,
            })
            .collect();
        let spent = self.spent.clone();
        for change in self.policy.step(self.now, spent.into_iter(), &readings) {
            match change {
                Change::Rest(unit) => {
                    assert!(!self.units[unit as usize].3, "it rests already");
                    self.units[unit as usize].3 = true;
                    self.rests += 1;
                }
                Change::Wake(unit) => {
                    assert!(self.units[unit as usize].3, "it watches already");
                    self.units[unit as usize].3 = false;
                }
            }
        }
    }

    /// Returns the part of the time that a vCPU has spent.
    fn spent(&self, vcpu: usize) -> f64 {
        self.spent[vcpu] as f64 / self.now as f64
    }

    /// Returns the part of the time that a unit has watched.
    fn watched(&self, unit: usize) -> f64 {
        self.units[unit].5 as f64 / self.now as f64
    }
}

#[test]
fn a_busy_loop_spends_its_share_and_no_more() {
    for (share, rate) in [
        ("5%", 0.6),
        ("5%", 0.06),
        ("5%", 1.0),
        ("1%", 0.9),
        ("0.1%", 0.9),
        ("50%", 0.9),
    ] {
        let mut guest = Guest::new(share, 1, &[(rate, 0)]);
        guest.run(20 * HZ);
        let allowed = share.parse::<Share>().unwrap().fraction();
        let spent = guest.spent(0);
        assert!(
            (allowed * 0.85..allowed * 1.05).contains(&spent),
            "{share} at {rate}: {spent}"
        );
    }
}

#[test]
fn what_fits_is_never_stopped() {
    let mut guest = Guest::new("5%", 2, &[(0.02, 0), (0.02, 0), (0.04, 1), (0.0, 1)]);
    guest.run(20 * HZ);
    assert_eq!(guest.rests, 0);
    assert!((0..4).all(|unit| guest.watched(unit) == 1.0));
}

#[test]
fn the_costliest_rest_and_the_cheap_watch_on() {
    let mut guest = Guest::new("5%", 1, &[(0.01, 0), (0.5, 0), (0.01, 0), (0.3, 0)]);
    guest.run(20 * HZ);
    assert!(guest.spent(0) < 0.0525, "{}", guest.spent(0));
    for cheap in [0, 2] {
        assert!(guest.watched(cheap) > 0.95, "{}", guest.watched(cheap));
    }
    // Both are watched for a part of the time.
    for costly in [1, 3] {
        let watched = guest.watched(costly);
        assert!((0.01..0.15).contains(&watched), "{watched}");
    }
}

#[test]
fn the_busiest_vcpu_counts() {
    // Together the others may spend more than one share.
    let mut guest = Guest::new("5%", 4, &[(0.6, 0), (0.04, 1), (0.04, 2), (0.04, 3)]);
    guest.run(20 * HZ);
    assert!(guest.spent(0) < 0.0525, "{}", guest.spent(0));
    for unit in 1..4 {
        assert!(guest.watched(unit) > 0.95, "{}", guest.watched(unit));
    }
}

#[test]
fn a_burst_after_a_quiet_time_gets_one_window_alone() {
    let mut guest = Guest::new("5%", 1, &[(0.0, 0)]);
    guest.run(60 * HZ);
    guest.units[0].0 = 1.0;
    let before = guest.spent[0];
    guest.run(HZ);
    let burst = guest.spent[0] - before;
    assert!(burst < HZ / 1000 * 57, "{burst}");
}

#[test]
fn a_unit_that_may_not_rest_watches_on_and_the_others_make_room() {
    let mut guest = Guest::new("5%", 1, &[(0.04, 0), (0.5, 0)]);
    guest.units[0].2 = false;
    guest.run(20 * HZ);
    assert_eq!(guest.watched(0), 1.0);
    assert!(guest.watched(1) < 0.04, "{}", guest.watched(1));
    assert!(guest.spent(0) < 0.0525, "{}", guest.spent(0));
}

#[test]
fn debts_are_paid_but_a_hit_of_minutes_is_forgiven() {
    let mut guest = Guest::new("5%", 1, &[(0.6, 0)]);
    guest.run(HZ);
    // The host took the CPU away for a minute in the middle of a hit.
    guest.now += 60 * HZ;
    guest.spent[0] += 60 * HZ;
    guest.units[0].4 += 60 * HZ;
    guest.step();
    let watched = guest.units[0].5;
    guest.run(HZ);
    assert_eq!(guest.units[0].5, watched, "it rests for a while");
    guest.run(4 * HZ);
    assert!(guest.units[0].5 > watched, "and watches again");
}

#[test]
fn units_come_and_go() {
    let mut guest = Guest::new("5%", 1, &[(0.6, 0), (0.6, 0)]);
    guest.run(2 * HZ);
    guest.units.pop();
    guest.run(2 * HZ);
    guest.units.push((0.01, 0, true, false, 0, 0));
    guest.run(2 * HZ);
    assert!(guest.spent(0) < 0.055, "{}", guest.spent(0));
    assert_eq!(guest.policy.units.len(), 2);
}

#[test]
fn what_changes_take_is_paid_for_by_watching_less() {
    let watched = |charge: u64| {
        let mut guest = Guest::new("5%", 1, &[(0.6, 0)]);
        for _ in 0..100 {
            let rests = guest.rests;
            guest.run(WINDOW);
            guest.policy.charge(charge * (guest.rests - rests) as u64);
        }
        guest.units[0].5
    };
    let (free, charged) = (watched(0), watched(WINDOW / 100));
    assert!(charged < free / 10 * 9, "{charged} of {free}");
}
