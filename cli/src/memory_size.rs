//! Memory sizes as people write them: a number and a suffix.

use std::fmt;

use parse_size::{Config, Error};

/// The text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The text is not a number with a known suffix.
    #[error("invalid size {text:?}: expected a number with K, M or G, such as 256M")]
    NotASize {
        /// The given text.
        text: String,
    },
    /// The size does not fit 64 bits.
    #[error("size {text:?} is too large: expected at most 512G")]
    TooLarge {
        /// The given text.
        text: String,
    },
    /// A bare number, which certainly meant MiB.
    #[error("{text:?} would be {text} bytes; did you mean {text}M?")]
    NoSuffix {
        /// The given text.
        text: String,
    },
}

/// The bound below which a bare number is treated as one with a forgotten suffix: no guest runs in
/// 64 KiB.
const FORGOTTEN_SUFFIX: u64 = 64 << 10;

/// Parses a size such as `256M`, `1.5G`, `65536K` or `268435456` and returns it in bytes. Suffixes
/// are powers of 1024, in either case, with or without `iB` or `B` after them.
///
/// # Errors
/// If the text is not a size, or it exceeds 64 bits.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let own = || text.to_owned();
    match Config::new().with_binary().parse_size(text) {
        Ok(1..FORGOTTEN_SUFFIX) if text.ends_with(|c: char| c.is_ascii_digit()) => {
            Err(SizeError::NoSuffix { text: own() })
        }
        Ok(size) => Ok(size),
        Err(Error::PosOverflow) => Err(SizeError::TooLarge { text: own() }),
        Err(_) => Err(SizeError::NotASize { text: own() }),
    }
}

/// A size shown in the largest unit that makes a whole number: `256 MiB`.
pub struct HumanSize(pub u64);

impl fmt::Display for HumanSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
            if self.0 != 0 && self.0.is_multiple_of(1u64 << shift) {
                return write!(f, "{} {unit}", self.0 >> shift);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("256M", 256 << 20),
            ("256m", 256 << 20),
            ("256MiB", 256 << 20),
            ("256MB", 256 << 20),
            ("256 M", 256 << 20),
            ("1G", 1 << 30),
            ("1.5G", 1536 << 20),
            ("65536K", 64 << 20),
            ("1T", 1 << 40),
            ("268435456", 256 << 20),
            ("0", 0),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_what_to_write() {
        for (text, expected) in [
            ("", "invalid size"),
            ("M", "invalid size"),
            ("-1M", "invalid size"),
            ("256X", "invalid size"),
            ("128", "did you mean 128M?"),
            ("1.5", "did you mean 1.5M?"),
            ("99999999999999999999", "512G"),
            ("18446744073709551615G", "512G"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(
                message.contains(expected) && message.contains(text),
                "{message}"
            );
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_whole_unit() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1 << 30, "1 GiB"),
            (1536 << 20, "1536 MiB"),
            (4096, "4 KiB"),
            (5, "5 bytes"),
        ] {
            assert_eq!(HumanSize(bytes).to_string(), text);
        }
    }
}
