//! Formats whole numbers and padding as C's printf does.

use super::renderer::sign;
use super::{Conversion, ConversionKind};

/// The padding of a field.
#[derive(Debug, Clone, Copy)]
pub(super) struct Padding {
    /// Blanks behind the value.
    pub(super) left: bool,
    /// Zeros before the value, unless it is at the left.
    pub(super) zero: bool,
    /// The least number of columns.
    pub(super) width: usize,
}

impl Padding {
    pub(super) fn without_zeros(self) -> Self {
        Self {
            zero: false,
            ..self
        }
    }
}

/// Writes a field; zeros go between the prefix and the body.
pub(super) fn write_padded(out: &mut Vec<u8>, padding: Padding, prefix: &[u8], body: &[u8]) {
    let missing = padding.width.saturating_sub(prefix.len() + body.len());
    let fill = |out: &mut Vec<u8>, with: u8| out.extend(std::iter::repeat_n(with, missing));
    if !padding.left && !padding.zero {
        fill(out, b' ');
    }
    out.extend_from_slice(prefix);
    if !padding.left && padding.zero {
        fill(out, b'0');
    }
    out.extend_from_slice(body);
    if padding.left {
        fill(out, b' ');
    }
}

/// Writes a number by one of the whole-number conversions; a signed one by its bits.
pub(super) fn write_integer(
    out: &mut Vec<u8>,
    padding: Padding,
    precision: Option<usize>,
    conversion: &Conversion,
    bits: u64,
) {
    let signed = bits.cast_signed();
    let (prefix, mut digits): (&[u8], String) = match conversion.kind {
        ConversionKind::Signed => (
            sign(signed < 0, conversion),
            signed.unsigned_abs().to_string(),
        ),
        ConversionKind::Octal => (b"", format!("{bits:o}")),
        ConversionKind::Hex { upper: false } if conversion.alternate && bits != 0 => {
            (b"0x", format!("{bits:x}"))
        }
        ConversionKind::Hex { upper: false } => (b"", format!("{bits:x}")),
        ConversionKind::Hex { upper: true } if conversion.alternate && bits != 0 => {
            (b"0X", format!("{bits:X}"))
        }
        ConversionKind::Hex { upper: true } => (b"", format!("{bits:X}")),
        ConversionKind::Pointer => (b"0x", format!("{bits:x}")),
        _ => (b"", bits.to_string()),
    };
    if bits == 0 && precision == Some(0) && conversion.kind != ConversionKind::Pointer {
        digits.clear();
    }
    if let Some(precision) = precision {
        digits = format!("{digits:0>precision$}");
    }
    if conversion.kind == ConversionKind::Octal && conversion.alternate && !digits.starts_with('0')
    {
        digits.insert(0, '0');
    }
    let padding = match precision {
        Some(_) => padding.without_zeros(),
        None => padding,
    };
    write_padded(out, padding, prefix, digits.as_bytes());
}
