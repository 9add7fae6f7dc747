//! The lookaside lists of one vCPU, which keep the results of its hits' lookups for its next hits.
//!
//! A hit holds its vCPU's lists while it lasts. If it cannot get them, it looks everything up in
//! the maps.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use vmm::lookaside::Lookaside;
use vmm::sharded_map::ShardedMap;

use super::budget::meter::Payers;
use super::hit::HitPath;
use super::plan::{ReturnPlan, SitePlan};
use super::return_sites::Known;
use super::returns::FunctionKey;

/// A lookaside list for one map.
pub(super) type List<V> = RefCell<Lookaside<Option<Arc<V>>>>;

/// The lists of one vCPU.
#[derive(Default)]
pub(crate) struct Seen {
    /// By address.
    kernel: Lookaside<HitPlan>,
    /// By the physical address.
    user: Lookaside<HitPlan>,
    lists: Lists,
}

/// The lookups within a hit, one list for each map.
#[derive(Default)]
pub(crate) struct Lists {
    pub(super) return_plans: List<ReturnPlan>,
    pub(super) kernel_returns: List<Known>,
    pub(super) user_returns: List<Known>,
}

/// The place of a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct At {
    /// The physical address of the site's first byte.
    pub(crate) site: u64,
    pub(crate) address: u64,
    pub(crate) user: bool,
}

/// The actions at one address, collected from the maps.
#[derive(Default)]
pub(crate) struct HitPlan {
    /// The number of changes that the plan is based on.
    pub(super) changes: u64,
    pub(super) site: u64,
    /// Whether a return trap is there.
    pub(super) is_return: bool,
    /// Whether only probes are there, and possibly a return is expected.
    pub(super) is_plain: bool,
    pub(super) plan: Option<Arc<SitePlan>>,
    /// The return address of the last call of the function that begins there, if it has a trap.
    pub(super) returns_to: Cell<Option<u64>>,
    /// The return plan of the function that begins there.
    pub(super) entered: Option<Arc<ReturnPlan>>,
    /// A function that returns there, by its key, with its return plan.
    pub(super) returning: Option<(FunctionKey, Arc<ReturnPlan>)>,
    /// The payers of a hit there.
    pub(super) payers: Payers,
}

impl Seen {
    /// Returns the actions at an address, and the other lists.
    #[inline(always)]
    pub(crate) fn spot(&mut self, path: &HitPath, vcpu: usize, at: At) -> (&HitPlan, &Lists) {
        // Read before the maps, so that a change in between counts as later.
        let changes = path.changes.number();
        let (list, key) = match at.user {
            true => (&mut self.user, at.site),
            false => (&mut self.kernel, at.address),
        };
        // A kernel can map other memory at an address without a change of the engine's plans.
        if !list.has(changes, key, |spot| spot.site == at.site) {
            renew(list, changes, path, vcpu, at);
        }
        (list.at(key), &self.lists)
    }

    /// Clears the lists and releases their contents.
    pub(super) fn clear(&mut self) {
        self.kernel.clear();
        self.user.clear();
        self.lists.return_plans.get_mut().clear();
        self.lists.kernel_returns.get_mut().clear();
        self.lists.user_returns.get_mut().clear();
    }
}

#[cold]
#[inline(never)]
fn renew(list: &mut Lookaside<HitPlan>, changes: u64, path: &HitPath, vcpu: usize, at: At) {
    let key = if at.user { at.site } else { at.address };
    list.put(changes, key, path.spot(vcpu, at));
}

/// Passes the value of `key` in `map` to `look`, from the list `seen` if available.
#[inline]
pub(super) fn look_up<V, R>(
    map: &ShardedMap<V>,
    seen: Option<&List<V>>,
    key: u64,
    look: impl FnOnce(Option<&Arc<V>>) -> R,
) -> R {
    match seen.and_then(|seen| seen.try_borrow_mut().ok()) {
        Some(mut seen) => look(seen.get(map, key)),
        None => look(map.get(key).as_ref()),
    }
}
