//! A map from addresses to shared values, read without a lock and changed rarely.
//!
//! It is split into shards by key. A change copies its shard and swaps it whole, so that a reader
//! sees a shard before or after the change and never between. Writers take turns. A value that a
//! reader holds stays alive after its removal.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::{ArcSwap, Guard};

/// The number of shards, a power of two. Copies of one shard stay short up to some hundred thousand
/// keys.
const SHARDS: usize = 256;
/// 2^64 divided by the golden ratio: its products are well mixed in the upper bits.
pub(crate) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A hasher of one 64-bit key.
///
/// Keys are the guest addresses of armed sites. A guest cannot make many of them collide, because
/// it does not choose the sites.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, key: u64) {
        let mixed = (self.0 ^ key).wrapping_mul(GOLDEN);
        // Tables use the lower bits for the place and the uppermost seven for a tag.
        self.0 = mixed ^ mixed >> 32;
    }
}

type Shard<V> = HashMap<u64, Arc<V>, BuildHasherDefault<AddressHasher>>;

/// A sharded map.
pub struct ShardedMap<V> {
    shards: Box<[ArcSwap<Shard<V>>]>,
    /// The lock of those who change the map.
    turn: Mutex<()>,
    /// The number of keys. It changes under `turn`, and is never less than the number that readers
    /// can find.
    ///
    /// A key is counted before it is visible and until after it is gone. A reader that has found
    /// one thus never sees an empty map.
    count: AtomicUsize,
    changes: Changes,
}

impl<V> fmt::Debug for ShardedMap<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedMap")
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

/// A number that identifies the state of a map, or of several that share it. Clones share the
/// number.
#[derive(Debug, Clone)]
pub struct Changes(Arc<AtomicU64>);

/// The changes of all maps, from 1 on, so that no two maps have the same number unless they share
/// it.
static CHANGES: AtomicU64 = AtomicU64::new(1);

fn next_change() -> u64 {
    CHANGES.fetch_add(1, Ordering::Relaxed)
}

impl Default for Changes {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(next_change())))
    }
}

impl Changes {
    /// Returns a number that no change of any map has had before.
    ///
    /// While it stays the same, nothing has changed. It is never 0. Takes no lock.
    #[must_use]
    #[inline]
    pub fn number(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Counts a change that was made.
    ///
    /// A reader that sees the number sees the change, and those that other maps have counted here
    /// before. A swap continues the release sequence of the value that it replaces.
    fn count(&self) {
        self.0.swap(next_change(), Ordering::Release);
    }
}

impl<V> Default for ShardedMap<V> {
    fn default() -> Self {
        Self::counted_by(&Changes::default())
    }
}

impl<V> ShardedMap<V> {
    /// Returns an empty map whose changes are counted by `changes`, with those of other maps.
    #[must_use]
    pub fn counted_by(changes: &Changes) -> Self {
        Self {
            shards: (0..SHARDS)
                .map(|_| ArcSwap::from_pointee(Shard::default()))
                .collect(),
            turn: Mutex::new(()),
            count: AtomicUsize::new(0),
            changes: changes.clone(),
        }
    }

    /// Returns the value of `key`. Takes no lock.
    #[must_use]
    pub fn get(&self, key: u64) -> Option<Arc<V>> {
        self.with(key, Arc::clone)
    }

    /// Returns the result of `look` on the value of `key`. Takes no lock and counts no reference.
    pub fn with<R>(&self, key: u64, look: impl FnOnce(&Arc<V>) -> R) -> Option<R> {
        let shard: Guard<Arc<Shard<V>>> = self.shard(key)?.load();
        shard.get(&key).map(look)
    }

    /// Checks whether `key` has a value.
    #[must_use]
    pub fn contains(&self, key: u64) -> bool {
        self.with(key, |_| ()).is_some()
    }

    /// Sets the value of `key`. Returns the value it had before.
    pub fn insert(&self, key: u64, value: Arc<V>) -> Option<Arc<V>> {
        self.change(key, |shard| shard.insert(key, value))
    }

    /// Removes the value of `key`.
    pub fn remove(&self, key: u64) -> Option<Arc<V>> {
        self.change(key, |shard| shard.remove(&key))
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Checks whether there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the [number](Changes::number) of this map's changes.
    #[must_use]
    #[inline]
    pub fn changes(&self) -> u64 {
        self.changes.number()
    }

    /// Returns all values, in no order. Those that are added or removed meanwhile may be missed.
    #[must_use]
    pub fn values(&self) -> Vec<Arc<V>> {
        self.shards
            .iter()
            .flat_map(|shard| shard.load().values().cloned().collect::<Vec<_>>())
            .collect()
    }

    /// Returns all keys, as [`values`](Self::values) does.
    #[must_use]
    pub fn keys(&self) -> Vec<u64> {
        self.shards
            .iter()
            .flat_map(|shard| shard.load().keys().copied().collect::<Vec<_>>())
            .collect()
    }

    fn change<R>(&self, key: u64, change: impl FnOnce(&mut Shard<V>) -> Option<R>) -> Option<R> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shard = self.shard(key)?;
        let before = shard.load();
        let mut next = Shard::clone(&before);
        let result = change(&mut next);
        let (had, has) = (before.len(), next.len());
        self.count
            .fetch_add(has.saturating_sub(had), Ordering::Release);
        shard.store(Arc::new(next));
        self.changes.count();
        self.count
            .fetch_sub(had.saturating_sub(has), Ordering::Release);
        result
    }

    fn shard(&self, key: u64) -> Option<&ArcSwap<Shard<V>>> {
        let number = (key.wrapping_mul(GOLDEN) >> 48) as usize % SHARDS;
        self.shards.get(number)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn values_are_found_by_their_keys_until_they_are_removed() {
        let map = ShardedMap::default();
        let keys = || (0..5000u64).map(|n| 0xffff_ffff_8100_0000 + n * 16);
        assert!(map.is_empty());
        for key in keys() {
            assert!(map.insert(key, Arc::new(key)).is_none());
        }
        assert_eq!(map.len(), 5000);
        assert!(keys().all(|key| map.get(key).as_deref() == Some(&key)));
        assert!(!map.contains(0xffff_ffff_8100_0001));
        assert_eq!(
            map.insert(keys().next().unwrap_or(0), Arc::new(7))
                .as_deref(),
            keys().next().as_ref()
        );
        assert_eq!(map.len(), 5000, "replaced, not added");
        for key in keys() {
            assert!(map.remove(key).is_some());
        }
        assert!(map.is_empty() && map.values().is_empty());
        assert!(map.remove(0).is_none());
    }

    #[test]
    fn readers_see_every_value_that_stays_while_others_come_and_go() {
        let map = ShardedMap::default();
        for key in 0..1000u64 {
            map.insert(key, Arc::new(key));
        }
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut rounds = 0;
                while !done.load(Ordering::Acquire) || rounds == 0 {
                    assert!((0..1000).all(|key| map.get(key).as_deref() == Some(&key)));
                    rounds += 1;
                }
            });
            for key in 1000..20_000u64 {
                map.insert(key, Arc::new(key));
                map.remove(key);
            }
            done.store(true, Ordering::Release);
            reader.join().unwrap();
        });
    }

    #[test]
    fn whoever_finds_a_key_does_not_see_an_empty_map() {
        const KEYS: u64 = 200_000;
        let map = ShardedMap::default();
        let current = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            let finder = scope.spawn(|| {
                let mut key = 0;
                while key < KEYS {
                    key = current.load(Ordering::Acquire);
                    // Each key is added once: one that is there before and after was there between.
                    assert!(!(map.contains(key) && map.is_empty() && map.contains(key)));
                }
            });
            for key in 0..KEYS {
                current.store(key, Ordering::Release);
                map.insert(key, Arc::new(key));
                map.remove(key);
            }
            current.store(KEYS, Ordering::Release);
            finder.join().unwrap();
        });
    }
}
