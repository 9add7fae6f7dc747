//! Sites in programs' text, by file and offset. A trap is armed in the file's page in the page
//! cache while that is in memory. Otherwise it waits for the page.
//!
//! A program with a private page has the same sites there: see [`copies`].
//!
//! [`super::guest_pages`] reports the guest's changes of these pages, on vCPU threads. One mutex
//! guards all state. No thread waits for the guest while it holds it.

mod copies;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use introspect::kernel::page_cache::{CachedFile, CachedPage, PageCacheLayout};
use introspect::x86_64::PAGE;
use introspect::{Gpa, Gva, MemoryView};
use vmm::sharded_map::ShardedMap;
use vmm::trap::{ArmError, SiteId, TrapTable};

use super::plan::SitePlan;
use super::returns::FunctionKey;
use super::splices::Splices;
use crate::probe::UserText;
use copies::Copied;
pub(crate) use copies::PrivateCopy;

/// The length of the longest instruction in bytes.
const LONGEST_INSTRUCTION: u64 = 15;
/// The base of user functions' keys among those of kernel functions and system calls: no address
/// has these bits.
const USER_KEY: u64 = 0x0f11_e000_0000_0000;

struct UserSite {
    number: u64,
    code: Vec<u8>,
    armed: Option<SiteId>,
    plan: SitePlan,
}

struct File {
    file: CachedFile,
    sites: BTreeMap<u64, UserSite>,
}

#[derive(Default)]
struct State {
    next: u64,
    files: HashMap<Gva, File>,
    /// By the page of memory.
    copies: BTreeMap<u64, Copied>,
}

/// All sites in programs' text.
#[derive(Default)]
pub(crate) struct UserSites {
    state: Mutex<State>,
    /// The number of copies.
    copies: AtomicUsize,
    /// Files whose pages the guest is passing on.
    pub(crate) splices: Splices,
}

/// The tables that user sites are armed in.
#[derive(Clone, Copy)]
pub(crate) struct Traps<'t> {
    pub(crate) table: &'t TrapTable,
    pub(crate) plans: &'t ShardedMap<SitePlan>,
}

impl UserSites {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the plan of a site, and arms or disarms it accordingly. Without its page in memory
    /// the site waits.
    ///
    /// # Errors
    /// If no trap can be armed there. Nothing is changed then.
    pub(crate) fn change(
        &self,
        traps: Traps<'_>,
        text: &UserText,
        change: impl FnOnce(&mut SitePlan, FunctionKey),
    ) -> Result<(), ArmError> {
        let mut state = self.lock();
        let number = state.next;
        let file = state
            .files
            .entry(text.file.mapping)
            .or_insert_with(|| File {
                file: text.file,
                sites: BTreeMap::new(),
            });
        let is_new = !file.sites.contains_key(&text.offset);
        let site = file.sites.entry(text.offset).or_insert_with(|| UserSite {
            number,
            code: text.code.clone(),
            armed: None,
            plan: SitePlan::default(),
        });
        let before = site.plan.clone();
        change(&mut site.plan, USER_KEY | site.number);
        let result = if site.plan.is_empty() {
            site.disarm(traps);
            Ok(())
        } else {
            match (site.armed, text.physical) {
                (Some(armed), _) => {
                    traps.plans.insert(armed.0.0, Arc::new(site.plan.clone()));
                    traps.table.reinstate(armed);
                    Ok(())
                }
                (None, Some(physical)) => {
                    let result = site.arm(traps, physical);
                    let mapping = text.file.mapping;
                    self.splices.take_out(traps.table, mapping, site.armed);
                    result
                }
                (None, None) => Ok(()),
            }
        };
        if result.is_err() {
            site.plan = before;
        }
        if site.plan.is_empty() {
            file.sites.remove(&text.offset);
        }
        if file.sites.is_empty() {
            state.files.remove(&text.file.mapping);
        }
        if is_new {
            state.next += 1;
        }
        state.change_copies(traps, text.file.mapping, text.offset);
        result
    }

    /// Checks whether a file has waiting sites.
    pub(crate) fn waits(&self, mapping: Gva) -> bool {
        let state = self.lock();
        let file = state.files.get(&mapping);
        file.is_some_and(|file| file.sites.values().any(|site| site.armed.is_none()))
    }

    /// Returns the number of sites that wait for their page.
    pub(crate) fn waiting(&self) -> usize {
        let state = self.lock();
        let sites = state.files.values().flat_map(|file| file.sites.values());
        sites.filter(|site| site.armed.is_none()).count()
    }

    /// Handles the removal of a folio from a file, with the file's bytes from page `index` on. Its
    /// sites wait from now on. Returns their number.
    pub(crate) fn pages_leave(
        &self,
        traps: Traps<'_>,
        mapping: Gva,
        index: u64,
        first: Gpa,
    ) -> usize {
        let mut state = self.lock();
        let Some(file) = state.files.get_mut(&mapping) else {
            return 0;
        };
        let start = index.saturating_mul(PAGE);
        let mut left = 0;
        for (offset, site) in &mut file.sites {
            // A site is in this folio if it is as far from the folio's first byte in memory as in
            // the file.
            let within = offset.checked_sub(start);
            let is_inside = site
                .armed
                .is_some_and(|armed| within.is_some() && armed.0.0.checked_sub(first.0) == within);
            if is_inside {
                site.disarm(traps);
                left += 1;
            }
        }
        left
    }

    /// Arms a file's waiting sites in its pages that are in memory, if the code there is unchanged.
    pub(crate) fn pages_arrive(
        &self,
        traps: Traps<'_>,
        mapping: Gva,
        layout: &PageCacheLayout,
        view: MemoryView<'_>,
    ) -> usize {
        let mut state = self.lock();
        let Some(file) = state.files.get_mut(&mapping) else {
            return 0;
        };
        let mut armed = 0;
        for (offset, site) in &mut file.sites {
            if site.armed.is_some() {
                continue;
            }
            let Some((physical, code)) = bytes_at(traps, layout, view, &file.file, *offset) else {
                continue;
            };
            // Another version of the file has other functions there.
            if !site.code.iter().zip(&code).all(|(was, is)| was == is) {
                continue;
            }
            // The code was known only in part while the page behind it was missing.
            if code.len() > site.code.len() {
                site.code = code;
            }
            if site.arm(traps, physical).is_ok() {
                self.splices.take_out(traps.table, mapping, site.armed);
                armed += 1;
            }
        }
        armed
    }

    /// Handles the end of a file's inode: its waiting sites never resume.
    pub(crate) fn file_goes(&self, traps: Traps<'_>, inode: Gva) {
        let mut state = self.lock();
        let gone: Vec<Gva> = state
            .files
            .iter()
            .filter(|(_, file)| file.file.inode == inode)
            .map(|(mapping, _)| *mapping)
            .collect();
        for mapping in gone {
            if let Some(mut file) = state.files.remove(&mapping) {
                for (offset, mut site) in std::mem::take(&mut file.sites) {
                    site.disarm(traps);
                    state.change_copies(traps, mapping, offset);
                }
            }
        }
    }

    /// Forgets all copies. To be called only when no event will be reported any more and no copy
    /// has a trap.
    pub(crate) fn clear(&self) {
        self.splices.clear();
        self.lock().copies.clear();
        self.copies.store(0, Ordering::Relaxed);
    }

    /// Suspends the sites in a range of physical memory; they wait from then on. Returns their
    /// number.
    pub(crate) fn take_out(&self, traps: Traps<'_>, range: &Range<u64>) -> usize {
        let mut state = self.lock();
        let mut out = 0;
        for site in state
            .files
            .values_mut()
            .flat_map(|file| file.sites.values_mut())
        {
            if site.armed.is_some_and(|armed| range.contains(&armed.0.0)) {
                site.disarm(traps);
                out += 1;
            }
        }
        out
    }
}

impl UserSite {
    fn arm(&mut self, traps: Traps<'_>, physical: Gpa) -> Result<(), ArmError> {
        self.armed = Some(arm(traps, physical, &self.code, &self.plan)?);
        Ok(())
    }

    fn disarm(&mut self, traps: Traps<'_>) {
        if let Some(site) = self.armed.take() {
            disarm(traps, site);
        }
    }
}

fn arm(traps: Traps<'_>, physical: Gpa, code: &[u8], plan: &SitePlan) -> Result<SiteId, ArmError> {
    // The plan must be in place before the trap.
    traps.plans.insert(physical.0, Arc::new(plan.clone()));
    let armed = traps.table.arm_user_at(physical, code);
    if armed.is_err() {
        traps.plans.remove(physical.0);
    }
    armed
}

fn disarm(traps: Traps<'_>, site: SiteId) {
    traps.table.disarm(site);
    traps.plans.remove(site.0.0);
}

/// Returns the place of the byte at `offset` of a file, and the code there without any trap. The
/// code is as long as an instruction. It is shorter if the rest is not in memory or is being
/// written to a disk.
fn bytes_at(
    traps: Traps<'_>,
    layout: &PageCacheLayout,
    view: MemoryView<'_>,
    file: &CachedFile,
    offset: u64,
) -> Option<(Gpa, Vec<u8>)> {
    let end = offset.checked_add(LONGEST_INSTRUCTION)?;
    let (mut physical, mut code, mut at) = (None, Vec::new(), offset);
    while at < end {
        let next = (at & !(PAGE - 1)).saturating_add(PAGE).min(end);
        let Ok(CachedPage::Present { gpa, page }) = layout.page(view, file, at / PAGE) else {
            break;
        };
        // The disk must get the page without traps.
        if layout.is_in_writeback(view, page) != Ok(false) {
            break;
        }
        let gpa = Gpa(gpa.0 + at % PAGE);
        let mut part = vec![0; usize::try_from(next - at).unwrap_or_default()];
        if traps.table.read_unpatched(gpa, &mut part).is_err() {
            break;
        }
        physical.get_or_insert(gpa);
        code.append(&mut part);
        at = next;
    }
    physical.map(|physical| (physical, code))
}
