//! What programs do to text pages themselves: their private pages when they write to their text,
//! and reads and writes of one program's memory by another.

use std::iter::once;
use std::sync::atomic::Ordering;

use introspect::x86_64::PAGE;
use introspect::x86_64::paging::translate;
use introspect::{Gpa, Gva, PausedMemory};
use vmm::StoppedVcpu;
use vmm::trap::INT3;

use super::originals::{Original, relative};
use super::watch::{PageWatch, Pending};
use crate::engine::hit::{Hit, HitPath};
use crate::engine::user_text::{PrivateCopy, Traps};

/// The largest length that the kernel keeps in an int.
const MOST_BYTES: u64 = 0x7fff_ffff;

impl PageWatch {
    /// Returns the copy that a fault makes of the page at `page`, if sites are kept for copies.
    fn copy_by(&self, path: &HitPath, hit: &Hit<'_>, fault: u64, page: Gpa) -> Option<PrivateCopy> {
        let (pages, memory) = (&self.pages, hit.memory);
        if !pages.traces_copies() {
            return None;
        }
        let paused = PausedMemory::new(memory);
        let owner = pages.layout.owner(paused.view(pages.space), page).ok()?;
        Some(PrivateCopy {
            text: path.user_sites.text_of(page, owner)?,
            space: pages.fault_tables(memory, fault)?,
            address: pages.fault_page_address(memory, fault)?,
            writable: pages.fault_is_writable(memory, fault)?,
        })
    }

    /// Prepares for the private copy of a text page that a program writes to. If the fault does not
    /// name the page yet, it is the one that is mapped.
    pub(super) fn own_copy(
        &self,
        path: &HitPath,
        hit: &Hit<'_>,
        traps: Traps<'_>,
        (fault, page_is_known): (u64, bool),
    ) -> Option<Pending> {
        let pages = &self.pages;
        let space = pages.fault_tables(hit.memory, fault)?;
        let address = pages.fault_page_address(hit.memory, fault)?;
        let before = match page_is_known {
            true => {
                let page = pages.word(hit.memory, fault, pages.fault_page)?;
                pages.memory_of(hit.memory, page)?
            }
            false => translate(hit.memory, space, Gva(address)).ok()?.gpa,
        };
        let range = before.0..before.0.saturating_add(PAGE);
        let originals = relative(&traps.table.user_originals(range), before.0);
        let copy = self.copy_by(path, hit, fault, before);
        if copy.is_none() && originals.is_empty() {
            return None;
        }
        Some(Pending::Page {
            before,
            space,
            address,
            originals,
            copy,
        })
    }

    /// Handles a program's write to a page that it has not touched before. Its private copy is made
    /// already, but is mapped only after this.
    pub(super) fn own_copy_at_first(
        &self,
        path: &HitPath,
        hit: &Hit<'_>,
        cpu: &StoppedVcpu<'_>,
        fault: u64,
    ) {
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
        if let Some(made) = self.copy_by(path, hit, fault, from) {
            path.user_sites
                .copied(path.traps(cpu), &path.user_returns, from, copy, made);
        }
    }

    /// Prepares a write of `length` bytes at `address` of the process with `mm`.
    pub(super) fn poke(
        &self,
        path: &HitPath,
        hit: &Hit<'_>,
        traps: Traps<'_>,
        mm: u64,
        address: u64,
        length: u64,
    ) -> Option<Pending> {
        let space = self.pages.tables_of(hit.memory, mm)?;
        let addresses = address..address.checked_add(length & MOST_BYTES)?;
        let opened = path
            .user_sites
            .write_to_copies(traps, &path.user_returns, space, &addresses);
        // The private copy may be made during the write.
        let pending = Pending::Written {
            space,
            addresses,
            opened,
        };
        self.pages.traces_copies().then_some(pending)
    }

    /// Prepares a copy of `length` bytes at `address` of the process with `mm` to `buffer`, in the
    /// kernel.
    pub(super) fn peek(
        &self,
        hit: &Hit<'_>,
        traps: Traps<'_>,
        mm: u64,
        address: u64,
        buffer: u64,
        length: u64,
    ) -> Option<Pending> {
        let length = length & MOST_BYTES;
        let space = self.pages.tables_of(hit.memory, mm)?;
        let end = address.checked_add(length)?;
        let mut originals = Vec::new();
        let mut at = address;
        while at < end {
            let next = (at & !(PAGE - 1)).saturating_add(PAGE).min(end);
            if let Ok(place) = translate(hit.memory, space, Gva(at)) {
                let start = place.gpa.0;
                for (site, byte) in traps.table.user_originals(start..start + (next - at)) {
                    originals.push(Original {
                        at: at - address + (site.0 - start),
                        ours: INT3,
                        original: byte,
                    });
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
