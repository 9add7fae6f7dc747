//! An index from names to numbers, for tables that keep the names themselves.
//!
//! The caller compares the names: what is found has the name's hash, and nearly always the name. A collision costs
//! time and nothing else.

/// Names by their hash.
#[derive(Debug)]
pub(super) struct NameIndex {
    /// `hash << 32 | number`, ascending once [`sort`](Self::sort)ed.
    keys: Vec<u64>,
}

impl NameIndex {
    /// An empty index with room for `names`.
    pub(super) fn with_capacity(names: usize) -> Self {
        Self {
            keys: Vec::with_capacity(names),
        }
    }

    /// Adds a name; several may be alike.
    pub(super) fn add(&mut self, name: &[u8], number: u32) {
        self.keys.push(hash(name) << 32 | u64::from(number));
    }

    /// To be called once, after the last name and before the first question.
    pub(super) fn sort(&mut self) {
        self.keys.sort_unstable();
    }

    /// The numbers whose names may be `name`, ascending.
    pub(super) fn candidates(&self, name: &[u8]) -> impl Iterator<Item = u32> + use<'_> {
        let hash = hash(name);
        let first = self.keys.partition_point(|key| key >> 32 < hash);
        self.keys
            .get(first..)
            .unwrap_or_default()
            .iter()
            .take_while(move |key| **key >> 32 == hash)
            .map(|key| (*key & 0xffff_ffff) as u32)
    }
}

/// FNV-1a, 32 bits.
fn hash(name: &[u8]) -> u64 {
    let hash = name.iter().fold(0x811c_9dc5u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    u64::from(hash)
}
