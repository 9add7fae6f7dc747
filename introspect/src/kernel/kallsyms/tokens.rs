//! `kallsyms_token_table` and `kallsyms_token_index`: 256 NUL-terminated pieces of names,
//! contiguous, and the 256 16-bit offsets of their first bytes.

use memchr::memmem;

use super::MAX_NAME;
use crate::bytes::u16_at;

/// The tokens of the digits, which are adjacent in every token table. Digits occur in kernel names,
/// and a character that occurs is a token of its own at its own index.
pub(super) const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\x00";
const FIRST_DIGIT: usize = b'0' as usize;
const TOKENS: usize = 256;

/// The table, accessed by its index.
#[derive(Debug)]
pub(super) struct Tokens<'a> {
    start: usize,
    end: usize,
    tokens: Vec<&'a [u8]>,
    /// The tokens that are short.
    short: Vec<ShortToken>,
}

/// A token of at most [`SHORT`] bytes, in a buffer of fixed size that is copied without a loop.
#[derive(Debug, Clone, Copy, Default)]
struct ShortToken {
    text: [u8; SHORT],
    length: u8,
}

const SHORT: usize = 15;

impl ShortToken {
    /// Makes an empty one for a longer token.
    fn new(token: &[u8]) -> Self {
        let mut text = [0; SHORT];
        match text.get_mut(..token.len()) {
            Some(part) => part.copy_from_slice(token),
            None => return Self::default(),
        }
        let length = u8::try_from(token.len()).unwrap_or_default();
        Self { text, length }
    }
}

impl<'a> Tokens<'a> {
    /// Returns the offset of the first byte of the token table.
    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// Returns the offset past the last byte of the token index.
    pub(super) fn end(&self) -> usize {
        self.end
    }

    /// Appends the text of the token.
    pub(super) fn expand(&self, token: u8, text: &mut Vec<u8>) {
        let token = usize::from(token);
        match self.short.get(token) {
            Some(short) if short.length > 0 => {
                let end = text.len() + usize::from(short.length);
                text.extend_from_slice(&short.text);
                text.truncate(end);
            }
            _ => text.extend_from_slice(self.tokens.get(token).copied().unwrap_or_default()),
        }
    }

    /// Finds the table whose token for `0` starts at `zero`, if there is one.
    fn around(bytes: &'a [u8], zero: usize) -> Option<Self> {
        // Walk to the end of the last token; the index starts at the next multiple of 8 (of 4 at
        // least).
        let mut at = zero;
        for _ in FIRST_DIGIT..TOKENS {
            let rest = bytes.get(at..)?;
            at += memchr::memchr(0, rest.get(..MAX_NAME).unwrap_or(rest))? + 1;
        }
        let four = at.checked_next_multiple_of(4)?;
        [four, four + 4]
            .into_iter()
            .find_map(|index| Self::with_index(bytes, zero, at, index))
    }

    /// Checks the index at `index` against the table that ends at `table_end`.
    fn with_index(bytes: &'a [u8], zero: usize, table_end: usize, index: usize) -> Option<Self> {
        let start = zero.checked_sub(usize::from(u16_at(bytes, index + 2 * FIRST_DIGIT)?))?;
        let mut tokens = Vec::with_capacity(TOKENS);
        let mut expected = start;
        for token in 0..TOKENS {
            let first = start + usize::from(u16_at(bytes, index + 2 * token)?);
            if first != expected || first >= table_end {
                return None;
            }
            let rest = bytes.get(first..table_end)?;
            let text = rest.get(..memchr::memchr(0, rest.get(..MAX_NAME).unwrap_or(rest))?)?;
            tokens.push(text);
            expected = first + text.len() + 1;
        }
        let end = index + 2 * TOKENS;
        (expected == table_end).then(|| Self {
            start,
            end,
            short: tokens.iter().map(|token| ShortToken::new(token)).collect(),
            tokens,
        })
    }
}

/// Returns every token table in `bytes`, in order.
pub(super) fn candidates(bytes: &[u8]) -> impl Iterator<Item = Tokens<'_>> {
    memmem::find_iter(bytes, DIGITS)
        .take(super::MAX_TOKEN_CANDIDATES)
        .filter_map(|zero| Tokens::around(bytes, zero))
}
