//! The VMAs of a process: the content of its address space, as in `/proc/PID/maps`.
//!
//! The caller passes a view of the kernel's memory, with the CPUs paused, and the address of an
//! `mm_struct` (`task_struct.mm`). This module reads all VMAs in order, the one that contains an
//! address, and [the name of each](VmaLayout::name). It does not read the paths of files, which
//! need the process's root. A VMA names its `struct file`.
//!
//! VMAs are in a maple tree since Linux 6.1. Before that, they are in a list with a red-black tree
//! beside it.

mod flags;
mod name;

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::list::Partial;
use super::maple_tree::{MapleError, MapleLayout};
use super::structure::{Structure, StructureError};
use super::symbols::Symbols;
use super::vma_list::{VmaList, VmaListError};
use crate::bytes::u64_at;
use crate::x86_64::PAGE;
use crate::{Gva, MemoryView};

pub use flags::VmaFlags;
use name::NameLayout;
pub use name::{MmBounds, VmaName};

/// The maximum number of VMAs read of one process. `vm.max_map_count` is 65,530 by default, and a
/// million on some machines.
pub const MAX_VMAS: usize = 1 << 20;
/// Size in bytes of the part of a `vm_area_struct` that must contain all members read; it has about
/// 200.
const MAX_SIZE: usize = 1024;

/// A VMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vma {
    /// The address of the `vm_area_struct`.
    pub address: Gva,
    /// The address of the first byte.
    pub start: u64,
    /// The address after the last byte.
    pub end: u64,
    /// The permissions and kind.
    pub flags: VmaFlags,
    /// Offset of the first byte in the file, in bytes. Without a file, a number of the kernel's
    /// own.
    pub file_offset: u64,
    /// The address of the `struct file` that is mapped.
    pub file: Option<Gva>,
    /// The value of `vm_ops`.
    operations: Option<Gva>,
    /// The value of `vm_private_data`.
    private_data: Option<Gva>,
    /// The name that the process set: the address of an `anon_vma_name`.
    given_name: Option<Gva>,
}

impl Vma {
    /// Checks whether `address` is inside.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

/// An error in reading VMAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VmaError {
    /// A structure is not in memory, or its pointer is invalid.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// The tree is broken.
    #[error("the memory areas of the mm_struct at {mm} cannot be listed: {source}")]
    Tree {
        /// The address of the `mm_struct`.
        mm: Gva,
        /// The cause.
        source: MapleError,
    },
    /// The list is broken.
    #[error("the memory areas of the mm_struct at {mm} cannot be listed: {source}")]
    List {
        /// The address of the `mm_struct`.
        mm: Gva,
        /// The cause.
        source: VmaListError,
    },
    /// The VMA's ends are invalid.
    #[error("the vm_area_struct at {vma} reaches from {start:#x} to {end:#x}: it is damaged")]
    BadRange {
        /// The address of the VMA.
        vma: Gva,
        /// The value of `vm_start`.
        start: u64,
        /// The value of `vm_end`.
        end: u64,
    },
    /// The VMA claims to belong to another process.
    #[error(
        "the vm_area_struct at {vma} belongs to the mm_struct {found}, not {mm}: it is damaged"
    )]
    Foreign {
        /// The address of the VMA.
        vma: Gva,
        /// The value of `vm_mm`.
        found: Gva,
        /// The address of the requested `mm_struct`.
        mm: Gva,
    },
    /// The names are longer than are read.
    #[error(
        "the names of the first {named} memory areas of the mm_struct at {mm} have {bytes} bytes: the rest is left out"
    )]
    LongNames {
        /// The address of the `mm_struct`.
        mm: Gva,
        /// The number of VMAs that were read.
        named: usize,
        /// Size of their names in bytes.
        bytes: usize,
    },
    /// There are more VMAs than are read.
    #[error("the mm_struct at {mm} has more than {MAX_VMAS} memory areas: it is damaged")]
    TooMany {
        /// The address of the `mm_struct`.
        mm: Gva,
    },
}

/// The location of a kernel's VMAs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmaLayout {
    index: Index,
    start: usize,
    end: usize,
    mm: usize,
    flags: usize,
    page_offset: usize,
    file: usize,
    operations: usize,
    private_data: usize,
    /// The location of the name that a process set.
    given_name: Option<GivenName>,
    /// The number of bytes to read of a `vm_area_struct`.
    size: usize,
    names: NameLayout,
}

/// The index by which a kernel finds VMAs.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Index {
    /// Linux 6.1 and later; with the tree's offset in `mm_struct`.
    Maple(MapleLayout, u64),
    List(VmaList),
}

/// The location of the name that a process set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GivenName {
    offset: usize,
    /// Whether it applies only to VMAs without a file: with a file, the bytes hold something else
    /// (up to Linux 6.1).
    without_file_only: bool,
}

impl VmaLayout {
    /// Looks up the offsets. `symbols` must have the slide of the running kernel; they identify the
    /// kinds of VMAs without a file.
    ///
    /// # Errors
    /// If the kernel's types do not describe VMAs.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        let index = match offset(btf, "mm_struct.mm_mt.ma_root", 8) {
            Ok(_) => {
                let tree = btf.member("mm_struct.mm_mt")?.byte_offset;
                Index::Maple(MapleLayout::new(btf)?, tree)
            }
            // In a newer kernel, the error of the tree says more than that of the missing list.
            Err(error) => Index::List(VmaList::new(btf).map_err(|_| error)?),
        };
        let mut size = 0;
        let mut at = |path: &str| field(btf, path, 8, &mut size);
        // Absent without CONFIG_ANON_VMA_NAME.
        let shared = btf.member("vm_area_struct.shared").ok();
        let shared = shared.map(|shared| shared.byte_offset);
        let given_name = at("vm_area_struct.anon_name").ok().map(|offset| GivenName {
            offset,
            without_file_only: shared == Some(offset as u64),
        });
        Ok(Self {
            index,
            start: at("vm_area_struct.vm_start")?,
            end: at("vm_area_struct.vm_end")?,
            mm: at("vm_area_struct.vm_mm")?,
            flags: at("vm_area_struct.vm_flags")?,
            page_offset: at("vm_area_struct.vm_pgoff")?,
            file: at("vm_area_struct.vm_file")?,
            operations: at("vm_area_struct.vm_ops")?,
            private_data: at("vm_area_struct.vm_private_data")?,
            given_name,
            size,
            names: NameLayout::new(btf, symbols)?,
        })
    }

    /// Reads all VMAs of the `mm_struct` at `mm`, ascending.
    #[must_use]
    pub fn vmas(&self, view: MemoryView<'_>, mm: Gva) -> Partial<Vma, VmaError> {
        let mut items = Vec::new();
        let error = match &self.index {
            Index::Maple(maple, tree) => {
                let walk = maple.entries(view, Gva(mm.0.wrapping_add(*tree)));
                let broken = walk.error.map(|source| VmaError::Tree { mm, source });
                let areas = walk.items.iter().map(|entry| Gva(entry.value));
                self.collect(view, mm, areas, &mut items).err().or(broken)
            }
            Index::List(list) => {
                let mut broken = None;
                let areas = list.walk(view, mm, &mut broken);
                let error = self.collect(view, mm, areas, &mut items).err();
                error.or(broken.map(|source| VmaError::List { mm, source }))
            }
        };
        Partial { items, error }
    }

    /// Finds the VMA of the `mm_struct` at `mm` that contains `address`.
    ///
    /// # Errors
    /// If the VMAs cannot be searched.
    pub fn find(
        &self,
        view: MemoryView<'_>,
        mm: Gva,
        address: u64,
    ) -> Result<Option<Vma>, VmaError> {
        let found = match &self.index {
            Index::Maple(maple, tree) => maple
                .find(view, Gva(mm.0.wrapping_add(*tree)), address)
                .map_err(|source| VmaError::Tree { mm, source })?
                .map(|entry| Gva(entry.value)),
            Index::List(list) => list
                .find(view, mm, address)
                .map_err(|source| VmaError::List { mm, source })?,
        };
        let vma = found.map(|at| self.vma_of(view, mm, at)).transpose()?;
        Ok(vma.filter(|vma| vma.contains(address)))
    }

    fn collect(
        &self,
        view: MemoryView<'_>,
        mm: Gva,
        areas: impl Iterator<Item = Gva>,
        vmas: &mut Vec<Vma>,
    ) -> Result<(), VmaError> {
        for address in areas {
            if vmas.len() == MAX_VMAS {
                return Err(VmaError::TooMany { mm });
            }
            vmas.push(self.vma_of(view, mm, address)?);
        }
        Ok(())
    }

    /// Reads the VMA at `address`, which must belong to `mm`.
    fn vma_of(&self, view: MemoryView<'_>, mm: Gva, address: Gva) -> Result<Vma, VmaError> {
        let (vma, found) = self.read(view, address)?;
        match found == Some(mm) {
            true => Ok(vma),
            false => Err(VmaError::Foreign {
                vma: address,
                found: found.unwrap_or(Gva(0)),
                mm,
            }),
        }
    }

    /// Reads the VMA at `address`, and its `mm_struct`.
    fn read(&self, view: MemoryView<'_>, address: Gva) -> Result<(Vma, Option<Gva>), VmaError> {
        let mut bytes = [0; MAX_SIZE];
        let part = bytes.split_at_mut(self.size.min(MAX_SIZE)).0;
        Structure::at(view, "vm_area_struct", address)?.read(0, part)?;
        let number = |offset| u64_at(&bytes, offset).unwrap_or(0);
        let pointer = |offset| Some(number(offset)).filter(|p| *p != 0).map(Gva);
        let (start, end) = (number(self.start), number(self.end));
        if start >= end {
            let vma = address;
            return Err(VmaError::BadRange { vma, start, end });
        }
        let file = pointer(self.file);
        let vma = Vma {
            address,
            start,
            end,
            flags: VmaFlags(number(self.flags)),
            file_offset: number(self.page_offset).wrapping_mul(PAGE),
            file,
            operations: pointer(self.operations),
            private_data: pointer(self.private_data),
            given_name: self
                .given_name
                .filter(|name| !(name.without_file_only && file.is_some()))
                .and_then(|name| pointer(name.offset)),
        };
        Ok((vma, pointer(self.mm)))
    }
}

/// Looks up the offset of a member of `vm_area_struct`, and grows `size` to cover it.
fn field(btf: &Btf, path: &str, expected: u64, size: &mut usize) -> Result<usize, LayoutError> {
    let at = offset(btf, path, expected)?;
    let end = at.saturating_add(expected);
    match usize::try_from(at) {
        Ok(offset) if end <= MAX_SIZE as u64 => {
            *size = (*size).max(offset + 8);
            Ok(offset)
        }
        _ => Err(LayoutError::Size {
            path: format!("the part of vm_area_struct before {path}"),
            found: at,
            expected: MAX_SIZE as u64,
        }),
    }
}

#[cfg(test)]
pub(crate) mod tests;
