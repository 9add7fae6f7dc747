//! The text of values, maps and all other output, as bt(5) and bpftrace write it.

use super::Output;
use super::map::{Shown, quotient, shown};
use crate::bt::ast::Dialect;
use crate::bt::format::{BufferStyle, shown_bytes};
use crate::bt::maps::Reading;
use crate::bt::value::{Names, Value};

/// The number of bytes of a stack's text in bt(5), with the NUL at its end.
const STRICT_STACK_BYTES: usize = 4096;

/// Returns the bytes to write.
#[must_use]
pub fn render(output: &Output, dialect: Dialect, names: &dyn Names) -> Vec<u8> {
    let mut out = Vec::new();
    match output {
        Output::Printf {
            format, arguments, ..
        } => return format.render(arguments, names),
        Output::Time { format, unix_ns } => return format.render(*unix_ns),
        Output::Fail { message } => {
            out.extend_from_slice(message.as_bytes());
            out.push(b'\n');
        }
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
                write_entry(&mut out, &snapshot.name, &entry, *divisor, dialect, names);
            }
        }
    }
    out
}

/// Writes the lines of a map's entry.
fn write_entry(
    out: &mut Vec<u8>,
    name: &str,
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
        out.extend_from_slice(name.as_bytes());
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
    match key {
        // bpftrace does not distinguish several keys from a tuple of them.
        [Value::Tuple(values)] if dialect == Dialect::Normal => joined(values, dialect, names),
        _ => joined(key, dialect, names),
    }
}

fn joined(values: &[Value], dialect: Dialect, names: &dyn Names) -> Vec<u8> {
    let mut out = Vec::new();
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            out.extend_from_slice(b", ");
        }
        write_value(&mut out, value, dialect, names);
    }
    out
}

/// Writes the text of a value, as `%s` shows it.
pub fn write_value(out: &mut Vec<u8>, value: &Value, dialect: Dialect, names: &dyn Names) {
    match value {
        Value::Int(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::Unsigned(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::Text(text) => out.extend_from_slice(text),
        Value::Bytes(bytes) => out.extend(shown_bytes(bytes, BufferStyle::Printable)),
        Value::Tuple(values) => {
            out.push(b'(');
            out.extend(joined(values, dialect, names));
            out.push(b')');
        }
        Value::KernelSymbol(address) => {
            write_symbol(out, &names.kernel(*address), dialect);
        }
        Value::UserSymbol { pid, address } => {
            write_symbol(out, &names.user(*pid, *address), dialect);
        }
        Value::KernelStack(frames) => {
            let frames = frames.iter().map(|&address| names.kernel(address));
            match dialect {
                Dialect::Normal => write_stack(out, frames),
                // In bt(5), a hit without kernel frames was in a program.
                Dialect::Strict if frames.len() == 0 => out.extend_from_slice(b"\nuserland\n"),
                Dialect::Strict => write_strict_stack(out, frames, b"\nkernel\n"),
            }
        }
        Value::UserStack { pid, frames } => {
            let frames = frames.iter().map(|&address| names.user(*pid, address));
            match dialect {
                Dialect::Normal => write_stack(out, frames),
                Dialect::Strict => write_strict_stack(out, frames, b"\nuserland\n"),
            }
        }
    }
}

/// Writes a symbol; bpftrace shows it without its offset.
fn write_symbol(out: &mut Vec<u8>, name: &str, dialect: Dialect) {
    let shown = match dialect {
        Dialect::Normal => split_offset(name).0,
        Dialect::Strict => name,
    };
    out.extend_from_slice(shown.as_bytes());
}

/// Writes frames as bpftrace shows them: with decimal offsets.
fn write_stack(out: &mut Vec<u8>, frames: impl Iterator<Item = String>) {
    out.push(b'\n');
    for frame in frames {
        let line = match split_offset(&frame) {
            (name, Some(offset)) => format!("    {name}+{offset}\n"),
            (name, None) => format!("    {name}\n"),
        };
        out.extend_from_slice(line.as_bytes());
    }
}

/// Writes frames as bt(5) shows them, in a buffer of [`STRICT_STACK_BYTES`]: a frame that has no
/// room is cut, and nothing follows it.
fn write_strict_stack(out: &mut Vec<u8>, frames: impl Iterator<Item = String>, last: &[u8]) {
    let mut room = STRICT_STACK_BYTES;
    for frame in frames {
        let most = room.saturating_sub(2);
        let line = format!("\n{frame}");
        if line.len() > most {
            out.extend(line.bytes().take(most));
            return;
        }
        out.extend_from_slice(line.as_bytes());
        room -= line.len();
    }
    out.extend(last.iter().take(room - 1));
}

/// Splits `name+0x10` into `name` and 16.
pub(super) fn split_offset(name: &str) -> (&str, Option<u64>) {
    match name.rsplit_once("+0x") {
        Some((symbol, offset)) => match u64::from_str_radix(offset, 16) {
            Ok(offset) => (symbol, Some(offset)),
            Err(_) => (name, None),
        },
        None => (name, None),
    }
}
