//! The maps of a script as numbers, for metrics.

use bt::ast::Aggregation;
use bt::histogram::{Buckets, Histogram};
use bt::maps::{self, MapSnapshot, Reading};
use bt::value::{Names, Value};
use bt::value_text::key_texts;

use crate::protocol::script::{LONGEST_KEY, MOST_ENTRIES, MapEntry, MapKind, MapLine, MapValue};

/// Returns the line of a map.
pub(super) fn line(kind: maps::MapKind, snapshot: &MapSnapshot, names: &dyn Names) -> MapLine {
    let entries = snapshot.entries.iter().filter_map(|(key, reading)| {
        let key = key_texts(key, names);
        if key.iter().map(Vec::len).sum::<usize>() > LONGEST_KEY {
            return None;
        }
        let key = key
            .iter()
            .map(|part| String::from_utf8_lossy(part).into_owned());
        Some(MapEntry {
            key: key.collect(),
            value: value(reading)?,
        })
    });
    let entries: Vec<MapEntry> = entries.take(MOST_ENTRIES).collect();
    MapLine {
        name: snapshot.name.to_string(),
        kind: of_kind(kind),
        left_out: (snapshot.entries.len() - entries.len()) as u64,
        entries,
    }
}

fn of_kind(kind: maps::MapKind) -> MapKind {
    match kind {
        maps::MapKind::Aggregation(Aggregation::Count) => MapKind::Count,
        maps::MapKind::Aggregation(Aggregation::Average | Aggregation::Stats) => MapKind::Mean,
        maps::MapKind::Aggregation(
            Aggregation::PowerHistogram(_) | Aggregation::LinearHistogram { .. },
        ) => MapKind::Histogram,
        _ => MapKind::Number,
    }
}

fn value(reading: &Reading) -> Option<MapValue> {
    Some(match reading {
        Reading::Value(Value::Int(number)) => MapValue::Number(*number),
        Reading::Value(Value::Bool(truth)) => MapValue::Number((*truth).into()),
        Reading::Value(Value::Enumerator { number, .. }) => MapValue::Number(*number),
        Reading::Value(Value::Unsigned(number) | Value::Address(number)) => {
            MapValue::Unsigned(*number)
        }
        Reading::Average { count, total } | Reading::Stats { count, total } => {
            MapValue::Mean(*count, *total)
        }
        Reading::Histogram { buckets, counts } => MapValue::Histogram(rows(*buckets, counts)),
        Reading::Value(_) | Reading::Series(_) => return None,
    })
}

fn rows(buckets: Buckets, counts: &Histogram) -> Vec<(Option<i64>, Option<i64>, u64)> {
    let rows = counts
        .rows(buckets)
        .into_iter()
        .filter(|(_, count)| *count > 0);
    rows.map(|(bucket, count)| {
        let (from, end) = buckets.bounds(bucket);
        (from, end.map(|end| end.saturating_sub(1)), count)
    })
    .collect()
}
