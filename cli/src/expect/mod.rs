//! The expectations of `run --expect`: probes, bounds on their hits, and a report of the verdicts.
//!
//! The caller reads each expectation with [`Expectation::parse`] and arms them all once the guest's
//! kernel is known ([`counting::Armed`]). It lets the guest run, and makes a [`report::Report`] of
//! the counts and the run's end.
//!
//! Hits are counted where they happen, predicates included: none is lost. Only the last events,
//! reported beside the counts, can be dropped; the drops are counted.

pub mod counting;
pub mod crash;
pub mod events;
mod parse;
pub mod report;
mod show;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::Serialize;
pub use show::tell;

/// An expected number of hits of a probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Expectation {
    /// The text as given.
    pub text: String,
    /// The probe as it is enabled: the entry, if the text names neither entry nor return.
    pub probe: String,
    /// The predicate without its slashes.
    pub predicate: Option<String>,
    /// The comparison of the hits.
    pub comparison: Comparison,
    /// The number to compare with.
    pub number: u64,
}

/// A probe with a predicate: a moment of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Point {
    /// The probe as it is enabled: the entry, if the text names neither entry nor return.
    pub probe: String,
    /// The predicate without its slashes.
    pub predicate: Option<String>,
}

/// A comparison of hits with a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Comparison {
    /// `>=`
    #[serde(rename = ">=")]
    AtLeast,
    /// `>`
    #[serde(rename = ">")]
    More,
    /// `==`
    #[serde(rename = "==")]
    Exactly,
    /// `<=`
    #[serde(rename = "<=")]
    AtMost,
    /// `<`
    #[serde(rename = "<")]
    Fewer,
}

impl Expectation {
    /// Checks whether this number of hits meets the expectation.
    pub fn holds(&self, seen: u64) -> bool {
        match self.comparison {
            Comparison::AtLeast => seen >= self.number,
            Comparison::More => seen > self.number,
            Comparison::Exactly => seen == self.number,
            Comparison::AtMost => seen <= self.number,
            Comparison::Fewer => seen < self.number,
        }
    }

    /// Checks whether further hits can break it: then it is known to hold only when the run is
    /// over.
    pub fn has_upper_bound(&self) -> bool {
        !matches!(self.comparison, Comparison::AtLeast | Comparison::More)
    }

    /// Returns the bound as text: `>= 1`.
    pub fn bound(&self) -> String {
        format!("{} {}", self.comparison, self.number)
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AtLeast => ">=",
            Self::More => ">",
            Self::Exactly => "==",
            Self::AtMost => "<=",
            Self::Fewer => "<",
        })
    }
}
