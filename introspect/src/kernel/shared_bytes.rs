//! Bytes that many hold and none copies: a table built in memory, a file read or mapped by the caller.
//!
//! The caller owns where they come from and keeps them as they are while anyone holds them. Whoever reads them checks
//! every offset, so that bytes that change or are shorter than they were make wrong answers and no panics.

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
    /// All bytes of `owner`: a `Vec<u8>`, or a type that holds a mapped file.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let part = 0..owner.as_ref().len();
        Self {
            all: Arc::new(owner),
            part,
        }
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let all: &[u8] = (*self.all).as_ref();
        all.get(self.part.clone()).unwrap_or_default()
    }

    /// A part of the bytes, sharing them; `None` if it reaches outside.
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
