//! Bytes shared without copies: a table built in memory, or a file that the caller read or mapped.
//!
//! The caller owns the source and keeps the bytes unchanged while they are shared. Readers check
//! every offset, so bytes that change or shrink make wrong answers but no panics.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A part of shared bytes. Cheap to clone.
#[derive(Clone)]
pub struct SharedBytes {
    all: Arc<dyn AsRef<[u8]> + Send + Sync>,
    part: Range<usize>,
}

impl SharedBytes {
    /// Shares all bytes of `owner`: a `Vec<u8>`, or a type that holds a mapped file.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let part = 0..owner.as_ref().len();
        Self {
            all: Arc::new(owner),
            part,
        }
    }

    /// Returns the bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let all: &[u8] = (*self.all).as_ref();
        all.get(self.part.clone()).unwrap_or_default()
    }

    /// Returns a part of the bytes, shared; `None` if it is out of bounds.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Option<Self> {
        self.as_bytes().get(range.clone())?;
        Some(Self {
            all: Arc::clone(&self.all),
            part: self.part.start + range.start..self.part.start + range.end,
        })
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.part.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_parts_are_those_of_the_whole() {
        let whole = SharedBytes::new(b"0123456789".to_vec());
        let middle = whole.part(2..8);
        let inner = middle.as_ref().and_then(|part| part.part(1..3));
        assert_eq!(inner.as_ref().map(SharedBytes::as_bytes), Some(&b"34"[..]));
        for outside in [0..7, 6..7] {
            let found = middle.as_ref().and_then(|part| part.part(outside.clone()));
            assert!(found.is_none(), "{outside:?}");
        }
    }
}
