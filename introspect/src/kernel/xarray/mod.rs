//! XArrays: the kernel's map from numbers to pointers (lib/xarray.c, since Linux 4.20). They hold a
//! file's cached pages.
//!
//! The caller passes a view of the kernel's memory and the address of a `struct xarray`. This
//! module reads the entry at one index, with its range of indices. The caller interprets the entry.
//!
//! An entry with bit 0 set is a plain number. The lower bits 10 mark entries of the array itself.
//! These are pointers to nodes, `sibling` entries that refer to another slot of the same node, and
//! two marks of the kernel.

use crate::bytes::u64_at;
use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// The highest internal entry that is a mark; those above are pointers to nodes.
const HIGHEST_MARK: u64 = 4096;
/// `XA_RETRY_ENTRY`: the node's content moved.
const RETRY: u64 = 256 << 2 | 2;
/// `XA_ZERO_ENTRY`: reserved, reads as nothing.
const ZERO: u64 = 257 << 2 | 2;
/// The binary logarithm of the maximum number of slots of a node (`XA_CHUNK_SHIFT` is 6, or 4 in
/// small kernels).
const MAX_CHUNK_SHIFT: u32 = 6;

/// The layout of a kernel's xarrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XArrayLayout {
    head: u64,
    shift: u64,
    slots: u64,
    /// The number of slots of a node as a power of two.
    chunk_shift: u32,
}

/// An entry at an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XArrayEntry {
    /// The first index of the entry.
    pub first: u64,
    /// The last index of the entry, inclusive.
    pub last: u64,
    /// The entry's value.
    pub value: XArrayValue,
}

/// The value of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XArrayValue {
    /// A pointer, as stored: its lower bits may be the user's tags.
    Pointer(Gva),
    /// A number of 63 bits.
    Value(u64),
}

/// An error in reading an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum XArrayError {
    /// A structure is not in memory, or its pointer is invalid.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// The node does not have the level that its parent implies.
    #[error("the xarray node at {node} has shift {found}, which its place in the tree rules out")]
    BadShift {
        /// The address of the node.
        node: Gva,
        /// The node's shift.
        found: u8,
    },
    /// An entry has no known meaning, or is a sibling of a sibling.
    #[error("slot {slot} of the xarray node at {node} holds {found:#x}, which means nothing there")]
    BadEntry {
        /// The address of the node; of the array itself for its head.
        node: Gva,
        /// The number of the slot.
        slot: u64,
        /// The entry in the slot.
        found: u64,
    },
    /// The array was paused in the middle of a change.
    #[error("the xarray node at {node} is being replaced: try again")]
    Retry {
        /// The address of the node.
        node: Gva,
    },
}

/// The content of a slot.
enum Slot {
    Empty,
    User(XArrayValue),
    Node(Gva),
    Sibling(u64),
    Retry,
    Unknown,
}

impl XArrayLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel has no xarrays (Linux before 4.20), or other ones.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        let slots = btf.member("xa_node.slots")?;
        let chunk_shift = (slots.size / 8).checked_ilog2().unwrap_or(0);
        if slots.size != 8 << chunk_shift || !(1..=MAX_CHUNK_SHIFT).contains(&chunk_shift) {
            return Err(LayoutError::Size {
                path: "xa_node.slots".to_owned(),
                found: slots.size,
                expected: 8 << MAX_CHUNK_SHIFT,
            });
        }
        Ok(Self {
            head: offset(btf, "xarray.xa_head", 8)?,
            shift: offset(btf, "xa_node.shift", 1)?,
            slots: slots.byte_offset,
            chunk_shift,
        })
    }

    /// Finds the entry at `index` of the array at `array`; `None` if there is none.
    ///
    /// # Errors
    /// If a node on the way is broken or not in memory.
    pub fn find(
        &self,
        view: MemoryView<'_>,
        array: Gva,
        index: u64,
    ) -> Result<Option<XArrayEntry>, XArrayError> {
        let head = Structure::at(view, "xarray", array)?.u64(self.head)?;
        let mut node = match decode(head) {
            Slot::Node(node) => node,
            Slot::Empty => return Ok(None),
            Slot::User(value) => {
                let entry = XArrayEntry {
                    first: 0,
                    last: 0,
                    value,
                };
                return Ok((index == 0).then_some(entry));
            }
            _ => {
                return Err(XArrayError::BadEntry {
                    node: array,
                    slot: 0,
                    found: head,
                });
            }
        };
        let mut level = None;
        // Shifts decrease from node to node, so this ends.
        loop {
            let structure = Structure::at(view, "xarray node", node)?;
            let shift = self.shift(&structure, level)?;
            if level.is_none() && index.checked_shr(shift + self.chunk_shift).unwrap_or(0) != 0 {
                return Ok(None);
            }
            let mut slots = [0; 8 << MAX_CHUNK_SHIFT];
            let used = slots.split_at_mut(8 << self.chunk_shift).0;
            structure.read(self.slots, used)?;
            let asked = index >> shift & self.last_slot();
            let (mut slot, mut found) = (asked, slot_at(&slots, asked));
            if let Slot::Sibling(of) = decode(found) {
                slot = of;
                found = slot_at(&slots, slot);
                if matches!(decode(found), Slot::Node(_) | Slot::Sibling(_)) {
                    return Err(XArrayError::BadEntry { node, slot, found });
                }
            }
            match decode(found) {
                Slot::Empty => return Ok(None),
                Slot::User(value) => {
                    let span = |slot: u64| slot << shift;
                    let base = index & !(span(self.last_slot()) | (span(1) - 1));
                    let siblings = (slot + 1..=self.last_slot())
                        .take_while(|at| {
                            matches!(decode(slot_at(&slots, *at)), Slot::Sibling(of) if of == slot)
                        })
                        .count() as u64;
                    // Another slot's entry applies to this one only if the siblings reach it
                    // without a gap.
                    if !(slot..=slot + siblings).contains(&asked) {
                        return Err(XArrayError::BadEntry {
                            node,
                            slot: asked,
                            found: slot_at(&slots, asked),
                        });
                    }
                    return Ok(Some(XArrayEntry {
                        first: base | span(slot),
                        last: base | span(slot + siblings) | (span(1) - 1),
                        value,
                    }));
                }
                Slot::Node(child) if shift != 0 => (node, level) = (child, Some(shift)),
                Slot::Retry => return Err(XArrayError::Retry { node }),
                _ => return Err(XArrayError::BadEntry { node, slot, found }),
            }
        }
    }

    fn last_slot(&self) -> u64 {
        (1 << self.chunk_shift) - 1
    }

    /// Returns the number of index bits below those that choose a slot of this node.
    fn shift(&self, node: &Structure<'_>, parent: Option<u32>) -> Result<u32, XArrayError> {
        let found = node.u8(self.shift)?;
        let shift = u32::from(found);
        let fits = match parent {
            Some(parent) => parent.checked_sub(self.chunk_shift) == Some(shift),
            None => shift < u64::BITS && shift % self.chunk_shift == 0,
        };
        match fits {
            true => Ok(shift),
            false => Err(XArrayError::BadShift {
                node: node.address(),
                found,
            }),
        }
    }
}

fn slot_at(slots: &[u8], slot: u64) -> u64 {
    usize::try_from(slot)
        .ok()
        .and_then(|slot| u64_at(slots, slot.checked_mul(8)?))
        .unwrap_or(0)
}

fn decode(entry: u64) -> Slot {
    match entry {
        0 | ZERO => Slot::Empty,
        _ if entry & 1 == 1 => Slot::User(XArrayValue::Value(entry >> 1)),
        _ if entry & 3 == 0 => Slot::User(XArrayValue::Pointer(Gva(entry))),
        RETRY => Slot::Retry,
        _ if entry >> 2 < (1 << MAX_CHUNK_SHIFT) - 1 => Slot::Sibling(entry >> 2),
        // Errors are negative numbers, so no node is in the last page of the address space.
        _ if entry > HIGHEST_MARK && entry < HIGHEST_MARK.wrapping_neg() => {
            Slot::Node(Gva(entry & !3))
        }
        _ => Slot::Unknown,
    }
}

#[cfg(test)]
pub(crate) mod tests;
