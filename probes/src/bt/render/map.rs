//! In which order the entries of a map are shown, and how their values are divided.

use std::cmp::Ordering;

use super::text::key_text;
use crate::bt::ast::Dialect;
use crate::bt::maps::{Key, MapSnapshot, Reading};
use crate::bt::value::{Names, Value};

/// An entry that is shown.
pub(super) struct Shown<'a> {
    pub(super) key: &'a Key,
    /// `a, 1`.
    pub(super) key_text: Vec<u8>,
    pub(super) reading: Reading,
}

/// The entries in order, `top` of them at most.
///
/// bt(5) shows the largest values first, text after numbers and equal values by the text of their keys. bpftrace shows the largest last (a
/// histogram is as large as its count, of `stats` the mean counts), and orders by key what has no size; here so does what is equal.
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
            // of what has no keys, bt(5) ignores it
            if entries.iter().any(|(key, ..)| !key.is_empty()) {
                entries.truncate(top.unwrap_or(usize::MAX));
            }
        }
        Dialect::Normal => {
            if entries
                .iter()
                .all(|(_, _, reading)| size(reading).is_some())
            {
                // stable: the snapshot is ordered by key
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

/// How large an entry is, if it has a size.
fn size(reading: &Reading) -> Option<i128> {
    match reading {
        Reading::Value(Value::Unsigned(number)) => Some(i128::from(*number)),
        Reading::Histogram { counts, .. } => Some(i128::from(counts.total())),
        _ => reading.number().map(i128::from),
    }
}

/// Numbers are above text.
fn strict_order(one: &Reading, other: &Reading) -> Ordering {
    match (size(one), size(other), one, other) {
        (Some(one), Some(other), ..) => one.cmp(&other),
        (Some(_), None, ..) => Ordering::Greater,
        (None, Some(_), ..) => Ordering::Less,
        (None, None, Reading::Value(one), Reading::Value(other)) => one.cmp(other),
        (None, None, ..) => Ordering::Equal,
    }
}

/// Numbers divided; how means and histograms are is their writers' to know.
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
        | Reading::Histogram { .. } => reading.clone(),
    }
}

/// A number divided by what a script has asked for.
pub(super) fn quotient(number: i64, divisor: Option<i64>) -> i64 {
    number.checked_div(divisor.unwrap_or(1)).unwrap_or(number)
}
