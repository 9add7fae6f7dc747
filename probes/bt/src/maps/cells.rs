//! Entries that are assigned, in one place for all threads.

use std::collections::HashMap;
use std::sync::Mutex;

use super::snapshot::Reading;
use super::{Key, lock};
use crate::ast::Dialect;
use crate::value::Value;

/// The entries of a map.
#[derive(Debug)]
pub(super) struct Cells {
    dialect: Dialect,
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<Key, Value>,
    /// Whether something was stored since the map was made or cleared: bt(5) distinguishes a map
    /// without entries from no map.
    is_set: bool,
}

impl State {
    /// Stores a value. Returns `false` if there is no room.
    fn store(&mut self, key: &[Value], value: Value, most: usize) -> bool {
        self.is_set = true;
        if let Some(cell) = self.entries.get_mut(key) {
            *cell = value;
            return true;
        }
        let room = self.entries.len() < most;
        if room {
            self.entries.insert(key.into(), value);
        }
        room
    }
}

impl Cells {
    pub(super) fn new(dialect: Dialect, most: usize) -> Self {
        Self {
            dialect,
            most,
            state: Mutex::default(),
        }
    }

    /// Returns the value, and whether there was room for an entry that reading makes.
    pub(super) fn get(&self, key: &[Value]) -> (Option<Value>, bool) {
        let mut state = lock(&self.state);
        match state.entries.get(key) {
            Some(value) => (Some(value.clone()), true),
            None if self.dialect == Dialect::Strict && state.is_set => {
                let stored = state.store(key, Value::ZERO, self.most);
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
        let mut value = change(state.entries.get(key));
        if self.dialect == Dialect::Strict
            && let Value::Unsigned(number) = value
        {
            // bt(5) knows one type of number.
            value = Value::Int(number.cast_signed());
        }
        let stored = state.store(key, value.clone(), self.most);
        (value, stored)
    }

    pub(super) fn delete(&self, key: &[Value]) -> bool {
        lock(&self.state).entries.remove(key).is_some()
    }

    pub(super) fn contains(&self, key: &[Value]) -> bool {
        lock(&self.state).entries.contains_key(key)
    }

    pub(super) fn clear(&self) {
        // Other threads need not wait while the entries are dropped.
        let cleared = std::mem::take(&mut *lock(&self.state));
        drop(cleared);
    }

    pub(super) fn zero(&self) {
        for value in lock(&self.state).entries.values_mut() {
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
