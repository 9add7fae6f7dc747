//! Histograms: the buckets in which values are counted, and the lines that show them.
//!
//! A [`Buckets`] says how a histogram divides its values, a [`Histogram`] holds the counts. The two
//! languages differ. bt(5) counts a value in the bucket that *ends* at the smallest power of two
//! not below it. bpftrace counts it in the bucket that *begins* at the largest power of two not
//! above it. Sources: bt(5) and its implementation for strict scripts, bpftrace's language manual
//! for the others.

use std::collections::BTreeMap;

use crate::ast::{Aggregation, Dialect};

/// The greatest number of buckets of one histogram, those beyond the ends included. The guest
/// chooses the values, so this bounds the memory that it can use up. bpftrace refuses `lhist` with
/// more than 1000 buckets; so may a compiler.
pub const MOST_BUCKETS: usize = 1002;

/// The number of columns of the bar.
const BAR_COLUMNS: usize = 52;
/// The column where bt(5)'s counts end.
const STRICT_COUNT_END: usize = 20;

/// A division of values into buckets. A bucket's number has a meaning that depends on the variant;
/// numbers ascend as the values do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Buckets {
    /// Powers of two, each divided into `2^bits` parts. The number is -1 for negative values, and
    /// ascends by one with each part. Without parts it is n + 1 for `[2^n, 2^(n+1))`.
    Power {
        /// The logarithm of the number of parts.
        bits: u32,
    },
    /// Equal steps. The number is 0 below `min`, `(max - min) / step + 1` from `max` on.
    Linear {
        /// The first value of the first step.
        min: i64,
        /// The value behind the last step.
        max: i64,
        /// The width of a bucket; less than 1 counts as 1.
        step: i64,
    },
    /// Powers of two as in bt(5). The number is the upper bound, -1 for negative values.
    StrictPower,
    /// Equal steps as in bt(5). The number is the upper bound; values outside of `min..=max` are
    /// not counted.
    StrictLinear {
        /// The smallest value counted.
        min: i64,
        /// The largest value counted.
        max: i64,
        /// The width of a bucket; less than 1 counts as 1.
        step: i64,
    },
}

impl Buckets {
    /// Returns the buckets of an aggregation, if it is a histogram.
    #[must_use]
    pub fn of(aggregation: Aggregation, dialect: Dialect) -> Option<Self> {
        Some(match (aggregation, dialect) {
            (Aggregation::PowerHistogram(bits), Dialect::Normal) => Self::Power { bits },
            (Aggregation::PowerHistogram(_), Dialect::Strict) => Self::StrictPower,
            (Aggregation::LinearHistogram { min, max, step }, Dialect::Normal) => {
                Self::Linear { min, max, step }
            }
            (Aggregation::LinearHistogram { min, max, step }, Dialect::Strict) => {
                Self::StrictLinear { min, max, step }
            }
            _ => return None,
        })
    }

    /// Returns the bucket of a value; `None` if it is not counted at all.
    #[must_use]
    pub fn bucket_of(self, value: i64) -> Option<i64> {
        match self {
            Self::Power { bits } => Some(match value {
                ..0 => -1,
                0 => 0,
                1.. => match value.ilog2().checked_sub(bits) {
                    None => value,
                    Some(shift) => (i64::from(shift) << bits) + (value >> shift),
                },
            }),
            Self::Linear { min, max, step } => {
                let (min, step) = (i128::from(min), i128::from(step.max(1)));
                let last = (i128::from(max) - min) / step + 1;
                let bucket = match i128::from(value) {
                    below if below < min => 0,
                    inside => ((inside - min) / step + 1).min(last),
                };
                i64::try_from(bucket).ok()
            }
            Self::StrictPower => Some(match value {
                ..0 => -1,
                0 => 0,
                1.. => i64::try_from(value.unsigned_abs().next_power_of_two()).unwrap_or(i64::MAX),
            }),
            Self::StrictLinear { min, max, step } => {
                let step = step.max(1);
                (min <= value && value <= max)
                    .then(|| (value / step).saturating_add(1).saturating_mul(step))
            }
        }
    }

    /// Returns the first value of a bucket and the first one behind it; `None` on a side without an
    /// end. For bt(5)'s powers of two these are the bucket's label. There, the first value is
    /// counted one bucket below, and the value behind it in this bucket.
    #[must_use]
    pub fn bounds(self, bucket: i64) -> (Option<i64>, Option<i64>) {
        // If 2^n is no `i64`, there is nothing behind the bucket.
        let power = |n: i64| u32::try_from(n).ok().and_then(|n| 1_i64.checked_shl(n));
        match self {
            Self::Power { .. } | Self::StrictPower if bucket < 0 => (None, Some(0)),
            Self::Power { .. } | Self::StrictPower if bucket == 0 => (Some(0), Some(1)),
            Self::Power { bits } => {
                let shift = (bucket >> bits) - 1;
                if shift < 0 {
                    return (Some(bucket), Some(bucket + 1));
                }
                let parts = 1 << bits;
                let width = power(shift).unwrap_or(i64::MAX);
                let start = (bucket & (parts - 1) | parts).checked_mul(width);
                (start, start.and_then(|start| start.checked_add(width)))
            }
            Self::StrictPower => (Some(bucket / 2), Some(bucket)),
            Self::Linear { min, max, step } => {
                let step = step.max(1);
                let last = (i128::from(max) - i128::from(min)) / i128::from(step) + 1;
                let start = |of: i64| min.saturating_add((of - 1).saturating_mul(step));
                if bucket <= 0 {
                    (None, Some(min))
                } else if i128::from(bucket) >= last {
                    (Some(max), None)
                } else {
                    (Some(start(bucket)), Some(start(bucket + 1)))
                }
            }
            Self::StrictLinear { step, .. } => {
                (Some(bucket.saturating_sub(step.max(1))), Some(bucket))
            }
        }
    }

    /// Returns a bucket's label: `[4, 8)`.
    #[must_use]
    pub fn label(self, bucket: i64) -> String {
        let number = |value: i64| match self {
            Self::StrictLinear { .. } => value.to_string(),
            Self::Power { bits: 1.. } => with_unit(value, |value, unit| value % unit == 0, 6),
            Self::Power { .. } | Self::StrictPower => {
                with_unit(value, |value, unit| value >= unit, 6)
            }
            Self::Linear { .. } => with_unit(value, |value, unit| value % unit == 0, 2),
        };
        match (self, self.bounds(bucket)) {
            (Self::StrictPower, _) if bucket == 0 => "[0]".to_owned(),
            (Self::Power { .. }, (Some(start), Some(end))) if end - start == 1 => {
                format!("[{start}]")
            }
            (_, (None, Some(end))) => format!("(..., {})", number(end)),
            (_, (Some(start), Some(end))) => format!("[{}, {})", number(start), number(end)),
            (Self::Power { .. }, (Some(start), None)) => format!("[{}, 8E)", number(start)),
            (_, (Some(start), None)) => format!("[{}, ...)", number(start)),
            (_, (None, None)) => "(..., ...)".to_owned(),
        }
    }

    /// Checks whether exactly those buckets are shown in which a value was ever counted.
    fn is_strict(self) -> bool {
        matches!(self, Self::StrictPower | Self::StrictLinear { .. })
    }
}

/// Formats a number with the largest suffix that `fits`, of the first `units` of K, M, G, T, P and
/// E (powers of 1024).
fn with_unit(value: i64, fits: impl Fn(i64, i64) -> bool, units: usize) -> String {
    if value == 0 {
        return "0".to_owned();
    }
    ["E", "P", "T", "G", "M", "K"]
        .into_iter()
        .zip((1..=6).rev())
        .skip(6 - units.min(6))
        .map(|(suffix, power)| (suffix, 1_i64 << (10 * power)))
        .find(|&(_, unit)| fits(value, unit))
        .map_or_else(
            || value.to_string(),
            |(suffix, unit)| format!("{}{suffix}", value / unit),
        )
}

/// The counts of a histogram, by bucket. There are at most [`MOST_BUCKETS`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Histogram {
    counts: BTreeMap<i64, u64>,
}

impl Histogram {
    /// Counts a value in its bucket. Returns `false` if there is no room for a new bucket.
    pub fn add(&mut self, bucket: i64) -> bool {
        if let Some(count) = self.counts.get_mut(&bucket) {
            *count = count.wrapping_add(1);
            return true;
        }
        let room = self.counts.len() < MOST_BUCKETS;
        if room {
            self.counts.insert(bucket, 1);
        }
        room
    }

    /// Adds the counts of another histogram with the same buckets.
    pub fn merge(&mut self, other: &Self) {
        for (&bucket, &count) in &other.counts {
            let sum = self.counts.entry(bucket).or_default();
            *sum = sum.wrapping_add(count);
        }
    }

    /// Sets all counts to 0; the buckets stay, because bt(5) goes on to show them.
    pub fn zero(&mut self) {
        self.counts.values_mut().for_each(|count| *count = 0);
    }

    /// Returns the number of values counted.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts
            .values()
            .fold(0, |sum, &count| sum.wrapping_add(count))
    }

    /// Returns the buckets and counts to show, ascending. In bt(5) these are the buckets in which a
    /// value was ever counted. Otherwise they are all from the first to the last with a count,
    /// unless there are too many.
    #[must_use]
    pub fn rows(&self, buckets: Buckets) -> Vec<(i64, u64)> {
        if buckets.is_strict() {
            return self
                .counts
                .iter()
                .map(|(&bucket, &count)| (bucket, count))
                .collect();
        }
        let counted: Vec<_> = (self.counts.iter())
            .filter(|&(_, &count)| count > 0)
            .map(|(&bucket, &count)| (bucket, count))
            .collect();
        let (Some(&(first, _)), Some(&(last, _))) = (counted.first(), counted.last()) else {
            return counted;
        };
        if last.abs_diff(first) >= MOST_BUCKETS as u64 {
            return counted;
        }
        (first..=last)
            .map(|bucket| (bucket, self.counts.get(&bucket).copied().unwrap_or(0)))
            .collect()
    }

    /// Renders the lines, each with its newline; none if nothing was counted. `divisor` divides the
    /// counts that are shown, not the bars.
    #[must_use]
    pub fn render(&self, buckets: Buckets, divisor: u64) -> String {
        let rows = self.rows(buckets);
        let most = rows.iter().map(|&(_, count)| count).max().unwrap_or(0);
        rows.into_iter()
            .map(|(bucket, count)| {
                let label = buckets.label(bucket);
                let shown = count / divisor.max(1);
                if buckets.is_strict() {
                    let bar = "@".repeat(exact_columns(count, most));
                    let width = STRICT_COUNT_END.saturating_sub(label.len());
                    format!("{label}{shown:>width$} |{bar:<BAR_COLUMNS$}|\n")
                } else {
                    let bar = "@".repeat(rounded_columns(count, most));
                    format!("{label:<16}{shown:>8} |{bar:<BAR_COLUMNS$}|\n")
                }
            })
            .collect()
    }
}

/// Returns the columns of a bar, rounded down.
fn exact_columns(count: u64, most: u64) -> usize {
    let columns = u128::from(count) * BAR_COLUMNS as u128 / u128::from(most.max(1));
    usize::try_from(columns).unwrap_or(BAR_COLUMNS)
}

/// Returns the columns of a bar as bpftrace computes them: in single precision, which is sometimes
/// one column less than the exact result.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss
)]
fn rounded_columns(count: u64, most: u64) -> usize {
    if most == 0 {
        return 0;
    }
    ((count as f32 / most as f32 * BAR_COLUMNS as f32) as usize).min(BAR_COLUMNS)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn counted(buckets: Buckets, values: &[i64]) -> Histogram {
        let mut histogram = Histogram::default();
        for bucket in values.iter().filter_map(|&value| buckets.bucket_of(value)) {
            assert!(histogram.add(bucket));
        }
        histogram
    }

    const fn linear(min: i64, max: i64, step: i64) -> Buckets {
        Buckets::Linear { min, max, step }
    }

    const fn strict_linear(min: i64, max: i64, step: i64) -> Buckets {
        Buckets::StrictLinear { min, max, step }
    }

    const LINEAR: Buckets = linear(0, 100, 10);
    const STRICT_LINEAR: Buckets = strict_linear(10, 50, 20);

    #[test]
    fn a_value_has_its_bucket() {
        let cases: &[(Buckets, i64, Option<&str>)] = &[
            (Buckets::Power { bits: 0 }, i64::MIN, Some("(..., 0)")),
            (Buckets::Power { bits: 0 }, -1, Some("(..., 0)")),
            (Buckets::Power { bits: 0 }, 0, Some("[0]")),
            (Buckets::Power { bits: 0 }, 1, Some("[1]")),
            (Buckets::Power { bits: 0 }, 2, Some("[2, 4)")),
            (Buckets::Power { bits: 0 }, 3, Some("[2, 4)")),
            (Buckets::Power { bits: 0 }, 4, Some("[4, 8)")),
            (Buckets::Power { bits: 0 }, 1023, Some("[512, 1K)")),
            (Buckets::Power { bits: 0 }, 1024, Some("[1K, 2K)")),
            (Buckets::Power { bits: 0 }, 1 << 20, Some("[1M, 2M)")),
            (Buckets::Power { bits: 0 }, (1 << 41) - 1, Some("[1T, 2T)")),
            (Buckets::Power { bits: 0 }, i64::MAX, Some("[4E, 8E)")),
            (Buckets::StrictPower, i64::MIN, Some("(..., 0)")),
            (Buckets::StrictPower, -3, Some("(..., 0)")),
            (Buckets::StrictPower, 0, Some("[0]")),
            (Buckets::StrictPower, 1, Some("[0, 1)")),
            (Buckets::StrictPower, 2, Some("[1, 2)")),
            (Buckets::StrictPower, 3, Some("[2, 4)")),
            (Buckets::StrictPower, 4, Some("[2, 4)")),
            (Buckets::StrictPower, 5, Some("[4, 8)")),
            (Buckets::StrictPower, 1024, Some("[512, 1K)")),
            (Buckets::StrictPower, 1025, Some("[1K, 2K)")),
            (Buckets::StrictPower, 1 << 62, Some("[2E, 4E)")),
            (Buckets::StrictPower, i64::MAX, Some("[3E, 7E)")),
            (LINEAR, -1, Some("(..., 0)")),
            (LINEAR, 0, Some("[0, 10)")),
            (LINEAR, 99, Some("[90, 100)")),
            (LINEAR, 100, Some("[100, ...)")),
            (LINEAR, i64::MAX, Some("[100, ...)")),
            (linear(-2048, 4096, 1024), -2000, Some("[-2K, -1K)")),
            (linear(-2048, 4096, 1024), -1, Some("[-1K, 0)")),
            (linear(0, 5, 2), 4, Some("[5, ...)")),
            (linear(0, 5, 0), 4, Some("[4, 5)")),
            (linear(i64::MIN, i64::MAX, 1), 0, None),
            (STRICT_LINEAR, 9, None),
            (STRICT_LINEAR, 10, Some("[0, 20)")),
            (STRICT_LINEAR, 19, Some("[0, 20)")),
            (STRICT_LINEAR, 20, Some("[20, 40)")),
            (STRICT_LINEAR, 50, Some("[40, 60)")),
            (STRICT_LINEAR, 51, None),
            (strict_linear(0, 4096, 1024), 1, Some("[0, 1024)")),
        ];
        for &(buckets, value, expected) in cases {
            let label = buckets.bucket_of(value).map(|bucket| buckets.label(bucket));
            assert_eq!(label.as_deref(), expected, "{value} in {buckets:?}");
        }
    }

    #[test]
    fn lines_are_as_in_bt() {
        let histogram = counted(Buckets::StrictPower, &[0, 1, 3, 4, 4, 4, 2000, -7]);
        assert_eq!(
            histogram.render(Buckets::StrictPower, 1),
            "\
(..., 0)           1 |@@@@@@@@@@@@@                                       |
[0]                1 |@@@@@@@@@@@@@                                       |
[0, 1)             1 |@@@@@@@@@@@@@                                       |
[2, 4)             4 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
[1K, 2K)           1 |@@@@@@@@@@@@@                                       |
"
        );
        let histogram = counted(STRICT_LINEAR, &[9, 10, 15, 19, 45, 51]);
        assert_eq!(
            histogram.render(STRICT_LINEAR, 1),
            "\
[0, 20)            3 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
[40, 60)           1 |@@@@@@@@@@@@@@@@@                                   |
"
        );
    }

    #[test]
    fn lines_are_as_in_bpftrace() {
        let histogram = counted(Buckets::Power { bits: 0 }, &[1, 2, 3, 3, 2, 16, 31]);
        assert_eq!(
            histogram.render(Buckets::Power { bits: 0 }, 1),
            "\
[1]                    1 |@@@@@@@@@@@@@                                       |
[2, 4)                 4 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
[4, 8)                 0 |                                                    |
[8, 16)                0 |                                                    |
[16, 32)               2 |@@@@@@@@@@@@@@@@@@@@@@@@@@                          |
"
        );
        let histogram = counted(LINEAR, &[-5, 5, 5, 15, 200]);
        assert!(histogram.render(LINEAR, 1).starts_with(
            "\
(..., 0)               1 |@@@@@@@@@@@@@@@@@@@@@@@@@@                          |
[0, 10)                2 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
[10, 20)               1 |@@@@@@@@@@@@@@@@@@@@@@@@@@                          |
[20, 30)               0 |                                                    |
"
        ));
        assert!(histogram.render(LINEAR, 1).ends_with(
            "[100, ...)             1 |@@@@@@@@@@@@@@@@@@@@@@@@@@                          |\n"
        ));
        assert_eq!(histogram.render(LINEAR, 1).lines().count(), 12);
        assert_eq!(
            counted(Buckets::Power { bits: 0 }, &[1, 1, 1]).render(Buckets::Power { bits: 0 }, 2),
            "[1]                    1 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|\n"
        );
    }

    #[test]
    fn zeroed_buckets_stay_in_bt_only() {
        for (buckets, expected) in [
            (Buckets::Power { bits: 0 }, String::new()),
            (
                Buckets::StrictPower,
                format!("[2, 4)             0 |{:52}|\n", ""),
            ),
        ] {
            let mut histogram = counted(buckets, &[3]);
            histogram.zero();
            assert_eq!(histogram.render(buckets, 1), expected, "{buckets:?}");
            assert_eq!(histogram.total(), 0);
        }
    }

    #[test]
    fn a_histogram_does_not_grow_without_bound() {
        let mut histogram = Histogram::default();
        let stored = (0..5000).filter(|&bucket| histogram.add(bucket)).count();
        assert_eq!(stored, MOST_BUCKETS);
        assert!(histogram.add(7), "a known bucket still counts");
        // Buckets that are far apart: none are made up between them.
        let buckets = linear(0, i64::MAX, 1);
        let far = counted(buckets, &[0, i64::MAX - 5]);
        assert_eq!(far.rows(buckets).len(), 2);
    }

    #[test]
    fn histograms_of_several_threads_add_up() {
        let mut one = counted(Buckets::Power { bits: 0 }, &[1, 2]);
        one.merge(&counted(Buckets::Power { bits: 0 }, &[2, 4]));
        assert_eq!(one, counted(Buckets::Power { bits: 0 }, &[1, 2, 2, 4]));
        assert_eq!(one.total(), 4);
    }
}
