//! Formats floating point numbers as C's printf does.

use super::{Conversion, FloatStyle};

/// The number of digits behind the point of a [`FloatStyle::Hex`] number: as many as a double has
/// bits.
const HEX_DIGITS: usize = 13;

/// Returns the digits of a number that is not negative.
pub(super) fn digits(
    number: f64,
    style: FloatStyle,
    upper: bool,
    precision: Option<usize>,
    conversion: &Conversion,
) -> String {
    let text = if number.is_nan() {
        "nan".to_owned()
    } else if number.is_infinite() {
        "inf".to_owned()
    } else {
        match style {
            FloatStyle::Fixed => fixed(number, precision.unwrap_or(6), conversion.alternate),
            FloatStyle::Exponent => exponent(number, precision.unwrap_or(6), conversion.alternate),
            FloatStyle::Shortest => {
                shortest(number, precision.unwrap_or(6).max(1), conversion.alternate)
            }
            FloatStyle::Hex => hex(number, precision, conversion.alternate),
        }
    };
    if upper { text.to_uppercase() } else { text }
}

fn fixed(number: f64, precision: usize, point: bool) -> String {
    let point = if point && precision == 0 { "." } else { "" };
    format!("{number:.precision$}{point}")
}

/// Splits a number into mantissa and exponent: `1.5` and 2 for 150.
fn mantissa_and_exponent(number: f64, precision: usize) -> (String, i32) {
    let text = format!("{number:.precision$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    (mantissa.to_owned(), exponent.parse().unwrap_or(0))
}

fn with_exponent(mantissa: &str, exponent: i32) -> String {
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

fn exponent(number: f64, precision: usize, point: bool) -> String {
    let (mut mantissa, exponent) = mantissa_and_exponent(number, precision);
    if point && precision == 0 {
        mantissa.push('.');
    }
    with_exponent(&mantissa, exponent)
}

fn shortest(number: f64, significant: usize, keep_zeros: bool) -> String {
    let (mantissa, exponent) = mantissa_and_exponent(number, significant - 1);
    let trimmed = |text: String| match keep_zeros {
        true if text.contains('.') => text,
        true => text + ".",
        false if text.contains('.') => {
            let text = text.trim_end_matches('0');
            text.trim_end_matches('.').to_owned()
        }
        false => text,
    };
    match usize::try_from(exponent) {
        Ok(above) if above < significant => trimmed(fixed(number, significant - 1 - above, false)),
        Err(_) if exponent >= -4 => {
            let below = usize::try_from(exponent.unsigned_abs()).unwrap_or(0);
            trimmed(fixed(number, significant - 1 + below, false))
        }
        _ => with_exponent(&trimmed(mantissa), exponent),
    }
}

fn hex(number: f64, precision: Option<usize>, point: bool) -> String {
    let bits = number.to_bits();
    let fraction = bits & ((1 << 52) - 1);
    let biased = bits >> 52;
    // (Whole digit, its fraction, exponent): subnormal numbers and 0 have no leading one.
    let (mut whole, exponent) = match biased {
        0 if fraction == 0 => (0, 0),
        0 => (0, -1022),
        _ => (1, i64::try_from(biased).unwrap_or(0) - 1023),
    };
    let mut fraction = fraction;
    let mut digits = HEX_DIGITS;
    if let Some(precision) = precision
        && precision < HEX_DIGITS
    {
        let dropped = 4 * (HEX_DIGITS - precision);
        let half = 1_u64 << (dropped - 1);
        let all = (whole << 52) | fraction;
        let (kept, rest) = (all >> dropped, all & ((1 << dropped) - 1));
        let up = rest > half || (rest == half && kept & 1 == 1);
        let rounded = (kept + u64::from(up)) << dropped;
        whole = rounded >> 52;
        fraction = rounded & ((1 << 52) - 1);
        digits = precision;
    }
    let mut text = format!("{fraction:013x}");
    match precision {
        Some(precision) if precision > HEX_DIGITS => {
            text.push_str(&"0".repeat(precision - HEX_DIGITS));
        }
        Some(_) => text.truncate(digits),
        None => text.truncate(text.trim_end_matches('0').len()),
    }
    let point = if text.is_empty() && !point { "" } else { "." };
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("0x{whole}{point}{text}p{sign}{}", exponent.unsigned_abs())
}
