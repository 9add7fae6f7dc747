//! Pages that leave their file, or move in memory.
//!
//! The kernel unmaps a page before it moves it, and maps it again afterwards. No watch reports
//! these two steps. In between its traps are suspended and its bytes are copied. Often the kernel
//! gives up before the copy, since something else refers to the page.

use std::sync::atomic::Ordering;

use introspect::kernel::page_cache::PageOwner;
use introspect::x86_64::PAGE;
use introspect::{Gpa, Gva, PausedMemory, PhysicalMemory};
use vmm::StoppedVcpu;
use vmm::trap::INT3;

use super::watch::{PageWatch, suspend};
use crate::engine::hit::{Hit, HitPath};
use crate::engine::user_text::Traps;

impl PageWatch {
    /// Suspends the traps in a page that leaves its file. They wait from then on. Returns the file,
    /// if it has such traps.
    pub(super) fn leaves(
        &self,
        path: &HitPath,
        hit: &Hit<'_>,
        traps: Traps<'_>,
        (mapping, folio): (usize, usize),
    ) -> Option<Gva> {
        let argument = |number: usize| hit.arguments().get(number).copied();
        let (mapping, folio) = (Gva(argument(mapping)?), Gva(argument(folio)?));
        let paused = PausedMemory::new(hit.memory);
        let view = paused.view(self.pages.space);
        let layout = &self.pages.layout;
        let first = layout.memory_of(view, folio).ok()?;
        let index = layout.index_of(view, folio).ok()?;
        path.user_sites.pages_leave(traps, mapping, index, first);
        // Return addresses are known by their pages alone.
        let owner = PageOwner { mapping, index };
        for page in self.patched_pages(hit, traps, first, Some(owner)) {
            for site in path.user_returns.forget(page..page + PAGE) {
                traps.table.disarm(site);
            }
        }
        path.user_sites.waits(mapping).then_some(mapping)
    }

    /// Handles the end of a move: the page at `to` has the bytes of the one at `from`, and its
    /// place in the file. Returns the file, if it has traps that wait.
    ///
    /// Another vCPU that maps a page of the file may have armed traps at `from` since
    /// [`Self::leaves`], so that their bytes were copied.
    pub(super) fn moved(
        &self,
        path: &HitPath,
        hit: &Hit<'_>,
        cpu: &StoppedVcpu<'_>,
        (to, from): (Gpa, Gpa),
    ) -> Option<Gva> {
        let (ram, traps) = (cpu.ram(), path.traps(cpu));
        let paused = PausedMemory::new(hit.memory);
        let owner = self.pages.layout.owner(paused.view(self.pages.space), to);
        let owner = owner.ok()??;
        for page in self.patched_pages(hit, traps, from, Some(owner)) {
            let range = page..page.saturating_add(PAGE);
            for (place, original) in traps.table.user_originals(range.clone()) {
                let copy = Gpa(to.0.saturating_add(place.0 - from.0));
                let mut byte = [0];
                if ram.read_physical(copy, &mut byte).is_ok()
                    && byte == [INT3]
                    && ram.write_physical(copy, &[original]).is_ok()
                {
                    path.counters.hidden.fetch_add(1, Ordering::Relaxed);
                }
            }
            suspend(path, traps, range);
        }
        let mapping = owner.mapping;
        path.user_sites.waits(mapping).then_some(mapping)
    }
}
