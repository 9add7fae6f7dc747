//! Time series: the values of a number in intervals of time, and the lines that show them, as
//! bpftrace's `tseries` has them.
//!
//! A [`Series`] keeps the newest intervals alone, so neither a guest nor time can make it grow. The
//! caller brings the time of each value, in nanoseconds since 1970.

use std::collections::BTreeMap;

use crate::ast::{Dialect, SeriesKind, SeriesPart};
use crate::time::{TimeFormat, Zone};

/// The columns of the graph, its two edges included.
const COLUMNS: usize = 53;
/// The columns of the smallest value above the graph.
const LEFT_COLUMNS: usize = 21;

/// The values of the newest intervals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Series {
    kind: SeriesKind,
    /// The values by the number of their interval since 1970.
    parts: BTreeMap<u64, Part>,
}

/// The values of one interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// The number of values.
    count: i64,
    /// The last value, the smallest, the largest or the sum.
    value: i64,
    /// The time of the last value.
    at: u64,
}

impl Part {
    fn merge(&mut self, other: Self, by: SeriesPart) {
        self.value = match by {
            SeriesPart::Last if other.at >= self.at => other.value,
            SeriesPart::Last => self.value,
            SeriesPart::Min => self.value.min(other.value),
            SeriesPart::Max => self.value.max(other.value),
            SeriesPart::Sum | SeriesPart::Average => self.value.wrapping_add(other.value),
        };
        self.count = self.count.wrapping_add(other.count);
        self.at = self.at.max(other.at);
    }

    fn shown(self, by: SeriesPart) -> i64 {
        match by {
            SeriesPart::Average => self.value.checked_div(self.count).unwrap_or(0),
            _ => self.value,
        }
    }
}

impl Series {
    /// Makes a series without values.
    #[must_use]
    pub fn new(kind: SeriesKind) -> Self {
        Self {
            kind,
            parts: BTreeMap::new(),
        }
    }

    /// Adds a value of a time.
    pub fn add(&mut self, value: i64, at: u64) {
        let count = 1;
        self.put(at / self.kind.interval.max(1), Part { count, value, at });
        self.forget();
    }

    /// Adds the values of another series of this kind.
    pub fn merge(&mut self, other: &Self) {
        for (number, part) in &other.parts {
            self.put(*number, *part);
        }
        self.forget();
    }

    fn put(&mut self, number: u64, part: Part) {
        let by = self.kind.part;
        let known = self.parts.entry(number);
        known
            .and_modify(|known| known.merge(part, by))
            .or_insert(part);
    }

    /// Drops the intervals that are too old beside the newest.
    fn forget(&mut self) {
        let newest = self.newest().unwrap_or(0);
        let most = u64::from(self.kind.intervals.max(1));
        let oldest = newest.saturating_sub(most - 1);
        while let Some(first) = self.parts.first_entry() {
            if *first.key() >= oldest {
                break;
            }
            first.remove();
        }
    }

    /// Forgets all values.
    pub fn clear(&mut self) {
        self.parts.clear();
    }

    /// Returns the number of the newest interval with a value.
    #[must_use]
    pub fn newest(&self) -> Option<u64> {
        self.parts.keys().next_back().copied()
    }

    /// Returns the intervals from the oldest with a value to number `last`: the nanoseconds since
    /// 1970 at which each begins, and its value if it has one.
    #[must_use]
    pub fn rows(&self, last: u64) -> Vec<(u64, Option<i64>)> {
        let Some((first, _)) = self.parts.first_key_value() else {
            return Vec::new();
        };
        let most = u64::from(self.kind.intervals.max(1));
        let first = (*first).max(last.saturating_sub(most - 1));
        let row = |number: u64| {
            let part = self.parts.get(&number);
            let value = part.map(|part| part.shown(self.kind.part));
            (number.saturating_mul(self.kind.interval.max(1)), value)
        };
        (first..=last).map(row).collect()
    }

    /// Returns the length of an interval in nanoseconds.
    #[must_use]
    pub fn interval(&self) -> u64 {
        self.kind.interval
    }
}

/// The unit of the times of rows: a name, its digits after the second, and its nanoseconds.
fn unit(interval: u64) -> (&'static str, usize, u64) {
    let units = [("ms", 3, 1_000_000), ("us", 6, 1000), ("ns", 9, 1)];
    if interval.is_multiple_of(1_000_000_000) {
        return ("", 0, 1);
    }
    let found = units
        .into_iter()
        .find(|(.., ns)| interval.is_multiple_of(*ns));
    found.unwrap_or(("ns", 9, 1))
}

/// Renders the graph of a series' rows, whose intervals have this length. Times are of `zone`.
#[must_use]
pub fn render(rows: &[(u64, Option<i64>)], interval: u64, zone: &Zone) -> String {
    let values = || rows.iter().filter_map(|(_, value)| *value);
    let (Some(mut low), Some(mut high)) = (values().min(), values().max()) else {
        return "<no data>\n".to_owned();
    };
    if low == high {
        (low, high) = (low.saturating_sub(1), high.saturating_add(1));
    }
    let (name, digits, ns) = unit(interval);
    let head = match digits {
        0 => "hh:mm:ss".to_owned(),
        _ => format!("hh:mm:ss.{name}"),
    };
    let width = 8 + digits + usize::from(digits > 0) + 1;
    let right = COLUMNS - LEFT_COLUMNS;
    let scale = format!("{:width$}{low:<LEFT_COLUMNS$}{high:>right$}\n", "");
    let edge = "_".repeat(COLUMNS - 2);
    let mut out = format!("{scale}{head:width$}|{edge}|\n");
    let format = TimeFormat::parse(b"%H:%M:%S", Dialect::Normal, zone);
    for (begin, value) in rows {
        let time = match &format {
            Ok(format) => format.render(i64::try_from(*begin).unwrap_or(i64::MAX)),
            Err(_) => Vec::new(),
        };
        out += &String::from_utf8_lossy(&time);
        if digits > 0 {
            let part = begin % 1_000_000_000 / ns;
            out += &format!(".{part:0digits$}");
        }
        let mut line = [b' '; COLUMNS];
        set(&mut line, 0, b'|');
        set(&mut line, COLUMNS - 1, b'|');
        if low < 0 && high > 0 {
            set(&mut line, place(low, high, 0, COLUMNS), b'.');
        }
        if let Some(value) = value {
            set(&mut line, place(low, high, *value, COLUMNS - 1), b'*');
        }
        let shown = value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        out += &format!(" {} {shown}\n", String::from_utf8_lossy(&line));
    }
    out + &format!("{:width$}v{edge}v\n{scale}", "")
}

fn set(line: &mut [u8; COLUMNS], at: usize, mark: u8) {
    if let Some(place) = line.get_mut(at) {
        *place = mark;
    }
}

/// Returns the column of a value between `low` and `high`, which are `columns` apart.
fn place(low: i64, high: i64, value: i64, columns: usize) -> usize {
    let (low, high, value) = (i128::from(low), i128::from(high), i128::from(value));
    let columns = columns as i128;
    let at = (value - low) * columns / (high - low).max(1);
    usize::try_from(at).unwrap_or(0).min(COLUMNS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn series(part: SeriesPart, intervals: u32, values: &[(u64, i64)]) -> Series {
        let mut series = Series::new(SeriesKind {
            interval: 100 * MS,
            intervals,
            part,
        });
        for (at, value) in values {
            series.add(*value, at * MS);
        }
        series
    }

    #[test]
    fn values_of_an_interval_are_gathered() {
        let values = [(0, 4), (99, -2), (150, 7), (160, 9)];
        for (part, expected) in [
            (SeriesPart::Last, [-2, 9]),
            (SeriesPart::Min, [-2, 7]),
            (SeriesPart::Max, [4, 9]),
            (SeriesPart::Sum, [2, 16]),
            (SeriesPart::Average, [1, 8]),
        ] {
            let all = series(part, 5, &values);
            let rows = [(0, Some(expected[0])), (100 * MS, Some(expected[1]))];
            assert_eq!(all.rows(1), rows, "{part:?}");
            // In two halves, merged in either order.
            let (mut one, other) = (
                series(part, 5, &[values[0], values[3]]),
                series(part, 5, &[values[1], values[2]]),
            );
            one.merge(&other);
            assert_eq!(one.rows(1), rows, "{part:?}");
        }
    }

    #[test]
    fn the_newest_intervals_are_kept() {
        let values: Vec<_> = (0..1000).map(|at| (100 * at, at as i64)).collect();
        let found = series(SeriesPart::Last, 3, &values);
        let newest: Vec<_> = found
            .rows(999)
            .into_iter()
            .map(|(_, value)| value)
            .collect();
        assert_eq!(newest, [Some(997), Some(998), Some(999)]);
        // Another key of the map has gone on for a while.
        let later: Vec<_> = found
            .rows(1001)
            .into_iter()
            .map(|(_, value)| value)
            .collect();
        assert_eq!(later, [Some(999), None, None]);
        let mut late = found.clone();
        late.add(5, 0);
        assert_eq!(late, found);
    }

    #[test]
    fn rows_are_drawn_as_bpftrace_does() {
        let found = series(
            SeriesPart::Last,
            9,
            &[(0, -5), (100, 0), (300, 5), (400, 4)],
        );
        let text = render(&found.rows(4), found.interval(), &Zone::utc());
        let scale = "             -5                                                  5\n";
        let rows = "\
hh:mm:ss.ms  |___________________________________________________|
00:00:00.000 *                         .                         | -5
00:00:00.100 |                         *                         | 0
00:00:00.200 |                         .                         | -
00:00:00.300 |                         .                         * 5
00:00:00.400 |                         .                   *     | 4
             v___________________________________________________v
";
        assert_eq!(text, [scale, rows, scale].concat());
        let one = render(&[(0, Some(9))], 1_000_000_000, &Zone::utc());
        let scale = "         8                                                  10\n";
        let rows = "\
hh:mm:ss |___________________________________________________|
00:00:00 |                         *                         | 9
         v___________________________________________________v
";
        assert_eq!(one, [scale, rows, scale].concat());
        assert_eq!(render(&[], 1, &Zone::utc()), "<no data>\n");
    }
}
