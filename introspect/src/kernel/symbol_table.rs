//! The flat bytes behind [`Symbols`](super::symbols::Symbols): all names, then 16 bytes for each
//! symbol, then the index of names.
//!
//! The caller sorts: absolute symbols first, then the others, each part ascending by address. Bytes
//! from elsewhere yield wrong symbols but no panics.

use super::name_index::{KEY, NameIndex, NameIndexBuilder};
use super::shared_bytes::SharedBytes;

/// Size of a stored symbol in bytes.
pub(super) const ENTRY: usize = 16;

/// A stored symbol; its name is a range of the names of its [`Table`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) address: u64,
    pub(super) name_start: u32,
    pub(super) name_length: u16,
    pub(super) kind: u8,
    pub(super) absolute: bool,
}

impl Entry {
    pub(super) fn from_bytes(bytes: &[u8; ENTRY]) -> Self {
        let word = u128::from_le_bytes(*bytes);
        Self {
            address: word as u64,
            name_start: (word >> 64) as u32,
            name_length: (word >> 96) as u16,
            kind: (word >> 112) as u8,
            absolute: word >> 120 != 0,
        }
    }

    pub(super) fn to_bytes(self) -> [u8; ENTRY] {
        let name = u128::from(self.name_start) << 64 | u128::from(self.name_length) << 96;
        let rest = u128::from(self.kind) << 112 | u128::from(self.absolute) << 120;
        (u128::from(self.address) | name | rest).to_le_bytes()
    }

    pub(super) fn address_in(bytes: &[u8; ENTRY]) -> u64 {
        Self::from_bytes(bytes).address
    }

    pub(super) fn name<'a>(&self, names: &'a [u8]) -> &'a [u8] {
        let start = self.name_start as usize;
        names
            .get(start..start + usize::from(self.name_length))
            .unwrap_or_default()
    }
}

/// The properties of a flat table of symbols that are not in its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TableShape {
    /// The number of symbols.
    pub(super) count: usize,
    /// The number of absolute symbols.
    pub(super) absolute: usize,
    /// The first address past the image (without slide), if known.
    pub(super) end: Option<u64>,
}

/// Names, entries (absolute symbols first, then the others, each part ascending by address), index
/// to the entries.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) bytes: SharedBytes,
    pub(super) shape: TableShape,
}

impl Table {
    /// Returns `None` if the bytes are too few for the shape.
    pub(super) fn new(bytes: SharedBytes, shape: TableShape) -> Option<Self> {
        let fixed = shape.count.checked_mul(ENTRY + KEY)?;
        (fixed <= bytes.as_bytes().len()).then_some(Self { bytes, shape })
    }

    /// Builds the table of sorted entries.
    pub(super) fn build(names: Vec<u8>, entries: &[Entry], end: Option<u64>) -> Self {
        let mut by_name = NameIndexBuilder::with_capacity(entries.len());
        for (index, entry) in (0..).zip(entries) {
            by_name.add(entry.name(&names), index);
        }
        let shape = TableShape {
            count: entries.len(),
            absolute: entries.partition_point(|entry| entry.absolute),
            end,
        };
        let mut bytes = names;
        bytes.reserve_exact(shape.count * (ENTRY + KEY));
        bytes.extend(entries.iter().flat_map(|entry| entry.to_bytes()));
        by_name.write(&mut bytes);
        let bytes = SharedBytes::new(bytes);
        Self { bytes, shape }
    }

    /// Returns the same table with all addresses `by` bytes lower, except those of absolute
    /// symbols.
    pub(super) fn lowered(&self, by: u64) -> Self {
        let count = self.shape.count;
        let mut bytes = self.bytes.as_bytes().to_vec();
        let entries = bytes.len().saturating_sub(count * (ENTRY + KEY));
        let entries = bytes.get_mut(entries..).unwrap_or_default();
        for bytes in entries.as_chunks_mut().0.iter_mut().take(count) {
            let mut entry = Entry::from_bytes(bytes);
            if !entry.absolute {
                entry.address = entry.address.wrapping_sub(by);
            }
            *bytes = entry.to_bytes();
        }
        Self {
            bytes: SharedBytes::new(bytes),
            shape: TableShape {
                end: self.shape.end.map(|end| end.wrapping_sub(by)),
                ..self.shape
            },
        }
    }

    /// Returns names, entries and index.
    pub(super) fn parts(&self) -> (&[u8], &[[u8; ENTRY]], NameIndex<'_>) {
        let bytes = self.bytes.as_bytes();
        let TableShape { count, .. } = self.shape;
        let names = bytes.len().saturating_sub(count * (ENTRY + KEY));
        let (names, rest) = bytes.split_at(names);
        let (entries, index) = rest.split_at_checked(count * ENTRY).unwrap_or_default();
        (names, entries.as_chunks().0, NameIndex::new(index))
    }

    pub(super) fn entries(&self) -> &[[u8; ENTRY]] {
        self.parts().1
    }

    /// Returns the symbols whose value is an address in the image.
    pub(super) fn relocatable(&self) -> &[[u8; ENTRY]] {
        self.entries()
            .get(self.shape.absolute..)
            .unwrap_or_default()
    }
}
