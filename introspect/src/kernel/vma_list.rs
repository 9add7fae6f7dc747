//! Memory areas before Linux 6.1: a list in the order of addresses, and a red-black tree over the same areas.
//!
//! The list is what a walk follows, the tree what a search descends. [`vma`](super::vma) reads the areas themselves.

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// Kinds of structures.
const MM: &str = "mm_struct";
const AREA: &str = "vm_area_struct";
/// Levels of a red-black tree of as many areas as there can be: twice the binary logarithm, with room.
const MAX_DEPTH: usize = 64;

/// Where the list and the tree stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmaList {
    first: u64,
    next: u64,
    root: u64,
    /// Of the tree's links in an area.
    node: u64,
    left: u64,
    right: u64,
    start: u64,
    end: u64,
}

/// Why areas could not be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VmaListError {
    /// A structure is not in memory, or what should point to it does not.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// The next area does not lie higher: the list is broken, and might be a ring.
    #[error(
        "the vm_area_struct at {vma} starts at {start:#x}, below the end {previous:#x} of the one before it"
    )]
    Order {
        /// Address of the area.
        vma: Gva,
        /// Its start.
        start: u64,
        /// End of the one before.
        previous: u64,
    },
    /// More levels than the tree can have.
    #[error(
        "the red-black tree of the mm_struct at {mm} has more than {MAX_DEPTH} levels: it is damaged"
    )]
    TooDeep {
        /// Address of the `mm_struct`.
        mm: Gva,
    },
}

impl VmaList {
    /// Finds the offsets.
    ///
    /// # Errors
    /// If the kernel keeps its areas in another way (Linux 6.1 and later).
    pub fn new(btf: &Btf) -> Result<Self, LayoutError> {
        Ok(Self {
            first: offset(btf, "mm_struct.mmap", 8)?,
            next: offset(btf, "vm_area_struct.vm_next", 8)?,
            root: offset(btf, "mm_struct.mm_rb.rb_node", 8)?,
            node: offset(btf, "vm_area_struct.vm_rb", 24)?,
            left: offset(btf, "rb_node.rb_left", 8)?,
            right: offset(btf, "rb_node.rb_right", 8)?,
            start: offset(btf, "vm_area_struct.vm_start", 8)?,
            end: offset(btf, "vm_area_struct.vm_end", 8)?,
        })
    }

    /// The areas in order. If the list is broken, the walk ends and `error` says why. Each area starts where the one
    /// before ends or higher, so that there is no walking in circles.
    pub fn walk<'a>(
        &'a self,
        view: MemoryView<'a>,
        mm: Gva,
        error: &'a mut Option<VmaListError>,
    ) -> impl Iterator<Item = Gva> + 'a {
        let mut link = (MM, mm, self.first);
        let mut previous = 0;
        std::iter::from_fn(move || {
            let (kind, base, offset) = link;
            let step = Structure::at(view, kind, base)
                .map_err(VmaListError::from)
                .and_then(|base| self.step(&base, offset, previous));
            match step {
                Ok(next) => {
                    let (vma, end) = next?;
                    previous = end;
                    link = (AREA, vma, self.next);
                    Some(vma)
                }
                Err(broken) => {
                    *error = Some(broken);
                    None
                }
            }
        })
        .fuse()
    }

    /// The area that a link leads to, and its end; `None` behind the last.
    fn step(
        &self,
        base: &Structure<'_>,
        link: u64,
        previous: u64,
    ) -> Result<Option<(Gva, u64)>, VmaListError> {
        let Some(vma) = base.follow(link, AREA)? else {
            return Ok(None);
        };
        let (start, end) = (vma.u64(self.start)?, vma.u64(self.end)?);
        let vma = vma.address();
        if start < previous || end <= start {
            return Err(VmaListError::Order {
                vma,
                start,
                previous,
            });
        }
        Ok(Some((vma, end)))
    }

    /// The area that holds `address`.
    ///
    /// # Errors
    /// If the tree is broken or not in memory.
    pub fn find(
        &self,
        view: MemoryView<'_>,
        mm: Gva,
        address: u64,
    ) -> Result<Option<Gva>, VmaListError> {
        let mut node = Structure::at(view, MM, mm)?.pointer(self.root)?;
        for _ in 0..MAX_DEPTH {
            let Some(Gva(at)) = node else {
                return Ok(None);
            };
            let vma = Structure::at(view, AREA, Gva(at.wrapping_sub(self.node)))?;
            let child = if address < vma.u64(self.start)? {
                self.left
            } else if address >= vma.u64(self.end)? {
                self.right
            } else {
                return Ok(Some(vma.address()));
            };
            node = vma.pointer(self.node.wrapping_add(child))?;
        }
        Err(VmaListError::TooDeep { mm })
    }
}
