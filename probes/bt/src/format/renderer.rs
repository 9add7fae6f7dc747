//! Renders one use of a format with the values that it takes.

use super::integer::{Padding, write_integer, write_padded};
use super::{Columns, Conversion, ConversionKind, MOST_COLUMNS, float, strict};
use crate::ast::Dialect;
use crate::value::{Names, Value};
use crate::value_text::{shown_bytes, text_of};

/// One use of a format.
pub(super) struct Renderer<'a> {
    dialect: Dialect,
    arguments: std::slice::Iter<'a, Value>,
    names: &'a dyn Names,
    out: Vec<u8>,
}

impl<'a> Renderer<'a> {
    pub(super) fn new(dialect: Dialect, arguments: &'a [Value], names: &'a dyn Names) -> Self {
        Self {
            dialect,
            arguments: arguments.iter(),
            names,
            out: Vec::new(),
        }
    }

    /// Returns the number of values that no conversion has taken yet.
    pub(super) fn left(&self) -> usize {
        self.arguments.len()
    }

    pub(super) fn into_text(self) -> Vec<u8> {
        self.out
    }

    pub(super) fn write(&mut self, text: &[u8]) {
        self.out.extend_from_slice(text);
    }

    /// Writes the next value by a conversion, and checks whether output goes on: `\c` ends it.
    pub(super) fn convert(&mut self, conversion: &Conversion) -> bool {
        let mut padding = Padding {
            left: conversion.left,
            zero: conversion.zero,
            width: 0,
        };
        match conversion.width {
            None => {}
            Some(Columns::Fixed(width)) => padding.width = width,
            Some(Columns::Argument) => {
                let width = self.columns();
                padding.left |= width < 0;
                padding.width = bounded(width.unsigned_abs());
            }
        }
        let precision = match conversion.precision {
            None => None,
            Some(Columns::Fixed(precision)) => Some(precision),
            Some(Columns::Argument) => u64::try_from(self.columns()).ok().map(bounded),
        };
        match conversion.kind {
            ConversionKind::EscapedText => {
                let text = self.text();
                return !strict::expand_escapes(&text, &mut self.out);
            }
            ConversionKind::Text => {
                let text = self.text();
                let most = precision.unwrap_or(text.len()).min(text.len());
                let text = text.get(..most).unwrap_or(&text);
                write_padded(&mut self.out, padding.without_zeros(), b"", text);
            }
            ConversionKind::Byte => {
                let byte = self.byte();
                write_padded(&mut self.out, padding.without_zeros(), b"", &[byte]);
            }
            ConversionKind::Buffer(style) => {
                let text = match self.arguments.next() {
                    Some(Value::Bytes(bytes) | Value::Text(bytes)) => shown_bytes(bytes, style),
                    Some(value) => self.text_of(value),
                    None => Vec::new(),
                };
                write_padded(&mut self.out, padding.without_zeros(), b"", &text);
            }
            ConversionKind::Float { style, upper } => {
                let number = match self.dialect {
                    Dialect::Strict => strict::leading_float(&self.text()),
                    #[allow(clippy::cast_precision_loss)]
                    Dialect::Normal => self.number().cast_signed() as f64,
                };
                let body = float::digits(number.abs(), style, upper, precision, conversion);
                let sign = sign(number.is_sign_negative(), conversion);
                let padding = match number.is_finite() {
                    true => padding,
                    false => padding.without_zeros(),
                };
                write_padded(&mut self.out, padding, sign, body.as_bytes());
            }
            ConversionKind::Signed
            | ConversionKind::Unsigned
            | ConversionKind::Octal
            | ConversionKind::Hex { .. }
            | ConversionKind::Pointer => {
                let number = match self.dialect {
                    Dialect::Normal => shown(self.number(), conversion),
                    Dialect::Strict if conversion.kind == ConversionKind::Signed => {
                        strict::leading_number(&self.text()).cast_unsigned()
                    }
                    Dialect::Strict => strict::leading_unsigned(&self.text()),
                };
                write_integer(&mut self.out, padding, precision, conversion, number);
            }
        }
        true
    }

    /// Returns the next value's text.
    fn text(&mut self) -> Vec<u8> {
        match self.arguments.next() {
            Some(value) => self.text_of(value),
            None => Vec::new(),
        }
    }

    fn text_of(&self, value: &Value) -> Vec<u8> {
        text_of(value, self.dialect, self.names)
    }

    /// Returns the next value as a number, 0 if it is none.
    fn number(&mut self) -> u64 {
        match self.arguments.next() {
            Some(Value::Int(number) | Value::Enumerator { number, .. }) => number.cast_unsigned(),
            Some(Value::Bool(truth)) => (*truth).into(),
            Some(
                Value::Unsigned(number)
                | Value::Address(number)
                | Value::Cgroup(number)
                | Value::KernelSymbol(number)
                | Value::UserSymbol {
                    address: number, ..
                },
            ) => *number,
            Some(
                Value::Text(_)
                | Value::Bytes(_)
                | Value::Tuple(_)
                | Value::Array(_)
                | Value::Record { .. }
                | Value::StackAs { .. }
                | Value::KernelStack(_)
                | Value::UserStack { .. },
            )
            | None => 0,
        }
    }

    /// Returns the byte that `%c` shows.
    fn byte(&mut self) -> u8 {
        match self.dialect {
            // Since 2024 a number is the character of that code, as in C.
            Dialect::Strict => match self.arguments.next() {
                Some(Value::Int(number)) => number.to_le_bytes()[0],
                Some(Value::Unsigned(number)) => number.to_le_bytes()[0],
                Some(other) => self.text_of(other).first().copied().unwrap_or(0),
                None => 0,
            },
            Dialect::Normal => self.number().to_le_bytes()[0],
        }
    }

    /// Returns a width or precision given by a value. printf(1) takes no value for it that does not
    /// look like a number.
    fn columns(&mut self) -> i64 {
        match self.dialect {
            Dialect::Normal => self.number().cast_signed(),
            Dialect::Strict => {
                let Some(value) = self.arguments.as_slice().first() else {
                    return 0;
                };
                let text = self.text_of(value);
                if text
                    .first()
                    .is_none_or(|&byte| b"+-.0123456789".contains(&byte))
                {
                    self.arguments.next();
                }
                strict::decimal(&text)
            }
        }
    }
}

/// Returns a number of columns given by a value, within bounds.
/// Returns the part of a number that a conversion shows, with its sign.
fn shown(number: u64, conversion: &Conversion) -> u64 {
    let shift = 64 - 8 * u32::from(conversion.bytes.clamp(1, 8));
    match conversion.kind {
        ConversionKind::Signed => ((number << shift).cast_signed() >> shift).cast_unsigned(),
        _ => number << shift >> shift,
    }
}

fn bounded(columns: u64) -> usize {
    usize::try_from(columns).map_or(MOST_COLUMNS, |columns| columns.min(MOST_COLUMNS))
}

/// Returns the sign of a number.
pub(super) fn sign(is_negative: bool, conversion: &Conversion) -> &'static [u8] {
    match (is_negative, conversion.plus, conversion.blank) {
        (true, ..) => b"-",
        (false, true, _) => b"+",
        (false, false, true) => b" ",
        (false, false, false) => b"",
    }
}
