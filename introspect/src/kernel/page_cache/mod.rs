//! The page cache: the location of a file's bytes in guest-physical memory, whether or not a
//! process maps them.
//!
//! The caller passes a view of the kernel's memory, with the CPUs paused, and the address of a
//! `struct file`. This module finds the page of a file's page index, reads cached bytes of a file,
//! and finds the file of a page of memory. It does not cover files of hugetlbfs and DAX, whose
//! pages are not in the cache. Nor does it see data never read from the disk, or changes of the
//! compressed or encrypted file beneath.
//!
//! The cache holds `struct page`s, which describe pages. Each is checked to belong to the file at
//! that index.

mod memory_model;
mod owner;

pub use owner::PageOwner;

use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, first_offset, offset};
use crate::kernel::structure::{Structure, StructureError};
use crate::kernel::symbols::Symbols;
use crate::kernel::xarray::{XArrayError, XArrayLayout, XArrayValue};
use crate::x86_64::PAGE;
use crate::{Gpa, Gva, MemoryView, PhysicalReadError};

use memory_model::MemoryModel;

/// The number of pages of the largest folio, 1 GiB.
const MAX_FOLIO_PAGES: u64 = 1 << 18;
/// The bit of `page.compound_head` that is set in all pages of a folio but the first.
const TAIL: u64 = 1;
/// The bits that are set if that word is a mask and not an address. The mask, applied to a `struct
/// page`'s address, yields that of the first page (Linux 7.1 and later, `compound_info`). No
/// `struct page` is at an address with these bits, where the kernel image is.
const MASK: u64 = 0xffff_ffff_0000_0000;

/// The location of a kernel's page cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageCacheLayout {
    xarray: XArrayLayout,
    file_mapping: u64,
    inode_size: u64,
    inode_mapping: Option<u64>,
    host: u64,
    pages: u64,
    operations: u64,
    model: MemoryModel,
    page_flags: u64,
    page_mapping: u64,
    page_index: u64,
    compound_head: u64,
    /// The bit of `page.flags` for bytes that match the file.
    up_to_date: u32,
    /// The bit of `page.flags` for bytes being written to the disk.
    writeback: Option<u32>,
    /// The operations of files whose index counts large pages.
    huge_operations: Option<Gva>,
    /// Offset of the page's type, if the kernel has one.
    page_type: Option<u64>,
    /// The bit of `page.flags` for memory of the slab allocator. Since Linux 6.11 the type says
    /// that.
    slab: Option<u32>,
}

/// A file in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CachedFile {
    /// The address of the file's `address_space`.
    pub mapping: Gva,
    /// The address of the file's `inode`.
    pub inode: Gva,
    /// The file's length in bytes.
    pub size: u64,
}

/// The cache's entry at a page index of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CachedPage {
    /// Nothing: the page was never read, or was dropped.
    Absent,
    /// A page.
    Present {
        /// The address of the page's first byte.
        gpa: Gpa,
        /// The address of the `struct page` of the page itself, not of its folio.
        page: Gva,
    },
    /// A page that is not filled yet.
    Filling {
        /// The address of the `struct page`.
        page: Gva,
    },
    /// A number instead of a page: the trace of a dropped one, or in tmpfs its place in the swap
    /// area.
    Value(u64),
}

/// An error in looking up a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PageCacheError {
    /// A structure is not in memory, or its pointer is invalid.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// The file cannot have pages.
    #[error("the {what} at {address} has no address_space: it is not a file with content")]
    NoMapping {
        /// The structure: `file` or `address_space`.
        what: &'static str,
        /// The structure's address.
        address: Gva,
    },
    /// The file's length is negative.
    #[error("the inode at {inode} has a size of {found:#x}: it is damaged")]
    BadSize {
        /// The address of the inode.
        inode: Gva,
        /// The `i_size` found.
        found: u64,
    },
    /// The file is in hugetlbfs.
    #[error(
        "the inode at {inode} is a file of hugetlbfs, which the page cache does not hold page by page"
    )]
    HugePages {
        /// The address of the inode.
        inode: Gva,
    },
    /// The array of pages is broken.
    #[error("page {index} of the address_space at {mapping} cannot be found: {source}")]
    Pages {
        /// The address of the `address_space`.
        mapping: Gva,
        /// The requested page index.
        index: u64,
        /// The cause.
        source: XArrayError,
    },
    /// The array's entry is another file's page, or no page.
    #[error(
        "the page at {page}, found for page {index} of the address_space at {mapping}, says that it is page \
         {found_index:#x} of {found_mapping}"
    )]
    Foreign {
        /// The address of the `struct page` of the folio.
        page: Gva,
        /// The address of the `address_space`.
        mapping: Gva,
        /// The requested page index.
        index: u64,
        /// The index found.
        found_index: u64,
        /// The mapping found.
        found_mapping: Gva,
    },
    /// The address is not of an element of the array of pages.
    #[error("the page at {page} is not in the array of pages at {array:#x}")]
    NotAPage {
        /// The address taken for a `struct page`.
        page: Gva,
        /// The start of the array.
        array: u64,
    },
    /// The address is beyond physical memory.
    #[error("guest-physical {gpa} is past the last address that x86-64 has (2^52 - 1)")]
    NotPhysical {
        /// The address.
        gpa: Gpa,
    },
    /// A page names a section of memory that does not exist.
    #[error("section {number} of memory has no array of pages (its section_mem_map is {found:#x})")]
    NoSection {
        /// The section's number.
        number: u64,
        /// The `section_mem_map` found.
        found: u64,
    },
}

/// An error in reading bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReadFileError {
    /// The cache is broken.
    #[error(transparent)]
    Cache(#[from] PageCacheError),
    /// A page is not in memory.
    #[error("the byte at {offset:#x} of the file is not in memory ({found:?})")]
    NotCached {
        /// Offset in the file of the first missing byte.
        offset: u64,
        /// The cache's entry for it.
        found: CachedPage,
    },
    /// The range reaches past the file's end.
    #[error("{length} bytes at {offset:#x} reach past the end of the file ({size:#x} bytes)")]
    PastEnd {
        /// Offset of the first requested byte.
        offset: u64,
        /// The number of requested bytes.
        length: usize,
        /// Length of the file in bytes.
        size: u64,
    },
    /// The page is not in RAM.
    #[error("the page of the byte at {offset:#x} of the file cannot be read: {source}")]
    Physical {
        /// Offset of the byte in the file.
        offset: u64,
        /// The cause.
        source: PhysicalReadError,
    },
}

impl PageCacheLayout {
    /// Looks up the offsets. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel's types do not describe a page cache.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        let page_flags = first_offset(btf, &["folio.flags", "page.flags"], 8)?;
        let flag = |value: i64| u32::try_from(value).ok().filter(|bit| *bit < u64::BITS);
        let up_to_date = btf.enumerator("pageflags.PG_uptodate")?;
        let slab = btf.enumerator("pageflags.PG_slab").ok();
        Ok(Self {
            xarray: XArrayLayout::new(btf)?,
            file_mapping: offset(btf, "file.f_mapping", 8)?,
            inode_size: offset(btf, "inode.i_size", 8)?,
            inode_mapping: offset(btf, "inode.i_mapping", 8).ok(),
            host: offset(btf, "address_space.host", 8)?,
            pages: btf.member("address_space.i_pages")?.byte_offset,
            operations: offset(btf, "address_space.a_ops", 8)?,
            model: MemoryModel::new(btf, symbols, page_flags)?,
            page_flags,
            page_mapping: first_offset(btf, &["folio.mapping", "page.mapping"], 8)?,
            page_index: first_offset(btf, &["folio.index", "page.index"], 8)?,
            compound_head: first_offset(btf, &["page.compound_head", "page.compound_info"], 8)?,
            up_to_date: flag(up_to_date).ok_or_else(|| LayoutError::Size {
                path: "pageflags.PG_uptodate".to_owned(),
                found: up_to_date.cast_unsigned(),
                expected: 2,
            })?,
            writeback: btf.enumerator("pageflags.PG_writeback").ok().and_then(flag),
            huge_operations: symbols.address_of("hugetlbfs_aops").map(Gva),
            page_type: offset(btf, "page.page_type", 4).ok(),
            slab: slab.and_then(flag),
        })
    }

    /// Returns the cache of the file that the `struct file` at `file` has open.
    ///
    /// # Errors
    /// If it has none, or cannot be read.
    pub fn open_file(&self, view: MemoryView<'_>, file: Gva) -> Result<CachedFile, PageCacheError> {
        let file = Structure::at(view, "file", file)?;
        self.cached_file(linked(file, self.file_mapping, "address_space")?)
    }

    /// Returns the cache of the file with the inode at `inode`.
    ///
    /// # Errors
    /// If it has none, or cannot be read.
    pub fn of_inode(&self, view: MemoryView<'_>, inode: Gva) -> Result<CachedFile, PageCacheError> {
        let inode = Structure::at(view, "inode", inode)?;
        let none = PageCacheError::NoMapping {
            what: inode.kind(),
            address: inode.address(),
        };
        let place = self.inode_mapping.ok_or(none)?;
        self.cached_file(linked(inode, place, "address_space")?)
    }

    fn cached_file(&self, mapping: Structure<'_>) -> Result<CachedFile, PageCacheError> {
        let structure = linked(mapping, self.host, "inode")?;
        let (inode, size) = (structure.address(), structure.u64(self.inode_size)?);
        if i64::try_from(size).is_err() {
            let found = size;
            return Err(PageCacheError::BadSize { inode, found });
        }
        let operations = mapping.pointer(self.operations)?;
        if operations.is_some() && operations == self.huge_operations {
            return Err(PageCacheError::HugePages { inode });
        }
        Ok(CachedFile {
            mapping: mapping.address(),
            inode,
            size,
        })
    }

    /// Returns the cache's entry for page `index` of the file: its bytes from `index` × 4096 on.
    ///
    /// # Errors
    /// If the cache is broken or not in memory.
    pub fn page(
        &self,
        view: MemoryView<'_>,
        file: &CachedFile,
        index: u64,
    ) -> Result<CachedPage, PageCacheError> {
        self.page_in(view, file.mapping, index)
    }

    /// Returns the cache's entry at `index` in the `address_space` at `mapping`.
    fn page_in(
        &self,
        view: MemoryView<'_>,
        mapping: Gva,
        index: u64,
    ) -> Result<CachedPage, PageCacheError> {
        let pages = Gva(mapping.0.wrapping_add(self.pages));
        let entry =
            self.xarray
                .find(view, pages, index)
                .map_err(|source| PageCacheError::Pages {
                    mapping,
                    index,
                    source,
                })?;
        match entry.map(|entry| entry.value) {
            None => Ok(CachedPage::Absent),
            Some(XArrayValue::Value(value)) => Ok(CachedPage::Value(value)),
            Some(XArrayValue::Pointer(found)) => self.page_of_folio(view, mapping, index, found),
        }
    }

    /// Returns page `index` of the file with `mapping`, given any page of the folio that holds it.
    fn page_of_folio(
        &self,
        view: MemoryView<'_>,
        mapping: Gva,
        index: u64,
        found: Gva,
    ) -> Result<CachedPage, PageCacheError> {
        let head = self.head_of(view, found)?;
        let found_index = head.u64(self.page_index)?;
        let found_mapping = Gva(head.u64(self.page_mapping)?);
        let foreign = PageCacheError::Foreign {
            page: head.address(),
            mapping,
            index,
            found_index,
            found_mapping,
        };
        let within = index
            .checked_sub(found_index)
            .filter(|within| found_mapping == mapping && *within < MAX_FOLIO_PAGES)
            .ok_or(foreign)?;
        let page = head.member(within * self.model.page_size);
        // Only the folio's own pages point to its first.
        if within != 0 && self.head_of(view, page)?.address() != head.address() {
            return Err(foreign);
        }
        let gpa = self.model.gpa(view, page)?;
        let up_to_date = head.u64(self.page_flags)? >> self.up_to_date & 1 == 1;
        Ok(match up_to_date {
            true => CachedPage::Present { gpa, page },
            false => CachedPage::Filling { page },
        })
    }

    /// Returns the first page of a page's folio, which for a single page is the page itself.
    fn head_of<'m>(
        &self,
        view: MemoryView<'m>,
        page: Gva,
    ) -> Result<Structure<'m>, PageCacheError> {
        let page = Structure::at(view, "page", page)?;
        let link = page.u64(self.compound_head)?;
        Ok(match link {
            _ if link & TAIL == 0 => page,
            // The page's address does not have the bit.
            _ if link & MASK == MASK => Structure::at(view, "page", Gva(page.address().0 & link))?,
            _ => Structure::at(view, "page", Gva(link - TAIL))?,
        })
    }

    /// Checks whether the bytes of the `struct page` at `page`, or of its folio, are being written
    /// to a disk.
    ///
    /// # Errors
    /// If the `struct page` is not in memory.
    pub fn is_in_writeback(&self, view: MemoryView<'_>, page: Gva) -> Result<bool, PageCacheError> {
        let flags = self.head_of(view, page)?.u64(self.page_flags)?;
        Ok(self.writeback.is_some_and(|bit| flags >> bit & 1 == 1))
    }

    /// Returns the first byte of the memory of the `struct page` at `page`.
    ///
    /// # Errors
    /// If it has none.
    pub fn memory_of(&self, view: MemoryView<'_>, page: Gva) -> Result<Gpa, PageCacheError> {
        self.model.gpa(view, page)
    }

    /// Returns the page index of the `struct page` at `page`, the first of its folio.
    ///
    /// # Errors
    /// If it is not in memory.
    pub fn index_of(&self, view: MemoryView<'_>, page: Gva) -> Result<u64, PageCacheError> {
        Ok(Structure::at(view, "page", page)?.u64(self.page_index)?)
    }

    /// Fills `buf` with the file's bytes from `offset` on. The content of `buf` is undefined after
    /// an error.
    ///
    /// # Errors
    /// If one of the bytes is not in memory, or past the file's end.
    pub fn read(
        &self,
        view: MemoryView<'_>,
        file: &CachedFile,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), ReadFileError> {
        let length = buf.len();
        let end = offset.checked_add(length as u64);
        if end.is_none_or(|end| end > file.size) {
            return Err(ReadFileError::PastEnd {
                offset,
                length,
                size: file.size,
            });
        }
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let gpa = match self.page(view, file, at / PAGE)? {
                CachedPage::Present { gpa, .. } => Gpa(gpa.0 + at % PAGE),
                found => return Err(ReadFileError::NotCached { offset: at, found }),
            };
            let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
            let (part, behind) = rest.split_at_mut(in_page.min(rest.len()));
            view.physical()
                .read_physical(gpa, part)
                .map_err(|source| ReadFileError::Physical { offset: at, source })?;
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }
}

/// Follows the pointer at `offset`, which is never null for a file with content.
fn linked<'p>(
    from: Structure<'p>,
    offset: u64,
    kind: &'static str,
) -> Result<Structure<'p>, PageCacheError> {
    from.follow(offset, kind)?.ok_or(PageCacheError::NoMapping {
        what: from.kind(),
        address: from.address(),
    })
}

#[cfg(test)]
mod tests;
