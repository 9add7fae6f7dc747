//! Maple trees: the kernel's map from ranges of numbers to pointers (lib/maple_tree.c, since Linux
//! 6.1). They hold a process's VMAs.
//!
//! The caller passes a view of the kernel's memory, and the address of a `struct maple_tree`. This
//! module reads all entries in order, and the entry of one index. It does not report gaps. The
//! caller keeps the CPUs paused. If one was paused in the middle of a change, a node may be
//! [dead](MapleError::Dead).
//!
//! A pointer to a node carries the node's type in bits 3 to 6; nodes are aligned to 256 bytes. A
//! node has up to 16 slots and, between them, pivots: the last index of the slot before. The parent
//! bounds the range of the last slot.

use crate::bytes::u64_at;
use crate::kernel::btf::{Btf, MemberError};
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::list::Partial;
use crate::kernel::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// Size and alignment of a node (`MAPLE_NODE_MASK` + 1).
const NODE_SIZE: usize = 256;
const NODE_MASK: u64 = NODE_SIZE as u64 - 1;
/// The maximum number of levels that a tree can claim (`MAPLE_HEIGHT_MAX`).
const MAX_DEPTH: usize = 31;
/// The maximum number of nodes visited in one walk: room for a million entries.
const MAX_NODES: usize = 1 << 17;
/// The end of the kernel's reserved values, which have the lower bits 10 (`MAPLE_RESERVED_RANGE`).
const RESERVED: u64 = 4096;

/// The layout of the nodes of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapleLayout {
    root: u64,
    shapes: Vec<Shape>,
}

/// A type of node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// The type's number in a pointer.
    kind: u64,
    leaf: bool,
    /// The offset and number of pivots, and of slots.
    pivots: (usize, usize),
    slots: (usize, usize),
    /// Offset of the byte with the number of the last slot in use.
    end: Option<usize>,
    /// Whether that byte overlaps the last slot, and counts only if the last pivot is 0.
    end_shares: bool,
}

/// A range with the pointer stored for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapleEntry {
    /// The first index.
    pub first: u64,
    /// The last index, inclusive.
    pub last: u64,
    /// The stored value, never 0.
    pub value: u64,
}

/// An error in reading a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MapleError {
    /// A structure is not in memory, or its pointer is invalid.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// A slot of an inner node holds no node.
    #[error("invalid slot {slot} of the maple node at {node}: expected a node, found {found:#x}")]
    NoChild {
        /// The address of the inner node.
        node: Gva,
        /// The number of the slot.
        slot: usize,
        /// The value in the slot.
        found: u64,
    },
    /// The kernel's types do not list the node's type.
    #[error("the maple node at {node} is of type {kind}, which is unknown")]
    UnknownType {
        /// The address of the node.
        node: Gva,
        /// The type's number in the pointer.
        kind: u64,
    },
    /// The node was removed from the tree.
    #[error("the maple node at {node} is dead: the tree is being changed, try again")]
    Dead {
        /// The address of the node.
        node: Gva,
    },
    /// Pivots do not ascend, or leave the node's own range.
    #[error(
        "pivot {slot} of the maple node at {node} is {found:#x}, outside {first:#x} to {last:#x}"
    )]
    BadPivot {
        /// The address of the node.
        node: Gva,
        /// The number of the pivot.
        slot: usize,
        /// The pivot's value.
        found: u64,
        /// The lowest valid value.
        first: u64,
        /// The highest valid value.
        last: u64,
    },
    /// The tree has too many levels.
    #[error("the maple tree at {tree} has more than {MAX_DEPTH} levels: it is damaged")]
    TooDeep {
        /// The address of the tree.
        tree: Gva,
    },
    /// The tree has too many nodes.
    #[error("the maple tree at {tree} has more than {most} nodes: it is damaged")]
    TooManyNodes {
        /// The address of the tree.
        tree: Gva,
        /// The maximum number of nodes.
        most: usize,
    },
}

/// A node on the way: its address, and its range according to its parent.
#[derive(Debug, Clone, Copy)]
struct Place {
    pointer: u64,
    first: u64,
    last: u64,
    depth: usize,
}

/// The meaning of a tree's root pointer.
enum Root {
    Node(Place),
    Entry(MapleEntry),
    Empty,
}

impl MapleLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel has no maple trees (Linux before 6.1), or other ones.
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        let size = btf.member("maple_node.slot")?;
        let size = size.byte_offset.saturating_add(size.size);
        if size != NODE_SIZE as u64 {
            return Err(LayoutError::Size {
                path: "maple_node".to_owned(),
                found: size,
                expected: NODE_SIZE as u64,
            });
        }
        offset(btf, "maple_node.parent", 8).and_then(|at| match at {
            0 => Ok(()),
            _ => Err(LayoutError::Size {
                path: "the part of maple_node before its parent".to_owned(),
                found: at,
                expected: 0,
            }),
        })?;
        let kind = |name: &str| -> Result<u64, MemberError> {
            let value = btf.enumerator(&format!("maple_type.{name}"))?;
            Ok(value.cast_unsigned())
        };
        let range = |kind, leaf| -> Result<Shape, LayoutError> {
            Ok(Shape {
                kind,
                leaf,
                pivots: words(btf, "maple_range_64.pivot")?,
                slots: words(btf, "maple_range_64.slot")?,
                end: Some(byte(btf, "maple_range_64.meta.end")?),
                end_shares: true,
            })
        };
        let dense = Shape {
            kind: kind("maple_dense")?,
            leaf: true,
            pivots: (0, 0),
            slots: words(btf, "maple_node.slot")?,
            end: None,
            end_shares: false,
        };
        let ranges_with_gaps = Shape {
            kind: kind("maple_arange_64")?,
            leaf: false,
            pivots: words(btf, "maple_arange_64.pivot")?,
            slots: words(btf, "maple_arange_64.slot")?,
            end: Some(byte(btf, "maple_arange_64.meta.end")?),
            end_shares: false,
        };
        Ok(Self {
            root: offset(btf, "maple_tree.ma_root", 8)?,
            shapes: vec![
                dense,
                range(kind("maple_leaf_64")?, true)?,
                range(kind("maple_range_64")?, false)?,
                ranges_with_gaps,
            ],
        })
    }

    /// Finds the entry whose range contains `index`, in the tree at `tree`.
    ///
    /// # Errors
    /// If a node on the way is broken or not in memory.
    pub fn find(
        &self,
        view: MemoryView<'_>,
        tree: Gva,
        index: u64,
    ) -> Result<Option<MapleEntry>, MapleError> {
        let mut place = match self.root(view, tree)? {
            Root::Empty => return Ok(None),
            Root::Entry(entry) => return Ok((index == 0).then_some(entry)),
            Root::Node(place) => place,
        };
        let mut slots = Vec::with_capacity(32);
        loop {
            let leaf = self.read_node(view, tree, place, &mut slots)?;
            let found = slots
                .iter()
                .enumerate()
                .find(|(_, slot)| slot.first <= index && index <= slot.last);
            match found {
                Some((slot, entry)) if !leaf => place = child(place, slot, *entry)?,
                found => {
                    return Ok(found
                        .map(|(_, entry)| *entry)
                        .filter(|entry| is_data(entry.value)));
                }
            }
        }
    }

    /// Returns all entries of the tree at `tree`, ascending.
    #[must_use]
    pub fn entries(&self, view: MemoryView<'_>, tree: Gva) -> Partial<MapleEntry, MapleError> {
        let mut items = Vec::new();
        let error = self.walk(view, tree, &mut items).err();
        Partial { items, error }
    }

    fn walk(
        &self,
        view: MemoryView<'_>,
        tree: Gva,
        entries: &mut Vec<MapleEntry>,
    ) -> Result<(), MapleError> {
        let mut pending = match self.root(view, tree)? {
            Root::Empty => return Ok(()),
            Root::Entry(entry) => {
                entries.push(entry);
                return Ok(());
            }
            Root::Node(place) => vec![Ok(place)],
        };
        let mut slots = Vec::with_capacity(32);
        let mut visited = 0;
        while let Some(place) = pending.pop() {
            let place = place?;
            visited += 1;
            if visited > MAX_NODES {
                let most = MAX_NODES;
                return Err(MapleError::TooManyNodes { tree, most });
            }
            if self.read_node(view, tree, place, &mut slots)? {
                entries.extend(slots.iter().filter(|slot| is_data(slot.value)));
                continue;
            }
            // Reversed, because the first slot must be popped first, so that all slots before a bad
            // one are walked.
            let children = slots.iter().enumerate().rev();
            pending.extend(children.map(|(number, slot)| child(place, number, *slot)));
        }
        Ok(())
    }

    fn root(&self, view: MemoryView<'_>, tree: Gva) -> Result<Root, MapleError> {
        let root = Structure::at(view, "maple tree", tree)?.u64(self.root)?;
        Ok(match root {
            0 => Root::Empty,
            pointer if pointer & 3 == 2 && pointer > RESERVED => Root::Node(Place {
                pointer,
                first: 0,
                last: u64::MAX,
                depth: 1,
            }),
            value => Root::Entry(MapleEntry {
                first: 0,
                last: 0,
                value,
            }),
        })
    }

    /// Reads a node's slots with their ranges, including empty ones. Returns whether the node is a
    /// leaf.
    fn read_node(
        &self,
        view: MemoryView<'_>,
        tree: Gva,
        place: Place,
        slots: &mut Vec<MapleEntry>,
    ) -> Result<bool, MapleError> {
        slots.clear();
        if place.depth > MAX_DEPTH {
            return Err(MapleError::TooDeep { tree });
        }
        let node = Gva(place.pointer & !NODE_MASK);
        let kind = place.pointer >> 3 & 0xf;
        let shape = self
            .shapes
            .iter()
            .find(|shape| shape.kind == kind)
            .ok_or(MapleError::UnknownType { node, kind })?;
        let bytes: [u8; NODE_SIZE] = Structure::at(view, "maple node", node)?.array(0)?;
        let parent = u64_at(&bytes, 0).unwrap_or(0);
        if parent & !NODE_MASK == node.0 {
            return Err(MapleError::Dead { node });
        }
        let end = shape.last_slot(&bytes);
        let mut first = place.first;
        for slot in 0..=end {
            let pivot = match shape.pivot(&bytes, slot) {
                // A dense node has one index per slot.
                _ if shape.pivots.1 == 0 => Some(first),
                Some(0) if slot > 0 => None,
                _ if slot == end => None,
                pivot => pivot,
            };
            let last = pivot.unwrap_or(place.last);
            if last < first || last > place.last {
                return Err(MapleError::BadPivot {
                    node,
                    slot,
                    found: last,
                    first,
                    last: place.last,
                });
            }
            let value = u64_at(&bytes, shape.slots.0 + 8 * slot).unwrap_or(0);
            slots.push(MapleEntry { first, last, value });
            if last == place.last {
                break;
            }
            first = last + 1;
        }
        Ok(shape.leaf)
    }
}

impl Shape {
    fn pivot(&self, bytes: &[u8], slot: usize) -> Option<u64> {
        (slot < self.pivots.1)
            .then(|| u64_at(bytes, self.pivots.0 + 8 * slot))
            .flatten()
    }

    /// Returns the number of the last slot in use according to the node. It may be lower where a
    /// pivot reaches the node's end.
    fn last_slot(&self, bytes: &[u8]) -> usize {
        let most = self.slots.1.saturating_sub(1);
        let last_pivot = self.pivot(bytes, self.pivots.1.saturating_sub(1));
        match self.end.and_then(|end| bytes.get(end)) {
            Some(_) if self.end_shares && last_pivot != Some(0) => most,
            Some(end) => usize::from(*end).min(most),
            None => most,
        }
    }
}

/// Returns the node that an inner node's slot points to.
fn child(parent: Place, slot: usize, entry: MapleEntry) -> Result<Place, MapleError> {
    let pointer = entry.value;
    match pointer & !NODE_MASK {
        0 => Err(MapleError::NoChild {
            node: Gva(parent.pointer & !NODE_MASK),
            slot,
            found: pointer,
        }),
        _ => Ok(Place {
            pointer,
            first: entry.first,
            last: entry.last,
            depth: parent.depth + 1,
        }),
    }
}

/// Checks whether a leaf's slot holds a user's value, and not nothing or a mark of the kernel.
fn is_data(value: u64) -> bool {
    value != 0 && !(value & 3 == 2 && value < RESERVED)
}

/// Returns the offset and number of the 8-byte elements of an array in a node.
fn words(btf: &Btf, path: &str) -> Result<(usize, usize), LayoutError> {
    let member = btf.member(path)?;
    let place = || {
        let offset = usize::try_from(member.byte_offset).ok()?;
        let size = usize::try_from(member.size).ok()?;
        let inside = offset.checked_add(size)? <= NODE_SIZE && size != 0 && size % 8 == 0;
        inside.then_some((offset, size / 8))
    };
    place().ok_or_else(|| LayoutError::Size {
        path: path.to_owned(),
        found: member.size,
        expected: 8,
    })
}

/// Returns the offset of a byte in a node.
fn byte(btf: &Btf, path: &str) -> Result<usize, LayoutError> {
    let at = offset(btf, path, 1)?;
    // An offset outside the node reads as absent.
    Ok(usize::try_from(at).unwrap_or(usize::MAX))
}

#[cfg(test)]
pub(super) mod tests;
