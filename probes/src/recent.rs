//! A table of bounded size: when it is full, the least recently used entries are removed.
//!
//! Readers of a stream keep data for each process that they see. The process numbers come from the
//! guest, or from any file, so the data must be bounded.

use std::collections::BTreeMap;
use std::mem;

/// A table of at most `most` entries.
#[derive(Debug)]
pub(crate) struct Recent<K, V> {
    most: usize,
    uses: u64,
    entries: BTreeMap<K, Entry<V>>,
}

#[derive(Debug)]
struct Entry<V> {
    used: u64,
    value: V,
}

impl<K: Ord + Copy, V> Recent<K, V> {
    /// Creates an empty table for `most` entries, at least two.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            most: most.max(2),
            uses: 0,
            entries: BTreeMap::new(),
        }
    }

    /// Returns the entry of `key`, if there is one. This does not count as a use.
    pub(crate) fn get(&self, key: K) -> Option<&V> {
        self.entries.get(&key).map(|entry| &entry.value)
    }

    /// Returns the entry of `key` for a change, in the same way.
    pub(crate) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        self.entries.get_mut(&key).map(|entry| &mut entry.value)
    }

    /// Returns the entry of `key`, created if there is none, and counts a use. If the table is
    /// full, half of its entries are lost: see [`make_room`](Self::make_room).
    pub(crate) fn of(&mut self, key: K, new: impl FnOnce() -> V) -> &mut V {
        self.make_room(key);
        self.uses += 1;
        let used = self.uses;
        let entry = self
            .entries
            .entry(key)
            .or_insert_with(|| Entry { used, value: new() });
        entry.used = used;
        &mut entry.value
    }

    /// Removes and returns the least recently used half if `key` is new and the table is full.
    pub(crate) fn make_room(&mut self, key: K) -> Vec<(K, V)> {
        if self.entries.len() < self.most || self.entries.contains_key(&key) {
            return Vec::new();
        }
        let mut uses: Vec<u64> = self.entries.values().map(|entry| entry.used).collect();
        let (_, middle, _) = uses.select_nth_unstable(self.most / 2 - 1);
        let last = *middle;
        let (kept, gone) = mem::take(&mut self.entries)
            .into_iter()
            .partition::<BTreeMap<_, _>, _>(|(_, entry)| entry.used > last);
        self.entries = kept;
        (gone.into_iter())
            .map(|(key, entry)| (key, entry.value))
            .collect()
    }

    /// Returns all values by key, for a change. This does not count as a use.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.entries.values_mut().map(|entry| &mut entry.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entries_used_longest_ago_make_room() {
        let mut table = Recent::new(4);
        for key in [1, 2, 3, 4] {
            table.of(key, || key * 10);
        }
        assert_eq!(*table.of(1, || 0), 10, "kept, and used again");
        assert!(table.make_room(4).is_empty(), "4 is there");
        assert_eq!(table.make_room(5), [(2, 20), (3, 30)]);
        table.of(5, || 50);
        assert_eq!(table.get(2), None);
        assert_eq!(table.get_mut(4), Some(&mut 40));
        let rest: Vec<i32> = table.values_mut().map(|value| *value).collect();
        assert_eq!(rest, [10, 40, 50]);
    }

    #[test]
    fn a_table_never_grows_beyond_its_bound() {
        let mut table = Recent::new(10);
        for key in 0..1000 {
            table.of(key, || ());
            assert!(table.entries.len() <= 10);
            assert!(table.get(key).is_some());
        }
    }
}
