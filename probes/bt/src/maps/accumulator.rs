//! The aggregated value of one function under one key in one shard.

use super::snapshot::Reading;
use crate::ast::{Aggregation, Dialect};
use crate::histogram::{Buckets, Histogram};
use crate::series::Series;
use crate::value::Value;

/// An aggregated value. Sums wrap around, as C's do.
#[derive(Debug, Clone)]
pub(super) enum Accumulator {
    Count(i64),
    Sum(i64),
    /// The smallest value; `None` until there is one.
    Min(Option<i64>),
    Max(Option<i64>),
    Average(Moments),
    Stats(Moments),
    Histogram {
        buckets: Buckets,
        counts: Histogram,
    },
    Series(Series),
}

/// The number of values and their sum.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moments {
    count: i64,
    total: i64,
}

impl Moments {
    fn add(&mut self, other: Self) {
        self.count = self.count.wrapping_add(other.count);
        self.total = self.total.wrapping_add(other.total);
    }
}

impl Accumulator {
    /// Makes an accumulator without values.
    pub(super) fn new(aggregation: Aggregation, dialect: Dialect) -> Self {
        match aggregation {
            Aggregation::Count => Self::Count(0),
            Aggregation::Sum => Self::Sum(0),
            Aggregation::Min => Self::Min(None),
            Aggregation::Max => Self::Max(None),
            Aggregation::Average => Self::Average(Moments::default()),
            Aggregation::Stats => Self::Stats(Moments::default()),
            Aggregation::TimeSeries(kind) => Self::Series(Series::new(kind)),
            Aggregation::PowerHistogram(_) | Aggregation::LinearHistogram { .. } => {
                Self::Histogram {
                    buckets: Buckets::of(aggregation, dialect)
                        .unwrap_or(Buckets::Power { bits: 0 }),
                    counts: Histogram::default(),
                }
            }
        }
    }

    /// Checks whether the value is aggregated.
    pub(super) fn takes(&self, value: i64) -> bool {
        match self {
            // Those of powers of two have a bucket for each value.
            Self::Histogram {
                buckets: buckets @ (Buckets::Linear { .. } | Buckets::StrictLinear { .. }),
                ..
            } => buckets.bucket_of(value).is_some(),
            _ => true,
        }
    }

    /// Adds a value of a time, in nanoseconds since 1970, which matters to a time series alone.
    /// Returns `false` if there is no room for it.
    #[inline(always)]
    pub(super) fn add(&mut self, value: i64, at: u64) -> bool {
        match self {
            Self::Count(count) => *count = count.wrapping_add(1),
            Self::Series(series) => series.add(value, at),
            Self::Sum(sum) => *sum = sum.wrapping_add(value),
            Self::Min(min) => *min = Some(min.map_or(value, |min| min.min(value))),
            Self::Max(max) => *max = Some(max.map_or(value, |max| max.max(value))),
            Self::Average(moments) | Self::Stats(moments) => moments.add(Moments {
                count: 1,
                total: value,
            }),
            Self::Histogram { buckets, counts } => {
                return (buckets.bucket_of(value)).is_none_or(|bucket| counts.add(bucket));
            }
        }
        true
    }

    /// Adds another shard's accumulator of the same function.
    pub(super) fn merge(&mut self, other: &Self) {
        match (self, other) {
            (Self::Count(into), Self::Count(from)) | (Self::Sum(into), Self::Sum(from)) => {
                *into = into.wrapping_add(*from);
            }
            (Self::Min(into), Self::Min(from)) => *into = into.iter().chain(from).min().copied(),
            (Self::Max(into), Self::Max(from)) => *into = into.iter().chain(from).max().copied(),
            (Self::Average(into), Self::Average(from)) | (Self::Stats(into), Self::Stats(from)) => {
                into.add(*from);
            }
            (Self::Histogram { counts: into, .. }, Self::Histogram { counts: from, .. }) => {
                into.merge(from);
            }
            (Self::Series(into), Self::Series(from)) => into.merge(from),
            // A map has one function.
            _ => {}
        }
    }

    /// Forgets all values.
    pub(super) fn zero(&mut self) {
        match self {
            Self::Count(number) | Self::Sum(number) => *number = 0,
            Self::Min(number) | Self::Max(number) => *number = None,
            Self::Average(moments) | Self::Stats(moments) => *moments = Moments::default(),
            Self::Histogram { counts, .. } => counts.zero(),
            Self::Series(series) => series.clear(),
        }
    }

    /// Returns the number that it amounts to; `None` for a histogram.
    pub(super) fn number(&self) -> Option<i64> {
        self.reading().number()
    }

    /// Returns the reading to show.
    pub(super) fn reading(&self) -> Reading {
        match self {
            Self::Count(number) | Self::Sum(number) => Reading::Value(Value::Int(*number)),
            Self::Min(number) | Self::Max(number) => {
                Reading::Value(Value::Int(number.unwrap_or(0)))
            }
            Self::Average(Moments { count, total }) => Reading::Average {
                count: *count,
                total: *total,
            },
            Self::Stats(Moments { count, total }) => Reading::Stats {
                count: *count,
                total: *total,
            },
            Self::Series(series) => Reading::Series(series.clone()),
            Self::Histogram { buckets, counts } => Reading::Histogram {
                buckets: *buckets,
                counts: counts.clone(),
            },
        }
    }
}
