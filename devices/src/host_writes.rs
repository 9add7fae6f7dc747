//! Notes the pages of a guest's memory that the host writes, while they are watched.
//!
//! KVM's log has the guest's writes. Writes of devices, the emulator and traps bypass KVM and are
//! noted here. vm-memory notes each of its writes ([`Bitmap`]); writers that bypass it note their
//! own. While nobody watches, a write costs one relaxed load.
//!
//! A write is noted after it is done. A reader that takes the notes and then reads a page sees each
//! write, or its note the next time. To hold from the first write on, this needs one of two things
//! when watching begins. Either writers are paused, or they write with sequentially consistent
//! operations, as traps do. Those are ordered with the load of the flag.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use vm_memory::bitmap::{BS, Bitmap, BitmapSlice, NewBitmap, WithBitmapSlice};
use vm_memory::{GuestMemoryMmap, VolatileSlice};

/// A guest's memory in which the host's writes can be watched.
pub type WatchedMemory = GuestMemoryMmap<HostWrites>;

/// A piece of such memory.
pub type MemorySlice<'m> = VolatileSlice<'m, BS<'m, HostWrites>>;

/// The size of a page in bytes.
const PAGE: usize = 4096;
/// The number of pages in a word of notes.
const IN_WORD: usize = u64::BITS as usize;

/// The notes of one region of memory. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct HostWrites {
    watched: Arc<AtomicBool>,
    /// A bit for each page.
    pages: Arc<[AtomicU64]>,
}

impl HostWrites {
    /// Makes notes for `length` bytes. Writes are noted while `watched` is set.
    #[must_use]
    pub fn new(length: usize, watched: Arc<AtomicBool>) -> Self {
        let words = length.div_ceil(PAGE).div_ceil(IN_WORD);
        Self {
            watched,
            pages: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Takes the notes: a bit for each page that was written since the last call. Later reads of
    /// memory see those writes.
    #[must_use]
    pub fn take(&self) -> Vec<u64> {
        let taken = self
            .pages
            .iter()
            .map(|word| match word.load(Ordering::Relaxed) {
                0 => 0,
                _ => word.swap(0, Ordering::Acquire),
            });
        let taken = taken.collect();
        fence(Ordering::SeqCst);
        taken
    }

    #[cold]
    #[inline(never)]
    fn note(&self, offset: usize, length: usize) {
        let last = offset.saturating_add(length.max(1) - 1) / PAGE;
        for page in offset / PAGE..=last {
            let Some(word) = self.pages.get(page / IN_WORD) else {
                return;
            };
            word.fetch_or(1 << (page % IN_WORD), Ordering::Release);
        }
    }
}

impl<'a> WithBitmapSlice<'a> for HostWrites {
    type S = HostWritesSlice<'a>;
}

impl Bitmap for HostWrites {
    #[inline]
    fn mark_dirty(&self, offset: usize, length: usize) {
        if length > 0 && self.watched.load(Ordering::Relaxed) {
            self.note(offset, length);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = offset / PAGE;
        let word = self.pages.get(page / IN_WORD);
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (page % IN_WORD) & 1 == 1)
    }

    fn slice_at(&self, offset: usize) -> HostWritesSlice<'_> {
        HostWritesSlice {
            notes: self,
            start: offset,
        }
    }
}

impl NewBitmap for HostWrites {
    fn with_len(length: usize) -> Self {
        Self::new(length, Arc::default())
    }
}

/// The notes from an offset on.
#[derive(Clone, Copy, Debug)]
pub struct HostWritesSlice<'a> {
    notes: &'a HostWrites,
    start: usize,
}

impl<'a> WithBitmapSlice<'a> for HostWritesSlice<'_> {
    type S = Self;
}

impl BitmapSlice for HostWritesSlice<'_> {}

impl Bitmap for HostWritesSlice<'_> {
    #[inline]
    fn mark_dirty(&self, offset: usize, length: usize) {
        self.notes
            .mark_dirty(self.start.saturating_add(offset), length);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.notes.dirty_at(self.start.saturating_add(offset))
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self {
            start: self.start.saturating_add(offset),
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

    const LENGTH: usize = 200 * PAGE;

    fn pages(words: &[u64]) -> Vec<usize> {
        let set = |page: &usize| words[page / IN_WORD] >> (page % IN_WORD) & 1 == 1;
        (0..words.len() * IN_WORD).filter(set).collect()
    }

    #[test]
    fn every_page_that_is_written_while_somebody_watches_is_noted_once() {
        let memory = WatchedMemory::from_ranges(&[(GuestAddress(0), LENGTH)]).unwrap();
        let region = memory.iter().next().unwrap().get_mmap();
        let notes = region.bitmap();
        let write = |at: usize, data: &[u8]| {
            memory.write_slice(data, GuestAddress(at as u64)).unwrap();
        };
        write(0, &[1]);
        assert_eq!(pages(&notes.take()), [0; 0]);
        notes.watched.store(true, Ordering::SeqCst);
        write(3 * PAGE - 1, &[1, 2]);
        write(63 * PAGE, &[3; 3 * PAGE]);
        let last = GuestAddress(LENGTH as u64 - 8);
        memory.write_obj(7u64, last).unwrap();
        memory
            .store(7u16, GuestAddress(100 * PAGE as u64), Ordering::Release)
            .unwrap();
        memory
            .read_obj::<u64>(GuestAddress(90 * PAGE as u64))
            .unwrap();
        assert!(notes.dirty_at(2 * PAGE) && !notes.dirty_at(90 * PAGE));
        assert_eq!(pages(&notes.take()), [2, 3, 63, 64, 65, 100, 199]);
        assert_eq!(pages(&notes.take()), [0; 0]);
    }
}
