//! The rows of a view: made of what its script prints, ordered, and filtered.

use std::collections::BTreeMap;

use serde_json::Value;

use super::views::{TICK, Unit, View};

/// The rate of samples of [`Unit::Percent`].
const SAMPLES: f64 = 99.0;

/// The maps of one tick: the numbers under each key.
pub type Frame = BTreeMap<String, BTreeMap<String, f64>>;

/// Collects the lines that a script prints until a tick is whole.
#[derive(Debug, Default)]
pub struct Collector {
    frame: Frame,
}

impl Collector {
    /// Takes a line of a script's JSON. Returns the maps of a tick at its end. Lines of other kinds
    /// are passed over.
    pub fn take(&mut self, line: &str) -> Option<Frame> {
        let line: Value = serde_json::from_str(line).ok()?;
        match (line.get("type")?.as_str()?, line.get("data")?) {
            ("value", Value::String(text)) if text == TICK => Some(std::mem::take(&mut self.frame)),
            ("map", Value::Object(maps)) => {
                for (name, value) in maps {
                    let entries = self.frame.entry(name.trim_start_matches('@').to_owned());
                    entries.or_default().extend(numbers(value));
                }
                None
            }
            _ => None,
        }
    }
}

/// Returns the numbers of a map, or the one of a variable without keys.
fn numbers(of: &Value) -> Vec<(String, f64)> {
    match of {
        Value::Object(entries) => entries
            .iter()
            .filter_map(|(key, value)| Some((key.clone(), value.as_f64()?)))
            .collect(),
        value => value
            .as_f64()
            .map(|number| (String::new(), number))
            .into_iter()
            .collect(),
    }
}

/// A row: the parts of its key, and a number for each column.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The parts of the key.
    pub key: Vec<String>,
    /// The numbers, in the columns' order and units.
    pub numbers: Vec<f64>,
}

impl Row {
    /// Returns the process that the row is of.
    pub fn pid(&self, view: &View) -> Option<u32> {
        let at = view.keys.iter().position(|title| *title == "PID")?;
        self.key.get(at)?.parse().ok()
    }
}

/// The order and the filter of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Order {
    /// The column by which rows are ordered.
    pub column: usize,
    /// Whether the smallest number comes first.
    pub ascending: bool,
    /// The text that a row's key must have.
    pub filter: String,
}

/// Returns the rows of a tick.
pub fn rows(view: &View, frame: &Frame, order: &Order) -> Vec<Row> {
    let keys = view
        .columns
        .iter()
        .filter_map(|column| frame.get(&column.map));
    let keys: std::collections::BTreeSet<&String> = keys.flat_map(BTreeMap::keys).collect();
    let number = |map: &str, key: &String| frame.get(map).and_then(|map| map.get(key)).copied();
    let mut rows: Vec<Row> = keys
        .into_iter()
        .map(|key| Row {
            key: parts(key, view.keys.len()),
            numbers: view
                .columns
                .iter()
                .map(|column| {
                    let value = number(&column.map, key).unwrap_or(0.0);
                    match column.unit {
                        Unit::Number | Unit::PerSecond | Unit::Bytes => value,
                        Unit::Percent => 100.0 * value / SAMPLES,
                        Unit::MeanOf(count) => match number(count, key) {
                            Some(count) if count > 0.0 => value / count / 1000.0,
                            _ => 0.0,
                        },
                    }
                })
                .collect(),
        })
        .filter(|row| row.key.iter().any(|part| part.contains(&order.filter)))
        .collect();
    let of = |row: &Row| row.numbers.get(order.column).copied().unwrap_or(0.0);
    rows.sort_by(|one, other| match order.ascending {
        true => of(one).total_cmp(&of(other)),
        false => of(other).total_cmp(&of(one)),
    });
    rows
}

/// Splits a key into its parts; only the last one may have commas of its own.
fn parts(key: &str, count: usize) -> Vec<String> {
    key.splitn(count.max(1), ',').map(str::to_owned).collect()
}

/// Returns a number as it is shown in a unit.
pub fn shown(number: f64, unit: &Unit) -> String {
    match unit {
        Unit::Percent | Unit::MeanOf(_) => format!("{number:.1}"),
        Unit::Number | Unit::PerSecond => format!("{number:.0}"),
        Unit::Bytes => {
            let units = ["", "K", "M", "G", "T"];
            let mut number = number;
            let mut at = 0;
            while number >= 1024.0 && at + 1 < units.len() {
                number /= 1024.0;
                at += 1;
            }
            match at {
                0 => format!("{number:.0}"),
                _ => format!("{number:.1}{}", units.get(at).unwrap_or(&"")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::args::TopKind as Kind;

    fn frame(lines: &[&str]) -> Frame {
        let mut collector = Collector::default();
        lines.iter().find_map(|line| collector.take(line)).unwrap()
    }

    fn order(column: usize, ascending: bool, filter: &str) -> Order {
        Order {
            column,
            ascending,
            filter: filter.to_owned(),
        }
    }

    #[test]
    fn a_tick_makes_rows_in_the_order_that_is_asked_for() {
        let frame = frame(&[
            "attached 3 probes",
            r#"{"type": "map", "data": {"@samples": {"7,sh": 99, "9,a,b": 33}}}"#,
            r#"{"type": "map", "data": {"@calls": {"7,sh": 5, "8,cat": 500}}}"#,
            r#"{"type": "hist", "data": {"@other": {}}}"#,
            r#"{"type": "value", "data": "top"}"#,
        ]);
        let view = View::of(Kind::Processes);
        let of = |order: Order| -> Vec<String> {
            let rows = rows(&view, &frame, &order);
            let text = rows.iter().map(|row| {
                let numbers = row.numbers.iter().zip(&view.columns);
                let numbers: Vec<String> = numbers.map(|(n, c)| shown(*n, &c.unit)).collect();
                format!("{} {}", row.key.join(" "), numbers.join(" "))
            });
            text.collect()
        };
        assert_eq!(
            of(order(0, false, "")),
            ["7 sh 100.0 5 0", "9 a,b 33.3 0 0", "8 cat 0.0 500 0"]
        );
        assert_eq!(
            of(order(1, true, "")),
            ["9 a,b 33.3 0 0", "7 sh 100.0 5 0", "8 cat 0.0 500 0"]
        );
        assert_eq!(of(order(0, false, "cat")), ["8 cat 0.0 500 0"]);
        let first = rows(&view, &frame, &order(0, false, "")).swap_remove(0);
        assert_eq!(first.pid(&view), Some(7));
    }

    #[test]
    fn times_are_means_and_bytes_have_suffixes() {
        let frame = frame(&[
            r#"{"type": "map", "data": {"@calls": {"read": 4}}}"#,
            r#"{"type": "map", "data": {"@time": {"read": 8000}}}"#,
            r#"{"type": "value", "data": "top"}"#,
        ]);
        let found = rows(&View::of(Kind::Calls), &frame, &Order::default());
        assert_eq!(found.first().unwrap().numbers, [4.0, 2.0, 0.0]);
        for (bytes, expected) in [
            (0.0, "0"),
            (1023.0, "1023"),
            (1536.0, "1.5K"),
            (3.0e9, "2.8G"),
        ] {
            assert_eq!(shown(bytes, &Unit::Bytes), expected);
        }
    }
}
