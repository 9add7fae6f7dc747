//! An index from names to numbers, for tables that keep the names themselves.
//!
//! The caller compares the names. A candidate has the name's hash, and nearly always the name. A
//! collision only costs time. The finished index is plain bytes, so that it can be stored in a
//! file.

/// A builder of an index.
#[derive(Debug)]
pub(super) struct NameIndexBuilder {
    keys: Vec<u64>,
}

/// Size of a key in bytes: `hash << 32 | number`, little-endian.
pub(super) const KEY: usize = 8;

impl NameIndexBuilder {
    /// Makes an empty index with room for `names`.
    pub(super) fn with_capacity(names: usize) -> Self {
        Self {
            keys: Vec::with_capacity(names),
        }
    }

    /// Adds a name; duplicates are allowed.
    pub(super) fn add(&mut self, name: &[u8], number: u32) {
        self.keys.push(hash(name) << 32 | u64::from(number));
    }

    /// Returns the number of names.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Appends the index to `out`: [`KEY`] bytes for each name.
    pub(super) fn write(mut self, out: &mut Vec<u8>) {
        self.keys.sort_unstable();
        out.reserve_exact(self.keys.len() * KEY);
        out.extend(self.keys.iter().flat_map(|key| key.to_le_bytes()));
    }
}

/// Names by their hash: keys in ascending order.
#[derive(Debug, Clone, Copy)]
pub(super) struct NameIndex<'a> {
    keys: &'a [[u8; KEY]],
}

impl<'a> NameIndex<'a> {
    /// Accepts the index that [`NameIndexBuilder::write`] wrote. Other bytes yield wrong numbers or
    /// none.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            keys: bytes.as_chunks().0,
        }
    }

    /// Returns the numbers whose names may be `name`, ascending.
    pub(super) fn candidates(self, name: &[u8]) -> impl Iterator<Item = u32> + use<'a> {
        let hash = hash(name);
        let key = |bytes: &[u8; KEY]| u64::from_le_bytes(*bytes);
        let first = self.keys.partition_point(|bytes| key(bytes) >> 32 < hash);
        self.keys
            .get(first..)
            .unwrap_or_default()
            .iter()
            .map(key)
            .take_while(move |key| *key >> 32 == hash)
            .map(|key| (key & 0xffff_ffff) as u32)
    }
}

/// Computes FNV-1a of 32 bits.
fn hash(name: &[u8]) -> u64 {
    let hash = name.iter().fold(0x811c_9dc5u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    u64::from(hash)
}
