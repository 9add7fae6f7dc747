//! The lookaside lists of one vCPU: results of its hits' lookups, kept for its next hits.
//!
//! A hit holds its vCPU's lists while it lasts. One that cannot have them looks everything up in the maps.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use vmm::lookaside::Lookaside;
use vmm::sharded_map::ShardedMap;

use super::hit::HitPath;
use super::plan::{ReturnPlan, SitePlan};
use super::return_sites::Known;
use super::returns::FunctionKey;

/// A list for one map.
pub(super) type List<V> = RefCell<Lookaside<Option<Arc<V>>>>;

/// The lists of one vCPU.
#[derive(Default)]
pub(crate) struct Seen {
    /// By address.
    kernel: Lookaside<HitPlan>,
    /// By the physical byte.
    user: Lookaside<HitPlan>,
    lists: Lists,
}

/// What a hit looks up on its way, one list for each map.
#[derive(Default)]
pub(crate) struct Lists {
    pub(super) return_plans: List<ReturnPlan>,
    pub(super) kernel_returns: List<Known>,
    pub(super) user_returns: List<Known>,
}

/// Where a hit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct At {
    /// The site's physical byte.
    pub(crate) site: u64,
    pub(crate) address: u64,
    pub(crate) user: bool,
}

/// All that is to be done at hits of one place: what the maps say of it, put together.
#[derive(Default)]
pub(crate) struct HitPlan {
    /// The number of changes that this is as of.
    pub(super) changes: u64,
    pub(super) site: u64,
    /// A trap for returns stands there.
    pub(super) is_return: bool,
    /// Nothing but probes stands there, and a return may be waited for.
    pub(super) is_plain: bool,
    pub(super) plan: Option<Arc<SitePlan>>,
    /// Where the last call of the function returns to that is entered there, which has a trap.
    pub(super) returns_to: Cell<Option<u64>>,
    /// Of the function that is entered there.
    pub(super) entered: Option<Arc<ReturnPlan>>,
    /// Of one function that returns there, which is known by its key.
    pub(super) returning: Option<(FunctionKey, Arc<ReturnPlan>)>,
}

impl Seen {
    /// Returns what is to be done at a place, and the other lists.
    #[inline(always)]
    pub(crate) fn spot(&mut self, path: &HitPath, at: At) -> (&HitPlan, &Lists) {
        // Before the maps are looked at: a change in between counts as later.
        let changes = path.changes.number();
        let (list, key) = match at.user {
            true => (&mut self.user, at.site),
            false => (&mut self.kernel, at.address),
        };
        // A kernel may map other memory at an address without a change of ours.
        if !list.has(changes, key, |spot| spot.site == at.site) {
            renew(list, changes, path, at);
        }
        (list.at(key), &self.lists)
    }

    /// Forgets everything, and lets go of it.
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
fn renew(list: &mut Lookaside<HitPlan>, changes: u64, path: &HitPath, at: At) {
    let key = if at.user { at.site } else { at.address };
    list.put(changes, key, path.spot(at));
}

/// Gives `look` the value of `key` in `map`, by what was `seen` of the map where that is at hand.
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
