//! From a `struct page` to its memory, and back (Documentation/mm/memory-model.rst of Linux).
//!
//! Most kernels map one array of `struct page` for all of physical memory
//! (`CONFIG_SPARSEMEM_VMEMMAP`). Others keep an array per section of 128 MiB, and each page carries
//! its section's number in the upper bits of its flags. The first kind is recognised by the
//! function that fills the one array.

use super::PageCacheError;
use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::structure::Structure;
use crate::kernel::symbols::Symbols;
use crate::x86_64::PAGE;
use crate::{Gpa, Gva, MemoryView};

/// The start of the array of `struct page` in a kernel without a variable for it, with 4 and 5
/// levels of page tables.
const VMEMMAP: u64 = 0xffff_ea00_0000_0000;
const VMEMMAP_5_LEVELS: u64 = 0xffd4_0000_0000_0000;
/// The first physical address beyond x86-64.
const PHYSICAL_END: u64 = 1 << 52;
/// The number of pages of a section (`PAGES_PER_SECTION`).
const SECTION_PAGES: u64 = 1 << 15;
/// The first bit of a section's number in `page.flags`. The topmost `MAX_PHYSMEM_BITS` -
/// `SECTION_SIZE_BITS` bits hold it: 46 - 27 with 4 levels. With 5 levels there is always one
/// array.
const SECTION_NUMBER: u32 = 64 - (46 - 27);
/// The maximum number of sections.
const SECTIONS: u64 = 1 << (64 - SECTION_NUMBER);
/// The flag bits in `mem_section.section_mem_map`; arrays of pages are aligned.
const SECTION_FLAGS: u64 = PAGE - 1;
/// `SECTION_HAS_MEM_MAP`.
const HAS_PAGES: u64 = 1 << 1;

/// The arrays of `struct page` in a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryModel {
    arrays: Arrays,
    /// Size of a `struct page` in bytes.
    pub(super) page_size: u64,
    /// Offset of the page's flags.
    flags: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrays {
    /// One array, whose address is in this variable, if there is one.
    Whole(Option<Gva>),
    Sections {
        /// The variable with the address of an array of pointers to arrays of `mem_section`.
        roots: Gva,
        /// Size of a `mem_section` in bytes.
        size: u64,
        /// Offset of the pointer to the section's pages.
        pages: u64,
    },
}

impl MemoryModel {
    /// Looks up the offsets. `flags` is that of `page.flags`.
    pub(super) fn new(btf: &Btf, symbols: &Symbols, flags: u64) -> Result<Self, LayoutError> {
        let odd_size = |name: &str, found, expected| LayoutError::Size {
            path: name.to_owned(),
            found,
            expected,
        };
        let page_size = btf.size_of("page").unwrap_or(0);
        if !(16..=256).contains(&page_size) {
            return Err(odd_size("page", page_size, 64));
        }
        let base = symbols.address_of("vmemmap_base").map(Gva);
        let whole = base.is_some() || symbols.address_of("vmemmap_populate").is_some();
        let arrays = match symbols.address_of("mem_section").map(Gva) {
            Some(roots) if !whole => {
                let size = btf.size_of("mem_section").unwrap_or(0);
                if !(8..=PAGE).contains(&size) {
                    return Err(odd_size("mem_section", size, 16));
                }
                let pages = offset(btf, "mem_section.section_mem_map", 8)?;
                Arrays::Sections { roots, size, pages }
            }
            _ => Arrays::Whole(base),
        };
        Ok(Self {
            arrays,
            page_size,
            flags,
        })
    }

    /// Returns the first byte of the memory of the `struct page` at `page`.
    pub(super) fn gpa(&self, view: MemoryView<'_>, page: Gva) -> Result<Gpa, PageCacheError> {
        let (array, frames) = match self.arrays {
            Arrays::Whole(variable) => (whole_array(view, variable)?, 0..PHYSICAL_END / PAGE),
            Arrays::Sections { roots, size, pages } => {
                let flags = Structure::at(view, "page", page)?.u64(self.flags)?;
                let section = flags >> SECTION_NUMBER;
                let array = section_pages(view, roots, size, pages, section)?;
                let first = section * SECTION_PAGES;
                (array, first..first + SECTION_PAGES)
            }
        };
        // The stored address is that of element 0 of the whole array, which lies before the
        // section's own elements.
        let distance = page.0.wrapping_sub(array);
        let frame = distance / self.page_size;
        match distance % self.page_size == 0 && frames.contains(&frame) {
            true => Ok(Gpa(frame * PAGE)),
            false => Err(PageCacheError::NotAPage { page, array }),
        }
    }

    /// Returns the `struct page` of the page that contains `gpa`. Does not check that it is in
    /// memory: addresses outside RAM have none.
    pub(super) fn page_at(&self, view: MemoryView<'_>, gpa: Gpa) -> Result<Gva, PageCacheError> {
        if gpa.0 >= PHYSICAL_END {
            return Err(PageCacheError::NotPhysical { gpa });
        }
        let frame = gpa.0 / PAGE;
        let array = match self.arrays {
            Arrays::Whole(variable) => whole_array(view, variable)?,
            Arrays::Sections { roots, size, pages } => match frame / SECTION_PAGES {
                number @ SECTIONS.. => return Err(PageCacheError::NoSection { number, found: 0 }),
                number => section_pages(view, roots, size, pages, number)?,
            },
        };
        // A kernel's numbers are small. Corrupt ones make an address that is not mapped.
        Ok(Gva(array.wrapping_add(frame.wrapping_mul(self.page_size))))
    }
}

/// Returns the start of the one array of pages, which is in `variable` if there is such a variable.
fn whole_array(view: MemoryView<'_>, variable: Option<Gva>) -> Result<u64, PageCacheError> {
    Ok(match variable {
        Some(variable) => Structure::at(view, "variable vmemmap_base", variable)?.u64(0)?,
        None if view.space().levels == 5 => VMEMMAP_5_LEVELS,
        None => VMEMMAP,
    })
}

/// Returns the address that the `struct page` of frame 0 would have if the array of a section
/// reached that far.
fn section_pages(
    view: MemoryView<'_>,
    roots: Gva,
    size: u64,
    pages: u64,
    number: u64,
) -> Result<u64, PageCacheError> {
    let per_root = PAGE / size;
    let variable = Structure::at(view, "variable mem_section", roots)?;
    let table = variable.follow_always(0, "table of mem_section")?;
    let found = match table.follow(number / per_root * 8, "mem_section")? {
        Some(root) => root.u64(number % per_root * size + pages)?,
        None => 0,
    };
    match found & HAS_PAGES != 0 {
        true => Ok(found & !SECTION_FLAGS),
        false => Err(PageCacheError::NoSection { number, found }),
    }
}
