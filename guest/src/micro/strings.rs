//! The text that the micro guest prints, with an address for each piece.

use super::layout::data;

/// A piece of text in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Text {
    /// The start of every line.
    Prefix,
    /// The text between words.
    Space,
    /// The end of a line.
    Newline,
    /// The text before the final count.
    Count,
    /// The last line.
    Done,
    /// The message for an unknown PROGRAM.
    Unknown,
    /// The text before the vector of an unexpected trap.
    Trap,
    /// The text before the trap's RIP.
    At,
    /// The text before the trap's error code.
    Error,
    /// The text before CR2.
    Address,
    /// The message for too few CPUs.
    Missing,
}

/// The texts, in the order of [`Text`].
const TEXTS: [(Text, &str); 11] = [
    (Text::Prefix, "micro: "),
    (Text::Space, " "),
    (Text::Newline, "\n"),
    (Text::Count, "micro: count "),
    (Text::Done, "micro: done\n"),
    (Text::Unknown, "micro: unknown program\n"),
    (Text::Trap, "micro: trap "),
    (Text::At, " at 0x"),
    (Text::Error, " error 0x"),
    (Text::Address, " address 0x"),
    (Text::Missing, "micro: CPUs missing, online "),
];

/// Returns every text, back to back.
pub fn bytes() -> Vec<u8> {
    TEXTS.iter().flat_map(|(_, text)| text.bytes()).collect()
}

impl Text {
    /// Returns the address and the length in bytes.
    pub fn place(self) -> (u64, u64) {
        let mut address = data::STRINGS;
        for (text, content) in TEXTS {
            let length = content.len() as u64;
            if text == self {
                return (address, length);
            }
            address += length;
        }
        (address, 0)
    }
}
