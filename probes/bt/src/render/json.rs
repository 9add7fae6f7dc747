//! One JSON object a line, as bpftrace's `-f json` writes them: `{"type": "map", "data": {"@x":
//! {"a": 1}}}`.
//!
//! Types are `printf`, `value`, `time`, `join`, `cat`, `map`, `stats` and `hist`. Numbers are
//! numbers, even if they are more exact than a reader's floating point. All that is shown by name
//! is a string. Bytes that are no UTF-8 become U+FFFD. Several keys are joined by `,`. Both bounds
//! of a bucket are inclusive: `{"min": 2, "max": 3, "count": 5}`.

use probes::json::string;

use super::map::{Shown, quotient, shown};
use super::text::render as text;
use super::{Complaint, Output};
use crate::ast::Dialect;
use crate::histogram::{Buckets, Histogram};
use crate::maps::{MapSnapshot, Reading};
use crate::series::Series;
use crate::time::{TimeFormat, Zone};
use crate::value::{Names, Value};
use crate::value_text::{self, parts, text_of};

/// Renders the line, with its newline.
#[must_use]
pub fn render(output: &Output, dialect: Dialect, names: &dyn Names) -> String {
    let (kind, data) = match output {
        Output::Printf {
            format,
            arguments,
            complaint: Some(complaint),
        } => {
            let Complaint {
                is_error,
                file,
                line,
                columns: (column, _),
            } = &**complaint;
            let kind = if *is_error { "errorf" } else { "warnf" };
            let text = string(&format.render(arguments, names));
            let file = string(file.as_bytes());
            return format!(
                "{{\"type\": \"{kind}\", \"msg\": {text}, \"filename\": {file}, \"line\": {line}, \"col\": {column}}}\n"
            );
        }
        Output::Ending => return String::new(),
        // The reason goes elsewhere.
        Output::File { path, .. } if names.file(&path.bytes(names)).is_lost() => {
            return String::new();
        }
        Output::Printf { .. } => ("printf", string(&text(output, dialect, names))),
        Output::File { .. } => ("cat", string(&text(output, dialect, names))),
        Output::Time { .. } => ("time", string(&text(output, dialect, names))),
        Output::Join { parts, separator } => ("join", string(&parts.join(&separator[..]))),
        Output::Fail { message } => ("error", string(message.as_bytes())),
        Output::Print(value) => ("value", of_value(value, dialect, names)),
        Output::Map {
            snapshot,
            top,
            divisor,
        } => {
            let entries = shown(snapshot, *top, *divisor, dialect, names);
            let name = string(format!("@{}", snapshot.name).as_bytes());
            let data = of_map(&entries, *divisor, dialect, names);
            (kind_of(snapshot), format!("{{{name}: {data}}}"))
        }
    };
    format!("{{\"type\": \"{kind}\", \"data\": {data}}}\n")
}

fn kind_of(snapshot: &MapSnapshot) -> &'static str {
    match snapshot.entries.first() {
        Some((_, Reading::Histogram { .. })) => "hist",
        Some((_, Reading::Stats { .. } | Reading::Average { .. })) => "stats",
        Some((_, Reading::Series(_))) => "tseries",
        _ => "map",
    }
}

/// Renders a variable's value if it has no keys, otherwise an object of them.
fn of_map(
    entries: &[Shown<'_>],
    divisor: Option<i64>,
    dialect: Dialect,
    names: &dyn Names,
) -> String {
    if let [only] = entries
        && only.key.is_empty()
    {
        return of_reading(&only.reading, divisor, dialect, names);
    }
    let entries = entries.iter().map(|entry| {
        let key = string(&value_text::joined(parts(entry.key), ",", dialect, names));
        let value = of_reading(&entry.reading, divisor, dialect, names);
        format!("{key}: {value}")
    });
    format!("{{{}}}", joined(entries))
}

fn of_reading(
    reading: &Reading,
    divisor: Option<i64>,
    dialect: Dialect,
    names: &dyn Names,
) -> String {
    match reading {
        Reading::Value(value) => of_value(value, dialect, names),
        Reading::Series(series) => of_series(series),
        Reading::Average { .. } => quotient(reading.number().unwrap_or(0), divisor).to_string(),
        Reading::Stats { count, total } => {
            let mean = reading.number().unwrap_or(0);
            format!("{{\"count\": {count}, \"average\": {mean}, \"total\": {total}}}")
        }
        Reading::Histogram { buckets, counts } => {
            of_histogram(*buckets, counts, divisor.unwrap_or(1).unsigned_abs())
        }
    }
}

fn of_histogram(buckets: Buckets, counts: &Histogram, divisor: u64) -> String {
    let rows = counts.rows(buckets).into_iter().map(|(bucket, count)| {
        let (min, end) = buckets.bounds(bucket);
        let min = min.map_or_else(String::new, |min| format!("\"min\": {min}, "));
        let max = end.map_or_else(String::new, |end| {
            format!("\"max\": {}, ", end.saturating_sub(1))
        });
        format!("{{{min}{max}\"count\": {}}}", count / divisor.max(1))
    });
    array(rows)
}

/// Renders the intervals that have values.
fn of_series(series: &Series) -> String {
    let format = TimeFormat::parse(b"%Y-%m-%dT%H:%M:%S", Dialect::Normal, &Zone::local());
    let rows = series.rows(series.newest().unwrap_or(0)).into_iter();
    let rows = rows.filter_map(|(begin, value)| {
        let value = value?;
        let unix_ns = i64::try_from(begin).unwrap_or(i64::MAX);
        let mut time = format.as_ref().ok()?.render(unix_ns);
        time.extend(format!(".{:09}", begin % 1_000_000_000).bytes());
        let time = string(&time);
        Some(format!(
            "{{\"interval_start\": {time}, \"value\": {value}}}"
        ))
    });
    array(rows)
}

fn of_value(value: &Value, dialect: Dialect, names: &dyn Names) -> String {
    match value {
        Value::Int(number) => number.to_string(),
        Value::Unsigned(number) => number.to_string(),
        Value::Bool(truth) => truth.to_string(),
        // As in bpftrace, what has a name or is an address is a number for programs.
        Value::Address(address) => address.to_string(),
        Value::Enumerator { number, .. } => number.to_string(),
        Value::Tuple(values) | Value::Array(values) => {
            let values = values.iter().map(|value| of_value(value, dialect, names));
            array(values)
        }
        Value::Record {
            names: members,
            items,
        } => {
            let members = members.iter().zip(items.iter()).map(|(name, item)| {
                let name = string(name.as_bytes());
                format!("{name}: {}", of_value(item, dialect, names))
            });
            format!("{{{}}}", joined(members))
        }
        _ => string(&text_of(value, dialect, names)),
    }
}

/// Renders an array, which has no blanks, as in bpftrace.
fn array(parts: impl Iterator<Item = String>) -> String {
    format!("[{}]", parts.collect::<Vec<_>>().join(","))
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(", ")
}
