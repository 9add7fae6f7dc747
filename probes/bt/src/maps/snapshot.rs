//! A map at one moment, merged and owned, for display.

use std::sync::Arc;

use super::Key;
use crate::histogram::{Buckets, Histogram};
use crate::series::Series;
use crate::value::Value;

/// The entries of a map, ordered by key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapSnapshot {
    /// The map's name without `@`.
    pub name: Arc<str>,
    /// Keys and values; the key of a variable without keys is empty.
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

    /// Returns the newest interval of all time series: their rows end there.
    #[must_use]
    pub fn newest(&self) -> u64 {
        let of_entry = |(_, reading): &(Key, Reading)| match reading {
            Reading::Series(series) => series.newest(),
            _ => None,
        };
        self.entries.iter().filter_map(of_entry).max().unwrap_or(0)
    }
}

/// The contents of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reading {
    /// A value, assigned or aggregated.
    Value(Value),
    /// The values of `avg`: the mean is shown.
    Average {
        /// The number of values.
        count: i64,
        /// The sum of the values.
        total: i64,
    },
    /// The values of `stats`: everything is shown.
    Stats {
        /// The number of values.
        count: i64,
        /// The sum of the values.
        total: i64,
    },
    /// The values of `hist` and `lhist`.
    Histogram {
        /// The division into buckets.
        buckets: Buckets,
        /// The number of values in each bucket.
        counts: Histogram,
    },
    /// The values of `tseries`.
    Series(Series),
}

impl Reading {
    /// Returns the number that it amounts to: the mean of `avg` and `stats` (rounded towards 0, and
    /// 0 without values), or the value itself. It is `None` for a histogram and for values that are
    /// no numbers.
    #[must_use]
    pub fn number(&self) -> Option<i64> {
        match self {
            Self::Value(Value::Int(number)) => Some(*number),
            Self::Value(Value::Unsigned(number)) => Some(number.cast_signed()),
            Self::Average { count, total } | Self::Stats { count, total } => {
                Some(total.checked_div(*count).unwrap_or(0))
            }
            Self::Value(_) | Self::Histogram { .. } | Self::Series(_) => None,
        }
    }
}
