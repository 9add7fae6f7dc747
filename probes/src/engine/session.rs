//! One client's probes, rings and counters within an engine.
//!
//! A session sees the hits of its own probes only. It loses events only if it drains too slowly
//! itself. Dropping it disables its probes and disarms the traps that no other session needs.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use introspect::memory_budget::{Held, OverBudget, Purpose};
use vmm::machine::EndWatch;

use super::budget::meter::{Meter, meters};
use super::budget::{Cost, Share, Unwatched};
use super::plan::{Capture, Enabled, ProbeCounters};
use super::program::Program;
use super::watchlist::Watched;
use super::{EnableError, Engine, Filter, NewFiles, NewModules};
use crate::doorbell::{Doorbell, LONGEST_WAIT, PACE, WatchedStream, Woken};
use crate::event::{Event, HEADER_WORDS, MAX_STRING};
use crate::merge::drain_in_order;
use crate::probe::Probe;
use crate::ring::{Ring, RingSizeError};

/// The most characters of a session's name.
const LONGEST_LABEL: usize = 200;

/// The size of a session's rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSize {
    /// The number of events in each vCPU's ring: a power of two.
    pub slots: usize,
    /// The number of words in an event: 4, and the captured values. Values that do not fit are left
    /// out.
    pub words: usize,
}

impl Default for RingSize {
    /// Returns 65,536 events of 14 words: 8 MiB for each vCPU.
    fn default() -> Self {
        Self {
            slots: 1 << 16,
            words: 14,
        }
    }
}

impl RingSize {
    /// Returns a size with room for everything that `capture` selects.
    #[must_use]
    pub fn for_capture(slots: usize, capture: &Capture) -> Self {
        Self {
            slots,
            words: capture.words(),
        }
    }
}

/// The part of a session that the hit path uses.
pub(crate) struct SessionShared {
    /// One ring for each vCPU; only the vCPU's own thread pushes to it.
    pub(crate) rings: Vec<Ring>,
    /// Timer ticks without an event of their own: one for each vCPU and turn that came too late.
    pub(crate) skipped_ticks: Arc<AtomicU64>,
    /// Wakes the drainer.
    pub(crate) doorbell: Doorbell,
    /// The session's meters, one for each vCPU.
    pub(crate) meters: Box<[Arc<Meter>]>,
}

impl SessionShared {
    /// Wakes the drainer if it waits and the vCPU of `ring` has queued records.
    #[inline]
    pub(crate) fn pushed(&self, ring: &Ring) {
        if !ring.is_empty() {
            self.doorbell.ring_if_awaited();
        }
    }
}

/// Waits for a session's next records, apart from the session itself: a thread that shares the
/// session under a lock waits without the lock. Clones wait for the same session; one at a time may
/// wait.
#[derive(Clone)]
pub struct Waiter {
    shared: Arc<SessionShared>,
    keeps_free: Arc<AtomicBool>,
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").finish_non_exhaustive()
    }
}

impl Waiter {
    #[cfg(test)]
    pub(crate) fn of(shared: &Arc<SessionShared>) -> Self {
        Self {
            shared: shared.clone(),
            keeps_free: Arc::default(),
        }
    }

    /// Waits until there may be something to do: records to drain, a file or module to look at
    /// ([`NewFiles`], [`NewModules`]), the machine's end, or a call of [`wake`](Self::wake). Never
    /// waits longer than [`LONGEST_WAIT`]. Records that follow each other quickly are waited for
    /// together.
    ///
    /// `client` is a stream that ends the wait, too.
    pub fn wait(&self, client: Option<WatchedStream<'_>>) -> Woken {
        self.wait_at_most(LONGEST_WAIT, client)
    }

    /// Waits as [`wait`](Self::wait) does, for no longer than `limit`.
    pub fn wait_at_most(&self, limit: Duration, client: Option<WatchedStream<'_>>) -> Woken {
        let SessionShared {
            rings, doorbell, ..
        } = &*self.shared;
        // Whether the guest still changes its text can only be asked.
        let longest = match self.keeps_free.load(Ordering::Relaxed) {
            true => PACE,
            false => LONGEST_WAIT,
        };
        doorbell.wait(
            || rings.iter().all(Ring::is_empty),
            client,
            limit.min(longest),
        )
    }

    /// Ends a wait in progress, or the next one.
    pub fn wake(&self) {
        self.shared.doorbell.ring();
    }
}

/// The counters of one probe. Exact while the guest is paused; then `hits = filtered + recorded +
/// dropped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbeStats {
    /// The number of hits.
    pub hits: u64,
    /// Hits that the filter excluded.
    pub filtered: u64,
    /// Hits that are, or were, in a ring.
    pub recorded: u64,
    /// Hits that were dropped because the ring was full.
    pub dropped: u64,
    /// Sites that were given up: this host could not execute their instruction in the state that
    /// the program was in. Hits there are not seen any more.
    pub given_up: u64,
}

impl std::ops::AddAssign for ProbeStats {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.filtered += other.filtered;
        self.recorded += other.recorded;
        self.dropped += other.dropped;
        self.given_up += other.given_up;
    }
}

/// The counters of a session. Exact while the guest is paused and the rings are drained; then
/// `recorded = read`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SessionStats {
    /// The sum over all probes, disabled ones included.
    pub probes: ProbeStats,
    /// The number of events drained.
    pub read: u64,
}

/// The reason that a session cannot be created.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The rings' size is not usable.
    #[error(transparent)]
    Ring(#[from] RingSizeError),
    /// The memory budget has no room for the rings.
    #[error(transparent)]
    Memory(#[from] OverBudget),
    /// The process has no descriptor left.
    #[error("a session needs a descriptor to be woken by: {0}")]
    Descriptor(#[from] rustix::io::Errno),
}

/// One client's probes and rings.
pub struct Session {
    /// The reservation of the rings' memory.
    _held: Held,
    engine: Engine,
    shared: Arc<SessionShared>,
    /// The enabled probes.
    watched: Arc<Watched>,
    /// The counts of disabled probes.
    past: ProbeStats,
    /// Disabled probes that may still count a hit in progress.
    retired: Vec<Arc<Enabled>>,
    /// Wakes the drainer when the machine ends.
    _end: EndWatch,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("past", &self.past)
            .finish_non_exhaustive()
    }
}

impl Session {
    pub(super) fn new(engine: Engine, size: RingSize) -> Result<Self, SessionError> {
        let words = size.words.max(HEADER_WORDS);
        let each = size
            .slots
            .saturating_mul(words)
            .saturating_mul(size_of::<u64>());
        let bytes = each.saturating_mul(engine.vcpus()) as u64;
        let held = Held::take(Purpose::Rings, bytes)?;
        let rings = (0..engine.vcpus())
            .map(|_| Ring::new(size.slots, words))
            .collect::<Result<_, _>>()?;
        let shared = Arc::new(SessionShared {
            rings,
            skipped_ticks: Arc::default(),
            doorbell: Doorbell::new()?,
            meters: meters(engine.vcpus()),
        });
        let at_end = shared.clone();
        Ok(Self {
            _held: held,
            _end: engine.machine().watch_end(move || at_end.doorbell.ring()),
            watched: engine.watch_session(&shared),
            engine,
            shared,
            past: ProbeStats::default(),
            retired: Vec::new(),
        })
    }

    /// Enables a probe. Returns its number, which its events carry.
    ///
    /// # Errors
    /// If a trap that it needs cannot be armed. No trap is left behind then.
    pub fn enable(
        &mut self,
        probe: &Probe,
        filter: Filter,
        capture: Capture,
    ) -> Result<u32, EnableError> {
        let mut capture = capture;
        for string in &mut capture.strings {
            string.length = string.length.min(MAX_STRING);
        }
        self.add(probe, filter, capture, None)
    }

    /// Enables a probe whose hits run `program` instead of being recorded.
    ///
    /// # Errors
    /// As [`enable`](Self::enable).
    pub fn enable_program(
        &mut self,
        probe: &Probe,
        filter: Filter,
        program: Arc<dyn Program>,
    ) -> Result<u32, EnableError> {
        self.add(probe, filter, Capture::default(), Some(program))
    }

    fn add(
        &mut self,
        probe: &Probe,
        filter: Filter,
        capture: Capture,
        program: Option<Arc<dyn Program>>,
    ) -> Result<u32, EnableError> {
        let (engine, filter) = (&self.engine, self.engine.hit_filter(filter));
        let mut list = self.watched.lock();
        let place = list.active.len();
        let (account, unit) = list.account(&self.shared, place, probe, program.as_deref());
        let number = u32::try_from(place).unwrap_or(u32::MAX);
        let enabled = Arc::new(Enabled::new(
            number,
            probe.target.kind(),
            filter,
            capture,
            program,
            account,
            vmm::host_tsc(),
        ));
        let places = engine.arm(probe, &enabled)?;
        let may_rest = list.budget.is_some() || engine.has_budget();
        let probe = may_rest.then(|| Box::new(probe.clone()));
        list.push(engine, unit, enabled, places, probe);
        Ok(number)
    }

    /// Moves an enabled probe to the places of `probe`: its module was loaded again. Number, filter
    /// and counts stay. Nothing happens if no enabled probe has the number.
    ///
    /// # Errors
    /// If a trap cannot be armed. The probe is then enabled without any.
    pub fn move_to(&mut self, number: u32, probe: &Probe) -> Result<(), EnableError> {
        let place = usize::try_from(number).ok();
        let mut list = self.watched.lock();
        let active = place.and_then(|at| list.active.get_mut(at)?.as_mut());
        let Some(active) = active else {
            return Ok(());
        };
        let resting = active.resting.take();
        let left = std::mem::take(&mut active.places);
        if let Some(known) = &mut active.probe {
            **known = probe.clone();
        }
        active.places = self.engine.rearm(probe, &active.enabled, &left)?;
        if let Some(resting) = resting {
            self.engine.rest(&mut [active]);
            self.engine.forget_resting(&resting);
        }
        Ok(())
    }

    /// Returns the number that the next enabled probe will get.
    #[must_use]
    pub fn next_number(&self) -> u32 {
        u32::try_from(self.watched.lock().active.len()).unwrap_or(u32::MAX)
    }

    /// Disables a probe. Its recorded events can still be drained. Returns `false` if no enabled
    /// probe has the number.
    pub fn disable(&mut self, number: u32) -> bool {
        let disabled = self.end(number);
        self.engine.let_go();
        self.settle();
        disabled
    }

    fn end(&mut self, number: u32) -> bool {
        let place = usize::try_from(number).ok();
        let Some(active) = place.and_then(|at| self.watched.lock().take(at)) else {
            return false;
        };
        self.engine.disarm(&active.enabled, &active.places);
        if let Some(resting) = &active.resting {
            self.engine.forget_resting(resting);
        }
        self.retired.push(active.enabled);
        true
    }

    /// Adds up the counts of retired probes that no hit uses any more.
    fn settle(&mut self) {
        let past = &mut self.past;
        self.retired.retain(|enabled| {
            let in_use = Arc::strong_count(enabled) > 1;
            if !in_use {
                *past += stats(&enabled.counters);
            }
            in_use
        });
    }

    /// Disables all probes.
    pub fn disable_all(&mut self) {
        self.watched.end();
        for number in 0..self.next_number() {
            self.end(number);
        }
        self.engine.let_go();
        self.settle();
    }

    /// Passes the events since the last call to `each`, in time order (see [`crate::merge`]).
    /// Returns their number. Never waits.
    pub fn drain(&mut self, mut each: impl FnMut(Event)) -> usize {
        self.engine.follow_up();
        drain_in_order(&self.shared.rings, vmm::host_tsc, |_, tsc, words| {
            if let Some(event) = Event::decode(tsc, words) {
                each(event);
            }
        })
    }

    /// Drains the records of programs, like [`drain`](Self::drain). `each` gets vCPU, time stamp
    /// counter and words of each.
    pub fn drain_records(&mut self, each: impl FnMut(usize, u64, &[u64])) -> usize {
        self.engine.follow_up();
        drain_in_order(&self.shared.rings, vmm::host_tsc, each)
    }

    /// Returns a waiter for the records to come.
    #[must_use]
    pub fn waiter(&self) -> Waiter {
        Waiter {
            shared: self.shared.clone(),
            keeps_free: self.engine.0.keeps_free.clone(),
        }
    }

    /// Reports files that are mapped for execution from now on, each once, while the guest is
    /// paused. `None` if the kernel cannot be watched for that.
    #[must_use]
    pub fn new_files(&self) -> Option<NewFiles> {
        NewFiles::listen(&self.engine, self.waiter())
    }

    /// Reports modules of these names that are loaded from now on, while the guest is paused.
    /// `None` if the kernel cannot be watched for that.
    #[must_use]
    pub fn new_modules(&self, names: Vec<String>) -> Option<NewModules> {
        NewModules::listen(&self.engine, names, self.waiter())
    }

    /// Returns the number of programs' records that were dropped because a ring was full.
    #[must_use]
    pub fn dropped_records(&self) -> u64 {
        self.shared.rings.iter().map(|r| r.stats().dropped).sum()
    }

    /// Returns the counters of one enabled probe.
    #[must_use]
    pub fn probe_stats(&self, number: u32) -> Option<ProbeStats> {
        let list = self.watched.lock();
        let active = list.active.get(usize::try_from(number).ok()?)?.as_ref()?;
        Some(stats(&active.enabled.counters))
    }

    /// Returns the counters of the session.
    #[must_use]
    pub fn stats(&self) -> SessionStats {
        let mut probes = self.past;
        let list = self.watched.lock();
        let active = list.active.iter().flatten().map(|active| &active.enabled);
        for enabled in active.chain(&self.retired) {
            probes += stats(&enabled.counters);
        }
        SessionStats {
            probes,
            read: self.shared.rings.iter().map(|ring| ring.stats().read).sum(),
        }
    }

    /// Returns the number of timer ticks that came too late and were joined with others, disabled
    /// timers included.
    #[must_use]
    pub fn skipped_ticks(&self) -> u64 {
        self.shared.skipped_ticks.load(Ordering::Relaxed)
    }

    /// Sets the share of each vCPU's time that the session may cost, or none. Probes that are
    /// enabled from now on are stopped for a while when it is spent.
    pub fn set_budget(&mut self, share: Option<Share>) {
        self.watched.set_budget(&self.engine, share);
        if share.is_some() {
            self.engine.keep_budgets();
        }
    }

    /// Keeps all probes watching, whatever the budget of all sessions: for a count that must be
    /// whole.
    pub fn watch_always(&mut self) {
        self.watched.lock().exempt();
    }

    /// Names the session, for lists of costs.
    pub fn set_label(&mut self, label: &str) {
        self.watched.lock().label = label.chars().take(LONGEST_LABEL).collect();
    }

    /// Returns what the session costs the guest, until its probes were all disabled.
    #[must_use]
    pub fn cost(&self) -> Cost {
        self.watched.cost()
    }

    /// Returns how long an enabled probe has not watched because of a budget.
    #[must_use]
    pub fn unwatched(&self, number: u32) -> Option<Unwatched> {
        self.watched.unwatched(usize::try_from(number).ok()?)
    }

    /// Returns the engine of this session.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.disable_all();
        // A waiter on another thread sees the end at once.
        self.shared.doorbell.ring();
    }
}

pub(super) fn stats(counters: &ProbeCounters) -> ProbeStats {
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let (filtered, recorded, dropped) = (
        load(&counters.filtered),
        load(&counters.recorded),
        load(&counters.dropped),
    );
    ProbeStats {
        hits: filtered + recorded + dropped,
        filtered,
        recorded,
        dropped,
        given_up: load(&counters.given_up),
    }
}
