//! The lookaside lists of one vCPU: results of its hits' lookups, kept for its next hits.
//!
//! A hit holds its vCPU's lists while it lasts. One that cannot have them looks everything up in the maps.

use std::cell::RefCell;
use std::sync::Arc;

use vmm::lookaside::Lookaside;
use vmm::sharded_map::ShardedMap;

use super::plan::{ReturnPlan, SitePlan};
use super::return_sites::Known;

/// The lists of one vCPU, one for each map.
#[derive(Default)]
pub(crate) struct Seen {
    pub(super) plans: RefCell<Lookaside<SitePlan>>,
    pub(super) return_plans: RefCell<Lookaside<ReturnPlan>>,
    pub(super) kernel_returns: RefCell<Lookaside<Known>>,
    pub(super) user_returns: RefCell<Lookaside<Known>>,
}

/// Returns the value of `key` in `map`, by what was `seen` of the map where that is at hand.
#[inline]
pub(super) fn get<V>(
    map: &ShardedMap<V>,
    seen: Option<&RefCell<Lookaside<V>>>,
    key: u64,
) -> Option<Arc<V>> {
    match seen.and_then(|seen| seen.try_borrow_mut().ok()) {
        Some(mut seen) => seen.get(map, key),
        None => map.get(key),
    }
}
