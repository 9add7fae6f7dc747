//! Entries by their keys, of which the one that was used last is found without hashing.
//!
//! A hit often uses the entry that the hit before it used, or one entry twice.

use indexmap::IndexMap;

use super::{Key, Seed};
use crate::value::Value;

/// The entries of a map, or of a shard of it.
#[derive(Debug)]
pub(super) struct Entries<V> {
    by_key: IndexMap<Key, V, Seed>,
    /// The index of the entry that was used last, if it is still there.
    last: usize,
}

impl<V> Default for Entries<V> {
    fn default() -> Self {
        Self {
            by_key: IndexMap::default(),
            last: 0,
        }
    }
}

/// Compares two keys, the commonest without a call.
#[inline(always)]
fn are_equal(left: &[Value], right: &[Value]) -> bool {
    match (left, right) {
        ([], []) => true,
        ([Value::Int(left)], [Value::Int(right)]) => left == right,
        ([Value::Text(left)], [Value::Text(right)]) => left == right,
        ([Value::KernelStack(left)], [Value::KernelStack(right)]) => left == right,
        _ => left == right,
    }
}

impl<V> Entries<V> {
    /// Returns the value of an entry, to change it.
    #[inline]
    pub(super) fn get_mut(&mut self, key: &[Value]) -> Option<&mut V> {
        let last = self.by_key.get_index(self.last);
        if !last.is_some_and(|(last, _)| are_equal(last, key)) {
            self.last = self.by_key.get_index_of(key)?;
        }
        let entry = self.by_key.get_index_mut(self.last);
        entry.map(|(_, value)| value)
    }

    /// Returns the value of an entry, made first if there is none.
    pub(super) fn get_or_insert(&mut self, key: Key, make: impl FnOnce() -> V) -> &mut V {
        let entry = self.by_key.entry(key);
        self.last = entry.index();
        entry.or_insert_with(make)
    }

    /// Returns the value of an entry.
    pub(super) fn get(&self, key: &[Value]) -> Option<&V> {
        self.by_key.get(key)
    }

    pub(super) fn contains(&self, key: &[Value]) -> bool {
        self.by_key.contains_key(key)
    }

    /// Removes an entry. Returns whether it existed.
    pub(super) fn remove(&mut self, key: &[Value]) -> bool {
        self.by_key.swap_remove(key).is_some()
    }

    pub(super) fn clear(&mut self) {
        self.by_key.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Key, &V)> {
        self.by_key.iter()
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.by_key.values_mut()
    }
}
