//! One shard of the pending calls: frames in a vector, and a hash table of their positions.
//!
//! The table uses open addressing with linear probing. An entry is at its hash's place, or at the
//! first free place behind it. At most half of the places are taken, and the hash factors are not
//! known to guests, so searches are short.
//!
//! All memory is reserved at the start. Parts that were never used cost nothing.

use super::{Frame, Key};

/// The bits of an entry that hold the number of its frame, from 1 on. The others hold the hash. No
/// entry is 0.
const NUMBER: u64 = (1 << NUMBER_BITS) - 1;
const NUMBER_BITS: u32 = 20;

/// The frames of a shard.
pub(super) struct Shard {
    /// The entries; a power of two of places.
    table: Box<[u64]>,
    frames: Vec<Frame>,
    room: usize,
}

/// The result of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// The frame, with the place of its entry.
    At { place: usize, index: usize },
    /// The free place for the entry.
    Free(usize),
}

/// Returns the home place of a hash, for a table of any size: its lower bits count.
fn home(hash: u64) -> usize {
    (hash >> NUMBER_BITS) as usize
}

fn entry(hash: u64, index: usize) -> u64 {
    hash & !NUMBER | (index as u64 + 1) & NUMBER
}

impl Shard {
    /// Creates a shard with room for `room` frames, which [`NUMBER`] can number.
    pub(super) fn new(room: usize) -> Self {
        Self {
            table: vec![0; (room * 2).next_power_of_two()].into(),
            frames: Vec::with_capacity(room),
            room,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.frames.len() >= self.room
    }

    pub(super) fn frames(&self) -> impl Iterator<Item = &Frame> {
        self.frames.iter()
    }

    #[inline]
    pub(super) fn frame_mut(&mut self, index: usize) -> Option<&mut Frame> {
        self.frames.get_mut(index)
    }

    #[inline]
    pub(super) fn find(&self, hash: u64, key: Key) -> Found {
        let mask = self.table.len() - 1;
        let mut place = home(hash) & mask;
        loop {
            // Some place is free, so this ends.
            let entry = self.table.get(place).copied().unwrap_or_default();
            if entry == 0 {
                return Found::Free(place);
            }
            if (entry ^ hash) & !NUMBER == 0 {
                let index = ((entry & NUMBER) - 1) as usize;
                if self.frames.get(index).is_some_and(|frame| frame.key == key) {
                    return Found::At { place, index };
                }
            }
            place = (place + 1) & mask;
        }
    }

    /// Adds a frame whose entry belongs at the free `place`. There must be room.
    #[inline]
    pub(super) fn insert(&mut self, place: usize, frame: Frame) {
        if let Some(free) = self.table.get_mut(place) {
            *free = entry(frame.hash, self.frames.len());
            self.frames.push(frame);
        }
    }

    /// Removes the frame that a search has found.
    #[inline]
    pub(super) fn remove(&mut self, place: usize, index: usize) -> Option<Frame> {
        self.free(place);
        if index + 1 == self.frames.len() {
            return self.frames.pop();
        }
        self.remove_between(index)
    }

    /// Removes a frame that has no entry any more. The last frame moves to its position.
    #[inline(never)]
    fn remove_between(&mut self, index: usize) -> Option<Frame> {
        let last = self.frames.last()?;
        let (hash, key) = (last.hash, last.key);
        if let Found::At { place, .. } = self.find(hash, key)
            && let Some(moved) = self.table.get_mut(place)
        {
            *moved = entry(hash, index);
        }
        (index < self.frames.len()).then(|| self.frames.swap_remove(index))
    }

    /// Frees a place. Later entries that a search would not reach any more move ahead.
    #[inline]
    fn free(&mut self, place: usize) {
        let mask = self.table.len() - 1;
        let mut hole = place;
        let mut next = (place + 1) & mask;
        loop {
            let entry = self.table.get(next).copied().unwrap_or_default();
            if entry == 0 {
                break;
            }
            // Whether the hole is between the entry's home and its place.
            let from_home = next.wrapping_sub(home(entry)) & mask;
            if from_home >= next.wrapping_sub(hole) & mask {
                if let Some(free) = self.table.get_mut(hole) {
                    *free = entry;
                }
                hole = next;
            }
            next = (next + 1) & mask;
        }
        if let Some(free) = self.table.get_mut(hole) {
            *free = 0;
        }
    }

    /// Removes the frame that was entered first.
    #[cold]
    pub(super) fn remove_oldest(&mut self) -> Option<Frame> {
        let frames = self.frames.iter();
        let oldest = frames.min_by_key(|frame| frame.first.entered)?;
        match self.find(oldest.hash, oldest.key) {
            Found::At { place, index } => self.remove(place, index),
            Found::Free(_) => None,
        }
    }

    /// Removes the frames that `keeps` rejects.
    pub(super) fn retain(&mut self, mut keeps: impl FnMut(&mut Frame) -> bool) {
        let mut index = 0;
        while let Some(frame) = self.frames.get_mut(index) {
            let (hash, key) = (frame.hash, frame.key);
            if keeps(frame) {
                index += 1;
                continue;
            }
            // The last frame moves to this position.
            match self.find(hash, key) {
                Found::At { place, index } => drop(self.remove(place, index)),
                Found::Free(_) => index += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::super::{FunctionKey, Returning};
    use super::*;

    const ROOM: usize = 16;

    fn frame(hash: u64, task: u64, function: FunctionKey) -> Frame {
        Frame {
            key: Key { task, stack: 0 },
            hash,
            thread: 0,
            return_address: 0,
            first: Returning {
                function,
                ..Returning::default()
            },
            later: Vec::new(),
        }
    }

    proptest! {
        /// Compares the shard with a map under collisions: few hashes, those of the table's last
        /// places among them.
        #[test]
        fn frames_are_found_until_they_are_taken_out(
            steps in prop::collection::vec((0u64..24, any::<bool>()), 0..400),
            spread in 0u64..4,
        ) {
            let hash_of = |task: u64| (30 + task * spread) << NUMBER_BITS;
            let (mut shard, mut expected) = (Shard::new(ROOM), HashMap::new());
            for (time, (task, enters)) in (1..).zip(steps) {
                let key = Key { task, stack: 0 };
                match (shard.find(hash_of(task), key), enters) {
                    (Found::Free(place), true) if !shard.is_full() => {
                        shard.insert(place, frame(hash_of(task), task, time));
                        expected.insert(task, time);
                    }
                    (Found::At { place, index }, false) => {
                        let frame = shard.remove(place, index).unwrap();
                        prop_assert_eq!(Some(frame.first.function), expected.remove(&task));
                    }
                    (Found::At { .. }, true) => prop_assert!(expected.contains_key(&task)),
                    (Found::Free(_), true) => prop_assert_eq!(expected.len(), ROOM),
                    (Found::Free(_), false) => prop_assert!(!expected.contains_key(&task)),
                }
                for (task, function) in &expected {
                    let Found::At { index, .. } = shard.find(hash_of(*task), Key { task: *task, stack: 0 }) else {
                        return Err(TestCaseError::fail("lost"));
                    };
                    prop_assert_eq!(shard.frame_mut(index).unwrap().first.function, *function);
                }
            }
            shard.retain(|frame| frame.first.function % 2 == 0);
            expected.retain(|_, function| *function % 2 == 0);
            prop_assert_eq!(shard.frames().count(), expected.len());
            for task in expected.keys() {
                let key = Key { task: *task, stack: 0 };
                let found = matches!(shard.find(hash_of(*task), key), Found::At { .. });
                prop_assert!(found);
            }
        }
    }
}
