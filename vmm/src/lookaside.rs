//! A lookaside list: a cache of one reader's last lookups, valid for as long as the map is
//! unchanged.
//!
//! The map is a [`ShardedMap`], or several that count their
//! [`Changes`](crate::sharded_map::Changes) together.
//!
//! A change empties the list at its next use. Until then it keeps its values alive, removed ones
//! too. A reader that may be idle for long [clears](Lookaside::clear) it. Keys without a value have
//! entries too.

use std::sync::Arc;

use crate::sharded_map::{GOLDEN, ShardedMap};

/// The number of cached keys. Each has only one possible place.
const PLACES: usize = 1 << PLACE_BITS;
const PLACE_BITS: u32 = 6;

#[derive(Debug)]
struct Place<V> {
    /// The key. It is one of another place if there is no value.
    key: u64,
    value: V,
}

/// The list of one reader.
#[derive(Debug)]
pub struct Lookaside<V> {
    /// The number of changes at which all places are valid.
    changes: u64,
    places: Box<[Place<V>; PLACES]>,
}

impl<V: Default> Default for Lookaside<V> {
    fn default() -> Self {
        let place = |number| Place {
            key: foreign_to(number),
            value: V::default(),
        };
        Self {
            changes: 0,
            places: Box::new(std::array::from_fn(place)),
        }
    }
}

impl<V: Default> Lookaside<V> {
    /// Checks whether the list has a value of `key` as of `changes` that `is_it` accepts.
    #[inline]
    pub fn has(&self, changes: u64, key: u64, is_it: impl FnOnce(&V) -> bool) -> bool {
        let place = &self.places[place_of(key)];
        changes == self.changes && place.key == key && is_it(&place.value)
    }

    /// Returns the value of `key`, which the list [has](Self::has) or which was
    /// [stored](Self::put).
    #[inline]
    pub fn at(&self, key: u64) -> &V {
        &self.places[place_of(key)].value
    }

    /// Stores the value of `key`, which was looked up after `changes` was read.
    pub fn put(&mut self, changes: u64, key: u64, value: V) {
        if changes != self.changes {
            self.clear();
            self.changes = changes;
        }
        self.places[place_of(key)] = Place { key, value };
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        // No map has this number.
        if self.changes == 0 {
            return;
        }
        self.changes = 0;
        for (number, place) in self.places.iter_mut().enumerate() {
            *place = Place {
                key: foreign_to(number),
                value: V::default(),
            };
        }
    }
}

impl<T> Lookaside<Option<Arc<T>>> {
    /// Returns the value of `key` in `map`, as [`ShardedMap::get`] does. A list is used with one
    /// map.
    #[inline]
    pub fn get(&mut self, map: &ShardedMap<T>, key: u64) -> Option<&Arc<T>> {
        // Read before the lookup, so that a change in between counts as later.
        let changes = map.changes();
        if !self.has(changes, key, |_| true) {
            self.renew(changes, map, key);
        }
        self.at(key).as_ref()
    }

    #[cold]
    #[inline(never)]
    fn renew(&mut self, changes: u64, map: &ShardedMap<T>, key: u64) {
        self.put(changes, key, map.get(key));
    }
}

/// Returns the place of a key, always less than [`PLACES`].
#[inline]
fn place_of(key: u64) -> usize {
    (key.wrapping_mul(GOLDEN) >> (u64::BITS - PLACE_BITS)) as usize
}

/// Returns a key of any other place.
fn foreign_to(number: usize) -> u64 {
    // 0 belongs to the first place.
    u64::from(number == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_found_until_it_is_removed_or_replaced() {
        let (map, mut seen) = (ShardedMap::default(), Lookaside::default());
        assert_eq!(seen.get(&map, 16), None);
        map.insert(16, Arc::new("first"));
        for _ in 0..2 {
            assert_eq!(seen.get(&map, 16), Some(&Arc::new("first")));
        }
        map.insert(16, Arc::new("second"));
        assert_eq!(seen.get(&map, 16), Some(&Arc::new("second")));
        map.remove(16);
        assert_eq!(seen.get(&map, 16), None);
    }

    #[test]
    fn keys_in_one_place_are_told_apart() {
        let (map, mut seen) = (ShardedMap::default(), Lookaside::default());
        // 0 and 1 are the keys of places without a value.
        let keys: Vec<u64> = (0..1000).map(|n| n * 64).collect();
        for key in &keys {
            map.insert(*key, Arc::new(*key));
        }
        for key in keys.iter().chain(&keys) {
            assert_eq!(seen.get(&map, *key), Some(&Arc::new(*key)));
            assert_eq!(seen.get(&map, key + 1), None);
        }
        assert!((0..PLACES).all(|number| place_of(foreign_to(number)) != number));
    }

    #[test]
    fn a_removed_value_lives_until_the_list_is_used_or_cleared() {
        for clears in [false, true] {
            let (map, mut seen) = (ShardedMap::default(), Lookaside::default());
            let value = Arc::new(5);
            let weak = Arc::downgrade(&value);
            map.insert(16, value);
            assert!(seen.get(&map, 16).is_some());
            map.remove(16);
            assert!(weak.upgrade().is_some());
            match clears {
                true => seen.clear(),
                false => assert_eq!(seen.get(&map, 32), None),
            }
            assert!(weak.upgrade().is_none());
            assert_eq!(seen.get(&map, 16), None);
        }
    }

    #[test]
    fn what_is_known_of_one_map_is_not_said_of_another() {
        let mut seen = Lookaside::default();
        let kept: Vec<ShardedMap<u64>> = (0..3u64)
            .map(|value| {
                let map = ShardedMap::default();
                map.insert(16, Arc::new(value));
                assert_eq!(seen.get(&map, 16), Some(&Arc::new(value)));
                map
            })
            .collect();
        assert_eq!(kept.len(), 3);
    }
}
