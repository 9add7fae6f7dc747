//! The host's access to bytes and words of guest RAM, which the guest may change at any time.
//!
//! Short accesses go word by word, so that a word is read and written whole. Every write is noted
//! while the host's writes are watched.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use introspect::{Gpa, PAGE_WORDS, PhysicalMemory, PhysicalReadError};
use vm_memory::{Bytes, GuestAddress};

use super::{GuestRam, Mapped, PAGE_SIZE, layout};

/// The longest access in bytes that goes word by word. Longer ones are left to vm-memory, whose
/// path to the bytes is longer.
const SHORT_ACCESS: usize = 64;
/// The size of a word in bytes.
pub(super) const WORD: usize = 8;

/// A short range of RAM: its words, then its bytes.
struct Short<'a> {
    /// The address of the range in the host.
    start: *const u8,
    words: &'a [AtomicU64],
    bytes: &'a [AtomicU8],
}

/// An error for a range of guest-physical memory that is not RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guest-physical {address}, {length} bytes: not in guest RAM")]
pub struct PhysicalWriteError {
    /// The first byte.
    pub address: Gpa,
    /// The number of bytes.
    pub length: usize,
}

impl GuestRam {
    /// Writes `data` at a guest-physical address.
    ///
    /// # Errors
    /// If any byte of the range is not RAM. Bytes in RAM before it may have been written.
    pub fn write_physical(&self, address: Gpa, data: &[u8]) -> Result<(), PhysicalWriteError> {
        if let Some(short) = self.short(address, data.len()) {
            let start = short.start;
            let (words, bytes) = data.split_at(short.words.len() * WORD);
            for (place, word) in short.words.iter().zip(words.as_chunks().0) {
                place.store(u64::from_le_bytes(*word), Ordering::Relaxed);
            }
            for (place, byte) in short.bytes.iter().zip(bytes) {
                place.store(*byte, Ordering::Relaxed);
            }
            self.wrote(start, data.len());
            return Ok(());
        }
        self.map
            .write_slice(data, GuestAddress(address.0))
            .map_err(|_| PhysicalWriteError {
                address,
                length: data.len(),
            })
    }

    /// Reads one byte.
    ///
    /// # Errors
    /// If it is not RAM.
    pub fn read_byte(&self, address: Gpa) -> Result<u8, PhysicalReadError> {
        let mut byte = [0];
        self.read_physical(address, &mut byte)?;
        Ok(byte[0])
    }

    /// Returns the host address of `length` bytes of RAM that do not cross a region, for atomic
    /// access. Writers must report their writes ([`wrote`](Self::wrote)).
    pub(crate) fn host_address(&self, address: Gpa, length: u64) -> Option<*mut u8> {
        self.mapped.iter().find_map(|region| {
            let offset = address.0.checked_sub(region.start)?;
            let inside = offset < region.length && length <= region.length - offset;
            inside.then(|| {
                std::ptr::with_exposed_provenance_mut::<u8>(region.host)
                    .wrapping_add(offset as usize)
            })
        })
    }

    /// Returns the word at an address that is a multiple of 8, which the guest may change at any
    /// time.
    ///
    /// It stays in place for as long as RAM of this [number](Self::number) lives. Writers must
    /// report their writes ([`wrote`](Self::wrote)).
    #[inline]
    pub(crate) fn word(&self, address: Gpa) -> Option<&AtomicU64> {
        if !address.0.is_multiple_of(WORD as u64) {
            return None;
        }
        // Regions are whole pages, so a word does not cross the end of one.
        let within = |region: &Mapped| {
            let offset = address.0.wrapping_sub(region.start);
            (offset < region.length).then(|| region.host.wrapping_add(offset as usize))
        };
        let [low, high] = &self.mapped;
        let host = within(low).or_else(|| within(high))?;
        let pointer = std::ptr::with_exposed_provenance_mut::<u64>(host);
        // SAFETY: the pointer is into guest RAM, mapped as long as `self.map` lives, which the
        // result borrows. It is aligned, because regions begin at pages in the guest and in the
        // host. All access is atomic.
        Some(unsafe { AtomicU64::from_ptr(pointer) })
    }

    /// Stores a word at an address that is a multiple of 8. Otherwise, or outside RAM, stores
    /// nothing and returns `false`.
    #[inline]
    pub(crate) fn store_word(&self, address: Gpa, value: u64) -> bool {
        let Some(word) = self.word(address) else {
            return false;
        };
        word.store(value.to_le(), Ordering::Relaxed);
        self.wrote(word.as_ptr().cast(), WORD);
        true
    }

    /// Returns a short range of RAM, which the guest may change at any time: aligned words, then
    /// the remaining bytes.
    fn short(&self, address: Gpa, length: usize) -> Option<Short<'_>> {
        if length > SHORT_ACCESS {
            return None;
        }
        let pointer = self.host_address(address, length as u64)?;
        let words: &[AtomicU64] = if pointer.addr().is_multiple_of(WORD) {
            // SAFETY: `pointer` is aligned, and valid for at least `length` bytes as long as
            // `self.map` lives, which the result borrows. All access is atomic.
            unsafe { std::slice::from_raw_parts(pointer.cast(), length / WORD) }
        } else {
            &[]
        };
        let done = words.len() * WORD;
        // SAFETY: the bytes behind the words are valid likewise. Bytes need no alignment.
        let bytes = unsafe {
            std::slice::from_raw_parts(pointer.wrapping_add(done).cast::<AtomicU8>(), length - done)
        };
        Some(Short {
            start: pointer,
            words,
            bytes,
        })
    }
}

impl PhysicalMemory for GuestRam {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        if let Some(short) = self.short(address, buf.len()) {
            let (words, bytes) = buf.split_at_mut(short.words.len() * WORD);
            for (word, place) in words.as_chunks_mut().0.iter_mut().zip(short.words) {
                *word = place.load(Ordering::Relaxed).to_le_bytes();
            }
            for (byte, place) in bytes.iter_mut().zip(short.bytes) {
                *byte = place.load(Ordering::Relaxed);
            }
            return Ok(());
        }
        self.map
            .read_slice(buf, GuestAddress(address.0))
            .map_err(|_| PhysicalReadError {
                address,
                length: buf.len(),
            })
    }

    #[inline]
    fn read_word(&self, address: Gpa) -> Result<u64, PhysicalReadError> {
        if let Some(word) = self.word(address) {
            return Ok(u64::from_le(word.load(Ordering::Relaxed)));
        }
        let mut bytes = [0; WORD];
        self.read_physical(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn page_words(&self, address: Gpa) -> Option<&[AtomicU64; PAGE_WORDS]> {
        let page = Gpa(address.0 & !(PAGE_SIZE - 1));
        let first = self.host_address(page, PAGE_SIZE)?;
        // SAFETY: the whole page is in RAM, mapped as long as `self.map` lives, which the result
        // borrows. It is aligned, because regions begin at pages in the guest and in the host. All
        // access is atomic.
        Some(unsafe { &*first.cast() })
    }

    fn ram(&self) -> Vec<Range<u64>> {
        layout(self.size)
    }
}
