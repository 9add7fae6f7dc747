//! What the guest's kernel does to pages that traps stand in: pages of programs' text in the page cache. No trap byte of ours is to be read by
//! the guest, copied, kept in a page that has become something else, or written to a disk.
//!
//! The functions by which the kernel does that are watched while any program's text is probed:
//!
//! | Function | What happens there | What is done |
//! |---|---|---|
//! | `filemap_unaccount_folio` | a page leaves the page cache: reclaim, truncation, removal of the file | traps out before; they wait |
//! | `folio_migrate_mapping` | a page moves | the same, before its bytes are copied |
//! | `clear_inode` | a file is gone | its traps out for good |
//! | `filemap_map_pages`, `finish_fault` | a page is about to be mapped | traps that wait for a page of the file, in |
//! | `copy_page_to_iter` | read(2) and its kin copy from the page | original bytes put into the copy |
//! | `splice_direct_to_actor` | sendfile(2): the page itself goes on its way | the file's traps out until it is done |
//! | `__access_remote_vm` | ptrace(2) and `/proc/PID/mem` read a program's memory | original bytes put into the copy |
//! | `wp_page_copy` | a program writes to its text: it gets a page of its own | original bytes put into that |
//! | `finish_fault` | the same, in a page that it has not touched before | the same |
//! | `copy_page_from_iter_atomic` | write(2) to the file | traps out of the page; they wait until it is mapped again |
//! | `__folio_start_writeback` | the page is written to a disk | the same |
//!
//! Not watched, so that our byte is seen or kept:
//!
//! - a program that maps the file and reads its text as data, as it would see a debugger's;
//! - splice(2) from the file to a pipe, and from there to a file or socket: the page itself travels;
//! - copies to a list of pages (`ITER_BVEC`: loop devices, fixed buffers of io_uring);
//! - the guest's own uprobes, which save the byte that they replace;
//! - pages of shared memory that go to swap;
//! - the first page of a mapping in a core dump;
//! - a page that is mapped again while it is being written to a disk.
//!
//! A private copy of a page (`wp_page_copy`) gets its original bytes back and is not traced.
#![allow(
    clippy::single_range_in_vec_init,
    reason = "lists of ranges, often of one"
)]

use std::collections::HashMap;
use std::iter::once;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use introspect::kernel::btf::Btf;
use introspect::kernel::page_cache::{PageCacheLayout, PageOwner};
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::x86_64::virtual_memory::{read_u64, read_virtual};
use introspect::{Gpa, Gva, PausedMemory, PhysicalMemory};
use vmm::memory::GuestRam;
use vmm::trap::{INT3, StoppedCpu};

use super::hit::{Hit, HitPath};
use super::returns::Returning;
use super::user_text::Traps;
use super::watch::Watch;
use crate::kernel_view::KernelView;

/// Pages of the largest folio that a file has.
const LARGEST_FOLIO: u64 = 1 << 9;
/// Bytes of the longest instruction.
const LONGEST_INSTRUCTION: u64 = 15;
/// Segments of a copy that are looked at.
const MOST_SEGMENTS: u64 = 1024;
/// Watched calls that are under way at once; more are let go by.
const MOST_CALLS: usize = 4096;

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
    file_mapping: u64,
    mm_tables: u64,
    copy: CopyLayout,
}

/// `struct iov_iter`.
struct CopyLayout {
    kind: u64,
    offset: u64,
    buffer: u64,
    segments: u64,
    /// Kinds: one buffer of the program, several, several of the kernel's.
    one: Option<u64>,
    several: u64,
    kernel: u64,
}

impl GuestPages {
    pub(crate) fn new(btf: &Btf, view: &KernelView) -> Result<Self, Unknown> {
        let offset = |path: &str| {
            let member = btf.member(path).map_err(|error| error.to_string())?;
            Ok::<_, Unknown>(member.byte_offset)
        };
        let either = |paths: &[&str]| {
            let mut last = String::new();
            for path in paths {
                match offset(path) {
                    Ok(found) => return Ok(found),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let kind = |name: &str| {
            let value = btf.enumerator(&format!("iter_type.{name}"));
            value
                .map(i64::cast_unsigned)
                .map_err(|error| error.to_string())
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
            file_mapping: offset("file.f_mapping")?,
            mm_tables: offset("mm_struct.pgd")?,
            copy: CopyLayout {
                kind: offset("iov_iter.iter_type")?,
                offset: offset("iov_iter.iov_offset")?,
                buffer: either(&["iov_iter.ubuf", "iov_iter.__iov", "iov_iter.iov"])?,
                segments: offset("iov_iter.nr_segs")?,
                one: kind("ITER_UBUF").ok(),
                several: kind("ITER_IOVEC")?,
                kernel: kind("ITER_KVEC")?,
            },
        })
    }

    /// The watches, and the functions that they belong on, as far as this kernel has them.
    pub(super) fn watches(self: &Arc<Self>, view: &KernelView) -> Vec<(Gva, Arc<dyn Watch>)> {
        let parameter = |function: &str, name: &str| {
            let prototype = view.btf.as_ref()?.func_proto_args(function).ok()?;
            prototype.parameters.iter().position(|p| p.name == name)
        };
        let leaves = |function: &str| {
            Some(Event::Leaves {
                mapping: parameter(function, "mapping")?,
                folio: parameter(function, "folio")?,
            })
        };
        let events = [
            ("filemap_unaccount_folio", leaves("filemap_unaccount_folio")),
            ("folio_migrate_mapping", leaves("folio_migrate_mapping")),
            ("clear_inode", Some(Event::FileGoes)),
            ("filemap_map_pages", Some(Event::Maps)),
            ("finish_fault", Some(Event::Maps)),
            ("copy_page_to_iter", Some(Event::Read)),
            ("splice_direct_to_actor", Some(Event::Splice)),
            ("__access_remote_vm", Some(Event::Peek)),
            ("wp_page_copy", Some(Event::OwnCopy)),
            ("copy_page_from_iter_atomic", Some(Event::Write)),
            ("__folio_start_writeback", Some(Event::WriteBack)),
        ];
        let watches = events.into_iter().filter_map(|(name, event)| {
            let address = view.symbols.address_of(name)?;
            let watch: Arc<dyn Watch> = Arc::new(PageWatch {
                pages: self.clone(),
                event: event?,
                calls: Mutex::default(),
            });
            Some((Gva(address), watch))
        });
        watches.collect()
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

    /// The file that a `struct vm_fault` is about.
    fn fault_mapping(&self, memory: &dyn PhysicalMemory, fault: u64) -> Option<Gva> {
        let area = self.word(memory, fault, self.fault_area)?;
        let file = self
            .word(memory, area, self.area_file)
            .filter(|file| *file != 0)?;
        self.word(memory, file, self.file_mapping).map(Gva)
    }

    /// Where the first `length` bytes go that are copied to the `struct iov_iter` at `iter`; nothing for kinds that copy no bytes.
    fn destination(&self, memory: &dyn PhysicalMemory, iter: u64, length: u64) -> Vec<Range<u64>> {
        let layout = &self.copy;
        let word = |offset| self.word(memory, iter, offset);
        let (Some(kind), Some(mut skip), Some(buffer), Some(segments)) = (
            word(layout.kind),
            word(layout.offset),
            word(layout.buffer),
            word(layout.segments),
        ) else {
            return Vec::new();
        };
        // A byte, or an enumeration of 32 bits in older kernels.
        let kind = kind & 0xff;
        if Some(kind) == layout.one {
            let start = buffer.wrapping_add(skip);
            return once(start..start.saturating_add(length)).collect();
        }
        if kind != layout.several && kind != layout.kernel {
            return Vec::new();
        }
        let (mut parts, mut left) = (Vec::new(), length);
        for number in 0..segments.min(MOST_SEGMENTS) {
            // struct iovec and struct kvec: base and length.
            let at = buffer.wrapping_add(number * 16);
            let (Some(base), Some(size)) = (self.word(memory, at, 0), self.word(memory, at, 8))
            else {
                break;
            };
            let inside = size.saturating_sub(skip).min(left);
            let start = base.wrapping_add(skip);
            skip = skip.saturating_sub(size);
            if inside > 0 {
                parts.push(start..start.saturating_add(inside));
                left -= inside;
            }
            if left == 0 {
                break;
            }
        }
        parts
    }
}

/// What a function is watched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// A page leaves the page cache, or moves: positions of the file and the page among the arguments.
    Leaves { mapping: usize, folio: usize },
    /// A file's inode goes.
    FileGoes,
    /// Pages of a file are about to be mapped.
    Maps,
    /// Bytes of a page are copied to somebody.
    Read,
    /// A file's pages are handed on.
    Splice,
    /// A program's memory is copied by another.
    Peek,
    /// A program gets a page of its own.
    OwnCopy,
    /// A page is written to.
    Write,
    /// Pages are written to a disk.
    WriteBack,
}

/// What is to be done when a watched call returns.
enum Pending {
    /// Bytes that belong into copies: which one of those copied, and the byte.
    Bytes {
        parts: Vec<Range<u64>>,
        space: AddressSpace,
        originals: Vec<(u64, u8)>,
    },
    /// The same, into the page that is mapped at an address afterwards.
    Page {
        address: u64,
        space: AddressSpace,
        originals: Vec<(u64, u8)>,
    },
    /// A file's traps that were taken out.
    File(Gva),
}

struct PageWatch {
    pages: Arc<GuestPages>,
    event: Event,
    /// By task and stack.
    calls: Mutex<HashMap<(u64, u64), Pending>>,
}

impl Watch for PageWatch {
    fn enter(&self, path: &HitPath, hit: &Hit<'_>) -> bool {
        let Some(cpu) = hit.cpu else { return false };
        let traps = Traps {
            table: cpu.traps(),
            plans: &path.plans,
        };
        let [first, second, third, fourth, ..] = hit.arguments();
        let (pages, memory) = (&self.pages, hit.memory);
        let pending = match self.event {
            Event::Leaves { mapping, folio } => {
                let argument = |number: usize| hit.arguments().get(number).copied();
                if let (Some(mapping), Some(folio)) = (argument(mapping), argument(folio)) {
                    self.leaves(path, hit, traps, Gva(mapping), folio);
                }
                None
            }
            Event::FileGoes => {
                path.user_sites.file_goes(traps, Gva(first));
                None
            }
            Event::Maps => {
                self.own_copy_at_first(path, hit, cpu, first);
                if let Some(mapping) = pages.fault_mapping(memory, first)
                    && path.user_sites.waits(mapping)
                {
                    let paused = PausedMemory::new(memory);
                    let view = paused.view(pages.space);
                    path.user_sites
                        .pages_arrive(traps, mapping, &pages.layout, view);
                }
                None
            }
            Event::Read => pages.memory_of(memory, first).and_then(|page| {
                let start = page.0.saturating_add(second);
                let originals = traps
                    .table
                    .user_originals(start..start.saturating_add(third));
                let originals = relative(&originals, start)?;
                let parts = pages.destination(memory, fourth, third);
                let space = hit.space;
                (!parts.is_empty()).then_some(Pending::Bytes {
                    parts,
                    space,
                    originals,
                })
            }),
            Event::Splice => {
                let mapping = pages.word(memory, first, pages.file_mapping).map(Gva);
                mapping.map(|mapping| {
                    let paused = PausedMemory::new(memory);
                    let view = paused.view(pages.space);
                    let is_of_file = |page| {
                        let owner = pages.layout.owner(view, page);
                        matches!(owner, Ok(Some(owner)) if owner.mapping == mapping)
                    };
                    let splices = &path.user_sites.splices;
                    let out = splices.begin(traps.table, mapping, is_of_file);
                    path.counters
                        .lifted
                        .fetch_add(out as u64, Ordering::Relaxed);
                    Pending::File(mapping)
                })
            }
            Event::Peek => self.peek(hit, traps, first, second, third, fourth),
            Event::OwnCopy => {
                let page = pages.word(memory, first, pages.fault_page);
                let address = pages.word(memory, first, pages.fault_address);
                page.zip(address).and_then(|(page, address)| {
                    let start = pages.memory_of(memory, page)?.0;
                    let originals = traps
                        .table
                        .user_originals(start..start.saturating_add(PAGE));
                    let originals = relative(&originals, start)?;
                    let space = pages.fault_tables(memory, first)?;
                    Some(Pending::Page {
                        address,
                        space,
                        originals,
                    })
                })
            }
            Event::Write => {
                if let Some(page) = pages.memory_of(memory, first) {
                    let start = page.0.saturating_add(second);
                    let end = start.saturating_add(third);
                    self.written(path, hit, traps, start..end);
                }
                None
            }
            Event::WriteBack => {
                if let Some(page) = pages.memory_of(memory, first) {
                    for page in self.patched_pages(hit, traps, page, None) {
                        lift(path, traps, page..page.saturating_add(PAGE));
                    }
                }
                None
            }
        };
        let Some(pending) = pending else { return false };
        // As at the return, which takes the return address off the stack.
        let key = (
            hit.current.task().address,
            hit.registers.rsp.wrapping_add(8),
        );
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        if calls.len() >= MOST_CALLS {
            log::warn!("too many reads of programs' text at once: one may show traps");
            if let Pending::File(mapping) = pending {
                path.user_sites.splices.end(traps.table, mapping);
            }
            return false;
        }
        calls.insert(key, pending);
        true
    }

    fn leave(&self, path: &HitPath, hit: &Hit<'_>, _: &Returning, from_stack: Gva) {
        let Some(cpu) = hit.cpu else { return };
        let key = (hit.current.task().address, from_stack.0);
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(pending) = calls.remove(&key) else {
            return;
        };
        drop(calls);
        let hidden = match pending {
            Pending::Bytes {
                parts,
                space,
                originals,
            } => {
                // What was not copied is not touched.
                let copied = hit.registers.rax;
                let originals = originals.into_iter().filter(|(at, _)| *at < copied);
                let places = originals.filter_map(|(at, byte)| Some((nth(&parts, at)?, byte)));
                put_right(cpu.ram(), space, places)
            }
            Pending::Page {
                address,
                space,
                originals,
            } => {
                let page = address & !(PAGE - 1);
                let places = originals.into_iter().map(|(at, byte)| (page + at, byte));
                // Still the old page if the fault came to nothing: that one stays as it is.
                match translate(cpu.ram(), space, Gva(page)) {
                    Ok(found) if !cpu.traps().is_patched(found.gpa) => {
                        put_right(cpu.ram(), space, places)
                    }
                    _ => 0,
                }
            }
            Pending::File(mapping) => {
                path.user_sites.splices.end(cpu.traps(), mapping);
                0
            }
        };
        path.counters.hidden.fetch_add(hidden, Ordering::Relaxed);
    }
}

impl PageWatch {
    fn leaves(&self, path: &HitPath, hit: &Hit<'_>, traps: Traps<'_>, mapping: Gva, folio: u64) {
        let paused = PausedMemory::new(hit.memory);
        let view = paused.view(self.pages.space);
        let layout = &self.pages.layout;
        let (Ok(first), Ok(index)) = (
            layout.memory_of(view, Gva(folio)),
            layout.index_of(view, Gva(folio)),
        ) else {
            return;
        };
        path.user_sites.pages_leave(traps, mapping, index, first);
        // Return addresses are known by their pages alone.
        let owner = PageOwner { mapping, index };
        for page in self.patched_pages(hit, traps, first, Some(owner)) {
            for site in path.user_returns.forget(page..page + PAGE) {
                traps.table.disarm(site);
            }
        }
    }

    /// Bytes of a page are written to: what stands in it is taken out, and the instruction that reaches into it from the file's page
    /// before, which is anywhere in memory.
    fn written(&self, path: &HitPath, hit: &Hit<'_>, traps: Traps<'_>, bytes: Range<u64>) {
        let end = bytes.end.checked_next_multiple_of(PAGE);
        lift(
            path,
            traps,
            bytes.start & !(PAGE - 1)..end.unwrap_or(u64::MAX),
        );
        if bytes.start % PAGE >= LONGEST_INSTRUCTION - 1 {
            return;
        }
        let paused = PausedMemory::new(hit.memory);
        let view = paused.view(self.pages.space);
        if let Ok(Some(before)) = self.pages.layout.page_before(view, Gpa(bytes.start)) {
            let end = before.0.saturating_add(PAGE);
            lift(path, traps, end - (LONGEST_INSTRUCTION - 1)..end);
        }
    }

    /// The pages of the folio that begins at `first` in which sites stand. `owner` is its first page's, if that may not be asked any
    /// more.
    fn patched_pages(
        &self,
        hit: &Hit<'_>,
        traps: Traps<'_>,
        first: Gpa,
        owner: Option<PageOwner>,
    ) -> Vec<u64> {
        let paused = PausedMemory::new(hit.memory);
        let view = paused.view(self.pages.space);
        let layout = &self.pages.layout;
        let folio = first.0..first.0.saturating_add(LARGEST_FOLIO * PAGE);
        let sites = traps.table.user_originals(folio);
        let mut pages: Vec<u64> = sites.iter().map(|(site, _)| site.0 & !(PAGE - 1)).collect();
        pages.dedup();
        if pages.is_empty() {
            return pages;
        }
        let owner = owner.or_else(|| layout.owner(view, first).ok()?);
        pages.retain(|page| {
            let expected = owner.map(|owner| PageOwner {
                index: owner.index.saturating_add((page - first.0) / PAGE),
                ..owner
            });
            *page == first.0 || expected.is_some() && layout.owner(view, Gpa(*page)) == Ok(expected)
        });
        pages
    }

    /// A program writes to a page that it has not touched before: its own copy has been made already.
    fn own_copy_at_first(&self, path: &HitPath, hit: &Hit<'_>, cpu: &StoppedCpu<'_>, fault: u64) {
        let pages = &self.pages;
        let page = |offset| {
            let page = pages.word(hit.memory, fault, offset)?;
            pages.memory_of(hit.memory, Some(page).filter(|page| *page != 0)?)
        };
        let (Some(copy), Some(from)) = (page(pages.fault_copy), page(pages.fault_page)) else {
            return;
        };
        let range = from.0..from.0.saturating_add(PAGE);
        let mut hidden = 0;
        for (place, original) in cpu.traps().user_originals(range) {
            let place = Gpa(copy.0 + (place.0 - from.0));
            if cpu.ram().read_byte(place) == Ok(INT3)
                && cpu.ram().write_physical(place, &[original]).is_ok()
            {
                hidden += 1;
            }
        }
        path.counters.hidden.fetch_add(hidden, Ordering::Relaxed);
    }

    /// `length` bytes at `address` of the process with `mm` are copied to `buffer`, in the kernel.
    fn peek(
        &self,
        hit: &Hit<'_>,
        traps: Traps<'_>,
        mm: u64,
        address: u64,
        buffer: u64,
        length: u64,
    ) -> Option<Pending> {
        // An int.
        let length = length & 0x7fff_ffff;
        let space = self.pages.tables_of(hit.memory, mm)?;
        let end = address.checked_add(length)?;
        let mut originals = Vec::new();
        let mut at = address;
        while at < end {
            let next = (at & !(PAGE - 1)).saturating_add(PAGE).min(end);
            if let Ok(place) = translate(hit.memory, space, Gva(at)) {
                let start = place.gpa.0;
                for (site, byte) in traps.table.user_originals(start..start + (next - at)) {
                    originals.push((at - address + (site.0 - start), byte));
                }
            }
            at = next;
        }
        (!originals.is_empty()).then(|| Pending::Bytes {
            parts: once(buffer..buffer.saturating_add(length)).collect(),
            space: self.pages.space,
            originals,
        })
    }
}

/// Takes the sites out of memory that is about to be written, or to be what is on a disk: they wait until it is mapped again.
fn lift(path: &HitPath, traps: Traps<'_>, range: Range<u64>) {
    let out = path.user_sites.take_out(traps, &range);
    path.counters
        .lifted
        .fetch_add(out as u64, Ordering::Relaxed);
    for site in path.user_returns.forget(range) {
        traps.table.disarm(site);
    }
}

/// Places as distances from `start`; `None` if there are none.
fn relative(originals: &[(Gpa, u8)], start: u64) -> Option<Vec<(u64, u8)>> {
    let places = originals
        .iter()
        .map(|(place, byte)| (place.0 - start, *byte));
    Some(places.collect::<Vec<_>>()).filter(|places| !places.is_empty())
}

/// The address of byte `number` of those that were copied to `parts` one after the other.
fn nth(parts: &[Range<u64>], number: u64) -> Option<u64> {
    let mut left = number;
    for part in parts {
        let length = part.end - part.start;
        if left < length {
            return Some(part.start + left);
        }
        left -= length;
    }
    None
}

/// Writes bytes over int3s; gives how many.
fn put_right(ram: &GuestRam, space: AddressSpace, places: impl Iterator<Item = (u64, u8)>) -> u64 {
    let mut done = 0;
    for (address, original) in places {
        let mut byte = [0];
        if read_virtual(ram, space, Gva(address), &mut byte).is_ok()
            && byte == [INT3]
            && let Ok(place) = translate(ram, space, Gva(address))
            && ram.write_physical(place.gpa, &[original]).is_ok()
        {
            done += 1;
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_through_the_parts_of_a_copy() {
        let parts = [10..13, 100..101, 50..60];
        for (number, address) in [
            (0, Some(10)),
            (2, Some(12)),
            (3, Some(100)),
            (4, Some(50)),
            (13, Some(59)),
            (14, None),
        ] {
            assert_eq!(nth(&parts, number), address, "{number}");
        }
    }
}
