//! `printf`'s formats: parsed once from the script's literal, rendered with the values of a hit.
//!
//! A strict format follows printf(1), as bt(5) does: values are taken as text and converted from
//! it. The format is reused as long as values are left, and backslashes in it are escapes. A normal
//! format follows bpftrace: values are converted as the numbers that they are, `%r` shows bytes,
//! and each conversion takes one value. In both, missing values count as 0 or empty text.
//!
//! The caller checks the script's arguments against [`Format::takes`]. The rendered bytes may mean
//! something to a terminal. [`MOST_COLUMNS`] bounds widths and precisions, so the output is bounded
//! as well.

mod float;
mod integer;
mod parse;
mod renderer;
mod strict;
#[cfg(test)]
mod tests;

use crate::ast::Dialect;
use crate::value::{Names, Value};
pub use crate::value_text::BufferStyle;
pub use parse::FormatError;
use renderer::Renderer;

/// The greatest width and precision.
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
    /// The kind of conversion.
    pub kind: ConversionKind,
    /// `#`: with base.
    pub alternate: bool,
    /// `-`: at the left of its field.
    pub left: bool,
    /// `+`: positive numbers with sign.
    pub plus: bool,
    /// ` `: positive numbers with a blank where the sign would be.
    pub blank: bool,
    /// `0`: padded with zeros.
    pub zero: bool,
    /// The least number of columns.
    pub width: Option<Columns>,
    /// The least number of digits, the number of digits behind the point, or the greatest number of
    /// bytes of text.
    pub precision: Option<Columns>,
    /// The bytes of a number that are shown: 1 for `hh`, 2 for `h`, else 8.
    pub bytes: u8,
}

/// A width or precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Columns {
    /// A number in the format.
    Fixed(usize),
    /// `*`: a number given by a value.
    Argument,
}

/// The kinds of conversions.
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
    /// `c`: in a strict format the first byte of text, otherwise the byte with that number.
    Byte,
    /// `s`.
    Text,
    /// `b` of a strict format: text whose escapes are expanded.
    EscapedText,
    /// `r` and the like, of a normal format.
    Buffer(BufferStyle),
    /// `a`, `e`, `f`, `g` of a strict format.
    Float {
        /// The style.
        style: FloatStyle,
        /// Whether the letter is a capital.
        upper: bool,
    },
}

/// The styles of floating point numbers.
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

/// The kinds of arguments that `printf` needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// A number.
    Number,
    /// Anything: all values have a text.
    Text,
    /// A result of `buf`, or text.
    Buffer,
}

impl Format {
    /// Parses a format; escapes of string literals are expanded already.
    ///
    /// # Errors
    ///
    /// [`FormatError`] if a `%` starts no conversion of the dialect's, or one whose width or
    /// precision is above [`MOST_COLUMNS`].
    pub fn parse(text: &[u8], dialect: Dialect) -> Result<Self, FormatError> {
        let pieces = parse::parse(text, dialect)?;
        Ok(Self { dialect, pieces })
    }

    /// Returns the format's dialect.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Returns the kind of each argument. Strict formats convert any value, and take this list
    /// again and again. Normal formats take as many arguments as this list has.
    #[must_use]
    pub fn takes(&self) -> Vec<Takes> {
        let mut takes = Vec::new();
        for piece in &self.pieces {
            if let Piece::Conversion(conversion) = piece {
                let columns = [conversion.width, conversion.precision].into_iter();
                let given = columns.filter(|columns| *columns == Some(Columns::Argument));
                takes.extend(given.map(|_| Takes::Number));
                takes.push(conversion.kind.takes());
            }
        }
        takes
    }

    /// Renders values by the format.
    #[must_use]
    pub fn render(&self, arguments: &[Value], names: &dyn Names) -> Vec<u8> {
        let mut renderer = Renderer::new(self.dialect, arguments, names);
        loop {
            let before = renderer.left();
            for piece in &self.pieces {
                match piece {
                    Piece::Text(text) => renderer.write(text),
                    Piece::Conversion(conversion) => {
                        if !renderer.convert(conversion) {
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
