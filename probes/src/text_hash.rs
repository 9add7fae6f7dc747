//! A hash of the guest's kernel text in memory.
//!
//! The caller pauses the machine for the call, and compares two results. Equal hashes before a
//! tracer was armed and after it was stopped prove that every byte was restored. A guest also
//! changes its own text: alternatives early in boot, static keys, its own probes at any time. So
//! compare only over a time in which it does not, or with the same guest untraced.

use std::fmt;
use std::ops::Range;

use introspect::x86_64::PAGE;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::{ReadVirtualError, read_virtual};
use introspect::{Gva, PhysicalMemory};
use sha2::{Digest, Sha256};

/// The largest accepted size in bytes; a distribution kernel has 20 MiB.
pub const MAX_TEXT: u64 = 1 << 30;

/// The SHA-256 of a range of memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TextHash(pub [u8; 32]);

impl fmt::Display for TextHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TextHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TextHash({self})")
    }
}

/// The reason that text cannot be hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TextHashError {
    /// The symbols of its bounds are missing or out of order.
    #[error(
        "the kernel text is bounded by _stext ({start:#x?}) and _etext ({end:#x?}), which are not there or not in \
         order: are these the guest's symbols?"
    )]
    NoBounds {
        /// `_stext`.
        start: Option<u64>,
        /// `_etext`.
        end: Option<u64>,
    },
    /// The range is empty or too large.
    #[error("invalid kernel text {start} to {end}: expected 1 to {MAX_TEXT:#x} bytes")]
    Range {
        /// The first byte.
        start: Gva,
        /// The end, exclusive.
        end: Gva,
    },
    /// Part of the text cannot be read.
    #[error("the kernel text cannot be read: {0}")]
    Read(#[from] ReadVirtualError),
}

/// Returns the SHA-256 of the virtual range `text`, read through the page tables `space`, int3s
/// included.
///
/// # Errors
/// If the range is empty or too large, or not mapped to RAM.
pub fn hash_text(
    memory: &impl PhysicalMemory,
    space: AddressSpace,
    text: Range<u64>,
) -> Result<TextHash, TextHashError> {
    if text.is_empty() || text.end - text.start > MAX_TEXT {
        return Err(TextHashError::Range {
            start: Gva(text.start),
            end: Gva(text.end),
        });
    }
    let mut hash = Sha256::new();
    let mut page = [0; PAGE as usize];
    let mut at = text.start;
    while at < text.end {
        let length = (PAGE - at % PAGE).min(text.end - at);
        let part = page.get_mut(..length as usize).unwrap_or_default();
        read_virtual(memory, space, Gva(at), part)?;
        hash.update(&*part);
        at += length;
    }
    Ok(TextHash(hash.finalize().into()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::test_memory::{Flags, TestMemory};

    use super::*;

    const TEXT: u64 = 0xffff_ffff_8100_0000;

    /// Creates three pages of text that are not adjacent in physical memory.
    fn guest() -> (TestMemory, AddressSpace) {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        for (page, gpa) in [(0, 0x18_0000), (1, 0x1a_0000), (2, 0x19_0000)] {
            memory.map(space, TEXT + page * 4096, gpa, 4096, Flags::default());
        }
        memory.write(0x18_0ffe, b"ab");
        memory.write(0x1a_0000, b"c");
        (memory, space)
    }

    #[test]
    fn the_hash_is_sha256_over_the_pages_in_virtual_order() {
        let (memory, space) = guest();
        let hash = hash_text(&memory, space, TEXT + 0xffe..TEXT + 0x1001).unwrap();
        // FIPS 180-2, appendix B.1: the message "abc".
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash.to_string(), expected);
    }

    #[test]
    fn every_byte_of_the_range_counts_and_no_other() {
        let (mut memory, space) = guest();
        let range = TEXT + 0x10..TEXT + 0x2010;
        let before = hash_text(&memory, space, range.clone()).unwrap();
        for (gpa, changes) in [
            (0x18_000f, false),
            (0x18_0010, true),
            (0x1a_0800, true),
            (0x19_000f, true),
            (0x19_0010, false),
        ] {
            memory.write(gpa, &[0xcc]);
            let now = hash_text(&memory, space, range.clone()).unwrap();
            assert_eq!(now != before, changes, "{gpa:#x}");
            memory.write(gpa, &[0]);
            assert_eq!(hash_text(&memory, space, range.clone()).unwrap(), before);
        }
    }

    #[test]
    fn ranges_that_are_none_are_refused() {
        let (memory, space) = guest();
        let reversed = Range {
            start: TEXT + 8,
            end: TEXT,
        };
        for range in [TEXT..TEXT, reversed, 0..u64::MAX] {
            let error = hash_text(&memory, space, range).unwrap_err();
            assert!(matches!(error, TextHashError::Range { .. }), "{error}");
        }
        let unmapped = hash_text(&memory, space, TEXT..TEXT + 0x4000).unwrap_err();
        assert!(
            unmapped.to_string().contains("0xffffffff81003000"),
            "{unmapped}"
        );
    }
}
