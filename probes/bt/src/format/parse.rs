//! Parses formats.

use super::{
    BufferStyle, Columns, Conversion, ConversionKind, FloatStyle, MOST_COLUMNS, Piece, strict,
};
use crate::ast::Dialect;

/// The reason why a text is no format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A `%` with nothing behind it.
    #[error("incomplete conversion {text}: expected a letter; write %% for a percent sign")]
    Incomplete {
        /// The part that there is.
        text: String,
    },
    /// A letter that is no conversion.
    #[error("unknown conversion {text}: expected {known}")]
    Unknown {
        /// The conversion.
        text: String,
        /// The conversions that exist.
        known: &'static str,
    },
    /// A field that is too wide.
    #[error("{text} asks for more than {MOST_COLUMNS} columns or digits")]
    TooWide {
        /// The conversion.
        text: String,
    },
}

pub(super) fn parse(text: &[u8], dialect: Dialect) -> Result<Vec<Piece>, FormatError> {
    let mut pieces = Vec::new();
    let mut literal = Vec::new();
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        match (byte, text.get(at + 1)) {
            (b'%', Some(b'%')) => {
                literal.push(b'%');
                at += 2;
            }
            (b'%', _) => {
                if !literal.is_empty() {
                    pieces.push(Piece::Text(std::mem::take(&mut literal)));
                }
                let mut reader = Reader {
                    text,
                    start: at,
                    at: at + 1,
                };
                pieces.push(Piece::Conversion(reader.conversion(dialect)?));
                at = reader.at;
            }
            (b'\\', _) if dialect == Dialect::Strict => {
                let (byte, length) = strict::escape(text.get(at..).unwrap_or(&[]));
                literal.extend(byte);
                at += length;
            }
            _ => {
                literal.push(byte);
                at += 1;
            }
        }
    }
    if !literal.is_empty() {
        pieces.push(Piece::Text(literal));
    }
    Ok(pieces)
}

/// A reader of one conversion.
struct Reader<'a> {
    text: &'a [u8],
    /// The offset of its `%`.
    start: usize,
    at: usize,
}

impl Reader<'_> {
    fn conversion(&mut self, dialect: Dialect) -> Result<Conversion, FormatError> {
        let mut conversion = Conversion {
            kind: ConversionKind::Text,
            alternate: false,
            left: false,
            plus: false,
            blank: false,
            zero: false,
            width: None,
            precision: None,
            bytes: 8,
        };
        loop {
            match self.text.get(self.at) {
                Some(b'#') => conversion.alternate = true,
                Some(b'-') => conversion.left = true,
                Some(b'+') => conversion.plus = true,
                Some(b' ') => conversion.blank = true,
                Some(b'0') => conversion.zero = true,
                _ => break,
            }
            self.at += 1;
        }
        let has_flags = self.at > self.start + 1;
        conversion.width = self.columns()?;
        if self.take(b'.') {
            conversion.precision = Some(self.columns()?.unwrap_or(Columns::Fixed(0)));
        }
        if dialect == Dialect::Normal {
            // Length modifiers: all numbers have 64 bits, of which `h` shows fewer.
            while let Some(letter @ (b'h' | b'l' | b'j' | b'z' | b't' | b'q' | b'L')) =
                self.text.get(self.at)
            {
                conversion.bytes = match (letter, conversion.bytes) {
                    (b'h', 8) => 2,
                    (b'h', _) => 1,
                    (_, bytes) => bytes,
                };
                self.at += 1;
            }
        }
        let is_plain = !has_flags && conversion.width.is_none() && conversion.precision.is_none();
        let Some(&letter) = self.text.get(self.at) else {
            return Err(FormatError::Incomplete { text: self.shown() });
        };
        self.at += 1;
        let kind = match dialect {
            Dialect::Strict => strict_kind(letter, is_plain),
            Dialect::Normal => self.normal_kind(letter),
        };
        conversion.kind = kind.ok_or_else(|| FormatError::Unknown {
            text: self.shown(),
            known: match dialect {
                Dialect::Strict => "%a %b %c %d %e %f %g %i %o %s %u %x",
                Dialect::Normal => "%c %d %i %o %p %r %rh %rx %s %u %x",
            },
        })?;
        Ok(conversion)
    }

    /// Reads a width or precision, if there is one.
    fn columns(&mut self) -> Result<Option<Columns>, FormatError> {
        if self.take(b'*') {
            return Ok(Some(Columns::Argument));
        }
        let digits = self.text.get(self.at..).unwrap_or(&[]).iter();
        let length = digits.take_while(|digit| digit.is_ascii_digit()).count();
        if length == 0 {
            return Ok(None);
        }
        let digits = self.text.get(self.at..self.at + length).unwrap_or(&[]);
        self.at += length;
        std::str::from_utf8(digits)
            .ok()
            .and_then(|digits| digits.parse().ok())
            .filter(|&columns| columns <= MOST_COLUMNS)
            .map(|columns| Some(Columns::Fixed(columns)))
            .ok_or_else(|| FormatError::TooWide { text: self.shown() })
    }

    fn take(&mut self, byte: u8) -> bool {
        let is_there = self.text.get(self.at) == Some(&byte);
        self.at += usize::from(is_there);
        is_there
    }

    fn normal_kind(&mut self, letter: u8) -> Option<ConversionKind> {
        Some(match letter {
            b'p' => ConversionKind::Pointer,
            b'r' if self.take(b'x') => ConversionKind::Buffer(BufferStyle::Escaped),
            b'r' if self.take(b'h') => ConversionKind::Buffer(BufferStyle::Spaced),
            b'r' => ConversionKind::Buffer(BufferStyle::Printable),
            _ => return plain_kind(letter),
        })
    }

    /// Returns the text of the conversion up to here.
    fn shown(&self) -> String {
        let text = self.text.get(self.start..self.at).unwrap_or(&[]);
        String::from_utf8_lossy(text).into_owned()
    }
}

/// Returns the kind of a strict conversion. printf(1) knows `%b` only without flags, width and
/// precision.
fn strict_kind(letter: u8, is_plain: bool) -> Option<ConversionKind> {
    let float = |style| ConversionKind::Float {
        style,
        upper: letter.is_ascii_uppercase(),
    };
    Some(match letter {
        b'b' if is_plain => ConversionKind::EscapedText,
        b'a' | b'A' => float(FloatStyle::Hex),
        b'e' | b'E' => float(FloatStyle::Exponent),
        b'f' | b'F' => float(FloatStyle::Fixed),
        b'g' | b'G' => float(FloatStyle::Shortest),
        _ => return plain_kind(letter),
    })
}

/// Returns the kind that a letter means in both dialects.
fn plain_kind(letter: u8) -> Option<ConversionKind> {
    Some(match letter {
        b'd' | b'i' => ConversionKind::Signed,
        b'u' => ConversionKind::Unsigned,
        b'o' => ConversionKind::Octal,
        b'x' => ConversionKind::Hex { upper: false },
        b'X' => ConversionKind::Hex { upper: true },
        b'c' => ConversionKind::Byte,
        b's' => ConversionKind::Text,
        _ => return None,
    })
}
