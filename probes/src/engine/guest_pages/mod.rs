//! What the guest's kernel does to pages that traps stand in: pages of programs' text in the page cache. No trap byte of ours is to be read by
//! the guest, copied, kept in a page that has become something else, or written to a disk.
//!
//! The functions by which the kernel does that are watched while any program's text is probed:
//!
//! | Function | What happens there | What is done |
//! |---|---|---|
//! | `filemap_unaccount_folio` (`unaccount_page_cache_page` up to 5.15) | a page leaves the page cache: reclaim, truncation, removal of the file | traps out before; they wait |
//! | `__folio_migrate_mapping`, or else `folio_migrate_mapping` (`migrate_page_move_mapping` up to 5.15) | a page moves | the same, before its bytes are copied |
//! | `folio_mc_copy` since 6.11 | a page that is about to move is copied | the same |
//! | `folio_migrate_flags` (`migrate_page_states` up to 5.15) | a page has moved | traps that wait for a page of the file, in |
//! | `clear_inode` | a file is gone | its traps out for good |
//! | `filemap_map_pages`, `finish_fault` | a page is about to be mapped | traps that wait for a page of the file, in |
//! | `copy_page_to_iter` | read(2) and its kin copy from the page | original bytes put into the copy |
//! | `splice_direct_to_actor` | sendfile(2): the page itself goes on its way | the file's traps out until it is done |
//! | `__access_remote_vm` | ptrace(2) and `/proc/PID/mem` read a program's memory | original bytes put into the copy |
//! | the same | they write to it | traps out of the program's own page, and in again where its text is as it was |
//! | `wp_page_copy`, or where that is part of it `do_wp_page` | a program writes to its text: it gets a page of its own | original bytes put into that |
//! | `finish_fault` | the same, in a page that it has not touched before | the same |
//! | `copy_page_from_iter_atomic` (`copy_folio_from_iter_atomic` since 6.17, `iov_iter_copy_from_user_atomic` up to 5.13) | write(2) to the file | traps out of the page; they wait until it is mapped again |
//! | `__folio_start_writeback` (`__test_set_page_writeback` up to 5.15); `shmem_writepage`, `shmem_writeout` | the page is written to a disk; to swap | the same |
//! | `folio_end_writeback`, `end_page_writeback` | that is done | traps that wait for a page of the file, in |
//!
//! Not watched, so that our byte is seen or kept:
//!
//! - a program that maps the file and reads its text as data, as it would see a debugger's;
//! - splice(2) from the file to a pipe, and from there to a file or socket: the page itself travels;
//! - copies to a list of pages (`ITER_BVEC`: loop devices, fixed buffers of io_uring);
//! - write(2) past the page cache (O_DIRECT) out of a program's own mapped text: a disk takes it from there.
//!
//! A private copy of a page (`wp_page_copy`) gets traps of its own; [`private`] says what is done with those, [`uprobes`] what about the
//! guest's own uprobes.

mod iter;
mod jobs;
mod mappings;
mod originals;
mod private;
mod uprobes;
mod watch;

use std::sync::Arc;

use introspect::kernel::btf::Btf;
use introspect::kernel::page_cache::PageCacheLayout;
use introspect::kernel::vma::VmaLayout;
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::x86_64::virtual_memory::read_u64;
use introspect::{Gpa, Gva, PausedMemory, PhysicalMemory};

use super::user_text::Traps;
use super::watch::Watch;
use crate::kernel_view::KernelView;
use iter::CopyLayout;
use mappings::MappingsLayout;
use private::CopyEvent;
use uprobes::UprobeEvent;
use watch::PageWatch;

/// The kernel does not tell.
type Unknown = String;

/// Where the kernel keeps what its functions are given.
pub(crate) struct GuestPages {
    layout: PageCacheLayout,
    space: AddressSpace,
    fault_area: u64,
    fault_page: u64,
    fault_copy: u64,
    fault_address: u64,
    area_file: u64,
    area_mm: u64,
    area_flags: u64,
    file_mapping: u64,
    mm_tables: u64,
    copy: CopyLayout,
    /// What is to be seen of private copies; nothing if that is not all there.
    copy_events: Vec<(Gva, CopyEvent)>,
    uprobe_events: Vec<(Gva, UprobeEvent)>,
    /// The tree of the guest's own uprobes: `struct rb_root`, of one pointer.
    uprobes: Option<Gva>,
    areas: Option<VmaLayout>,
    mappings: Result<MappingsLayout, Unknown>,
}

impl GuestPages {
    pub(crate) fn new(btf: &Btf, view: &KernelView) -> Result<Self, Unknown> {
        let offset = |path: &str| {
            let member = btf.member(path).map_err(|error| error.to_string())?;
            Ok::<_, Unknown>(member.byte_offset)
        };
        Ok(Self {
            layout: PageCacheLayout::new(btf, &view.symbols).map_err(|error| error.to_string())?,
            space: view.space,
            fault_area: offset("vm_fault.vma")?,
            fault_page: offset("vm_fault.page")?,
            fault_copy: offset("vm_fault.cow_page")?,
            fault_address: offset("vm_fault.address")?,
            area_file: offset("vm_area_struct.vm_file")?,
            area_mm: offset("vm_area_struct.vm_mm")?,
            area_flags: offset("vm_area_struct.vm_flags")?,
            file_mapping: offset("file.f_mapping")?,
            mm_tables: offset("mm_struct.pgd")?,
            copy: CopyLayout::new(btf)?,
            copy_events: private::events(btf, &view.symbols),
            uprobe_events: uprobes::events(btf, &view.symbols),
            uprobes: view.symbols.address_of("uprobes_tree").map(Gva),
            areas: VmaLayout::new(btf, &view.symbols).ok(),
            mappings: MappingsLayout::new(btf),
        })
    }

    /// The watches, and the functions that they belong on, as far as this kernel has them.
    pub(super) fn watches(self: &Arc<Self>, view: &KernelView) -> Vec<(Gva, Arc<dyn Watch>)> {
        let position = |function: &str, name: &str| parameter(view.btf.as_ref()?, function, name);
        let found = jobs::found(&view.symbols, position).into_iter();
        let watches = found.map(|(address, event)| {
            let watch: Arc<dyn Watch> = Arc::new(PageWatch::new(self.clone(), event));
            (address, watch)
        });
        let others = self.copy_watches().chain(self.uprobe_watches());
        watches.chain(others).collect()
    }

    /// The page cache.
    pub(super) fn layout(&self) -> &PageCacheLayout {
        &self.layout
    }

    /// Whether private copies get traps.
    fn traces_copies(&self) -> bool {
        !self.copy_events.is_empty()
    }

    /// The file whose page is mapped at `address` of `space`, if it is one's; `kernel` maps the kernel.
    pub(crate) fn file_of(
        &self,
        memory: &dyn PhysicalMemory,
        kernel: AddressSpace,
        space: AddressSpace,
        address: Gva,
    ) -> Option<Gva> {
        let place = translate(memory, space, address).ok()?;
        let paused = PausedMemory::new(memory);
        let owner = self.layout.owner(paused.view(kernel), place.gpa);
        owner.ok()?.map(|owner| owner.mapping)
    }

    fn word(&self, memory: &dyn PhysicalMemory, structure: u64, offset: u64) -> Option<u64> {
        read_u64(memory, self.space, Gva(structure.wrapping_add(offset))).ok()
    }

    /// Memory of a `struct page` or `struct folio`.
    fn memory_of(&self, memory: &dyn PhysicalMemory, page: u64) -> Option<Gpa> {
        let paused = PausedMemory::new(memory);
        self.layout
            .memory_of(paused.view(self.space), Gva(page))
            .ok()
    }

    /// The page tables of a `struct mm_struct`.
    fn tables_of(&self, memory: &dyn PhysicalMemory, mm: u64) -> Option<AddressSpace> {
        let tables = self.word(memory, mm, self.mm_tables)?;
        let root = translate(memory, self.space, Gva(tables)).ok()?.gpa;
        Some(AddressSpace { root, ..self.space })
    }

    /// The page tables that a `struct vm_fault` is about: a debugger's faults are those of the program it writes to.
    fn fault_tables(&self, memory: &dyn PhysicalMemory, fault: u64) -> Option<AddressSpace> {
        let area = self.word(memory, fault, self.fault_area)?;
        self.tables_of(memory, self.word(memory, area, self.area_mm)?)
    }

    /// The first address of the page that a `struct vm_fault` is about.
    fn fault_page_address(&self, memory: &dyn PhysicalMemory, fault: u64) -> Option<u64> {
        let address = self.word(memory, fault, self.fault_address)?;
        Some(address & !(PAGE - 1))
    }

    /// Whether the program can write to where a `struct vm_fault` is about.
    fn fault_is_writable(&self, memory: &dyn PhysicalMemory, fault: u64) -> Option<bool> {
        let area = self.word(memory, fault, self.fault_area)?;
        let flags = self.word(memory, area, self.area_flags)?;
        Some(flags & private::VM_WRITE != 0)
    }

    /// The file that a `struct vm_fault` is about.
    fn fault_mapping(&self, memory: &dyn PhysicalMemory, fault: u64) -> Option<Gva> {
        self.area_mapping(memory, self.word(memory, fault, self.fault_area)?)
    }

    /// The file that a `struct vm_area_struct` maps.
    fn area_mapping(&self, memory: &dyn PhysicalMemory, area: u64) -> Option<Gva> {
        let file = self
            .word(memory, area, self.area_file)
            .filter(|file| *file != 0)?;
        self.word(memory, file, self.file_mapping).map(Gva)
    }
}

/// The position of the parameter called `name` of a kernel function.
fn parameter(btf: &Btf, function: &str, name: &str) -> Option<usize> {
    let prototype = btf.func_proto_args(function).ok()?;
    prototype.parameters.iter().position(|p| p.name == name)
}
