//! Watches on the guest's own uprobes (kernel/events/uprobes.c). These read the instruction that
//! they replace from the page cache. They give each program a private page with their int3, past
//! the usual ways to a copy.
//!
//! | Function | Event | Action |
//! |---|---|---|
//! | `uprobe_register`, `uprobe_unregister` and their kin | instructions are read, pages copied and compared | traps of that file's text suspended until the call returns |
//! | `uprobe_mmap` | the same, in a program that maps a file, if there is any uprobe | the same |
//! | `uprobe_notify_resume` | a program that has met an int3 reads it again, if its uprobe has been removed meanwhile: another's int3 would kill it | if there is one of ours: traps of that page suspended until the call returns |
//! | `uprobe_write`, up to 6.17 `uprobe_write_opcode` | a program gets a private page with or without an int3, or the file's page again | the same; the private page's traps evicted, and new ones armed in the page that it has then |
//!
//! Such a call takes as long as all CPUs take to notice, and programs run meanwhile. Hits in that
//! file are missed, hits in others are not. If the kernel does not say which file it is, all user
//! traps are suspended.
//!
//! If the guest's int3 stands at a site of the engine, both are hit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use introspect::kernel::btf::Btf;
use introspect::kernel::page_cache::PageOwner;
use introspect::kernel::symbols::Symbols;
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::{Gpa, Gva, PausedMemory};
use vmm::StoppedVcpu;
use vmm::trap::{INT3, SuspendedUser, TrapTable};

use super::private::VM_WRITE;
use super::{GuestPages, parameter};
use crate::engine::calls::Calls;
use crate::engine::hit::{Hit, HitPath};
use crate::engine::returns::Returning;
use crate::engine::user_text::PrivateCopy;
use crate::engine::watch::Watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UprobeEvent {
    /// Uprobes of a file are added, removed or changed.
    Changes(Option<File>),
    /// A program maps a file.
    Maps,
    /// A program has met an int3. The offset of the instruction pointer in a `struct pt_regs`.
    Resumes { ip: u64 },
    /// A program's page is replaced. Positions of the program and the address among the arguments.
    Writes { program: Program, address: usize },
}

/// An argument that identifies a file, with the way to its `address_space`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct File {
    argument: usize,
    /// The offset of the inode in a `struct uprobe`; `None` if the argument is the inode.
    inode: Option<u64>,
    /// The offset of `i_mapping` in an inode.
    mapping: u64,
}

/// An argument that identifies a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Program {
    /// The position of its `mm_struct`.
    Memory(usize),
    /// The position of one of its areas (`vm_area_struct`).
    Area(usize),
}

/// Returns the events to be watched with the addresses of their functions.
pub(super) fn events(btf: &Btf, symbols: &Symbols) -> Vec<(Gva, UprobeEvent)> {
    // In a kernel that has both, the first calls the second.
    let writes = ["uprobe_write", "uprobe_write_opcode"]
        .into_iter()
        .find(|name| symbols.address_of(name).is_some());
    let writes = writes.map(|function| (function, writes_of(btf, function)));
    let changes = [
        "uprobe_register",
        "uprobe_register_refctr",
        "uprobe_apply",
        "uprobe_unregister",
        "uprobe_unregister_nosync",
    ];
    let changes = changes.map(|name| (name, Some(UprobeEvent::Changes(file_of(btf, name)))));
    let maps = ("uprobe_mmap", Some(UprobeEvent::Maps));
    let ip = btf.member("pt_regs.ip").ok().map(|ip| ip.byte_offset);
    let resumes = ip.map(|ip| UprobeEvent::Resumes { ip });
    let resumes = ("uprobe_notify_resume", resumes);
    let all = changes.into_iter().chain([maps, resumes]).chain(writes);
    all.filter_map(|(name, event)| Some((Gva(symbols.address_of(name)?), event?)))
        .collect()
}

/// Reads from a function's type which argument identifies the file. Since Linux 6.12 it is a uprobe
/// in some functions.
fn file_of(btf: &Btf, function: &str) -> Option<File> {
    let offset = |path: &str| Some(btf.member(path).ok()?.byte_offset);
    let mapping = offset("inode.i_mapping")?;
    let file = |argument, inode| File {
        argument,
        inode,
        mapping,
    };
    match parameter(btf, function, "inode") {
        Some(argument) => Some(file(argument, None)),
        None => {
            let inode = offset("uprobe.inode")?;
            Some(file(parameter(btf, function, "uprobe")?, Some(inode)))
        }
    }
}

/// Reads from a function's type which arguments identify the page that it replaces. Since Linux
/// 6.16 one is an area.
fn writes_of(btf: &Btf, function: &str) -> Option<UprobeEvent> {
    let at = |name| parameter(btf, function, name);
    let program = at("mm").map(Program::Memory);
    let program = program.or_else(|| at("vma").map(Program::Area))?;
    let mut addresses = ["vaddr", "opcode_vaddr", "insn_vaddr"].into_iter();
    let Some(address) = addresses.find_map(at) else {
        log::warn!(
            "{function} has other arguments than those known: the guest's uprobes may lose ours"
        );
        return None;
    };
    Some(UprobeEvent::Writes { program, address })
}

/// A page of a program.
#[derive(Debug, Clone, Copy)]
struct Place {
    mm: Gva,
    space: AddressSpace,
    address: u64,
    /// The page of memory before the call.
    page: Option<Gpa>,
    /// The `address_space` of the file that is mapped there.
    mapping: Option<Gva>,
}

/// The work that is left for a call's return.
struct Open {
    suspended: SuspendedUser,
    written: Option<Place>,
}

struct UprobeWatch {
    pages: Arc<GuestPages>,
    event: UprobeEvent,
    calls: Calls<Open>,
    /// Set once it has been told that a file was not known.
    is_told: AtomicBool,
}

impl GuestPages {
    /// Returns the watches on uprobes with the functions to put them on.
    pub(super) fn uprobe_watches(self: &Arc<Self>) -> impl Iterator<Item = (Gva, Arc<dyn Watch>)> {
        self.uprobe_events.iter().map(|(address, event)| {
            let watch: Arc<dyn Watch> = Arc::new(UprobeWatch {
                pages: self.clone(),
                event: *event,
                calls: Calls::default(),
                is_told: AtomicBool::new(false),
            });
            (*address, watch)
        })
    }
}

impl UprobeWatch {
    /// Checks whether the guest has any uprobe. If the kernel's tree is not known, it is assumed
    /// to.
    fn there_are_some(&self, hit: &Hit<'_>) -> bool {
        let Some(tree) = self.pages.uprobes else {
            return true;
        };
        self.pages.word(hit.memory, tree.0, 0) != Some(0)
    }

    /// Returns the page in which a program that has met an int3 of its own would find one of ours
    /// instead.
    fn page_with_ours(&self, hit: &Hit<'_>, cpu: &StoppedVcpu<'_>, ip: u64) -> Option<u64> {
        let [regs, ..] = hit.arguments();
        let behind = self.pages.word(hit.memory, regs, ip)?;
        let at = Gva(behind.wrapping_sub(1));
        let found = translate(hit.memory, cpu.address_space(), at).ok()?;
        let original = cpu.traps().user_original(found.gpa)?;
        (original != INT3).then_some(found.gpa.0 / PAGE)
    }

    /// Suspends the traps of the event's file, or all if the file is not known.
    fn suspend(
        &self,
        hit: &Hit<'_>,
        cpu: &StoppedVcpu<'_>,
        written: Option<&Place>,
    ) -> SuspendedUser {
        let pages = &self.pages;
        let mapping = match self.event {
            UprobeEvent::Changes(file) => file.and_then(|file| self.mapping(hit, file)),
            UprobeEvent::Maps => {
                let [area, ..] = hit.arguments();
                let Some(mapping) = pages.area_mapping(hit.memory, area) else {
                    return SuspendedUser::default();
                };
                Some(mapping)
            }
            UprobeEvent::Resumes { ip } => {
                let Some(met) = self.page_with_ours(hit, cpu, ip) else {
                    return SuspendedUser::default();
                };
                return cpu.traps().suspend_user(|page| page.0 / PAGE == met);
            }
            UprobeEvent::Writes { .. } => written.and_then(|place| place.mapping),
        };
        let Some(mapping) = mapping else {
            if !self.is_told.swap(true, Ordering::Relaxed) {
                let event = self.event;
                log::warn!(
                    "the guest changes its own uprobes, and the file is not known ({event:?}): hits in all programs may be missed"
                );
            }
            return cpu.traps().suspend_user(|_| true);
        };
        let own = written.and_then(|place| place.page);
        let paused = PausedMemory::new(hit.memory);
        let view = paused.view(pages.space);
        cpu.traps().suspend_user(|page| {
            let owner = pages.layout.owner(view, page);
            let is_of_file = matches!(owner, Ok(Some(owner)) if owner.mapping == mapping);
            is_of_file || own.is_some_and(|own| own.0 / PAGE == page.0 / PAGE)
        })
    }

    fn mapping(&self, hit: &Hit<'_>, file: File) -> Option<Gva> {
        let word = |at, offset| {
            let read = self.pages.word(hit.memory, at, offset);
            read.filter(|pointer| *pointer != 0)
        };
        let told = hit.arguments().get(file.argument).copied()?;
        let inode = match file.inode {
            Some(offset) => word(told, offset)?,
            None => told,
        };
        word(inode, file.mapping).map(Gva)
    }

    fn place(&self, hit: &Hit<'_>, program: Program, address: usize) -> Option<Place> {
        let (arguments, pages) = (hit.arguments(), &self.pages);
        let argument = |number: usize| arguments.get(number).copied();
        let address = argument(address)? & !(PAGE - 1);
        let (mm, area) = match program {
            Program::Memory(number) => {
                let mm = argument(number)?;
                (mm, self.area(hit, mm, address))
            }
            Program::Area(number) => {
                let area = argument(number)?;
                (pages.word(hit.memory, area, pages.area_mm)?, Some(area))
            }
        };
        let space = pages.tables_of(hit.memory, mm)?;
        let page = translate(hit.memory, space, Gva(address));
        Some(Place {
            mm: Gva(mm),
            space,
            address,
            page: page.ok().map(|page| page.gpa),
            mapping: area.and_then(|area| pages.area_mapping(hit.memory, area)),
        })
    }

    fn area(&self, hit: &Hit<'_>, mm: u64, address: u64) -> Option<u64> {
        let paused = PausedMemory::new(hit.memory);
        let view = paused.view(self.pages.space);
        let found = self.pages.areas.as_ref()?.find(view, Gva(mm), address);
        found.ok()?.map(|area| area.address.0)
    }

    /// Notes the page that a program has at a place now, if it is a private one.
    fn note(&self, path: &HitPath, cpu: &StoppedVcpu<'_>, place: &Place) {
        let pages = &self.pages;
        let Some(areas) = pages.areas.as_ref().filter(|_| pages.traces_copies()) else {
            return;
        };
        let Ok(found) = translate(cpu.ram(), place.space, Gva(place.address)) else {
            return;
        };
        let paused = PausedMemory::new(cpu.ram());
        let view = paused.view(pages.space);
        if !matches!(pages.layout.owner(view, found.gpa), Ok(None)) {
            return;
        }
        let Ok(Some(area)) = areas.find(view, place.mm, place.address) else {
            return;
        };
        let mapping = pages.area_mapping(cpu.ram(), area.address.0);
        let owner = mapping.map(|mapping| PageOwner {
            mapping,
            index: (area.file_offset + (place.address - area.start)) / PAGE,
        });
        let sites = &path.user_sites;
        let Some(text) = owner.and_then(|owner| sites.text_of(found.gpa, Some(owner))) else {
            return;
        };
        let copy = PrivateCopy {
            space: place.space,
            address: place.address,
            text,
            writable: area.flags.0 & VM_WRITE != 0,
        };
        let (traps, returns) = (path.traps(cpu), &path.user_returns);
        let before = place.page.unwrap_or(found.gpa);
        sites.copied(traps, returns, before, found.gpa, copy);
        let addresses = place.address..place.address.saturating_add(PAGE);
        sites.written(traps, cpu.ram(), returns, &[], (place.space, &addresses));
    }
}

impl Watch for UprobeWatch {
    fn on_entry(&self, path: &HitPath, hit: &Hit<'_>) -> bool {
        let Some(cpu) = hit.cpu else { return false };
        if self.event == UprobeEvent::Maps && !self.there_are_some(hit) {
            return false;
        }
        let mut written = None;
        if let UprobeEvent::Writes { program, address } = self.event {
            written = self.place(hit, program, address);
        }
        if let Some(place) = written {
            let returns = &path.user_returns;
            path.user_sites
                .forget_copies(path.traps(cpu), returns, |_, copy| {
                    copy.space == place.space && copy.address == place.address
                });
        }
        let suspended = self.suspend(hit, cpu, written.as_ref());
        if suspended.is_empty() && matches!(self.event, UprobeEvent::Resumes { .. }) {
            return false;
        }
        path.count_suspended_in_programs(suspended.len());
        let entered = self.calls.enter(hit, Open { suspended, written });
        for Open { suspended, .. } in entered.unreturned {
            cpu.traps().resume_user(suspended);
        }
        if !entered.is_kept {
            log::warn!("a change of the guest's uprobes cannot be followed: it may meet traps");
        }
        entered.is_kept
    }

    fn on_return(&self, path: &HitPath, hit: &Hit<'_>, _: &Returning, from_stack: Gva) {
        let Some(cpu) = hit.cpu else { return };
        let Some(Open { suspended, written }) = self.calls.leave(hit, from_stack) else {
            return;
        };
        if let Some(place) = written {
            self.note(path, cpu, &place);
        }
        cpu.traps().resume_user(suspended);
    }

    fn on_unwatch(&self, traps: &TrapTable) {
        for open in self.calls.close() {
            traps.resume_user(open.suspended);
        }
    }
}
