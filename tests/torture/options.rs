//! The command line, and its effects: the length of each phase and its share.

use std::time::Duration;

use clap::Parser;

use crate::phase::{Phase, Share};

/// Tortures machines and their tracers.
#[derive(Debug, Parser)]
#[command(name = "torture", bin_name = "cargo torture")]
pub struct Options {
    /// Minutes that it takes, at least; none is as long as the rounds and kills take
    #[arg(long = "for", value_name = "MINUTES", default_value_t = 0)]
    minutes: u64,
    /// Seed of all that is random; another one each time if none is given
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Numbers of vCPUs, a phase each
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [2], value_parser = clap::value_parser!(u8).range(1..=16))]
    cpus: Vec<u8>,
    /// Times that probes are armed and removed in each of these phases, at least
    #[arg(long, value_name = "N", default_value_t = 100)]
    rounds: u64,
    /// Clients that are killed, all phases together, at least
    #[arg(long, value_name = "N", default_value_t = 20)]
    client_kills: u64,
    /// Machines that are killed
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub machine_kills: u64,
    /// Only these clients besides those who count, to find out who is to blame
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub clients: Option<Vec<String>>,
    /// Only these loops in the guest
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', num_args = 0..)]
    pub victims: Option<Vec<String>>,
    /// Build the command first, as `cargo torture` has it
    #[arg(long, hide = true)]
    pub build: bool,
    /// Only phases whose names contain this, as test programs have it
    filter: Vec<String>,
    /// Of test programs: phases run one after the other anyway
    #[arg(long, hide = true)]
    test_threads: Option<u32>,
    #[arg(long, hide = true)]
    nocapture: bool,
    #[arg(long, short, hide = true)]
    quiet: bool,
    #[arg(skip = fastrand::u64(..=u64::from(u32::MAX)))]
    random: u64,
}

impl Options {
    /// Returns the seed, which is the same at every call.
    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or(self.random)
    }

    /// Returns whether a phase is selected.
    pub fn wants(&self, phase: &str) -> bool {
        self.filter.is_empty() || self.filter.iter().any(|part| phase.contains(part.as_str()))
    }

    /// Returns all phases, in order.
    pub fn phases(&self) -> Vec<Phase> {
        let mut phases: Vec<_> = self.cpus.iter().map(|&cpus| Phase::Crowd(cpus)).collect();
        phases.push(Phase::Kills);
        phases
    }

    /// Returns the share of a phase with a guest.
    pub fn share(&self) -> Share {
        let phases = self.cpus.len().max(1) as u64;
        Share {
            least: Duration::from_secs(self.minutes * 60 / phases),
            rounds: self.rounds,
            client_kills: self.client_kills.div_ceil(phases),
        }
    }

    /// Returns the approximate minutes of the whole run on a host of two CPUs with software KVM,
    /// with the guests in the cache. It assumes 35 rounds and 3 killed clients a second, side by
    /// side, a second for each killed machine, and two minutes for a phase's end.
    pub fn expected_minutes(&self) -> u64 {
        let share = self.share();
        let work = (share.rounds / 35).max(share.client_kills / 3);
        let phase = work.max(share.least.as_secs()) + 120;
        (phase * self.cpus.len() as u64 + self.machine_kills).div_ceil(60)
    }
}
