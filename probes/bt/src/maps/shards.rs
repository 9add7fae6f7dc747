//! Entries with an aggregation, one set per thread.
//!
//! Lock order: `known`, then a shard. A hit on a key that its shard has takes the shard's lock
//! only. A change to the set of keys holds `known` throughout, so that the number of different keys
//! stays exact.

use std::collections::{HashMap, HashSet};

use parking_lot::Mutex;

use super::accumulator::Accumulator;
use super::entries::Entries;
use super::snapshot::Reading;
use super::{Key, Seed};
use crate::ast::{Aggregation, Dialect};
use crate::value::Value;

/// The entries of a map.
#[derive(Debug)]
pub(super) struct Shards {
    aggregation: Aggregation,
    /// The initial value of an entry.
    fresh: Accumulator,
    most: usize,
    /// The keys of all shards.
    known: Mutex<HashSet<Key, Seed>>,
    shards: Box<[Shard]>,
}

/// One thread's part, on cache lines of its own (two, as processors fetch pairs of them).
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard(Mutex<Entries<Accumulator>>);

impl Shards {
    pub(super) fn new(
        aggregation: Aggregation,
        dialect: Dialect,
        shards: usize,
        most: usize,
    ) -> Self {
        Self {
            aggregation,
            fresh: Accumulator::new(aggregation, dialect),
            most,
            known: Mutex::default(),
            shards: (0..shards.max(1)).map(|_| Shard::default()).collect(),
        }
    }

    /// Returns the function that aggregates.
    pub(super) fn aggregation(&self) -> Aggregation {
        self.aggregation
    }

    /// Adds a value of a time. Returns `false` if there is no room for it.
    pub(super) fn add(&self, shard: usize, key: &[Value], value: i64, at: u64) -> bool {
        let Some(Shard(shard)) = self.shards.get(shard % self.shards.len()) else {
            return false;
        };
        if !self.fresh.takes(value) {
            return true;
        }
        if let Some(accumulator) = shard.lock().get_mut(key) {
            return accumulator.add(value, at);
        }
        let mut known = self.known.lock();
        let key = match known.get(key) {
            Some(key) => key.clone(),
            None if known.len() < self.most => {
                let key = Key::from(key);
                known.insert(key.clone());
                key
            }
            None => return false,
        };
        let mut entries = shard.lock();
        entries
            .get_or_insert(key, || self.fresh.clone())
            .add(value, at)
    }

    /// Returns an entry merged from all shards.
    pub(super) fn merged(&self, key: &[Value]) -> Option<Accumulator> {
        let mut merged: Option<Accumulator> = None;
        for Shard(shard) in &self.shards {
            if let Some(part) = shard.lock().get(key) {
                match &mut merged {
                    Some(merged) => merged.merge(part),
                    None => merged = Some(part.clone()),
                }
            }
        }
        merged
    }

    pub(super) fn delete(&self, key: &[Value]) -> bool {
        let mut known = self.known.lock();
        for Shard(shard) in &self.shards {
            shard.lock().remove(key);
        }
        known.remove(key)
    }

    pub(super) fn contains(&self, key: &[Value]) -> bool {
        self.known.lock().contains(key)
    }

    pub(super) fn clear(&self) {
        let mut known = self.known.lock();
        for Shard(shard) in &self.shards {
            shard.lock().clear();
        }
        known.clear();
    }

    pub(super) fn zero(&self) {
        for Shard(shard) in &self.shards {
            let mut entries = shard.lock();
            entries.values_mut().for_each(Accumulator::zero);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.known.lock().len()
    }

    pub(super) fn entries(&self) -> Vec<(Key, Reading)> {
        let mut merged: HashMap<Key, Accumulator> = HashMap::new();
        // No key goes away while the shards are visited one by one.
        let _known = self.known.lock();
        for Shard(shard) in &self.shards {
            for (key, part) in shard.lock().iter() {
                merged
                    .entry(key.clone())
                    .and_modify(|merged| merged.merge(part))
                    .or_insert_with(|| part.clone());
            }
        }
        (merged.into_iter())
            .map(|(key, accumulator)| (key, accumulator.reading()))
            .collect()
    }
}
