//! Finds the processes that map a page of a file, through the kernel's tree of the file's areas
//! (`address_space.i_mmap`). The tree has private mappings too.
//!
//! Source: include/linux/fs.h, `struct address_space`; mm/interval_tree.c. An area that is being
//! inserted or removed while the guest is paused may be missed.

use introspect::kernel::btf::Btf;
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::translate;
use introspect::{Gpa, Gva, PhysicalMemory};

use super::{GuestPages, Unknown};

/// The largest number of a file's areas that are read.
const MOST_AREAS: usize = 1 << 16;

/// Offsets in the tree and its areas.
pub(super) struct MappingsLayout {
    tree: u64,
    node: u64,
    left: u64,
    right: u64,
    start: u64,
    end: u64,
    first_page: u64,
}

impl MappingsLayout {
    pub(super) fn new(btf: &Btf) -> Result<Self, Unknown> {
        let offset = |path: &str| super::offset(btf, path);
        Ok(Self {
            tree: offset("address_space.i_mmap")? + offset("rb_root_cached.rb_root")?,
            node: offset("vm_area_struct.shared.rb")?,
            left: offset("rb_node.rb_left")?,
            right: offset("rb_node.rb_right")?,
            start: offset("vm_area_struct.vm_start")?,
            end: offset("vm_area_struct.vm_end")?,
            first_page: offset("vm_area_struct.vm_pgoff")?,
        })
    }
}

impl GuestPages {
    /// Returns the pages of memory at which processes map the byte at `offset` of a file. The
    /// second value is the reason that some may be missing. `memory` must not change meanwhile.
    pub(in crate::engine) fn mapped(
        &self,
        memory: &dyn PhysicalMemory,
        mapping: Gva,
        offset: u64,
    ) -> (Vec<Gpa>, Option<Unknown>) {
        let mut found = Vec::new();
        let layout = match &self.mappings {
            Ok(layout) => layout,
            Err(error) => return (found, Some(error.clone())),
        };
        let word = |structure: u64, at: u64| self.word(memory, structure, at);
        let Some(root) = word(mapping.0, layout.tree) else {
            let error = format!("the address_space at {mapping} cannot be read");
            return (found, Some(error));
        };
        let mut left = vec![root];
        let mut seen = 0;
        while let Some(node) = left.pop() {
            if node == 0 {
                continue;
            }
            seen += 1;
            if seen > MOST_AREAS {
                let error = format!("more than {MOST_AREAS} areas map the file");
                return (found, Some(error));
            }
            let (Some(lower), Some(higher)) = (word(node, layout.left), word(node, layout.right))
            else {
                let error = format!("the tree of the areas that map a file is broken at {node:#x}");
                return (found, Some(error));
            };
            left.extend([lower, higher]);
            let area = node.wrapping_sub(layout.node);
            let page = || {
                let (start, end) = (word(area, layout.start)?, word(area, layout.end)?);
                let first = word(area, layout.first_page)?.checked_mul(PAGE)?;
                let address = start.checked_add(offset.checked_sub(first)?)?;
                if address >= end || self.area_mapping(memory, area) != Some(mapping) {
                    return None;
                }
                let space = self.tables_of(memory, word(area, self.area_mm)?)?;
                let place = translate(memory, space, Gva(address)).ok()?;
                Some(Gpa(place.gpa.0 & !(PAGE - 1)))
            };
            found.extend(page());
        }
        (found, None)
    }
}
