//! A map as it was at one moment, merged and owned: what goes to whoever shows it.

use std::sync::Arc;

use super::Key;
use crate::bt::histogram::{Buckets, Histogram};
use crate::bt::value::Value;

/// The entries of a map, ordered by key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapSnapshot {
    /// The map's name without `@`.
    pub name: Arc<str>,
    /// Key and value; the key of a variable without keys is empty.
    pub entries: Vec<(Key, Reading)>,
}

impl Default for MapSnapshot {
    fn default() -> Self {
        Self {
            name: "".into(),
            entries: Vec::new(),
        }
    }
}

impl MapSnapshot {
    pub(super) fn new(name: Arc<str>, mut entries: Vec<(Key, Reading)>) -> Self {
        entries.sort_by(|one, other| one.0.cmp(&other.0));
        Self { name, entries }
    }
}

/// What an entry holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reading {
    /// A value, assigned or gathered.
    Value(Value),
    /// Of `avg`: shown is the mean.
    Average {
        /// How many.
        count: i64,
        /// Their sum.
        total: i64,
    },
    /// Of `stats`: shown is everything.
    Stats {
        /// How many.
        count: i64,
        /// Their sum.
        total: i64,
    },
    /// Of `hist` and `lhist`.
    Histogram {
        /// What its buckets are.
        buckets: Buckets,
        /// How many are in each.
        counts: Histogram,
    },
}

impl Reading {
    /// The number that it amounts to: the mean of `avg` and `stats` (rounded to 0, and 0 of none), the value itself; none for a histogram
    /// and for values that are no numbers.
    #[must_use]
    pub fn number(&self) -> Option<i64> {
        match self {
            Self::Value(Value::Int(number)) => Some(*number),
            Self::Value(Value::Unsigned(number)) => Some(number.cast_signed()),
            Self::Average { count, total } | Self::Stats { count, total } => {
                Some(total.checked_div(*count).unwrap_or(0))
            }
            Self::Value(_) | Self::Histogram { .. } => None,
        }
    }
}
