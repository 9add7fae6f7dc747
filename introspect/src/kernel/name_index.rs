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
    pub(super) fn write(self, out: &mut Vec<u8>) {
        out.reserve_exact(self.keys.len() * KEY);
        let sorted = sorted(&self.keys);
        out.extend(sorted.iter().flat_map(|key| key.to_le_bytes()));
    }
}

/// The upper bits of a hash by which keys are put into buckets.
const BUCKET_BITS: u32 = 16;

/// Returns keys in ascending order. Hashes are spread evenly: a kernel's quarter of a million names
/// come four to a bucket, which takes a fifth of the instructions of sorting them all.
fn sorted(keys: &[u64]) -> Vec<u64> {
    let bucket = |key: u64| (key >> (u64::BITS - BUCKET_BITS)) as usize;
    // The place of each bucket's next key.
    let mut next = vec![0; (1 << BUCKET_BITS) + 1];
    for key in keys {
        if let Some(count) = next.get_mut(bucket(*key) + 1) {
            *count += 1;
        }
    }
    let mut before = 0;
    for start in &mut next {
        before += *start;
        *start = before;
    }
    let mut sorted = vec![0; keys.len()];
    for key in keys {
        let place = next.get_mut(bucket(*key));
        if let Some(place) = place
            && let Some(slot) = sorted.get_mut(*place)
        {
            *slot = *key;
            *place += 1;
        }
    }
    // Each is behind its bucket's last key now. A guest may choose names of one hash: they are
    // sorted as fast as any others.
    let mut start = 0;
    for end in next {
        if let Some(bucket) = sorted.get_mut(start..end) {
            bucket.sort_unstable();
        }
        start = start.max(end);
    }
    sorted
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_sorted_however_their_hashes_are_spread() {
        let spread = |n: u64| hash(&n.to_le_bytes()) << 32 | n;
        let one = |n: u64| 0xabcd_0000_0000_0000 | (n * 7919 % 5000);
        let ends = |n: u64| if n.is_multiple_of(2) { u64::MAX - n } else { n };
        for key in [&spread as &dyn Fn(u64) -> u64, &one, &ends] {
            for count in [0, 1, 2, 5000] {
                let keys: Vec<u64> = (0..count).map(key).collect();
                let mut expected = keys.clone();
                expected.sort_unstable();
                assert!(sorted(&keys) == expected, "{count}");
            }
        }
    }
}
