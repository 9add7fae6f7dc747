//! printf(1)'s interpretation of text: escapes, and the number at its start.

/// Expands one escape of a format or of `%b`; `text` begins with its backslash. Returns the byte
/// that it stands for, and its length in bytes. A backslash at the end stands for nothing, an
/// unknown escape for its letter.
pub(super) fn escape(text: &[u8]) -> (Option<u8>, usize) {
    let Some(&letter) = text.get(1) else {
        return (None, 1);
    };
    let digits = |from: usize, most: usize, base: u32| {
        let digits = text.get(from..).unwrap_or(&[]).iter().take(most);
        let values = digits.map_while(move |&digit| char::from(digit).to_digit(base));
        values.fold((0_u8, from), |(value, end), digit| {
            let digit = digit.to_le_bytes()[0];
            let base = base.to_le_bytes()[0];
            (value.wrapping_mul(base).wrapping_add(digit), end + 1)
        })
    };
    let (byte, length) = match letter {
        b'0'..=b'7' => digits(1, 3, 8),
        b'x' => digits(2, text.len(), 16),
        b'a' => (0x07, 2),
        b'b' => (0x08, 2),
        b'e' => (0x1b, 2),
        b'f' => (0x0c, 2),
        b'n' => (b'\n', 2),
        b'r' => (b'\r', 2),
        b't' => (b'\t', 2),
        b'v' => (0x0b, 2),
        _ => (letter, 2),
    };
    (Some(byte), length)
}

/// Writes text with the escapes of `%b` expanded: octal numbers have a 0 before their three digits.
/// Returns whether `\c` ended it, and all output.
pub(super) fn expand_escapes(text: &[u8], out: &mut Vec<u8>) -> bool {
    let mut rest = text;
    while let Some((&byte, behind)) = rest.split_first() {
        if byte != b'\\' {
            out.push(byte);
            rest = behind;
            continue;
        }
        match behind.first() {
            Some(b'c') => return true,
            Some(b'0') => {
                // The 0 itself is no digit of the number.
                let digits = behind.get(1..).unwrap_or(&[]);
                let length = (digits.iter().take(3))
                    .take_while(|digit| (b'0'..=b'7').contains(digit))
                    .count();
                let value = digits.iter().take(length).fold(0_u8, |value, digit| {
                    value.wrapping_mul(8).wrapping_add(digit - b'0')
                });
                out.push(value);
                rest = digits.get(length..).unwrap_or(&[]);
            }
            _ => {
                let (byte, length) = escape(rest);
                out.extend(byte);
                rest = rest.get(length..).unwrap_or(&[]);
            }
        }
    }
    false
}

/// Returns sign and magnitude of the whole number at the start of text, in C's bases: `0x` is
/// hexadecimal, a leading 0 octal. The magnitude is at most `u64::MAX`.
fn leading_magnitude(text: &[u8], base: Option<u32>) -> (bool, u64) {
    let text = text.trim_ascii_start();
    let (is_negative, text) = match text {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, text),
    };
    let (base, digits) = match (base, text) {
        (Some(base), _) => (base, text),
        (None, [b'0', b'x' | b'X', rest @ ..])
            if rest.first().is_some_and(u8::is_ascii_hexdigit) =>
        {
            (16, rest)
        }
        (None, [b'0', ..]) => (8, text),
        (None, _) => (10, text),
    };
    let magnitude = (digits.iter())
        .map_while(|&digit| char::from(digit).to_digit(base))
        .fold(0_u64, |value, digit| {
            (value.saturating_mul(u64::from(base))).saturating_add(u64::from(digit))
        });
    (is_negative, magnitude)
}

fn signed((is_negative, magnitude): (bool, u64)) -> i64 {
    match is_negative {
        true => 0_i64.checked_sub_unsigned(magnitude).unwrap_or(i64::MIN),
        false => i64::try_from(magnitude).unwrap_or(i64::MAX),
    }
}

/// Returns the number at the start of text, as strtol(3) does, or 0. After a quote it is the
/// character behind it.
pub(super) fn leading_number(text: &[u8]) -> i64 {
    match text {
        [b'"' | b'\'', rest @ ..] => i64::from(rest.first().copied().unwrap_or(0)),
        _ => signed(leading_magnitude(text, None)),
    }
}

/// Returns the number at the start of text, as strtoul(3) does: negative numbers wrap around.
pub(super) fn leading_unsigned(text: &[u8]) -> u64 {
    match text {
        [b'"' | b'\'', rest @ ..] => u64::from(rest.first().copied().unwrap_or(0)),
        _ => match leading_magnitude(text, None) {
            (_, u64::MAX) => u64::MAX,
            (true, magnitude) => magnitude.wrapping_neg(),
            (false, magnitude) => magnitude,
        },
    }
}

/// Returns the decimal number at the start of text, as atoi(3) does.
pub(super) fn decimal(text: &[u8]) -> i64 {
    signed(leading_magnitude(text, Some(10)))
}

/// Returns the floating point number at the start of text, as strtod(3) does.
pub(super) fn leading_float(text: &[u8]) -> f64 {
    if let [b'"' | b'\'', rest @ ..] = text {
        return f64::from(rest.first().copied().unwrap_or(0));
    }
    let text = text.trim_ascii_start();
    let (sign, unsigned) = match text {
        [b'-', rest @ ..] => (-1.0, rest),
        [b'+', rest @ ..] => (1.0, rest),
        _ => (1.0, text),
    };
    let begins = |word: &[u8]| {
        (unsigned.get(..word.len())).is_some_and(|start| start.eq_ignore_ascii_case(word))
    };
    if begins(b"inf") {
        return sign * f64::INFINITY;
    }
    if begins(b"nan") {
        return f64::NAN.copysign(sign);
    }
    if begins(b"0x") {
        return sign * hex_float(unsigned.get(2..).unwrap_or(&[]));
    }
    let digits = |from: usize| {
        let digits = unsigned.get(from..).unwrap_or(&[]).iter();
        from + digits.take_while(|digit| digit.is_ascii_digit()).count()
    };
    let mut end = digits(0);
    if unsigned.get(end) == Some(&b'.') {
        end = digits(end + 1);
    }
    if matches!(unsigned.get(end), Some(b'e' | b'E')) {
        let signs = usize::from(matches!(unsigned.get(end + 1), Some(b'+' | b'-')));
        let after = digits(end + 1 + signs);
        if after > end + 1 + signs {
            end = after;
        }
    }
    let number = unsigned.get(..end).unwrap_or(&[]);
    let number = std::str::from_utf8(number).ok();
    sign * number.and_then(|text| text.parse().ok()).unwrap_or(0.0)
}

/// Returns the number that hexadecimal digits begin, with `.` and `p`.
fn hex_float(text: &[u8]) -> f64 {
    let mut value = 0.0_f64;
    let mut scale = 0_i32;
    let mut behind_point = false;
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        match char::from(byte).to_digit(16) {
            Some(digit) => {
                value = value * 16.0 + f64::from(digit);
                scale = scale.saturating_sub(if behind_point { 4 } else { 0 });
            }
            None if byte == b'.' && !behind_point => behind_point = true,
            None => break,
        }
        rest = tail;
    }
    if let [b'p' | b'P', tail @ ..] = rest {
        let exponent = decimal(tail).clamp(-10_000, 10_000);
        scale = scale.saturating_add(i32::try_from(exponent).unwrap_or(0));
    }
    value * 2.0_f64.powi(scale)
}
