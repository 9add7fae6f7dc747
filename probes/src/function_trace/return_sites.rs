//! The return addresses that already have a trap: asked at each entry hit, changed rarely.
//!
//! Readers take no lock: a fixed open-addressing table, filled and never emptied while the tracer lives. Writers
//! take turns. The guest chooses return addresses, so their number is limited.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use introspect::Gva;
use vmm::trap::{ArmError, SiteId};

/// What is known of a return address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReturnSite {
    /// A trap stands there.
    Armed,
    /// None can.
    Refused,
}

const ARMED: u8 = 1;
/// Most sites; the table then takes 18 MiB.
const MAX_SITES: usize = 1 << 20;

struct Armed {
    sites: Vec<SiteId>,
    /// Slots in use.
    known: usize,
    /// No further site is to be armed.
    closed: bool,
}

/// The table.
pub(super) struct ReturnSites {
    /// Return addresses; 0 is an empty slot. Written under the lock of `armed`.
    addresses: Box<[AtomicU64]>,
    /// [`ARMED`] or 0 for each; written before the address.
    states: Box<[AtomicU8]>,
    armed: Mutex<Armed>,
    limit: usize,
}

impl ReturnSites {
    /// Room for `limit` addresses.
    pub(super) fn new(limit: usize) -> Self {
        let limit = limit.min(MAX_SITES);
        // At most half full, so that searches are short.
        let slots = limit.max(1).saturating_mul(2).next_power_of_two();
        Self {
            addresses: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            states: (0..slots).map(|_| AtomicU8::new(0)).collect(),
            armed: Mutex::new(Armed {
                sites: Vec::new(),
                known: 0,
                closed: false,
            }),
            limit,
        }
    }

    /// What is known of `address`.
    pub(super) fn get(&self, address: Gva) -> Option<ReturnSite> {
        for slot in self.search(address.0) {
            match self.addresses.get(slot)?.load(Ordering::Acquire) {
                0 => return None,
                found if found == address.0 => {
                    return Some(match self.states.get(slot)?.load(Ordering::Relaxed) {
                        ARMED => ReturnSite::Armed,
                        _ => ReturnSite::Refused,
                    });
                }
                _ => {}
            }
        }
        None
    }

    /// Whether a trap stands at `address`, which `arm` puts there if it has not been tried before.
    pub(super) fn ensure(
        &self,
        address: Gva,
        arm: impl FnOnce(Gva) -> Result<SiteId, ArmError>,
    ) -> ReturnSite {
        if let Some(known) = self.get(address) {
            return known;
        }
        let mut armed = self.lock();
        // Another vCPU may have been faster.
        if let Some(known) = self.get(address) {
            return known;
        }
        if armed.closed || armed.known >= self.limit || address.0 == 0 {
            return ReturnSite::Refused;
        }
        let (site, state) = match arm(address) {
            Ok(id) => {
                armed.sites.push(id);
                (ReturnSite::Armed, ARMED)
            }
            Err(error) => {
                log::warn!("no return event from {address}: {error}");
                (ReturnSite::Refused, 0)
            }
        };
        let free = self.search(address.0).find_map(|slot| {
            let place = self.addresses.get(slot)?;
            (place.load(Ordering::Relaxed) == 0).then_some((place, self.states.get(slot)?))
        });
        if let Some((place, slot_state)) = free {
            slot_state.store(state, Ordering::Relaxed);
            place.store(address.0, Ordering::Release);
            armed.known += 1;
        }
        site
    }

    /// The sites armed so far, for taking them away; none is armed afterwards.
    pub(super) fn close(&self) -> Vec<SiteId> {
        let mut armed = self.lock();
        armed.closed = true;
        std::mem::take(&mut armed.sites)
    }

    fn search(&self, address: u64) -> impl Iterator<Item = usize> + use<> {
        let mask = self.addresses.len() - 1;
        // Fibonacci hashing: the high bits of the product are well mixed.
        let start = (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        (0..=mask).map(move |step| start.wrapping_add(step) & mask)
    }

    fn lock(&self) -> MutexGuard<'_, Armed> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use introspect::Gpa;

    use super::*;

    fn good(address: Gva) -> Result<SiteId, ArmError> {
        Ok(SiteId(Gpa(address.0)))
    }

    fn bad(address: Gva) -> Result<SiteId, ArmError> {
        Err(ArmError::Reserved { address })
    }

    #[test]
    fn an_address_is_tried_once_whatever_comes_of_it() {
        let sites = ReturnSites::new(8);
        assert_eq!(sites.get(Gva(0x10)), None);
        assert_eq!(sites.ensure(Gva(0x10), good), ReturnSite::Armed);
        assert_eq!(sites.ensure(Gva(0x10), bad), ReturnSite::Armed);
        assert_eq!(sites.ensure(Gva(0x20), bad), ReturnSite::Refused);
        assert_eq!(sites.ensure(Gva(0x20), good), ReturnSite::Refused);
        assert_eq!(sites.get(Gva(0x10)), Some(ReturnSite::Armed));
        assert_eq!(sites.close(), [SiteId(Gpa(0x10))]);
    }

    #[test]
    fn the_guest_cannot_have_more_sites_than_the_limit() {
        let sites = ReturnSites::new(100);
        let armed = (1..=1000).filter(|n| sites.ensure(Gva(n * 16), good) == ReturnSite::Armed);
        assert_eq!(armed.count(), 100);
        assert!((1..=100).all(|n| sites.get(Gva(n * 16)) == Some(ReturnSite::Armed)));
        assert_eq!(sites.close().len(), 100);
    }

    #[test]
    fn a_closed_table_arms_nothing() {
        let sites = ReturnSites::new(8);
        sites.ensure(Gva(0x10), good);
        assert_eq!(sites.close().len(), 1);
        assert_eq!(sites.ensure(Gva(0x20), good), ReturnSite::Refused);
        assert!(sites.close().is_empty());
    }
}
