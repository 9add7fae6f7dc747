//! Splits text into tokens. The dialects differ so much that each has its own lexer: [`normal`] and
//! [`strict`].

pub mod literal;
pub mod normal;
pub mod strict;

/// Checks for a blank as C's `isspace` does.
fn is_blank(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}
