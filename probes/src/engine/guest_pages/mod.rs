//! Keeps trap bytes out of reach of the guest's page handling, for pages of programs' text in the
//! page cache. The guest must not read a trap byte, copy it, or write it to a disk. Nor must a page
//! keep one when it becomes something else.
//!
//! While any program's text is probed, these functions of the guest's kernel are watched:
//!
//! | Function | Event | Action |
//! |---|---|---|
//! | `filemap_unaccount_folio` (`unaccount_page_cache_page` up to 5.15) | a page leaves the page cache: reclaim, truncation, removal of the file | traps suspended before it; they wait |
//! | `__folio_migrate_mapping`, or else `folio_migrate_mapping` (`migrate_page_move_mapping` up to 5.15) | a page moves | the same, before its bytes are copied; if it stays after all, its traps are resumed |
//! | `folio_mc_copy` since 6.11 | a page that is about to move is copied | the same |
//! | `folio_migrate_flags` (`migrate_page_states` up to 5.15) | a page has moved | trap bytes that were copied with it restored; waiting traps of the file's pages resumed |
//! | `clear_inode` | a file is gone | its traps evicted |
//! | `filemap_map_pages`, `finish_fault` | a page is about to be mapped | waiting traps of the file's pages resumed |
//! | `copy_page_to_iter` | read(2) and its kin copy from the page | original bytes put into the copy |
//! | `splice_direct_to_actor` | sendfile(2): the page itself is passed on | the file's traps suspended until the call returns |
//! | `__access_remote_vm` | ptrace(2) and `/proc/PID/mem` read a program's memory | original bytes put into the copy |
//! | the same | they write to it | traps of the program's private page suspended, and resumed where its text is as it was |
//! | `wp_page_copy`, or `do_wp_page` where that contains it | a program writes to its text and gets a private page | original bytes put into the private page |
//! | `finish_fault` | the same, in a page that the program has not touched before | the same |
//! | `copy_page_from_iter_atomic` (`copy_folio_from_iter_atomic` since 6.17, `iov_iter_copy_from_user_atomic` up to 5.13) | write(2) to the file | traps of the page suspended; they wait until it is mapped again |
//! | `__folio_start_writeback` (`__test_set_page_writeback` up to 5.15); `shmem_writepage`, `shmem_writeout` | the page is written to a disk; to swap | the same |
//! | `folio_end_writeback`, `end_page_writeback` | the write has ended | waiting traps of the file's pages resumed |
//!
//! Not watched, so that the guest sees or keeps the trap byte:
//!
//! - a program that maps the file and reads its text as data (it would see a debugger's traps too);
//! - splice(2) from the file to a pipe, and from there to a file or socket: the page itself
//!   travels;
//! - copies to a list of pages (`ITER_BVEC`: loop devices, fixed buffers of io_uring);
//! - write(2) past the page cache (O_DIRECT) from a program's own mapped text: the disk reads it
//!   there.
//!
//! A private copy of a page (`wp_page_copy`) gets traps of its own: see [`private`]. For the
//! guest's own uprobes see [`uprobes`].

mod iter;
mod jobs;
mod mappings;
mod moves;
mod originals;
mod own_copies;
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
use crate::kernel_view::{KernelView, parameter};
use iter::CopyLayout;
use mappings::MappingsLayout;
use private::CopyEvent;
use uprobes::UprobeEvent;
use watch::PageWatch;

/// The reason that the kernel does not provide something.
type Unknown = String;

/// The layout of the kernel structures that the watched functions take as arguments.
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
    task_mm: u64,
    copy: CopyLayout,
    /// The watches on private copies; empty if the kernel lacks one that is needed.
    copy_events: Vec<(Gva, CopyEvent)>,
    uprobe_events: Vec<(Gva, UprobeEvent)>,
    /// The tree of the guest's own uprobes: a `struct rb_root`, which is one pointer.
    uprobes: Option<Gva>,
    areas: Option<VmaLayout>,
    mappings: Result<MappingsLayout, Unknown>,
}

impl GuestPages {
    pub(crate) fn new(btf: &Btf, view: &KernelView) -> Result<Self, Unknown> {
        let offset = |path: &str| offset(btf, path);
        Ok(Self {
            layout: PageCacheLayout::new(btf, &view.kernel.symbols)
                .map_err(|error| error.to_string())?,
            space: view.kernel.space,
            fault_area: offset("vm_fault.vma")?,
            fault_page: offset("vm_fault.page")?,
            fault_copy: offset("vm_fault.cow_page")?,
            fault_address: offset("vm_fault.address")?,
            area_file: offset("vm_area_struct.vm_file")?,
            area_mm: offset("vm_area_struct.vm_mm")?,
            area_flags: offset("vm_area_struct.vm_flags")?,
            file_mapping: offset("file.f_mapping")?,
            mm_tables: offset("mm_struct.pgd")?,
            task_mm: offset("task_struct.mm")?,
            copy: CopyLayout::new(btf)?,
            copy_events: private::events(btf, &view.kernel.symbols),
            uprobe_events: uprobes::events(btf, &view.kernel.symbols),
            uprobes: view.kernel.symbols.address_of("uprobes_tree").map(Gva),
            areas: VmaLayout::new(btf, &view.kernel.symbols).ok(),
            mappings: MappingsLayout::new(btf),
        })
    }

    /// Returns the watches with the functions to put them on, as far as this kernel has them.
    pub(super) fn watches(self: &Arc<Self>, view: &KernelView) -> Vec<(Gva, Arc<dyn Watch>)> {
        let position = |function: &str, name: &str| parameter(view.kernel.btf()?, function, name);
        let found = jobs::found(&view.kernel.symbols, position).into_iter();
        let watches = found.map(|(address, event)| {
            let watch: Arc<dyn Watch> = Arc::new(PageWatch::new(self.clone(), event));
            (address, watch)
        });
        let others = self.copy_watches().chain(self.uprobe_watches());
        watches.chain(others).collect()
    }

    /// Returns the layout of the page cache.
    pub(super) fn layout(&self) -> &PageCacheLayout {
        &self.layout
    }

    /// Checks whether private copies get traps.
    fn traces_copies(&self) -> bool {
        !self.copy_events.is_empty()
    }

    /// Returns the file whose page is mapped at `address` of `space`, if any. `kernel` maps the
    /// kernel.
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

    /// Returns the memory of a `struct page` or `struct folio`.
    fn memory_of(&self, memory: &dyn PhysicalMemory, page: u64) -> Option<Gpa> {
        let paused = PausedMemory::new(memory);
        self.layout
            .memory_of(paused.view(self.space), Gva(page))
            .ok()
    }

    /// Returns the page tables of a `struct mm_struct`.
    fn tables_of(&self, memory: &dyn PhysicalMemory, mm: u64) -> Option<AddressSpace> {
        let tables = self.word(memory, mm, self.mm_tables)?;
        let root = translate(memory, self.space, Gva(tables)).ok()?.gpa;
        Some(AddressSpace { root, ..self.space })
    }

    /// Returns the page tables of a `struct vm_fault`'s area. A debugger's fault is in the program
    /// that it writes to.
    fn fault_tables(&self, memory: &dyn PhysicalMemory, fault: u64) -> Option<AddressSpace> {
        let area = self.word(memory, fault, self.fault_area)?;
        self.tables_of(memory, self.word(memory, area, self.area_mm)?)
    }

    /// Returns the first address of the page of a `struct vm_fault`.
    fn fault_page_address(&self, memory: &dyn PhysicalMemory, fault: u64) -> Option<u64> {
        let address = self.word(memory, fault, self.fault_address)?;
        Some(address & !(PAGE - 1))
    }

    /// Checks whether the program can write to the area of a `struct vm_fault`.
    fn fault_is_writable(&self, memory: &dyn PhysicalMemory, fault: u64) -> Option<bool> {
        let area = self.word(memory, fault, self.fault_area)?;
        let flags = self.word(memory, area, self.area_flags)?;
        Some(flags & private::VM_WRITE != 0)
    }

    /// Returns the file of a `struct vm_fault`.
    fn fault_mapping(&self, memory: &dyn PhysicalMemory, fault: u64) -> Option<Gva> {
        self.area_mapping(memory, self.word(memory, fault, self.fault_area)?)
    }

    /// Returns the file that a `struct vm_area_struct` maps.
    fn area_mapping(&self, memory: &dyn PhysicalMemory, area: u64) -> Option<Gva> {
        let file = self
            .word(memory, area, self.area_file)
            .filter(|file| *file != 0)?;
        self.word(memory, file, self.file_mapping).map(Gva)
    }
}

/// Returns the offset of a structure's member.
fn offset(btf: &Btf, path: &str) -> Result<u64, Unknown> {
    let member = btf.member(path).map_err(|error| error.to_string())?;
    Ok(member.byte_offset)
}
