//! A set of pages of guest RAM.

use std::ops::Range;

use crate::memory::{GuestRam, PAGE_SIZE};

/// The number of pages in a word.
const IN_WORD: u64 = u64::BITS as u64;

/// Pages of RAM, one bit for each.
///
/// Each region of memory has the words in which KVM and vm-memory note its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageSet {
    regions: Vec<Region>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Region {
    /// The guest-physical addresses.
    range: Range<u64>,
    words: Vec<u64>,
}

impl PageSet {
    /// Returns an empty set for `ram`.
    pub(crate) fn empty(ram: &GuestRam) -> Self {
        Self::of(ram, |pages| vec![0; pages.div_ceil(IN_WORD) as usize])
    }

    /// Returns the set of all pages of `ram`.
    pub(crate) fn all(ram: &GuestRam) -> Self {
        Self::of(ram, |pages| {
            let word = |at: u64| match pages - at * IN_WORD {
                rest if rest < IN_WORD => (1 << rest) - 1,
                _ => u64::MAX,
            };
            (0..pages.div_ceil(IN_WORD)).map(word).collect()
        })
    }

    fn of(ram: &GuestRam, words: impl Fn(u64) -> Vec<u64>) -> Self {
        use introspect::PhysicalMemory;
        let region = |range: Range<u64>| Region {
            words: words((range.end - range.start) / PAGE_SIZE),
            range,
        };
        Self {
            regions: ram.ram().into_iter().map(region).collect(),
        }
    }

    /// Adds the pages whose bits are set in `words`, in the region with this number.
    pub(crate) fn add_words(&mut self, region: usize, words: &[u64]) {
        let Some(region) = self.regions.get_mut(region) else {
            return;
        };
        for (word, added) in region.words.iter_mut().zip(words) {
            *word |= added;
        }
    }

    /// Adds the page that contains the byte at `address`, if that is RAM.
    pub(crate) fn add(&mut self, address: u64) {
        for region in &mut self.regions {
            if region.range.contains(&address) {
                let page = (address - region.range.start) / PAGE_SIZE;
                if let Some(word) = region.words.get_mut((page / IN_WORD) as usize) {
                    *word |= 1 << (page % IN_WORD);
                }
            }
        }
    }

    /// Checks whether the set has the page of the byte at `address`.
    pub(crate) fn has(&self, address: u64) -> bool {
        let mut of = self
            .regions
            .iter()
            .filter(|region| region.range.contains(&address));
        of.any(|region| region.has((address - region.range.start) / PAGE_SIZE))
    }

    /// Adds the pages of another set of the same RAM.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (region, added) in other.regions.iter().enumerate() {
            self.add_words(region, &added.words);
        }
    }

    /// Returns the total size of the pages in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let words = self.regions.iter().flat_map(|region| &region.words);
        words.map(|word| u64::from(word.count_ones())).sum::<u64>() * PAGE_SIZE
    }

    /// Returns the guest-physical ranges of adjacent pages, in order, at most `most` bytes each.
    pub(crate) fn runs(&self, most: u64) -> impl Iterator<Item = Range<u64>> {
        let most = (most / PAGE_SIZE).max(1);
        self.regions.iter().flat_map(move |region| {
            let start = region.range.start;
            let pages = (region.range.end - start) / PAGE_SIZE;
            let mut next = 0;
            std::iter::from_fn(move || {
                let first = region.next_page(next, pages)?;
                let most = pages.min(first + most);
                let end = (first..most)
                    .find(|page| !region.has(*page))
                    .unwrap_or(most);
                next = end;
                Some(start + first * PAGE_SIZE..start + end * PAGE_SIZE)
            })
        })
    }
}

impl Region {
    fn has(&self, page: u64) -> bool {
        let word = self.words.get((page / IN_WORD) as usize);
        word.is_some_and(|word| word >> (page % IN_WORD) & 1 == 1)
    }

    /// Returns the first page of the set from `from` on, below `end`.
    fn next_page(&self, from: u64, end: u64) -> Option<u64> {
        let mut at = from;
        while at < end {
            let word = self.words.get((at / IN_WORD) as usize)? >> (at % IN_WORD);
            if word != 0 {
                return Some(at + u64::from(word.trailing_zeros())).filter(|page| *page < end);
            }
            at = (at / IN_WORD + 1) * IN_WORD;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::memory::{HOLE_END, HOLE_START};

    fn runs(set: &PageSet, most: u64) -> Vec<(u64, u64)> {
        let run = |run: Range<u64>| (run.start / PAGE_SIZE, (run.end - run.start) / PAGE_SIZE);
        set.runs(most).map(run).collect()
    }

    #[test]
    fn pages_come_as_runs_of_a_bounded_length() {
        let ram = GuestRam::new(4 << 20).unwrap();
        let mut set = PageSet::empty(&ram);
        assert_eq!((set.bytes(), runs(&set, 1 << 20)), (0, vec![]));
        for page in [0, 62, 63, 64, 65, 66, 1023] {
            set.add(page * PAGE_SIZE + 17);
        }
        set.add(4 << 20);
        assert_eq!(set.bytes(), 7 * PAGE_SIZE);
        assert_eq!(runs(&set, 1 << 20), [(0, 1), (62, 5), (1023, 1)]);
        let split = [(0, 1), (62, 3), (65, 2), (1023, 1)];
        assert_eq!(runs(&set, 3 * PAGE_SIZE), split);
        assert_eq!(runs(&PageSet::all(&ram), 4 << 20), [(0, 1024)]);
    }

    #[test]
    fn both_sides_of_the_hole_have_pages() {
        let ram = GuestRam::within((3 << 30) + (8 << 20), None).unwrap();
        let mut set = PageSet::empty(&ram);
        set.add(HOLE_START - 1);
        set.add(HOLE_START);
        let mut other = PageSet::empty(&ram);
        other.add(HOLE_END);
        set.merge(&other);
        let starts: Vec<u64> = set.runs(1 << 20).map(|run| run.start).collect();
        assert_eq!(starts, [HOLE_START - PAGE_SIZE, HOLE_END]);
        assert_eq!(PageSet::all(&ram).bytes(), ram.size());
    }
}
