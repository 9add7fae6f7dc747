//! VMAs before Linux 6.1: a list in the order of addresses, and a red-black tree of the same VMAs.
//!
//! A walk follows the list; a search descends the tree. [`vma`](super::vma) reads the VMAs
//! themselves.

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::structure::{Structure, StructureError};
use crate::{Gva, MemoryView};

/// The kinds of structures.
const MM: &str = "mm_struct";
const AREA: &str = "vm_area_struct";
/// The maximum number of levels of a red-black tree of the maximum number of VMAs: twice the binary
/// logarithm, with room.
const MAX_DEPTH: usize = 64;

/// The location of the list and the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmaList {
    first: u64,
    next: u64,
    root: u64,
    /// Offsets of the tree's links in a VMA.
    node: u64,
    left: u64,
    right: u64,
    start: u64,
    end: u64,
}

/// An error in listing VMAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VmaListError {
    /// A structure is not in memory, or its pointer is invalid.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// The next VMA is not above the one before. The list is broken, and might be a ring.
    #[error(
        "the vm_area_struct at {vma} starts at {start:#x}, below the end {previous:#x} of the one before it"
    )]
    Order {
        /// The address of the VMA.
        vma: Gva,
        /// The start of the VMA.
        start: u64,
        /// The end of the VMA before.
        previous: u64,
    },
    /// The tree has too many levels.
    #[error(
        "the red-black tree of the mm_struct at {mm} has more than {MAX_DEPTH} levels: it is damaged"
    )]
    TooDeep {
        /// The address of the `mm_struct`.
        mm: Gva,
    },
}

impl VmaList {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel stores its VMAs in another way (Linux 6.1 and later).
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

    /// Returns the VMAs in order. If the list is broken, the walk ends and `error` says why. Each
    /// VMA starts at or above the end of the one before, so the walk cannot loop.
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

    /// Returns the VMA that a link points to, and its end; `None` after the last.
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

    /// Finds the VMA that contains `address`.
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
