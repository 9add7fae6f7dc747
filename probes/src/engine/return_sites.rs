//! The return addresses that have a trap. They are looked up at each entry of a function whose
//! return is probed, and seldom change.
//!
//! A site stays while the return of a function that was seen to return to it is probed. The guest
//! chooses return addresses, so their number is limited.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm::sharded_map::{Changes, ShardedMap};
use vmm::trap::{ArmError, SiteId};

use super::returns::FunctionKey;
use super::seen::{List, look_up};

/// A vCPU's lookaside list of return addresses, if it is available.
pub(super) type SeenReturns<'s> = Option<&'s List<Known>>;

/// The state of a return address for a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReturnSite {
    /// A trap is armed there.
    Armed,
    /// No trap can be armed there.
    Refused,
    /// The function's return is not probed any more.
    Closed,
}

/// A return address. Immutable: adding a function replaces it.
#[derive(Debug, Clone)]
pub(super) struct Known {
    site: Option<SiteId>,
    /// The functions that return there.
    functions: Vec<FunctionKey>,
}

/// The largest number of functions remembered for a return address. Further ones share its trap.
const MAX_FUNCTIONS: usize = 64;

#[derive(Default)]
struct Registry {
    by_function: HashMap<FunctionKey, HashSet<u64>>,
    /// Functions whose return is not probed any more. A late hit must not arm a trap for them.
    closed: HashSet<FunctionKey>,
}

/// All return addresses in one kind of text: by virtual address in the kernel, by physical address
/// in programs.
pub(super) struct ReturnSites {
    known: ShardedMap<Known>,
    registry: Mutex<Registry>,
    limit: usize,
}

impl ReturnSites {
    /// Creates a registry of `limit` addresses. `changes` counts its additions and removals.
    pub(super) fn new(limit: usize, changes: &Changes) -> Self {
        Self {
            known: ShardedMap::counted_by(changes),
            registry: Mutex::default(),
            limit,
        }
    }

    /// Checks whether a return trap is armed at `address`.
    pub(super) fn is_armed(&self, address: u64) -> bool {
        let known = self.known.get(address);
        known.is_some_and(|known| known.site.is_some())
    }

    /// Returns the functions that were seen to return to `address`, the first one first, if a trap
    /// is armed there.
    pub(super) fn functions_at(&self, address: u64) -> Vec<FunctionKey> {
        if self.known.is_empty() {
            return Vec::new();
        }
        let known = self.known.get(address).filter(|known| known.site.is_some());
        known.map_or_else(Vec::new, |known| known.functions.clone())
    }

    /// Checks whether a trap is armed at `address` for `function`. Calls `arm` if that was not
    /// tried before.
    pub(super) fn ensure(
        &self,
        address: u64,
        function: FunctionKey,
        seen: SeenReturns<'_>,
        arm: impl FnOnce() -> Result<SiteId, ArmError>,
    ) -> ReturnSite {
        if let Some(known) = self.get(address, function, seen) {
            return known;
        }
        let mut registry = self.lock();
        // Another vCPU may have been faster.
        if let Some(known) = self.get(address, function, None) {
            return known;
        }
        if registry.closed.contains(&function) {
            return ReturnSite::Closed;
        }
        if address == 0 {
            return ReturnSite::Refused;
        }
        let before = self.known.get(address);
        let next = match before {
            Some(known) => {
                let mut functions = known.functions.clone();
                functions.push(function);
                Known {
                    site: known.site,
                    functions,
                }
            }
            None if self.known.len() >= self.limit => return ReturnSite::Refused,
            None => Known {
                // The table must have it before memory does: see below.
                site: None,
                functions: vec![function],
            },
        };
        registry
            .by_function
            .entry(function)
            .or_default()
            .insert(address);
        if next.site.is_some() || self.known.contains(address) {
            let site = next.site;
            self.known.insert(address, Arc::new(next));
            return state(site);
        }
        match arm() {
            Ok(site) => {
                // A vCPU that meets the trap before this misses nothing: it knows no call that
                // returns there yet.
                self.known.insert(
                    address,
                    Arc::new(Known {
                        site: Some(site),
                        ..next
                    }),
                );
                ReturnSite::Armed
            }
            Err(error) => {
                log::warn!("no return event from {address:#x}: {error}");
                self.known.insert(address, Arc::new(next));
                ReturnSite::Refused
            }
        }
    }

    fn get(
        &self,
        address: u64,
        function: FunctionKey,
        seen: SeenReturns<'_>,
    ) -> Option<ReturnSite> {
        look_up(&self.known, seen, address, |known| {
            let known = known?;
            let is_known =
                known.functions.contains(&function) || known.functions.len() >= MAX_FUNCTIONS;
            is_known.then(|| state(known.site))
        })
    }

    /// Allows return traps for `function` from now on.
    pub(super) fn open(&self, function: FunctionKey) {
        self.lock().closed.remove(&function);
    }

    /// Refuses return traps for `function` from now on. Returns the sites that no other function
    /// needs, which the caller disarms.
    pub(super) fn close(&self, function: FunctionKey) -> Vec<SiteId> {
        let mut registry = self.lock();
        registry.closed.insert(function);
        let mut sites = Vec::new();
        for address in registry.by_function.remove(&function).unwrap_or_default() {
            let Some(known) = self.known.get(address) else {
                continue;
            };
            let mut functions = known.functions.clone();
            functions.retain(|other| *other != function);
            if functions.is_empty() {
                self.known.remove(address);
                sites.extend(known.site);
            } else {
                let site = known.site;
                self.known
                    .insert(address, Arc::new(Known { site, functions }));
            }
        }
        sites
    }

    /// Forgets the addresses in `range`, whose text is freed. Returns the sites there, which the
    /// caller disarms.
    pub(super) fn forget(&self, range: std::ops::Range<u64>) -> Vec<SiteId> {
        let mut registry = self.lock();
        let mut sites = Vec::new();
        for addresses in registry.by_function.values_mut() {
            addresses.retain(|address| {
                let gone = range.contains(address);
                if gone {
                    sites.extend(self.known.remove(*address).and_then(|known| known.site));
                }
                !gone
            });
        }
        sites
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn state(site: Option<SiteId>) -> ReturnSite {
    match site {
        Some(_) => ReturnSite::Armed,
        None => ReturnSite::Refused,
    }
}

#[cfg(test)]
mod tests {
    use introspect::{Gpa, Gva};

    use super::*;

    const F: FunctionKey = 0xf000;
    const G: FunctionKey = 0x1_0000;

    fn good(address: u64) -> impl FnOnce() -> Result<SiteId, ArmError> {
        move || Ok(SiteId(Gpa(address)))
    }

    fn bad(address: u64) -> impl FnOnce() -> Result<SiteId, ArmError> {
        move || {
            Err(ArmError::Reserved {
                address: Gva(address),
            })
        }
    }

    #[test]
    fn an_address_is_tried_once_whatever_comes_of_it() {
        let sites = ReturnSites::new(8, &Changes::default());
        assert!(!sites.is_armed(0x10));
        assert_eq!(sites.ensure(0x10, F, None, good(0x10)), ReturnSite::Armed);
        assert_eq!(sites.ensure(0x10, F, None, bad(0x10)), ReturnSite::Armed);
        assert_eq!(sites.ensure(0x10, G, None, bad(0x10)), ReturnSite::Armed);
        assert_eq!(sites.ensure(0x20, F, None, bad(0x20)), ReturnSite::Refused);
        assert_eq!(sites.ensure(0x20, F, None, good(0x20)), ReturnSite::Refused);
        assert_eq!(sites.ensure(0x20, G, None, good(0x20)), ReturnSite::Refused);
        assert!(sites.is_armed(0x10) && !sites.is_armed(0x20));
    }

    #[test]
    fn a_site_stays_until_no_function_needs_it() {
        let sites = ReturnSites::new(8, &Changes::default());
        sites.ensure(0x10, F, None, good(0x10));
        sites.ensure(0x10, G, None, good(0x10));
        sites.ensure(0x20, F, None, good(0x20));
        assert_eq!(sites.close(F), [SiteId(Gpa(0x20))]);
        assert!(sites.is_armed(0x10) && !sites.is_armed(0x20));
        assert_eq!(sites.ensure(0x30, F, None, good(0x30)), ReturnSite::Closed);
        assert_eq!(sites.close(G), [SiteId(Gpa(0x10))]);
        sites.open(F);
        assert_eq!(sites.ensure(0x30, F, None, good(0x30)), ReturnSite::Armed);
    }

    #[test]
    fn the_guest_cannot_have_more_sites_than_the_limit() {
        let sites = ReturnSites::new(100, &Changes::default());
        let armed = (1..=1000u64)
            .filter(|n| sites.ensure(n * 16, F, None, good(n * 16)) == ReturnSite::Armed);
        assert_eq!(armed.count(), 100);
        assert_eq!(sites.close(F).len(), 100);
    }

    #[test]
    fn text_that_goes_away_takes_its_sites_along() {
        let sites = ReturnSites::new(8, &Changes::default());
        for address in [0x10, 0x20, 0x30] {
            sites.ensure(address, F, None, good(address));
        }
        assert_eq!(sites.forget(0x20..0x30), [SiteId(Gpa(0x20))]);
        assert!(sites.is_armed(0x10) && !sites.is_armed(0x20) && sites.is_armed(0x30));
        assert_eq!(sites.close(F).len(), 2);
    }
}
