//! The order in which the entries of a map are shown, and the division of their values.

use std::cmp::Ordering;

use super::text::key_text;
use crate::ast::Dialect;
use crate::maps::{Key, MapSnapshot, Reading};
use crate::value::{Names, Value};

/// An entry to show.
pub(super) struct Shown<'a> {
    pub(super) key: &'a Key,
    /// The text of the key: `a, 1`.
    pub(super) key_text: Vec<u8>,
    pub(super) reading: Reading,
}

/// Returns the entries in order, `top` of them at most.
///
/// bt(5) shows the largest values first, text after numbers, and equal values by the text of their
/// keys. bpftrace shows the largest last. A histogram's size is its count, that of `stats` its
/// mean. bpftrace orders entries without a size by key; here this applies to equal entries, too.
pub(super) fn shown<'a>(
    snapshot: &'a MapSnapshot,
    top: Option<usize>,
    divisor: Option<i64>,
    dialect: Dialect,
    names: &dyn Names,
) -> Vec<Shown<'a>> {
    let mut entries: Vec<_> = (snapshot.entries.iter())
        .map(|(key, reading)| (key, key_text(key, dialect, names), reading))
        .collect();
    match dialect {
        Dialect::Strict => {
            entries.sort_by(|(_, one_key, one), (_, other_key, other)| {
                strict_order(other, one).then_with(|| one_key.cmp(other_key))
            });
            // bt(5) ignores it for a variable without keys.
            if entries.iter().any(|(key, ..)| !key.is_empty()) {
                entries.truncate(top.unwrap_or(usize::MAX));
            }
        }
        Dialect::Normal => {
            if entries
                .iter()
                .all(|(_, _, reading)| size(reading).is_some())
            {
                // The sort is stable, and the snapshot is ordered by key.
                entries.sort_by_key(|(_, _, reading)| size(reading));
            }
            let most = top.unwrap_or(usize::MAX);
            entries.drain(..entries.len().saturating_sub(most));
        }
    }
    (entries.into_iter())
        .map(|(key, key_text, reading)| Shown {
            key,
            key_text,
            reading: divided(reading, divisor),
        })
        .collect()
}

/// Returns the size of an entry, if it has one.
fn size(reading: &Reading) -> Option<i128> {
    match reading {
        Reading::Value(Value::Unsigned(number) | Value::Address(number)) => {
            Some(i128::from(*number))
        }
        Reading::Value(Value::Bool(truth)) => Some(i128::from(*truth)),
        Reading::Value(Value::Enumerator { number, .. }) => Some(i128::from(*number)),
        Reading::Histogram { counts, .. } => Some(i128::from(counts.total())),
        _ => reading.number().map(i128::from),
    }
}

/// Compares two readings: numbers are above text.
fn strict_order(one: &Reading, other: &Reading) -> Ordering {
    match (size(one), size(other), one, other) {
        (Some(one), Some(other), ..) => one.cmp(&other),
        (Some(_), None, ..) => Ordering::Greater,
        (None, Some(_), ..) => Ordering::Less,
        (None, None, Reading::Value(one), Reading::Value(other)) => one.cmp(other),
        (None, None, ..) => Ordering::Equal,
    }
}

/// Divides numbers; means and histograms are divided by the code that writes them.
fn divided(reading: &Reading, divisor: Option<i64>) -> Reading {
    match reading {
        Reading::Value(Value::Int(number)) => {
            Reading::Value(Value::Int(quotient(*number, divisor)))
        }
        Reading::Value(Value::Unsigned(number)) => {
            let divisor = divisor.unwrap_or(1).unsigned_abs();
            Reading::Value(Value::Unsigned(number / divisor.max(1)))
        }
        Reading::Value(_)
        | Reading::Average { .. }
        | Reading::Stats { .. }
        | Reading::Histogram { .. }
        | Reading::Series(_) => reading.clone(),
    }
}

/// Divides a number by a script's divisor.
pub(super) fn quotient(number: i64, divisor: Option<i64>) -> i64 {
    number.checked_div(divisor.unwrap_or(1)).unwrap_or(number)
}
