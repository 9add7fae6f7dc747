//! Entries that are assigned, in one place for all threads.

use std::sync::Mutex;

use lru::LruCache;

use super::snapshot::Reading;
use super::{Capacity, Key, Seed, lock};
use crate::ast::Dialect;
use crate::value::Value;

/// The entries of a map.
#[derive(Debug)]
pub(super) struct Cells {
    dialect: Dialect,
    size: Capacity,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The entries, the least recently used one last. The bound is checked by [`State::store`].
    entries: LruCache<Key, Value, Seed>,
    /// Whether something was stored since the map was made or cleared: bt(5) distinguishes a map
    /// without entries from no map.
    is_set: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            entries: LruCache::unbounded_with_hasher(Seed::default()),
            is_set: false,
        }
    }
}

impl State {
    /// Returns the value of an entry, to change it.
    fn cell(&mut self, key: &[Value], size: Capacity) -> Option<&mut Value> {
        // Only a map that evicts needs the order of uses.
        match size.evicts {
            true => self.entries.get_mut(key),
            false => self.entries.peek_mut(key),
        }
    }

    /// Stores a value that has no entry yet. Returns `false` if there is no room.
    fn insert(&mut self, key: &[Value], value: Value, size: Capacity) -> bool {
        self.is_set = true;
        let mut room = self.entries.len() < size.most;
        if !room && size.evicts {
            room = self.entries.pop_lru().is_some();
        }
        if room {
            self.entries.put(key.into(), value);
        }
        room
    }
}

impl Cells {
    pub(super) fn new(dialect: Dialect, size: Capacity) -> Self {
        Self {
            dialect,
            size,
            state: Mutex::default(),
        }
    }

    /// Returns the value, and whether there was room for an entry that reading makes.
    pub(super) fn get(&self, key: &[Value]) -> (Option<Value>, bool) {
        let mut state = lock(&self.state);
        let found = match self.size.evicts {
            true => state.entries.get(key).cloned(),
            false => state.entries.peek(key).cloned(),
        };
        match found {
            Some(value) => (Some(value), true),
            None if self.dialect == Dialect::Strict && state.is_set => {
                let stored = state.insert(key, Value::ZERO, self.size);
                (Some(Value::ZERO), stored)
            }
            None => (None, true),
        }
    }

    /// Returns the new value, and whether there was room for it.
    pub(super) fn update(
        &self,
        key: &[Value],
        change: impl FnOnce(Option<&Value>) -> Value,
    ) -> (Value, bool) {
        let mut state = lock(&self.state);
        let changed = |before| match (self.dialect, change(before)) {
            // bt(5) knows one type of number.
            (Dialect::Strict, Value::Unsigned(number)) => Value::Int(number.cast_signed()),
            (_, value) => value,
        };
        if let Some(cell) = state.cell(key, self.size) {
            let value = changed(Some(cell));
            *cell = value.clone();
            return (value, true);
        }
        let value = changed(None);
        let stored = state.insert(key, value.clone(), self.size);
        (value, stored)
    }

    pub(super) fn delete(&self, key: &[Value]) -> bool {
        lock(&self.state).entries.pop(key).is_some()
    }

    pub(super) fn contains(&self, key: &[Value]) -> bool {
        lock(&self.state).entries.contains(key)
    }

    pub(super) fn clear(&self) {
        // Other threads need not wait while the entries are dropped.
        let cleared = std::mem::take(&mut *lock(&self.state));
        drop(cleared);
    }

    pub(super) fn zero(&self) {
        for (_, value) in &mut lock(&self.state).entries {
            *value = match value {
                Value::Unsigned(_) if self.dialect == Dialect::Normal => Value::Unsigned(0),
                Value::Text(_) if self.dialect == Dialect::Normal => Value::text(b""),
                _ => Value::ZERO,
            };
        }
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.state).entries.len()
    }

    pub(super) fn entries(&self) -> Vec<(Key, Reading)> {
        (lock(&self.state).entries.iter())
            .map(|(key, value)| (key.clone(), Reading::Value(value.clone())))
            .collect()
    }
}
