//! The global variables of a script.
//!
//! The threads that run a script's programs share one [`Maps`] and change it by reference. A
//! [`MapSnapshot`] serves to show a map. A variable without keys is a map with the one key that is
//! empty.
//!
//! The values of `count()` and the like are kept per shard and merged when read. There is one shard
//! a vCPU, so that hits do not wait for each other. Assigned values are kept in one place. No
//! thread's update is lost. The maps are bounded: see [`Maps::lost`]. Nothing here needs the guest:
//! symbols and stacks stay addresses.
//!
//! In the strict dialect maps are those of bt(5), oddities included. Keys are the texts that they
//! show, joined by `", "`. `count()`, `sum()`, `min()` and `max()` change plain entries, a missing
//! entry counts as 0, and several of them may change one map.

mod accumulator;
mod cells;
mod entries;
mod shards;
mod snapshot;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ast::{Aggregation, Dialect, MapSize};
use crate::shape::Shape;
use crate::value::Value;
use cells::Cells;
use shards::Shards;
pub use snapshot::{MapSnapshot, Reading};

/// A map's number: its index in the declarations.
pub type MapNumber = usize;

/// The key of an entry: empty for a variable without keys.
pub type Key = Arc<[Value]>;

/// The hasher of keys, with a random seed of its own for each map: a guest cannot choose keys that
/// collide.
type Seed = foldhash::fast::RandomState;

/// The number of bytes of a key in bt(5), of the values that are text at the time of the hit.
const STRICT_KEY_BYTES: usize = 511;

/// The greatest number of intervals that the time series of a map may keep, those of all vCPUs
/// together: some 200 MiB.
const MOST_INTERVALS: usize = 1 << 22;

/// A global variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapDeclaration {
    /// The variable's name without `@`; may be empty.
    pub name: String,
    /// The kind of map.
    pub kind: MapKind,
    /// The capacity, if it is another than that of all maps.
    pub size: Option<Capacity>,
    /// The shape of the keys: of several, that of their tuple.
    pub key_shape: Shape,
    /// The shape of the values.
    pub shape: Shape,
    /// Whether it has keys, as far as the script tells.
    pub is_keyed: bool,
}

impl MapDeclaration {
    /// Makes the declaration of a map whose keys and values are shown as they are.
    #[must_use]
    pub fn new(name: &str, kind: MapKind) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            size: None,
            key_shape: Shape::Plain,
            shape: Shape::Plain,
            is_keyed: true,
        }
    }
}

/// The room of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// The greatest number of entries.
    pub most: usize,
    /// Whether a full map drops the entry that was used least recently, and not the new one.
    pub evicts: bool,
}

impl Capacity {
    /// Returns the capacity that a script gives a map.
    #[must_use]
    pub fn of(size: &MapSize) -> Self {
        Self {
            most: size.most,
            evicts: size.evicts,
        }
    }
}

/// The contents of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapKind {
    /// Assigned values. In the strict dialect, all but histograms.
    Scalar,
    /// Values that a function aggregates.
    Aggregation(Aggregation),
}

/// All global variables of a script. An invalid map number finds nothing and changes nothing.
#[derive(Debug)]
pub struct Maps {
    maps: Vec<Map>,
    dialect: Dialect,
    lost: AtomicU64,
}

#[derive(Debug)]
struct Map {
    name: Arc<str>,
    storage: Storage,
    key_shape: Shape,
    shape: Shape,
    /// Whether it is one count, which is there from the start, as in bpftrace.
    is_count: bool,
}

#[derive(Debug)]
enum Storage {
    Cells(Cells),
    Shards(Shards),
}

impl Maps {
    /// Makes the empty maps of a script. `shards` is the number of threads that aggregate at a time
    /// (0 counts as 1). Each map has at most `most_entries` entries, if
    /// its declaration says no other number.
    #[must_use]
    pub fn new(
        declarations: Vec<MapDeclaration>,
        shards: usize,
        dialect: Dialect,
        most_entries: usize,
    ) -> Self {
        let maps = (declarations.into_iter())
            .map(|declaration| {
                let kind = declaration.kind;
                let size = declaration.size.unwrap_or(Capacity {
                    most: most_entries,
                    evicts: false,
                });
                Map {
                    name: declaration.name.into(),
                    key_shape: declaration.key_shape,
                    shape: declaration.shape,
                    is_count: !declaration.is_keyed
                        && kind == MapKind::Aggregation(Aggregation::Count),
                    storage: match kind {
                        MapKind::Scalar => Storage::Cells(Cells::new(dialect, size)),
                        MapKind::Aggregation(aggregation) => {
                            let most = size.most.min(most_keys(aggregation, shards));
                            Storage::Shards(Shards::new(aggregation, dialect, shards, most))
                        }
                    },
                }
            })
            .collect();
        Self {
            maps,
            dialect,
            lost: AtomicU64::new(0),
        }
    }

    /// Returns an entry's value. For aggregated values it is the number that they amount to, for
    /// `avg` and `stats` the mean; a histogram has none.
    ///
    /// It is `None` if there is no such entry. In the strict dialect that holds only for a map that
    /// is unset or cleared. In all others, reading an entry makes it, with the value 0, as in
    /// bt(5).
    pub fn get(&self, map: MapNumber, key: &[Value]) -> Option<Value> {
        self.with_key(key, |key| match self.storage(map)? {
            Storage::Cells(cells) => {
                let (value, stored) = cells.get(key);
                self.note(stored);
                value
            }
            Storage::Shards(shards) => shards.merged(key)?.number().map(Value::Int),
        })
    }

    /// Assigns a value. A map with an aggregation accepts no assignments.
    pub fn set(&self, map: MapNumber, key: &[Value], value: Value) {
        if let Some(Storage::Cells(cells)) = self.storage(map) {
            let stored = self.with_key(key, |key| cells.set(key, value));
            self.note(stored);
        }
    }

    /// Replaces a value by the result of `change`, as one step, and returns the new value. `change`
    /// runs under the map's lock, so it must not call the maps.
    pub fn update(
        &self,
        map: MapNumber,
        key: &[Value],
        change: impl FnOnce(Option<&Value>) -> Value,
    ) -> Value {
        let Some(Storage::Cells(cells)) = self.storage(map) else {
            return change(None);
        };
        let (value, stored) = self.with_key(key, |key| cells.update(key, change));
        self.note(stored);
        value
    }

    /// Aggregates a value for the thread of a shard. Any shard number will do, but threads that
    /// share one wait for each other. `aggregation` matters only for a map of assigned values, and
    /// the time `at`, in nanoseconds since 1970, only for a time series.
    pub fn aggregate(
        &self,
        map: MapNumber,
        shard: usize,
        aggregation: Aggregation,
        key: &[Value],
        value: i64,
        at: u64,
    ) {
        let stored = self.with_key(key, |key| match self.storage(map) {
            None => true,
            Some(Storage::Shards(shards)) => shards.add(shard, key, value, at),
            Some(Storage::Cells(cells)) => {
                (cells.update(key, |old| combine(aggregation, self.dialect, old, value))).1
            }
        });
        self.note(stored);
    }

    /// Removes an entry. Returns whether it existed.
    pub fn delete(&self, map: MapNumber, key: &[Value]) -> bool {
        self.with_key(key, |key| match self.storage(map) {
            None => false,
            Some(Storage::Cells(cells)) => cells.delete(key),
            Some(Storage::Shards(shards)) => shards.delete(key),
        })
    }

    /// Checks whether there is such an entry.
    #[must_use]
    pub fn contains(&self, map: MapNumber, key: &[Value]) -> bool {
        self.with_key(key, |key| match self.storage(map) {
            None => false,
            Some(Storage::Cells(cells)) => cells.contains(key),
            Some(Storage::Shards(shards)) => shards.contains(key),
        })
    }

    /// Removes all entries.
    pub fn clear(&self, map: MapNumber) {
        match self.storage(map) {
            None => {}
            Some(Storage::Cells(cells)) => cells.clear(),
            Some(Storage::Shards(shards)) => shards.clear(),
        }
    }

    /// Sets all entries to 0, and text to empty; in the strict dialect all to the number 0.
    /// Aggregations start anew.
    pub fn zero(&self, map: MapNumber) {
        match self.storage(map) {
            None => {}
            Some(Storage::Cells(cells)) => cells.zero(),
            Some(Storage::Shards(shards)) => shards.zero(),
        }
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self, map: MapNumber) -> usize {
        match self.storage(map) {
            None => 0,
            Some(Storage::Cells(cells)) => cells.len(),
            Some(Storage::Shards(shards)) => shards.len(),
        }
    }

    /// Returns all entries, ordered by key. Entries of one shard are of one moment.
    #[must_use]
    pub fn snapshot(&self, map: MapNumber) -> MapSnapshot {
        let Some(map) = self.maps.get(map) else {
            return MapSnapshot::default();
        };
        let mut entries = match &map.storage {
            Storage::Cells(cells) => cells.entries(),
            Storage::Shards(shards) => shards.entries(),
        };
        if entries.is_empty() && map.is_count {
            entries.push((Key::default(), Reading::Value(Value::ZERO)));
        }
        MapSnapshot::new(map.name.clone(), entries)
    }

    /// Returns the number of maps; they are numbered from 0.
    #[must_use]
    pub fn count(&self) -> usize {
        self.maps.len()
    }

    /// Returns the contents of a map; `None` if there is none of this number.
    #[must_use]
    pub fn kind(&self, map: MapNumber) -> Option<MapKind> {
        Some(match self.storage(map)? {
            Storage::Cells(_) => MapKind::Scalar,
            Storage::Shards(shards) => MapKind::Aggregation(shards.aggregation()),
        })
    }

    /// Returns a snapshot of a map as it is shown.
    #[must_use]
    pub fn dress(&self, map: MapNumber, mut snapshot: MapSnapshot) -> MapSnapshot {
        let Some(Map {
            key_shape, shape, ..
        }) = self.maps.get(map)
        else {
            return snapshot;
        };
        if (key_shape, shape) != (&Shape::Plain, &Shape::Plain) {
            for (key, reading) in &mut snapshot.entries {
                *key = key_shape.dress_key(key);
                if let Reading::Value(value) = reading {
                    let plain = std::mem::replace(value, Value::ZERO);
                    *value = shape.dress(plain);
                }
            }
        }
        snapshot
    }

    /// Returns the map of this name, without `@`.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<MapNumber> {
        self.maps.iter().position(|map| &*map.name == name)
    }

    /// Returns the number of values that were not kept: the map had no room for a new entry, or the
    /// histogram none for a new bucket.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn storage(&self, map: MapNumber) -> Option<&Storage> {
        self.maps.get(map).map(|map| &map.storage)
    }

    #[inline]
    fn note(&self, stored: bool) {
        if !stored {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Passes on the key as the dialect compares it.
    #[inline]
    fn with_key<R>(&self, key: &[Value], then: impl FnOnce(&[Value]) -> R) -> R {
        let text;
        let key = match self.dialect {
            Dialect::Normal => key,
            Dialect::Strict => {
                text = strict_key(key);
                &*text
            }
        };
        then(key)
    }
}

/// Returns the greatest number of keys with an aggregation: each may have all of its intervals on
/// each vCPU.
fn most_keys(aggregation: Aggregation, shards: usize) -> usize {
    match aggregation {
        Aggregation::TimeSeries(kind) => {
            let intervals = usize::try_from(kind.intervals).unwrap_or(usize::MAX);
            let each = intervals.saturating_mul(shards.max(1));
            (MOST_INTERVALS / each.max(1)).max(1)
        }
        _ => usize::MAX,
    }
}

/// Returns the text of a key, as bt(5) compares it: 1 and "1" are the same, and so are `1, 2` and
/// "1, 2". Values that the guest's names show, such as stacks, stay unchanged.
fn strict_key(key: &[Value]) -> Cow<'_, [Value]> {
    let text = |value: &Value| match value {
        Value::Int(number) => Some(Arc::from(number.to_string().as_bytes())),
        Value::Unsigned(number) => Some(Arc::from(number.to_string().as_bytes())),
        Value::Text(text) => Some(text.clone()),
        _ => None,
    };
    match key {
        [] => Cow::Borrowed(key),
        [Value::Text(text)] if text.len() <= STRICT_KEY_BYTES => Cow::Borrowed(key),
        _ => match key.iter().map(text).collect::<Option<Vec<_>>>() {
            Some(parts) => {
                let mut joined = parts.join(&b", "[..]);
                joined.truncate(STRICT_KEY_BYTES);
                Cow::Owned(vec![Value::Text(joined.into())])
            }
            None => (key.iter())
                .map(|value| text(value).map_or_else(|| value.clone(), Value::Text))
                .collect(),
        },
    }
}

/// Applies an aggregation to an entry that holds an assigned value. A value that cannot be added up
/// is left as it is.
fn combine(aggregation: Aggregation, dialect: Dialect, old: Option<&Value>, value: i64) -> Value {
    #[allow(clippy::cast_possible_wrap)] // C's conversion
    let old_number = match old {
        Some(Value::Int(number)) => Some(*number),
        Some(Value::Unsigned(number)) => Some(*number as i64),
        Some(_) => Some(0),
        // In bt(5) a missing entry is 0, even for the minimum.
        None if dialect == Dialect::Strict => Some(0),
        None => None,
    };
    let before = old_number.unwrap_or(0);
    Value::Int(match aggregation {
        Aggregation::Count => before.wrapping_add(1),
        Aggregation::Sum => before.wrapping_add(value),
        Aggregation::Min => old_number.map_or(value, |old| old.min(value)),
        Aggregation::Max => old_number.map_or(value, |old| old.max(value)),
        Aggregation::Average
        | Aggregation::Stats
        | Aggregation::PowerHistogram(_)
        | Aggregation::LinearHistogram { .. }
        | Aggregation::TimeSeries(_) => before,
    })
}
