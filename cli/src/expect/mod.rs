//! What `run --expect` expects of a guest: probes, how often they are to be hit, and a report on whether they were.
//!
//! The caller reads each expectation with [`Expectation::parse`], arms them all once the guest's kernel is known ([`counting::Armed`]),
//! lets the guest run, and makes a [`report::Report`] of what was counted and how the run ended. Hits are counted where they happen,
//! predicates included: none is lost. What can be lost is one of the last events, which are told beside the counts; that is counted.

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

/// How often probes are to be hit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Expectation {
    /// As it was given.
    pub text: String,
    /// The probe as it is enabled: of one that names neither entry nor return, the entry.
    pub probe: String,
    /// The predicate without its slashes.
    pub predicate: Option<String>,
    /// How the hits are compared.
    pub comparison: Comparison,
    /// With what.
    pub number: u64,
}

/// How hits are compared with a number.
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
    /// Whether so many hits are what was expected.
    pub fn holds(&self, seen: u64) -> bool {
        match self.comparison {
            Comparison::AtLeast => seen >= self.number,
            Comparison::More => seen > self.number,
            Comparison::Exactly => seen == self.number,
            Comparison::AtMost => seen <= self.number,
            Comparison::Fewer => seen < self.number,
        }
    }

    /// Whether further hits can break it: then it is known to hold only when the run is over.
    pub fn has_upper_bound(&self) -> bool {
        !matches!(self.comparison, Comparison::AtLeast | Comparison::More)
    }

    /// `>= 1`
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
