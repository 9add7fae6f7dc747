//! Meters: what a guest's time at sites is counted in, at each hit, without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use super::super::session::SessionShared;

/// The meter of one vCPU, for one session or for all. Only the vCPU's own thread adds to it.
#[derive(Debug)]
// Two cache lines, since CPUs fetch them in pairs: vCPUs do not share one.
#[repr(align(128))]
pub(crate) struct Meter {
    hits: AtomicU64,
    ticks: AtomicU64,
    /// The ticks at which the keeper is woken.
    limit: AtomicU64,
}

impl Default for Meter {
    fn default() -> Self {
        Self {
            hits: AtomicU64::new(0),
            ticks: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
        }
    }
}

impl Meter {
    /// Adds a hit of `ticks`. Returns whether the limit is reached, once for each limit.
    #[inline(always)]
    pub(crate) fn add(&self, ticks: u64) -> bool {
        let hits = self.hits.load(Ordering::Relaxed);
        self.hits.store(hits.wrapping_add(1), Ordering::Relaxed);
        let sum = self.ticks.load(Ordering::Relaxed).wrapping_add(ticks);
        self.ticks.store(sum, Ordering::Relaxed);
        sum >= self.limit.load(Ordering::Relaxed) && self.reach()
    }

    #[cold]
    fn reach(&self) -> bool {
        self.limit.swap(u64::MAX, Ordering::Relaxed) != u64::MAX
    }

    pub(crate) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    pub(crate) fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    pub(crate) fn set_limit(&self, ticks: u64) {
        self.limit.store(ticks, Ordering::Relaxed);
    }
}

/// Returns a meter for each vCPU.
pub(crate) fn meters(vcpus: usize) -> Box<[Arc<Meter>]> {
    (0..vcpus).map(|_| Arc::default()).collect()
}

/// The cost of one unit of a session: of its probes that rest and watch together.
pub(crate) struct Account {
    pub(crate) session: Arc<SessionShared>,
    ticks: AtomicU64,
}

impl Account {
    pub(crate) fn new(session: Arc<SessionShared>) -> Self {
        Self {
            session,
            ticks: AtomicU64::new(0),
        }
    }

    pub(crate) fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(crate) fn add(&self, ticks: u64) {
        self.ticks.fetch_add(ticks, Ordering::Relaxed);
    }
}

/// The accounts and meters that one vCPU's hits at one address are charged to.
#[derive(Default)]
pub(crate) struct Payers {
    /// The vCPU's meter of all sessions.
    all: Option<Arc<Meter>>,
    /// The usual payer, and the vCPU's meter of its session.
    first: Option<(Arc<Account>, Arc<Meter>)>,
    others: Option<Box<Others>>,
}

/// Further payers. They have each session's meter once, and not the first one's.
#[derive(Default)]
struct Others {
    accounts: Vec<Arc<Account>>,
    meters: Vec<Arc<Meter>>,
}

impl Payers {
    /// Returns the payers of a hit that no session has caused, on the vCPU with the meter `all`.
    pub(crate) fn new(all: Option<&Arc<Meter>>) -> Self {
        Self {
            all: all.cloned(),
            first: None,
            others: None,
        }
    }

    /// Adds an account, and the meter of its session for vCPU `vcpu`, each once.
    pub(crate) fn add(&mut self, vcpu: usize, account: &Arc<Account>) {
        let Some(meter) = account.session.meters.get(vcpu) else {
            return;
        };
        let Some((first, first_meter)) = &self.first else {
            self.first = Some((account.clone(), meter.clone()));
            return;
        };
        let is_account = |known: &Arc<Account>| Arc::ptr_eq(known, account);
        let is_meter = |known: &Arc<Meter>| Arc::ptr_eq(known, meter);
        if is_account(first) {
            return;
        }
        let others = self.others.get_or_insert_default();
        if others.accounts.iter().any(is_account) {
            return;
        }
        others.accounts.push(account.clone());
        if !is_meter(first_meter) && !others.meters.iter().any(is_meter) {
            others.meters.push(meter.clone());
        }
    }

    /// Charges a hit of `ticks` to all. Returns whether a limit is reached.
    #[inline(always)]
    pub(crate) fn charge(&self, ticks: u64) -> bool {
        let mut reached = self.all.as_ref().is_some_and(|all| all.add(ticks));
        if let Some((account, meter)) = &self.first {
            account.add(ticks);
            reached |= meter.add(ticks);
        }
        if let Some(others) = &self.others {
            reached |= others.charge(ticks);
        }
        reached
    }
}

impl Others {
    #[inline(never)]
    fn charge(&self, ticks: u64) -> bool {
        for account in &self.accounts {
            account.add(ticks);
        }
        let mut reached = false;
        for meter in &self.meters {
            reached |= meter.add(ticks);
        }
        reached
    }
}

/// Wakes the budget's keeper from a hit.
#[derive(Debug, Default)]
pub(crate) struct Bell(OnceLock<Thread>);

impl Bell {
    pub(crate) fn belongs_to(&self, keeper: Thread) {
        let _ = self.0.set(keeper);
    }

    #[cold]
    pub(crate) fn ring(&self) {
        if let Some(keeper) = self.0.get() {
            keeper.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::doorbell::Doorbell;

    #[test]
    fn a_session_pays_once_for_a_hit_and_each_of_its_accounts_once() {
        let session = || {
            Arc::new(SessionShared {
                rings: Vec::new(),
                skipped_ticks: Arc::default(),
                doorbell: Doorbell::new().unwrap(),
                meters: meters(2),
            })
        };
        let (all, one, other) = (Arc::default(), session(), session());
        let account = |session: &Arc<SessionShared>| Arc::new(Account::new(session.clone()));
        let accounts = [
            account(&one),
            account(&one),
            account(&other),
            account(&other),
        ];
        let mut payers = Payers::new(Some(&all));
        payers.charge(1);
        for account in accounts.iter().chain(&accounts) {
            payers.add(1, account);
        }
        payers.charge(10);
        assert_eq!(accounts.map(|account| account.ticks()), [10; 4]);
        let of = |meter: &Meter| (meter.hits(), meter.ticks());
        assert_eq!(of(&all), (2, 11));
        for session in [one, other] {
            assert_eq!(
                [0, 1].map(|vcpu| of(&session.meters[vcpu])),
                [(0, 0), (1, 10)]
            );
        }
    }

    #[test]
    fn a_limit_is_reported_once() {
        let meter = Meter::default();
        assert!(!meter.add(10));
        meter.set_limit(25);
        let reached: Vec<bool> = (0..4).map(|_| meter.add(10)).collect();
        assert_eq!(reached, [false, true, false, false]);
        assert_eq!((meter.hits(), meter.ticks()), (5, 50));
    }
}
