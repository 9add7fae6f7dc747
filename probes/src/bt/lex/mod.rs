//! Text into tokens. The two dialects cut text so differently that each has its own lexer: [`normal`] and [`strict`].

pub mod literal;
pub mod normal;
pub mod strict;

/// As C's `isspace`.
fn is_blank(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}
