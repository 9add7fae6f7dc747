//! Watches on what the guest does to private copies of text pages with traps: see
//! [`super::super::user_text`].
//!
//! | Function | Event | Action |
//! |---|---|---|
//! | `unmap_page_range` (`__zap_vma_range` since 7.1) | a program ends, maps something else there, or frees the pages | traps evicted |
//! | `move_page_tables` | the pages move to another address | the same |
//! | `try_to_unmap`, `try_to_migrate` | a page goes to swap, or moves in memory | the same |
//! | `do_coredump` (`vfs_coredump` since 6.17) | a program's pages are written to a file | the same, for the whole program; traps in the first pages of its files suspended until the call returns |
//! | `mprotect_fixup` | a program's text becomes writable, or read-only again | traps suspended; and resumed |
//!
//! If a kernel lacks one of the first two or the last, private copies are not traced.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use introspect::kernel::btf::Btf;
use introspect::kernel::symbols::Symbols;
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use introspect::{Gva, PausedMemory};

use vmm::trap::{SuspendedUser, TrapTable};

use super::{GuestPages, Traps, parameter};
use crate::engine::calls::Calls;
use crate::engine::hit::{Hit, HitPath};
use crate::engine::returns::Returning;
use crate::engine::watch::Watch;
use crate::event::MAX_ARGUMENTS;

/// `VM_WRITE` (include/linux/mm.h).
pub(super) const VM_WRITE: u64 = 2;

/// An event on private copies, with positions among the function's arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyEvent {
    /// A program's pages are unmapped or move. Its area, the first address, and the end or the
    /// length.
    Leaves {
        area: usize,
        start: usize,
        end: Option<usize>,
        length: Option<usize>,
    },
    /// A program's pages move. An argument points to a structure with the area, the first address
    /// and the end at these offsets.
    Moves {
        control: usize,
        area: u64,
        start: u64,
        end: u64,
    },
    /// A page of memory is freed. The position of its folio.
    FolioGoes(usize),
    /// The running program's memory is written to a file.
    Dumps,
    /// The protection of a program's pages changes.
    Protects {
        area: usize,
        start: usize,
        end: usize,
        flags: usize,
    },
}

/// The work that is left for a call's return.
enum Open {
    /// The program cannot write to the pages any more.
    Protecting {
        space: AddressSpace,
        addresses: Range<u64>,
    },
    /// The program's pages are in the file.
    Dumping(SuspendedUser),
}

struct CopyWatch {
    pages: Arc<GuestPages>,
    event: CopyEvent,
    calls: Calls<Open>,
}

/// Returns the events to be watched with their functions' addresses; empty if the kernel lacks one
/// that is needed.
pub(super) fn events(btf: &Btf, symbols: &Symbols) -> Vec<(Gva, CopyEvent)> {
    let at = |function: &str, name: &str| parameter(btf, function, name);
    let unmaps = |function: &str| {
        Some(CopyEvent::Leaves {
            area: at(function, "vma")?,
            start: at(function, "addr").or_else(|| at(function, "start"))?,
            end: Some(at(function, "end")?),
            length: None,
        })
    };
    let offset = |path: &str| Some(btf.member(path).ok()?.byte_offset);
    // Since Linux 6.16 one structure holds all of it.
    let moves_by_control = || {
        Some(CopyEvent::Moves {
            control: at("move_page_tables", "pmc")?,
            area: offset("pagetable_move_control.old")?,
            start: offset("pagetable_move_control.old_addr")?,
            end: offset("pagetable_move_control.old_end")?,
        })
    };
    let moves = || {
        Some(CopyEvent::Leaves {
            area: at("move_page_tables", "vma")?,
            start: at("move_page_tables", "old_addr")?,
            end: None,
            length: Some(at("move_page_tables", "len")?),
        })
    };
    let protects = || {
        Some(CopyEvent::Protects {
            area: at("mprotect_fixup", "vma")?,
            start: at("mprotect_fixup", "start")?,
            end: at("mprotect_fixup", "end")?,
            flags: at("mprotect_fixup", "newflags")?,
        })
    };
    let folio = |function: &str| {
        let folio = at(function, "folio").or_else(|| at(function, "page"));
        folio.map(CopyEvent::FolioGoes)
    };
    let place =
        |(name, event): (&str, Option<CopyEvent>)| Some((Gva(symbols.address_of(name)?), event?));
    // Renamed in Linux 7.1.
    let unmapping = ["unmap_page_range", "__zap_vma_range"]
        .into_iter()
        .find(|name| symbols.address_of(name).is_some())
        .unwrap_or("unmap_page_range");
    let needed = [
        (unmapping, unmaps(unmapping)),
        ("move_page_tables", moves().or_else(moves_by_control)),
        ("mprotect_fixup", protects()),
    ];
    let others = [
        ("try_to_unmap", folio("try_to_unmap")),
        ("try_to_migrate", folio("try_to_migrate")),
        ("do_coredump", Some(CopyEvent::Dumps)),
        // Since Linux 6.17.
        ("vfs_coredump", Some(CopyEvent::Dumps)),
    ];
    let needed: Option<Vec<_>> = needed.into_iter().map(place).collect();
    let Some(mut events) = needed else {
        log::info!("private copies of programs' text are not traced in this kernel");
        return Vec::new();
    };
    events.extend(others.into_iter().filter_map(place));
    events
}

impl GuestPages {
    /// Returns the watches on private copies with the functions to put them on.
    pub(super) fn copy_watches(self: &Arc<Self>) -> impl Iterator<Item = (Gva, Arc<dyn Watch>)> {
        self.copy_events.iter().map(|(address, event)| {
            let watch: Arc<dyn Watch> = Arc::new(CopyWatch {
                pages: self.clone(),
                event: *event,
                calls: Calls::default(),
            });
            (*address, watch)
        })
    }
}

impl CopyWatch {
    fn argument(&self, hit: &Hit<'_>, number: usize) -> Option<u64> {
        match hit.arguments().get(number) {
            Some(argument) => Some(*argument),
            // On the stack, behind the return address.
            None => {
                let slot = (number - MAX_ARGUMENTS + 1) as u64 * 8;
                let at = hit.registers.rsp.wrapping_add(slot);
                read_u64(hit.memory, self.pages.space, Gva(at)).ok()
            }
        }
    }

    /// Returns the page tables of an area's program.
    fn space_of(&self, hit: &Hit<'_>, area: u64) -> Option<AddressSpace> {
        let pages = &self.pages;
        pages.tables_of(hit.memory, pages.word(hit.memory, area, pages.area_mm)?)
    }

    /// Returns the files that the running program maps from their first byte on, or `None` if they
    /// are not known.
    fn headers(&self, hit: &Hit<'_>) -> Option<HashSet<Gva>> {
        let pages = &self.pages;
        let mm = pages.word(hit.memory, hit.current.task().address, pages.task_mm)?;
        let paused = PausedMemory::new(hit.memory);
        let areas = pages
            .areas
            .as_ref()?
            .vmas(paused.view(pages.space), Gva(mm));
        let areas = Some(areas.items).filter(|_| areas.error.is_none())?;
        let from_start = areas
            .iter()
            .filter(|area| area.file_offset == 0 && area.file.is_some());
        from_start
            .map(|area| pages.area_mapping(hit.memory, area.address.0))
            .collect()
    }

    /// Prepares for a dump of the running program's memory: its private pages, and the first page
    /// of each file that it maps.
    fn dumps(&self, path: &HitPath, hit: &Hit<'_>, traps: Traps<'_>) -> bool {
        let root = hit.space().root;
        path.user_sites
            .forget_copies(traps, &path.user_returns, |_, copy| copy.space.root == root);
        let paused = PausedMemory::new(hit.memory);
        let view = paused.view(self.pages.space);
        let layout = &self.pages.layout;
        let headers = self.headers(hit);
        let is_dumped = |mapping| {
            headers
                .as_ref()
                .is_none_or(|files| files.contains(&mapping))
        };
        let suspended = traps.table.suspend_user(|page| {
            let owner = layout.owner(view, page).ok().flatten();
            owner.is_some_and(|owner| owner.index == 0 && is_dumped(owner.mapping))
        });
        if suspended.is_empty() {
            return false;
        }
        path.count_suspended_in_programs(suspended.len());
        self.keep(hit, traps, Open::Dumping(suspended))
    }

    /// Keeps the work for a call's return. Resumes the traps of calls whose return will not be
    /// reported. Returns whether the work is kept.
    fn keep(&self, hit: &Hit<'_>, traps: Traps<'_>, open: Open) -> bool {
        let entered = self.calls.enter(hit, open);
        resume(traps.table, entered.unreturned);
        entered.is_kept
    }

    fn change(&self, path: &HitPath, hit: &Hit<'_>, traps: Traps<'_>) -> Option<bool> {
        let returns = &path.user_returns;
        let argument = |number| self.argument(hit, number);
        match self.event {
            CopyEvent::Leaves {
                area,
                start,
                end,
                length,
            } => {
                let space = self.space_of(hit, argument(area)?)?;
                let start = argument(start)?;
                let end = match (end, length) {
                    (Some(end), _) => argument(end)?,
                    (None, Some(length)) => start.saturating_add(argument(length)?),
                    (None, None) => return None,
                };
                forget(path, traps, space, &(start..end));
                Some(false)
            }
            CopyEvent::Moves {
                control,
                area,
                start,
                end,
            } => {
                let control = argument(control)?;
                let member = |offset| self.pages.word(hit.memory, control, offset);
                let space = self.space_of(hit, member(area)?)?;
                forget(path, traps, space, &(member(start)?..member(end)?));
                Some(false)
            }
            CopyEvent::FolioGoes(folio) => {
                let first = self.pages.memory_of(hit.memory, argument(folio)?)?;
                path.user_sites
                    .forget_copies(traps, returns, |page, _| page == first.0);
                Some(false)
            }
            CopyEvent::Dumps => Some(self.dumps(path, hit, traps)),
            CopyEvent::Protects {
                area,
                start,
                end,
                flags,
            } => {
                let space = self.space_of(hit, argument(area)?)?;
                let addresses = argument(start)?..argument(end)?;
                if argument(flags)? & VM_WRITE != 0 {
                    path.user_sites
                        .make_writable(traps, returns, space, &addresses);
                    return Some(false);
                }
                Some(self.keep(hit, traps, Open::Protecting { space, addresses }))
            }
        }
    }
}

/// Resumes the traps that calls keep suspended.
fn resume(traps: &TrapTable, calls: impl IntoIterator<Item = Open>) {
    for open in calls {
        if let Open::Dumping(suspended) = open {
            traps.resume_user(suspended);
        }
    }
}

/// Forgets a program's copies that overlap `addresses`.
fn forget(path: &HitPath, traps: Traps<'_>, space: AddressSpace, addresses: &Range<u64>) {
    path.user_sites
        .forget_copies(traps, &path.user_returns, |_, copy| {
            copy.space == space
                && copy.address < addresses.end
                && addresses.start < copy.address.saturating_add(PAGE)
        });
}

impl Watch for CopyWatch {
    fn on_entry(&self, path: &HitPath, hit: &Hit<'_>) -> bool {
        let concerns_files = self.event == CopyEvent::Dumps;
        let concerned = concerns_files || path.user_sites.has_copies();
        let Some(cpu) = hit.cpu.filter(|_| concerned) else {
            return false;
        };
        let traps = path.traps(cpu);
        self.change(path, hit, traps) == Some(true)
    }

    fn on_return(&self, path: &HitPath, hit: &Hit<'_>, _: &Returning, from_stack: Gva) {
        let Some(cpu) = hit.cpu else { return };
        match self.calls.leave(hit, from_stack) {
            // On an error nothing has changed.
            Some(Open::Protecting { space, addresses }) if hit.registers.rax & 0xffff_ffff == 0 => {
                path.user_sites.make_read_only(
                    path.traps(cpu),
                    cpu.ram(),
                    &path.user_returns,
                    (space, &addresses),
                );
            }
            open => resume(cpu.traps(), open),
        }
    }

    fn on_unwatch(&self, traps: &TrapTable) {
        resume(traps, self.calls.close());
    }
}
