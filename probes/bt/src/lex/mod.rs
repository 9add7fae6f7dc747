//! Splits text into tokens. The dialects differ so much that each has its own lexer: [`normal`] and
//! [`strict`].

pub mod literal;
pub mod normal;
pub mod strict;

/// Checks for a blank as C's `isspace` does.
fn is_blank(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Returns the number of bytes at the start that are wanted.
fn length_of(text: &[u8], wanted: impl Fn(u8) -> bool) -> usize {
    text.iter().take_while(|byte| wanted(**byte)).count()
}
