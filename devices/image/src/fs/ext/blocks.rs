//! The blocks of a file: trees of extents, and the older map of blocks.
//!
//! Both are trees on the disk whose nodes may lead anywhere, each to a part of the file. A file has
//! a budget of nodes.

use crate::bytes::{short, word};
use crate::disk::Window;
use crate::file::{Run, Runs};
use crate::fs::FsError;

/// The most nodes of a file: extents of 100 GiB in the worst places, or a map of 100 GiB.
const MOST_NODES: u32 = 30_000;
/// The deepest tree of extents (Linux, `EXT4_MAX_EXTENT_DEPTH`).
const MOST_DEPTH: u16 = 5;
const EXTENT_MAGIC: u16 = 0xf30a;
/// Extents of more blocks than this are allocated and not written: zeros.
const LONGEST: u64 = 32768;

const DAMAGED: FsError = FsError::Damaged("the places of a file's blocks");

struct Walk<'a> {
    window: &'a Window,
    block: u64,
    /// The file's size in bytes.
    size: u64,
    runs: Runs,
    nodes: u32,
    /// The blocks of all extents, those beyond its size included.
    blocks: u64,
}

impl Walk<'_> {
    fn node(&mut self, block: u64) -> Result<Vec<u8>, FsError> {
        self.nodes += 1;
        if self.nodes > MOST_NODES {
            return Err(DAMAGED);
        }
        let at = block.checked_mul(self.block).ok_or(DAMAGED)?;
        let size = usize::try_from(self.block).map_err(|_| DAMAGED)?;
        Ok(self.window.vec(at, size)?)
    }

    /// Adds blocks of the file; those beyond its size are left out.
    fn add(&mut self, block: u64, from: u64, count: u64) -> Result<(), FsError> {
        let at = block.checked_mul(self.block).ok_or(DAMAGED)?;
        let Some(left) = self.size.checked_sub(at).filter(|left| *left > 0) else {
            return Ok(());
        };
        let run = Run {
            at,
            from: from.checked_mul(self.block).ok_or(DAMAGED)?,
            length: count.checked_mul(self.block).ok_or(DAMAGED)?.min(left),
        };
        self.runs.add(run).ok_or(DAMAGED)
    }

    fn extents(&mut self, node: &[u8], depth: Option<u16>) -> Result<(), FsError> {
        let header = (|| {
            (short(node, 0)? == EXTENT_MAGIC).then_some(())?;
            Some((short(node, 2)?, short(node, 6)?))
        })();
        let (count, found) = header.ok_or(DAMAGED)?;
        // Each level says how many are below it, so that no circle is followed.
        if found > MOST_DEPTH || depth.is_some_and(|depth| depth != found) {
            return Err(DAMAGED);
        }
        let entries = node.chunks_exact(12).skip(1).take(count.into());
        for entry in entries {
            let place = (|| {
                let first = u64::from(word(entry, 0)?);
                Some(match found.checked_sub(1) {
                    None => (first, word(entry, 8)?, short(entry, 6)?, None),
                    Some(below) => (first, word(entry, 4)?, short(entry, 8)?, Some(below)),
                })
            })();
            let (first, low, high, below) = place.ok_or(DAMAGED)?;
            let block = u64::from(high) << 32 | u64::from(low);
            match below {
                Some(below) => {
                    let child = self.node(block)?;
                    self.extents(&child, Some(below))?;
                }
                None => {
                    let count = u64::from(short(entry, 4).unwrap_or_default());
                    let unwritten = count.checked_sub(LONGEST).filter(|count| *count > 0);
                    self.blocks = self.blocks.saturating_add(unwritten.unwrap_or(count));
                    if count > 0 && count <= LONGEST {
                        self.add(first, block, count)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds the blocks below an entry of the map, `depth` levels of nodes down; returns the number
    /// of the next block of the file.
    fn mapped(&mut self, next: u64, block: u32, depth: u32) -> Result<u64, FsError> {
        let per_node = self.block / 4;
        let covered = per_node.checked_pow(depth).ok_or(DAMAGED)?;
        let is_beyond = next.saturating_mul(self.block) >= self.size;
        if block == 0 || is_beyond {
            return next.checked_add(covered).ok_or(DAMAGED);
        }
        if depth == 0 {
            self.add(next, block.into(), 1)?;
            return Ok(next + 1);
        }
        let node = self.node(block.into())?;
        let mut at = next;
        for entry in node.chunks_exact(4) {
            if at.saturating_mul(self.block) >= self.size {
                break;
            }
            at = self.mapped(at, word(entry, 0).unwrap_or_default(), depth - 1)?;
        }
        next.checked_add(covered).ok_or(DAMAGED)
    }
}

fn walk(window: &Window, block: u32, size: u64) -> Walk<'_> {
    Walk {
        window,
        block: block.into(),
        size,
        runs: Runs::new(),
        nodes: 0,
        blocks: 0,
    }
}

/// Returns the runs of a file with a tree of extents, whose root is in its inode, and the number of
/// blocks of its extents and of the tree's nodes.
pub(super) fn extents(
    window: &Window,
    block: u32,
    root: &[u8],
    size: u64,
) -> Result<(Vec<Run>, u64), FsError> {
    let mut walk = walk(window, block, size);
    walk.extents(root, None)?;
    let blocks = walk.blocks.saturating_add(walk.nodes.into());
    Ok((walk.runs.finish(), blocks))
}

/// Returns the runs of a file with a map of blocks: twelve, and three trees of one to three levels.
pub(super) fn mapped(
    window: &Window,
    block: u32,
    root: &[u8],
    size: u64,
) -> Result<Vec<Run>, FsError> {
    let mut walk = walk(window, block, size);
    let mut next = 0;
    for (index, entry) in root.chunks_exact(4).enumerate() {
        let depth = index.saturating_sub(11).min(3);
        let entry = word(entry, 0).unwrap_or_default();
        next = walk.mapped(next, entry, u32::try_from(depth).map_err(|_| DAMAGED)?)?;
    }
    Ok(walk.runs.finish())
}
