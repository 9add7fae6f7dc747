//! A lookaside list: the results of one reader's last lookups in a [`ShardedMap`], returned again for as long as the map has
//! not changed.
//!
//! A change of the map empties the list at its next use. No entry keeps a removed value alive. Keys that are not in the map
//! have entries too.

use std::sync::{Arc, Weak};

use crate::sharded_map::ShardedMap;

/// Keys that are remembered, each in the only place that it may have; a power of two.
const PLACES: usize = 64;

/// The result of a key's last lookup.
#[derive(Debug)]
enum Known<V> {
    Nothing,
    Absent,
    Present(Weak<V>),
}

#[derive(Debug)]
struct Place<V> {
    key: u64,
    known: Known<V>,
}

/// The list of one reader, for one map.
#[derive(Debug)]
pub struct Lookaside<V> {
    /// The map's [count of changes](ShardedMap::changes) that all places are as of.
    changes: u64,
    places: Box<[Place<V>; PLACES]>,
}

impl<V> Default for Lookaside<V> {
    fn default() -> Self {
        let place = |_| Place {
            key: 0,
            known: Known::Nothing,
        };
        Self {
            changes: 0,
            places: Box::new(std::array::from_fn(place)),
        }
    }
}

impl<V> Lookaside<V> {
    /// Returns the value of `key` in `map`, as [`ShardedMap::get`] does.
    #[inline]
    pub fn get(&mut self, map: &ShardedMap<V>, key: u64) -> Option<Arc<V>> {
        // Before the map is looked at: a change in between counts as later.
        let changes = map.changes();
        if changes == self.changes
            && let Some(place) = self.places.get(place_of(key))
            && place.key == key
        {
            match &place.known {
                Known::Nothing => {}
                Known::Absent => return None,
                Known::Present(value) => {
                    if let Some(value) = value.upgrade() {
                        return Some(value);
                    }
                }
            }
        }
        self.find(map, changes, key)
    }

    #[cold]
    #[inline(never)]
    fn find(&mut self, map: &ShardedMap<V>, changes: u64, key: u64) -> Option<Arc<V>> {
        if changes != self.changes {
            for place in self.places.iter_mut() {
                place.known = Known::Nothing;
            }
            self.changes = changes;
        }
        let found = map.get(key);
        if let Some(place) = self.places.get_mut(place_of(key)) {
            *place = Place {
                key,
                known: found
                    .as_ref()
                    .map_or(Known::Absent, |value| Known::Present(Arc::downgrade(value))),
            };
        }
        found
    }
}

/// Functions begin at multiples of 16, and what calls return to anywhere.
fn place_of(key: u64) -> usize {
    (key ^ key >> 6 ^ key >> 12) as usize % PLACES
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
            assert_eq!(seen.get(&map, 16).as_deref(), Some(&"first"));
        }
        map.insert(16, Arc::new("second"));
        assert_eq!(seen.get(&map, 16).as_deref(), Some(&"second"));
        map.remove(16);
        assert_eq!(seen.get(&map, 16), None);
    }

    #[test]
    fn keys_in_one_place_are_told_apart() {
        let (map, mut seen) = (ShardedMap::default(), Lookaside::default());
        let keys: Vec<u64> = (0..1000).map(|n| n * 64).collect();
        for key in &keys {
            map.insert(*key, Arc::new(*key));
        }
        for key in keys.iter().chain(&keys) {
            assert_eq!(seen.get(&map, *key).as_deref(), Some(key));
            assert_eq!(seen.get(&map, key + 1), None);
        }
    }

    #[test]
    fn a_removed_value_is_not_kept_alive() {
        let (map, mut seen) = (ShardedMap::default(), Lookaside::default());
        let value = Arc::new(5);
        let weak = Arc::downgrade(&value);
        map.insert(16, value);
        assert!(seen.get(&map, 16).is_some());
        map.remove(16);
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn what_is_known_of_one_map_is_not_said_of_another() {
        let mut seen = Lookaside::default();
        let kept: Vec<ShardedMap<u64>> = (0..3u64)
            .map(|value| {
                let map = ShardedMap::default();
                map.insert(16, Arc::new(value));
                assert_eq!(seen.get(&map, 16).as_deref(), Some(&value));
                map
            })
            .collect();
        assert_eq!(kept.len(), 3);
    }
}
