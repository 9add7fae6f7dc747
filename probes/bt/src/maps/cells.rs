//! Entries that are assigned, in one place for all threads.

use lru::LruCache;
use parking_lot::Mutex;

use super::entries::Entries;
use super::snapshot::Reading;
use super::{Capacity, Key, Seed};
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
    entries: Kept,
    /// Whether something was stored since the map was made or cleared: bt(5) distinguishes a map
    /// without entries from no map.
    is_set: bool,
}

/// The entries. The bound is checked by [`State::insert`].
#[derive(Debug)]
enum Kept {
    Plain(Entries<Value>),
    /// Those of a map that evicts, which needs the order of uses, the latest first.
    Used(LruCache<Key, Value, Seed>),
}

impl State {
    fn new(size: Capacity) -> Self {
        Self {
            entries: match size.evicts {
                true => Kept::Used(LruCache::unbounded_with_hasher(Seed::default())),
                false => Kept::Plain(Entries::default()),
            },
            is_set: false,
        }
    }

    /// Returns the value of an entry, to change it.
    #[inline]
    fn cell(&mut self, key: &[Value]) -> Option<&mut Value> {
        match &mut self.entries {
            Kept::Plain(entries) => entries.get_mut(key),
            Kept::Used(entries) => entries.get_mut(key),
        }
    }

    /// Stores a value that has no entry yet. Returns `false` if there is no room.
    fn insert(&mut self, key: &[Value], value: Value, size: Capacity) -> bool {
        self.is_set = true;
        match &mut self.entries {
            Kept::Plain(entries) => {
                let room = entries.len() < size.most;
                if room {
                    entries.get_or_insert(key.into(), || value);
                }
                room
            }
            Kept::Used(entries) => {
                let room = entries.len() < size.most || entries.pop_lru().is_some();
                if room {
                    entries.put(key.into(), value);
                }
                room
            }
        }
    }
}

impl Cells {
    pub(super) fn new(dialect: Dialect, size: Capacity) -> Self {
        Self {
            dialect,
            size,
            state: Mutex::new(State::new(size)),
        }
    }

    /// Returns the value, and whether there was room for an entry that reading makes.
    pub(super) fn get(&self, key: &[Value]) -> (Option<Value>, bool) {
        let mut state = self.state.lock();
        let found = state.cell(key).cloned();
        match found {
            Some(value) => (Some(value), true),
            None if self.dialect == Dialect::Strict && state.is_set => {
                let stored = state.insert(key, Value::ZERO, self.size);
                (Some(Value::ZERO), stored)
            }
            None => (None, true),
        }
    }

    /// Assigns a value. Returns whether there was room for it.
    pub(super) fn set(&self, key: &[Value], value: Value) -> bool {
        let value = self.held(value);
        let mut state = self.state.lock();
        let Some(cell) = state.cell(key) else {
            return state.insert(key, value, self.size);
        };
        *cell = value;
        true
    }

    /// Returns a value as the dialect keeps it.
    #[inline]
    fn held(&self, value: Value) -> Value {
        match (self.dialect, value) {
            // bt(5) knows one type of number.
            (Dialect::Strict, Value::Unsigned(number)) => Value::Int(number.cast_signed()),
            (_, value) => value,
        }
    }

    /// Returns the new value, and whether there was room for it.
    pub(super) fn update(
        &self,
        key: &[Value],
        change: impl FnOnce(Option<&Value>) -> Value,
    ) -> (Value, bool) {
        let mut state = self.state.lock();
        if let Some(cell) = state.cell(key) {
            let value = self.held(change(Some(cell)));
            *cell = value.clone();
            return (value, true);
        }
        let value = self.held(change(None));
        let stored = state.insert(key, value.clone(), self.size);
        (value, stored)
    }

    pub(super) fn delete(&self, key: &[Value]) -> bool {
        match &mut self.state.lock().entries {
            Kept::Plain(entries) => entries.remove(key),
            Kept::Used(entries) => entries.pop(key).is_some(),
        }
    }

    pub(super) fn contains(&self, key: &[Value]) -> bool {
        match &self.state.lock().entries {
            Kept::Plain(entries) => entries.contains(key),
            Kept::Used(entries) => entries.contains(key),
        }
    }

    pub(super) fn clear(&self) {
        // Other threads need not wait while the entries are dropped.
        let fresh = State::new(self.size);
        let cleared = std::mem::replace(&mut *self.state.lock(), fresh);
        drop(cleared);
    }

    pub(super) fn zero(&self) {
        let zero = |value: &mut Value| {
            *value = match value {
                Value::Unsigned(_) if self.dialect == Dialect::Normal => Value::Unsigned(0),
                Value::Text(_) if self.dialect == Dialect::Normal => Value::text(b""),
                _ => Value::ZERO,
            };
        };
        match &mut self.state.lock().entries {
            Kept::Plain(entries) => entries.values_mut().for_each(zero),
            Kept::Used(entries) => entries.iter_mut().for_each(|(_, value)| zero(value)),
        }
    }

    pub(super) fn len(&self) -> usize {
        match &self.state.lock().entries {
            Kept::Plain(entries) => entries.len(),
            Kept::Used(entries) => entries.len(),
        }
    }

    pub(super) fn entries(&self) -> Vec<(Key, Reading)> {
        let entry = |(key, value): (&Key, &Value)| (key.clone(), Reading::Value(value.clone()));
        match &self.state.lock().entries {
            Kept::Plain(entries) => entries.iter().map(entry).collect(),
            Kept::Used(entries) => entries.iter().map(entry).collect(),
        }
    }
}
