//! Reads a micro guest's timings from the ticks that its programs leave behind (`guest::micro`, the
//! programs that measure): percentiles of the rounds, or one figure for a loop.
//!
//! The caller owns the machine and reads after its run has ended. This module finds the ticks and
//! converts them to nanoseconds. It does not decide what to subtract, and does not remove the noise
//! of a busy host.

use std::time::{Duration, Instant};

use introspect::{Gpa, Gva, PhysicalMemory};
use vmm::Machine;

use crate::micro::MicroGuest;

/// The time for which the host's clock and the time-stamp counter are compared.
const CALIBRATION: Duration = Duration::from_millis(200);

/// The cost of one round, over all rounds of a run, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The average.
    pub mean: f64,
    /// The number of timed rounds.
    pub samples: usize,
}

/// A reader of the timings of one micro guest's machines.
#[derive(Debug, Clone, Copy)]
pub struct TimingReader {
    ticks_per_ns: f64,
    samples: Gva,
    capacity: u64,
    count: Gva,
    elapsed: Gva,
}

impl TimingReader {
    /// Finds the variables in the micro guest's file, and measures the time-stamp counter against
    /// the host's clock. The guest's counter runs at the host's rate.
    ///
    /// # Panics
    /// If a variable is missing.
    #[must_use]
    pub fn new(guest: &MicroGuest) -> Self {
        let (samples, size) = guest.extent("micro_samples");
        Self {
            ticks_per_ns: ticks_per_ns(),
            samples,
            capacity: size / 4,
            count: guest.address("micro_count"),
            elapsed: guest.address("micro_elapsed"),
        }
    }

    /// Reads the rounds of a program that times each of them.
    ///
    /// # Panics
    /// If there are none: the program does not time its rounds, or has not ended.
    #[must_use]
    pub fn rounds(&self, machine: &Machine) -> Timing {
        let rounds = variable(machine, self.count).min(self.capacity);
        let mut bytes = vec![0; rounds as usize * 4];
        read(machine, self.samples, &mut bytes);
        let (ticks, _) = bytes.as_chunks();
        let ticks = ticks.iter().map(|bytes| u32::from_le_bytes(*bytes));
        let timing = Timing::of(ticks.collect(), self.ticks_per_ns);
        timing.expect("the guest has timed no round; does its program, and has it ended?")
    }

    /// Reads the nanoseconds of a program that times its whole loop.
    ///
    /// # Panics
    /// If it did not.
    #[must_use]
    pub fn whole(&self, machine: &Machine) -> f64 {
        let ticks = variable(machine, self.elapsed);
        assert!(
            ticks > 0,
            "the guest has timed no loop; does its program, and has it ended?"
        );
        ticks as f64 / self.ticks_per_ns
    }
}

fn variable(machine: &Machine, address: Gva) -> u64 {
    let mut bytes = [0; 8];
    read(machine, address, &mut bytes);
    u64::from_le_bytes(bytes)
}

/// Reads guest memory: virtual and physical addresses of the micro guest are equal.
fn read(machine: &Machine, address: Gva, bytes: &mut [u8]) {
    let read = machine.ram().read_physical(Gpa(address.0), bytes);
    read.unwrap_or_else(|e| panic!("micro guest: {e}"));
}

impl Timing {
    /// Returns the timing of ticks in any order; `None` without ticks.
    fn of(mut ticks: Vec<u32>, ticks_per_ns: f64) -> Option<Self> {
        ticks.sort_unstable();
        // Nearest rank.
        let rank = |percent: usize| {
            let rank = (ticks.len() * percent).div_ceil(100);
            ticks.get(rank.checked_sub(1)?).copied()
        };
        let sum: f64 = ticks.iter().map(|t| f64::from(*t)).sum();
        Some(Self {
            p50: f64::from(rank(50)?) / ticks_per_ns,
            p99: f64::from(rank(99)?) / ticks_per_ns,
            mean: sum / ticks.len() as f64 / ticks_per_ns,
            samples: ticks.len(),
        })
    }
}

/// Returns the rate of the host's time-stamp counter.
fn ticks_per_ns() -> f64 {
    let (clock, ticks) = (Instant::now(), vmm::host_tsc());
    std::thread::sleep(CALIBRATION);
    let (clock, ticks) = (clock.elapsed(), vmm::host_tsc().wrapping_sub(ticks));
    ticks as f64 / clock.as_nanos() as f64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let of = |ticks: Vec<u32>| Timing::of(ticks, 2.0);
        let hundred = of((1..=100).rev().collect()).unwrap();
        assert_eq!(
            (hundred.p50, hundred.p99, hundred.mean),
            (25.0, 49.5, 25.25)
        );
        let one = of(vec![8]).unwrap();
        assert_eq!((one.p50, one.p99, one.samples), (4.0, 4.0, 1));
        assert_eq!(of(Vec::new()), None);
    }
}
