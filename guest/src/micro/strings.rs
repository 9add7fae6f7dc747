//! The text that the micro guest prints, with an address for each piece.

use super::layout::data;

/// A piece of text in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Text {
    /// Start of every line.
    Prefix,
    /// Between words.
    Space,
    /// End of a line.
    Newline,
    /// Before the final count.
    Count,
    /// The last line.
    Done,
    /// PROGRAM is none of ours.
    Unknown,
    /// Before the vector of a trap nobody expected.
    Trap,
    /// Before its RIP.
    At,
    /// Before its error code.
    Error,
    /// Before CR2.
    Address,
    /// Too few CPUs came up.
    Missing,
}

/// All text, in the order of [`Text`].
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

/// Every text, back to back.
pub fn bytes() -> Vec<u8> {
    TEXTS.iter().flat_map(|(_, text)| text.bytes()).collect()
}

impl Text {
    /// Its address and its length in bytes.
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
