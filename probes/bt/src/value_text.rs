//! The text of a value: numbers, bytes, symbols and stacks, as both dialects write them.
//!
//! [`Names`] gives the names of addresses. The text is raw bytes, as in [`render`](crate::render).

use crate::ast::Dialect;
use crate::value::{Names, StackForm, Value};

/// The number of bytes of a stack's text in bt(5), with the NUL at its end.
const STRICT_STACK_BYTES: usize = 4096;

/// The styles of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferStyle {
    /// `r`: printable ASCII as it is, other bytes as `\x0a`.
    Printable,
    /// `rx`: all bytes as `\x0a`.
    Escaped,
    /// `rh`: all bytes as `0a`, with blanks between.
    Spaced,
}

/// Returns the text of several values, with commas between them.
pub(crate) fn joined(
    values: &[Value],
    between: &str,
    dialect: Dialect,
    names: &dyn Names,
) -> Vec<u8> {
    let texts = values.iter().map(|value| text_of(value, dialect, names));
    texts.collect::<Vec<_>>().join(between.as_bytes())
}

/// Returns the text of a value.
pub(crate) fn text_of(value: &Value, dialect: Dialect, names: &dyn Names) -> Vec<u8> {
    let mut text = Vec::new();
    write_value(&mut text, value, dialect, names);
    text
}

/// Returns the text of each part of a map's key, as bpftrace shows it.
#[must_use]
pub fn key_texts(key: &[Value], names: &dyn Names) -> Vec<Vec<u8>> {
    let parts = parts(key).iter();
    parts
        .map(|part| text_of(part, Dialect::Normal, names))
        .collect()
}

/// Returns the parts of a key, which may be in a tuple.
pub(crate) fn parts(key: &[Value]) -> &[Value] {
    match key {
        [Value::Tuple(values)] => values,
        _ => key,
    }
}

/// Writes the text of a value, as `%s` shows it.
pub(crate) fn write_value(out: &mut Vec<u8>, value: &Value, dialect: Dialect, names: &dyn Names) {
    match value {
        Value::Int(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::Unsigned(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::Text(text) => out.extend_from_slice(text),
        Value::Bytes(bytes) => out.extend(shown_bytes(bytes, BufferStyle::Printable)),
        Value::Tuple(values) => {
            out.push(b'(');
            out.extend(joined(values, ", ", dialect, names));
            out.push(b')');
        }
        Value::Array(values) => {
            out.push(b'[');
            out.extend(joined(values, ",", dialect, names));
            out.push(b']');
        }
        Value::StackAs { form, stack } => write_stack_as(out, *form, stack, names),
        Value::Bool(truth) => out.extend_from_slice(truth.to_string().as_bytes()),
        Value::Address(address) => out.extend_from_slice(format!("{address:#x}").as_bytes()),
        Value::Enumerator { name, .. } => out.extend_from_slice(name.as_bytes()),
        Value::Record {
            names: members,
            items,
        } => {
            let members = members.iter().zip(items.iter()).map(|(name, item)| {
                let text = text_of(item, dialect, names);
                [b".", name.as_bytes(), b" = ", &text].concat()
            });
            let members = members.collect::<Vec<_>>().join(&b", "[..]);
            out.extend([&b"{ "[..], &members, b" }"].concat());
        }
        // The only hierarchy, as bpftrace names it.
        Value::Cgroup(id) => match names.cgroup(*id) {
            Some(path) => out.extend([b"unified:", &path[..]].concat()),
            None => out.extend_from_slice(format!("(no control group {id})").as_bytes()),
        },
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
            (name, None) => format!("    {}\n", with_offset(name)),
        };
        out.extend_from_slice(line.as_bytes());
    }
}

/// Returns a name with the offset that it has as a frame; an address without a name has none.
fn with_offset(name: &str) -> String {
    match name.starts_with("0x") {
        true => name.to_owned(),
        false => format!("{name}+0"),
    }
}

/// Writes a stack with its addresses in front, or with nothing else.
fn write_stack_as(out: &mut Vec<u8>, form: StackForm, stack: &Value, names: &dyn Names) {
    let (frames, pid) = match stack {
        Value::KernelStack(frames) => (frames, None),
        Value::UserStack { pid, frames } => (frames, Some(*pid)),
        _ => return,
    };
    out.push(b'\n');
    for &address in frames.iter() {
        let line = frame_line(form, address, pid, names);
        out.extend_from_slice(format!("    {line}\n").as_bytes());
    }
}

/// Returns the line of a frame that shows its address.
fn frame_line(form: StackForm, address: u64, pid: Option<u32>, names: &dyn Names) -> String {
    if form == StackForm::Addresses {
        return format!("{address:x}");
    }
    let name = match pid {
        Some(pid) => names.user(pid, address),
        None => names.kernel(address),
    };
    match split_offset(&name) {
        (name, Some(offset)) => format!("{address:x} {name}+{offset}"),
        (name, None) => format!("{address:x} {}", with_offset(name)),
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
pub(crate) fn split_offset(name: &str) -> (&str, Option<u64>) {
    match name.rsplit_once("+0x") {
        Some((symbol, offset)) => match u64::from_str_radix(offset, 16) {
            Ok(offset) => (symbol, Some(offset)),
            Err(_) => (name, None),
        },
        None => (name, None),
    }
}

/// Renders bytes in one of the styles.
pub(crate) fn shown_bytes(bytes: &[u8], style: BufferStyle) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for &byte in bytes {
        match style {
            BufferStyle::Printable if (b' '..=b'~').contains(&byte) => out.push(byte),
            BufferStyle::Printable | BufferStyle::Escaped => {
                out.extend_from_slice(format!("\\x{byte:02x}").as_bytes());
            }
            BufferStyle::Spaced => {
                if !out.is_empty() {
                    out.push(b' ');
                }
                out.extend_from_slice(format!("{byte:02x}").as_bytes());
            }
        }
    }
    out
}
