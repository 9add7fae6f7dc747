//! Numbers and strings as bpftrace writes them: `0x1f`, `0755`, `1_000`, `1e6`, `5ms`,
//! `"a\tb\x21\101"`.

use crate::ast::Span;
use crate::diagnostic::Diagnostic;

/// Units of time behind a number, in nanoseconds: bpftrace's duration suffixes.
const UNITS: &[(&str, u64)] = &[
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
    ("d", 86_400_000_000_000),
];

/// C's suffixes, which have no effect here: all numbers have 64 bits.
const C_SUFFIXES: &[&str] = &["u", "l", "ul", "lu", "ll", "ull", "llu"];

/// Returns the value of a number that starts with a digit and consists of letters, digits and `_`.
///
/// # Errors
/// A sentence if it is no number, or has more than 64 bits.
pub fn number(text: &str) -> Result<u64, String> {
    let plain: String = text.chars().filter(|c| *c != '_').collect();
    let plain = plain.to_ascii_lowercase();
    let too_large = || format!("the number {text} is above {}", u64::MAX);
    let no_number = || {
        format!(
            "invalid number {text}: expected a form such as 42, 0x2a, 052, 1_000 or 1e6, or a unit as in 5ms or 2s"
        )
    };
    let digits = |digits: &str, base: u32| -> Result<u64, String> {
        if digits.is_empty() || !digits.chars().all(|c| c.is_digit(base)) {
            return Err(no_number());
        }
        u64::from_str_radix(digits, base).map_err(|_| too_large())
    };
    if let Some(hex) = plain.strip_prefix("0x") {
        return digits(hex.trim_end_matches(['u', 'l']), 16);
    }
    let first_letter = plain
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(plain.len());
    let (value, suffix) = plain.split_at(first_letter);
    let base = if value.len() > 1 && value.starts_with('0') {
        8
    } else {
        10
    };
    let value = digits(value, base)?;
    if suffix.is_empty() || C_SUFFIXES.contains(&suffix) {
        return Ok(value);
    }
    if let Some(exponent) = suffix.strip_prefix('e') {
        let exponent = u32::try_from(digits(exponent, 10)?).map_err(|_| too_large())?;
        return 10u64
            .checked_pow(exponent)
            .and_then(|power| power.checked_mul(value))
            .or((value == 0).then_some(0))
            .ok_or_else(too_large);
    }
    let (_, unit) = UNITS
        .iter()
        .find(|(name, _)| *name == suffix)
        .ok_or_else(no_number)?;
    value.checked_mul(*unit).ok_or_else(too_large)
}

/// Returns the bytes of a string literal. `inner` is the text between the quotes, which starts at
/// byte `start` of the script.
///
/// # Errors
/// An escape is none of C's.
pub fn text(inner: &[u8], start: usize) -> Result<Vec<u8>, Diagnostic> {
    let mut out = Vec::with_capacity(inner.len());
    let mut at = 0;
    while let Some(byte) = inner.get(at) {
        at += 1;
        if *byte != b'\\' {
            out.push(*byte);
            continue;
        }
        let rest = inner.get(at..).unwrap_or_default();
        let (value, length) = escape(rest).ok_or_else(|| {
            let end = at + usize::from(!rest.is_empty());
            let what = String::from_utf8_lossy(inner.get(at - 1..end).unwrap_or_default());
            let span = Span {
                start: start + at - 1,
                end: start + end,
            };
            Diagnostic::new(
                span,
                format!(
                    "unknown escape {what}; known are \\\\ \\\" \\' \\a \\b \\e \\f \\n \\r \\t \\v, octal \\101 and hexadecimal \\x41"
                ),
            )
        })?;
        out.push(value);
        at += length;
    }
    Ok(out)
}

/// Returns the byte that an escape stands for, and its length. `rest` begins behind the backslash.
fn escape(rest: &[u8]) -> Option<(u8, usize)> {
    match *rest.first()? {
        b'x' => digits(rest, 1, 2, 16),
        b'0'..=b'7' => digits(rest, 0, 3, 8),
        letter => Some((of_letter(letter)?, 1)),
    }
}

/// Returns the byte that one character behind a backslash stands for, in both dialects.
pub(super) fn of_letter(letter: u8) -> Option<u8> {
    Some(match letter {
        b'a' => 7,
        b'b' => 8,
        b'e' => 0x1b,
        b'f' => 0x0c,
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'v' => 0x0b,
        b'\\' | b'\'' | b'"' => letter,
        _ => return None,
    })
}

/// Reads up to `most` digits from byte `from` on. Returns their value and end, or `None` if there
/// are none or they exceed a byte.
fn digits(rest: &[u8], from: usize, most: usize, base: u32) -> Option<(u8, usize)> {
    let mut value = 0u32;
    let mut length = from;
    for byte in rest.iter().skip(from).take(most) {
        let Some(digit) = char::from(*byte).to_digit(base) else {
            break;
        };
        value = value * base + digit;
        length += 1;
    }
    if length == from {
        return None;
    }
    Some((u8::try_from(value).ok()?, length))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn numbers_are_read_as_bpftrace_reads_them() {
        for (written, value) in [
            ("0", 0),
            ("42", 42),
            ("0x2A", 42),
            ("0XfF", 255),
            ("052", 42),
            ("1_000_000", 1_000_000),
            ("1e6", 1_000_000),
            ("0e99", 0),
            ("3E2", 300),
            ("5ns", 5),
            ("5us", 5_000),
            ("5ms", 5_000_000),
            ("2s", 2_000_000_000),
            ("1m", 60_000_000_000),
            ("1h", 3_600_000_000_000),
            ("1d", 86_400_000_000_000),
            ("7ul", 7),
            ("18446744073709551615", u64::MAX),
            ("0xffffffffffffffff", u64::MAX),
        ] {
            assert_eq!(number(written), Ok(value), "{written}");
        }
        for (written, part) in [
            ("18446744073709551616", "above"),
            ("1e20", "above"),
            ("1e99999999999", "above"),
            ("99999999999999d", "above"),
            ("0x", "invalid number"),
            ("0xg", "invalid number"),
            ("08", "invalid number"),
            ("12ab", "invalid number"),
            ("5min", "invalid number"),
            ("1e", "invalid number"),
        ] {
            let message = number(written).unwrap_err();
            assert!(message.contains(part), "{written}: {message}");
        }
    }

    #[test]
    fn escapes_become_bytes() {
        for (written, bytes) in [
            (r"a\nb", &b"a\nb"[..]),
            (r#"\\\"\'"#, b"\\\"'"),
            (r"\a\b\e\f\r\t\v", b"\x07\x08\x1b\x0c\r\t\x0b"),
            (r"\x41\x4a4\x9", b"AJ4\x09"),
            (r"\1018\0", b"A8\0"),
        ] {
            assert_eq!(text(written.as_bytes(), 0).unwrap(), bytes, "{written}");
        }
        for written in [r"ab\q", r"ab\x", r"ab\777", r"ab\"] {
            let error = text(written.as_bytes(), 10).unwrap_err();
            assert_eq!(error.span.start, 12, "{written}");
            assert!(error.message.contains("unknown escape \\"), "{written}");
        }
    }
}
