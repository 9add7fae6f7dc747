//! Selects the hits of a probe that are recorded: by process, thread, name, address space, CPU and
//! rate.
//!
//! The cheapest conditions are checked first: the CPU and the page tables, then the current task's
//! numbers, its name last. Rates count the hits that passed all of these.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use introspect::Gpa;

use super::processes::Followed;
use crate::event::COMM_LENGTH;

/// A set of numbers or names that a hit is compared with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Match<T> {
    /// Every value.
    #[default]
    Any,
    /// These values only.
    In(Vec<T>),
    /// All values but these.
    NotIn(Vec<T>),
}

impl<T> Match<T> {
    /// Checks whether every value matches.
    #[must_use]
    pub fn is_any(&self) -> bool {
        matches!(self, Self::Any)
    }

    fn admits<V: ?Sized>(&self, value: &V) -> bool
    where
        T: PartialEq<V>,
    {
        match self {
            Self::Any => true,
            Self::In(values) => values.iter().any(|one| one == value),
            Self::NotIn(values) => values.iter().all(|one| one != value),
        }
    }
}

/// The conditions for a hit to be recorded. By default, all hits are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Filter {
    /// Processes (the kernel's tgid).
    pub pids: Match<u32>,
    /// Whether descendants of the processes in [`pids`](Self::pids) are included.
    pub follow: bool,
    /// Threads (the kernel's pid).
    pub tids: Match<u32>,
    /// Names of threads, cut to 15 bytes as the kernel does.
    pub comms: Match<Vec<u8>>,
    /// Roots of page tables: the guest's CR3 without its lower 12 bits.
    pub spaces: Match<Gpa>,
    /// vCPUs.
    pub vcpus: Match<usize>,
    /// Whether hits in interrupt context, and those with an unknown task, are excluded. They always
    /// are if processes, threads or names are given.
    pub processes_only: bool,
    /// The sampling rate: one hit in this many is recorded; 0 and 1 mean all.
    pub one_in: u32,
    /// The largest number of hits recorded in a second, the first ones; 0 means no limit.
    pub per_second: u32,
}

/// Under page table isolation, page tables with the user half only differ in bit 12.
const ISOLATION: u64 = 1 << 12;

/// The process and thread of a hit, as far as known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Identity {
    pub(crate) pid: Option<u32>,
    pub(crate) tid: Option<u32>,
}

/// The part of a filter that must be evaluated, apart from its rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Kind {
    /// Every hit is wanted.
    #[default]
    All,
    /// The hits of one process, wherever it runs.
    Process(u32),
    /// All conditions must be checked, those on the task if `needs_task`.
    Mixed { needs_task: bool },
}

impl Kind {
    fn of(filter: &Filter, follows: bool) -> Self {
        let any_place = filter.vcpus.is_any() && filter.spaces.is_any();
        let any_thread = filter.tids.is_any() && filter.comms.is_any();
        let any_task = any_thread && filter.pids.is_any() && !filter.processes_only;
        match &filter.pids {
            _ if any_place && any_task => Self::All,
            Match::In(pids) if any_place && any_thread && !follows && pids.len() == 1 => {
                Self::Process(pids.first().copied().unwrap_or_default())
            }
            _ => Self::Mixed {
                needs_task: !any_task,
            },
        }
    }
}

/// A filter with the state of its rates.
#[derive(Debug, Default)]
pub(crate) struct HitFilter {
    filter: Filter,
    /// The processes followed, if descendants are included.
    followed: Option<Followed>,
    kind: Kind,
    /// Whether there is a rate limit.
    has_rate: bool,
    passed: AtomicU64,
    /// The time stamp counter at the start of the current second, and the hits recorded in it.
    second: AtomicU64,
    in_second: AtomicU32,
}

impl HitFilter {
    pub(crate) fn new(filter: Filter, followed: Option<Followed>) -> Self {
        Self {
            kind: Kind::of(&filter, followed.is_some()),
            has_rate: filter.one_in > 1 || filter.per_second != 0,
            followed,
            passed: AtomicU64::new(0),
            second: AtomicU64::new(0),
            in_second: AtomicU32::new(0),
            filter,
        }
    }

    /// Checks whether a hit is wanted, apart from its rates. `who`, `comm` and the `root` of the
    /// page tables are each called only if a condition needs them.
    #[inline(always)]
    pub(crate) fn admits(
        &self,
        vcpu: usize,
        root: impl FnOnce() -> Gpa,
        who: impl FnOnce() -> Identity,
        comm: impl FnOnce() -> Option<[u8; COMM_LENGTH]>,
    ) -> bool {
        match self.kind {
            Kind::All => true,
            Kind::Process(pid) => {
                let who = who();
                who.pid == Some(pid) && who.tid.is_some()
            }
            Kind::Mixed { needs_task } => self.admits_mixed(needs_task, vcpu, root, who, comm),
        }
    }

    #[inline(never)]
    fn admits_mixed(
        &self,
        needs_task: bool,
        vcpu: usize,
        root: impl FnOnce() -> Gpa,
        who: impl FnOnce() -> Identity,
        comm: impl FnOnce() -> Option<[u8; COMM_LENGTH]>,
    ) -> bool {
        self.admits_place(vcpu, root) && (!needs_task || self.admits_task(who, comm))
    }

    /// Checks whether the hit's vCPU and page tables are wanted.
    fn admits_place(&self, vcpu: usize, root: impl FnOnce() -> Gpa) -> bool {
        let spaces = &self.filter.spaces;
        self.filter.vcpus.admits(&vcpu)
            && (spaces.is_any() || spaces.admits(&Gpa(root().0 & !ISOLATION)))
    }

    /// Checks whether the hit's task is wanted.
    fn admits_task(
        &self,
        who: impl FnOnce() -> Identity,
        comm: impl FnOnce() -> Option<[u8; COMM_LENGTH]>,
    ) -> bool {
        let who = who();
        let (Some(pid), Some(tid)) = (who.pid, who.tid) else {
            return false;
        };
        // A process that has ended is not followed any more, even if its number is reused.
        let is_process = match &self.followed {
            Some(followed) => followed.contains(pid),
            None => self.filter.pids.admits(&pid),
        };
        if !is_process || !self.filter.tids.admits(&tid) {
            return false;
        }
        match &self.filter.comms {
            Match::Any => true,
            comms => comm().is_some_and(|comm| {
                let end = comm.iter().position(|byte| *byte == 0);
                let name = comm.get(..end.unwrap_or(comm.len())).unwrap_or_default();
                comms.admits(name)
            }),
        }
    }

    /// Checks whether there is a rate limit.
    pub(crate) fn has_rate(&self) -> bool {
        self.has_rate
    }

    /// Checks whether the rates admit one more hit now. `clock` is called only if the time matters;
    /// `hz` is its frequency.
    #[inline]
    pub(crate) fn admits_rate(&self, clock: impl FnOnce() -> u64, hz: u64) -> bool {
        !self.has_rate || self.counts(clock, hz)
    }

    #[inline(never)]
    fn counts(&self, clock: impl FnOnce() -> u64, hz: u64) -> bool {
        if self.filter.one_in > 1 {
            let number = self.passed.fetch_add(1, Ordering::Relaxed);
            if !number.is_multiple_of(u64::from(self.filter.one_in)) {
                return false;
            }
        }
        if self.filter.per_second == 0 {
            return true;
        }
        let tsc = clock();
        let began = self.second.load(Ordering::Relaxed);
        if tsc.wrapping_sub(began) >= hz
            && self
                .second
                .compare_exchange(began, tsc, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        {
            self.in_second.store(0, Ordering::Relaxed);
        }
        self.in_second.fetch_add(1, Ordering::Relaxed) < self.filter.per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOMEBODY: Identity = Identity {
        pid: Some(40),
        tid: Some(41),
    };

    fn admits(filter: Filter) -> bool {
        let filter = HitFilter::new(filter, None);
        let comm = || Some(*b"busybox\0garbage\0");
        filter.admits(1, || Gpa(0x5000), || SOMEBODY, comm)
    }

    /// Returns the filter that `set` makes of one that admits all.
    fn filter(set: impl FnOnce(&mut Filter)) -> Filter {
        let mut filter = Filter::default();
        set(&mut filter);
        filter
    }

    fn pids(pids: Match<u32>) -> Filter {
        filter(|filter| filter.pids = pids)
    }

    fn tids(tids: Match<u32>) -> Filter {
        filter(|filter| filter.tids = tids)
    }

    fn comms(of: fn(Vec<Vec<u8>>) -> Match<Vec<u8>>, name: &str) -> Filter {
        filter(|filter| filter.comms = of(vec![name.into()]))
    }

    fn space(root: u64) -> Filter {
        filter(|filter| filter.spaces = Match::In(vec![Gpa(root)]))
    }

    fn vcpus(vcpus: Match<usize>) -> Filter {
        filter(|filter| filter.vcpus = vcpus)
    }

    fn processes() -> Filter {
        filter(|filter| filter.processes_only = true)
    }

    #[test]
    fn each_part_of_a_filter_counts() {
        use Match::{In, NotIn};
        for (filter, admitted) in [
            (Filter::default(), true),
            (pids(In(vec![7, 40])), true),
            (pids(In(vec![41])), false),
            (pids(NotIn(vec![40])), false),
            (tids(In(vec![41])), true),
            (tids(NotIn(vec![40])), true),
            (comms(In, "busybox"), true),
            (comms(In, "busy"), false),
            (comms(NotIn, "busybox"), false),
            (space(0x4000), true),
            (space(0x5000), false),
            (vcpus(In(vec![0])), false),
            (vcpus(NotIn(vec![0])), true),
            (processes(), true),
        ] {
            assert_eq!(admits(filter.clone()), admitted, "{filter:?}");
        }
    }

    #[test]
    fn a_hit_of_nobody_passes_only_where_nobody_is_asked_for() {
        let nobody = Identity::default();
        for (filter, admitted) in [
            (Filter::default(), true),
            (processes(), false),
            (pids(Match::NotIn(vec![1])), false),
        ] {
            let filter = HitFilter::new(filter, None);
            assert_eq!(filter.admits(0, || Gpa(0), || nobody, || None), admitted);
        }
    }

    #[test]
    fn whoever_gets_the_number_of_a_followed_process_is_not_followed() {
        let followed = Followed::new([40]);
        let mut filter = pids(Match::In(vec![40]));
        filter.follow = true;
        let filter = HitFilter::new(filter, Some(followed.clone()));
        assert!(filter.admits(0, || Gpa(0), || SOMEBODY, || None));
        followed.ended(40);
        assert!(!filter.admits(0, || Gpa(0), || SOMEBODY, || None));
    }

    #[test]
    fn one_in_n_and_so_many_a_second() {
        let of = |one_in, per_second| {
            let filter = filter(|filter| {
                filter.one_in = one_in;
                filter.per_second = per_second;
            });
            HitFilter::new(filter, None)
        };
        let count = |filter: &HitFilter, times: std::ops::Range<u64>| {
            times
                .filter(|time| filter.admits_rate(|| *time, 1000))
                .count()
        };
        assert_eq!(count(&of(0, 0), 0..100), 100);
        assert_eq!(count(&of(1, 0), 0..100), 100);
        assert_eq!(count(&of(10, 0), 0..100), 10);
        assert_eq!(count(&of(0, 7), 5000..6000), 7);
        assert_eq!(count(&of(0, 7), 5000..8000), 21);
        assert_eq!(count(&of(10, 7), 5000..5050), 5);
    }
}
