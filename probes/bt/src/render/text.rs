//! The text of values, maps and all other output, as bt(5) and bpftrace write it.

use super::map::{Shown, quotient, shown};
use super::{Complaint, Output};
use crate::ast::Dialect;
use crate::maps::{MapSnapshot, Reading};
use crate::series;
use crate::time::Zone;
use crate::value::{Names, Value};
use crate::value_text::{joined, parts, write_value};

/// Returns the bytes to write.
#[must_use]
pub fn render(output: &Output, dialect: Dialect, names: &dyn Names) -> Vec<u8> {
    let mut out = Vec::new();
    match output {
        Output::Printf {
            format,
            arguments,
            complaint,
        } => {
            let text = format.render(arguments, names);
            let Some(complaint) = complaint else {
                return text;
            };
            let Complaint {
                is_error,
                file,
                line,
                columns: (first, last),
            } = &**complaint;
            let word = if *is_error { "ERROR" } else { "WARNING" };
            let place = format!("{file}:{line}:{first}-{last}: {word}: ");
            return [place.as_bytes(), &text, b"\n"].concat();
        }
        Output::File { path, .. } => return names.file(&path.bytes(names)).bytes.to_vec(),
        Output::Time { format, unix_ns } => return format.render(*unix_ns),
        Output::Fail { message } => {
            out.extend_from_slice(message.as_bytes());
            out.push(b'\n');
        }
        Output::Ending => out.extend_from_slice(b"\n\n"),
        Output::Print(value) => {
            write_value(&mut out, value, dialect, names);
            out.push(b'\n');
        }
        Output::Join { parts, separator } => {
            out = parts.join(&separator[..]);
            out.push(b'\n');
        }
        Output::Map {
            snapshot,
            top,
            divisor,
        } => {
            for entry in shown(snapshot, *top, *divisor, dialect, names) {
                write_entry(&mut out, snapshot, &entry, *divisor, dialect, names);
            }
        }
    }
    out
}

/// Writes the lines of a map's entry.
fn write_entry(
    out: &mut Vec<u8>,
    of: &MapSnapshot,
    entry: &Shown<'_>,
    divisor: Option<i64>,
    dialect: Dialect,
    names: &dyn Names,
) {
    let is_keyed = !entry.key.is_empty();
    // bt(5) shows a variable without keys as it shows values.
    let is_named = is_keyed
        || dialect == Dialect::Normal
        || matches!(entry.reading, Reading::Histogram { .. });
    if is_named {
        out.push(b'@');
        out.extend_from_slice(of.name.as_bytes());
        if is_keyed {
            out.push(b'[');
            out.extend_from_slice(&entry.key_text);
            out.push(b']');
        }
        out.push(b':');
    }
    match &entry.reading {
        Reading::Histogram { buckets, counts } => {
            out.push(b'\n');
            let divisor = divisor.unwrap_or(1).unsigned_abs();
            out.extend_from_slice(counts.render(*buckets, divisor).as_bytes());
            if dialect == Dialect::Strict {
                return;
            }
        }
        Reading::Series(series) => {
            let rows = series.rows(of.newest());
            let text = series::render(&rows, series.interval(), &Zone::local());
            out.extend_from_slice(b"\n");
            out.extend_from_slice(text.as_bytes());
        }
        Reading::Stats { count, total } => {
            let mean = entry.reading.number().unwrap_or(0);
            let text = format!(" count {count}, average {mean}, total {total}");
            out.extend_from_slice(text.as_bytes());
        }
        Reading::Average { .. } => {
            let mean = quotient(entry.reading.number().unwrap_or(0), divisor);
            out.extend_from_slice(format!(" {mean}").as_bytes());
        }
        Reading::Value(value) => {
            if is_named {
                out.push(b' ');
            }
            write_value(out, value, dialect, names);
        }
    }
    out.push(b'\n');
}

/// Returns the text of a map's key, without its brackets.
pub(super) fn key_text(key: &[Value], dialect: Dialect, names: &dyn Names) -> Vec<u8> {
    let values = match dialect {
        // bpftrace does not distinguish several keys from a tuple of them.
        Dialect::Normal => parts(key),
        Dialect::Strict => key,
    };
    joined(values, ", ", dialect, names)
}
