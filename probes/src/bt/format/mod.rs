//! `printf`'s formats: read once from the script's literal, rendered with the values of a hit.
//!
//! A strict format follows printf(1), as bt(5) does: values are taken as text and converted from it, the format is used again as long as
//! values are left, and backslashes in it escape. A normal one follows bpftrace: values are converted as the numbers that they are,
//! `%r` shows bytes, and each conversion takes one value. Values that are missing count as 0 or no text in both.
//!
//! The caller checks the script's arguments against [`Format::takes`]; what is rendered is bytes that may mean something to a
//! terminal. Widths and precisions are bounded by [`MOST_COLUMNS`], so that output is as well.

mod float;
mod integer;
mod parse;
mod renderer;
mod strict;
#[cfg(test)]
mod tests;

use super::ast::Dialect;
use super::value::{Names, Value};
pub use parse::FormatError;
use renderer::Renderer;

/// Largest width and precision.
pub const MOST_COLUMNS: usize = 4096;

/// A format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Format {
    dialect: Dialect,
    pieces: Vec<Piece>,
}

/// A part of a format.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(Vec<u8>),
    Conversion(Conversion),
}

/// A conversion: `%-8.3d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conversion {
    /// Where its `%` stands in the format.
    pub offset: usize,
    /// What it makes of the value.
    pub kind: ConversionKind,
    /// `#`: with base.
    pub alternate: bool,
    /// `-`: at the left of its field.
    pub left: bool,
    /// `+`: positive numbers with sign.
    pub plus: bool,
    /// ` `: positive numbers with a blank where the sign would be.
    pub blank: bool,
    /// `0`: filled with zeros.
    pub zero: bool,
    /// Columns at least.
    pub width: Option<Columns>,
    /// Digits at least, digits behind the point, or bytes of text at most.
    pub precision: Option<Columns>,
}

/// A width or precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Columns {
    /// As the format says.
    Fixed(usize),
    /// `*`: as a value says.
    Argument,
}

/// What a conversion makes of its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConversionKind {
    /// `d`, `i`.
    Signed,
    /// `u`.
    Unsigned,
    /// `o`.
    Octal,
    /// `x`, `X`.
    Hex {
        /// `X`.
        upper: bool,
    },
    /// `p`.
    Pointer,
    /// `c`: of a strict format the first byte of text, else the byte with that number.
    Byte,
    /// `s`.
    Text,
    /// `b` of a strict format: text whose escapes are expanded.
    EscapedText,
    /// `r` and its like, of a normal format.
    Buffer(BufferStyle),
    /// `a`, `e`, `f`, `g` of a strict format.
    Float {
        /// Which.
        style: FloatStyle,
        /// Whether it is a capital.
        upper: bool,
    },
}

/// How bytes are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferStyle {
    /// `r`: those that are printable in ASCII as such, others as `\x0a`.
    Printable,
    /// `rx`: all as `\x0a`.
    Escaped,
    /// `rh`: all as `0a`, with blanks between.
    Spaced,
}

/// How a floating point number is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatStyle {
    /// `a`: `0x1.8p+1`.
    Hex,
    /// `e`: `1.500000e+01`.
    Exponent,
    /// `f`: `15.000000`.
    Fixed,
    /// `g`: the shorter of the two.
    Shortest,
}

/// What an argument of `printf` must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// A number.
    Number,
    /// Anything: all values have a text.
    Text,
    /// What `buf` makes; text will do.
    Buffer,
}

impl Format {
    /// Reads a format; escapes of string literals are expanded already.
    ///
    /// # Errors
    ///
    /// [`FormatError`] where a `%` starts no conversion of the dialect's, or one whose width or precision is above [`MOST_COLUMNS`].
    pub fn parse(text: &[u8], dialect: Dialect) -> Result<Self, FormatError> {
        let pieces = parse::parse(text, dialect)?;
        Ok(Self { dialect, pieces })
    }

    /// Which language's it is.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// The conversions, in order.
    pub fn conversions(&self) -> impl Iterator<Item = &Conversion> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Text(_) => None,
            Piece::Conversion(conversion) => Some(conversion),
        })
    }

    /// What each argument is taken as, with the offset in the format of the conversion that takes it. Strict formats convert whatever they
    /// are given, and take these again and again; of normal ones the number of arguments is this list's.
    #[must_use]
    pub fn takes(&self) -> Vec<(usize, Takes)> {
        let mut takes = Vec::new();
        for conversion in self.conversions() {
            for columns in [conversion.width, conversion.precision] {
                if columns == Some(Columns::Argument) {
                    takes.push((conversion.offset, Takes::Number));
                }
            }
            takes.push((conversion.offset, conversion.kind.takes()));
        }
        takes
    }

    /// The text that the format makes of values.
    #[must_use]
    pub fn render(&self, arguments: &[Value], names: &dyn Names) -> Vec<u8> {
        let mut renderer = Renderer::new(self.dialect, arguments, names);
        loop {
            let before = renderer.left();
            for piece in &self.pieces {
                match piece {
                    Piece::Text(text) => renderer.write(text),
                    Piece::Conversion(conversion) => {
                        if renderer.convert(conversion).is_stop() {
                            return renderer.into_text();
                        }
                    }
                }
            }
            let left = renderer.left();
            if self.dialect == Dialect::Normal || left == 0 || left == before {
                return renderer.into_text();
            }
        }
    }
}

impl ConversionKind {
    fn takes(self) -> Takes {
        match self {
            Self::Signed
            | Self::Unsigned
            | Self::Octal
            | Self::Hex { .. }
            | Self::Pointer
            | Self::Byte
            | Self::Float { .. } => Takes::Number,
            Self::Text | Self::EscapedText => Takes::Text,
            Self::Buffer(_) => Takes::Buffer,
        }
    }
}

/// Bytes in one of the styles.
pub(super) fn shown_bytes(bytes: &[u8], style: BufferStyle) -> Vec<u8> {
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
