//! From a page of memory back to the file whose bytes it holds.

use super::{CachedPage, MAX_FOLIO_PAGES, PageCacheError, PageCacheLayout};
use crate::kernel::structure::Structure;
use crate::x86_64::PAGE;
use crate::{Gpa, Gva, MemoryView};

/// The lower bits of `page.mapping`, set if it is not an `address_space` (`PAGE_MAPPING_FLAGS`).
const MAPPING_FLAGS: u64 = 3;
/// The lowest count of mappings, which shares its bytes with `page.page_type`
/// (`PAGE_MAPCOUNT_RESERVE`). Lower values are the type of a page that no file has: free, a page
/// table, the slab allocator's.
const LOWEST_MAP_COUNT: i32 = -128;

/// A page's place in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageOwner {
    /// The address of the file's `address_space`, as in
    /// [`CachedFile::mapping`](super::CachedFile::mapping).
    pub mapping: Gva,
    /// The page index: the page holds the file's bytes from `index` × 4096 on.
    pub index: u64,
}

impl PageCacheLayout {
    /// Returns the file that owns the page with the byte at `gpa`. Returns `None` if the page is in
    /// no file's cache: anonymous memory, the kernel's own, free pages, pages of hugetlbfs. The
    /// page's own mapping counts only if the cache of that file has this very page at that index.
    ///
    /// # Errors
    /// If the page has no `struct page`, because it is not RAM, or the cache is broken.
    pub fn owner(
        &self,
        view: MemoryView<'_>,
        gpa: Gpa,
    ) -> Result<Option<PageOwner>, PageCacheError> {
        let gpa = Gpa(gpa.0 & !(PAGE - 1));
        let page = self.model.page_at(view, gpa)?;
        let head = self.head_of(view, page)?;
        let (head, within) = match head.address() == page {
            true => (head, 0),
            false => {
                let first = self.model.gpa(view, head.address())?;
                let distance = gpa.0.checked_sub(first.0);
                match distance.map(|bytes| bytes / PAGE) {
                    Some(within @ 0..MAX_FOLIO_PAGES) => (head, within),
                    _ => return Ok(None),
                }
            }
        };
        let mapping = Gva(head.u64(self.page_mapping)?);
        if mapping.0 == 0 || mapping.0 & MAPPING_FLAGS != 0 || !self.may_be_cached(&head)? {
            return Ok(None);
        }
        let Some(index) = head.u64(self.page_index)?.checked_add(within) else {
            return Ok(None);
        };
        let operations = Structure::at(view, "address_space", mapping)?.pointer(self.operations)?;
        if operations.is_some() && operations == self.huge_operations {
            return Ok(None);
        }
        let is_there = match self.page_in(view, mapping, index)? {
            CachedPage::Present { gpa: found, .. } => found == gpa,
            CachedPage::Filling { page: found } => found == page,
            CachedPage::Absent | CachedPage::Value(_) => false,
        };
        Ok(is_there.then_some(PageOwner { mapping, index }))
    }

    /// Returns the page of the same file before the one with the byte at `gpa`, if it is in memory.
    ///
    /// # Errors
    /// As [`owner`](Self::owner).
    pub fn page_before(
        &self,
        view: MemoryView<'_>,
        gpa: Gpa,
    ) -> Result<Option<Gpa>, PageCacheError> {
        let Some(PageOwner { mapping, index }) = self.owner(view, gpa)? else {
            return Ok(None);
        };
        let Some(index) = index.checked_sub(1) else {
            return Ok(None);
        };
        Ok(match self.page_in(view, mapping, index)? {
            CachedPage::Present { gpa, .. } => Some(gpa),
            CachedPage::Filling { .. } | CachedPage::Absent | CachedPage::Value(_) => None,
        })
    }

    /// Checks whether a page with a mapping can be a file's. The slab allocator keeps another
    /// pointer there.
    fn may_be_cached(&self, head: &Structure<'_>) -> Result<bool, PageCacheError> {
        if let Some(slab) = self.slab
            && head.u64(self.page_flags)? >> slab & 1 == 1
        {
            return Ok(false);
        }
        Ok(match self.page_type {
            Some(offset) => head.i32(offset)? >= LOWEST_MAP_COUNT,
            None => true,
        })
    }
}
