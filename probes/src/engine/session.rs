//! One user of the engine: its probes, its rings, its counts.
//!
//! A session sees the hits of its own probes only, and loses events only through its own slowness. When it is dropped, its probes and
//! with them the traps that nobody else needs are gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use introspect::memory_budget::{Held, OverBudget, Purpose};

use super::plan::{Capture, Enabled, ProbeCounters};
use super::program::Program;
use super::{ArmedAt, EnableError, Engine, Filter};
use crate::event::{Event, HEADER_WORDS, MAX_STRING};
use crate::merge::drain_in_order;
use crate::probe::Probe;
use crate::ring::{Ring, RingSizeError};

/// Sizes of a session's rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSize {
    /// Events that each vCPU's ring holds: a power of two.
    pub slots: usize,
    /// Words of an event: 4, and what is captured. What does not fit is left out.
    pub words: usize,
}

impl Default for RingSize {
    /// 65,536 events of 14 words: 8 MiB for each vCPU.
    fn default() -> Self {
        Self {
            slots: 1 << 16,
            words: 14,
        }
    }
}

impl RingSize {
    /// Room for all that `capture` asks for.
    #[must_use]
    pub fn for_capture(slots: usize, capture: &Capture) -> Self {
        Self {
            slots,
            words: capture.words(),
        }
    }
}

/// What the hit path needs of a session.
pub(crate) struct SessionShared {
    /// One per vCPU; each is pushed to by its vCPU's thread alone.
    pub(crate) rings: Vec<Ring>,
    /// Ticks of its timers that were no events of their own: one for each vCPU and turn that came too late.
    pub(crate) skipped_ticks: Arc<AtomicU64>,
}

/// Counts of one probe of a session. Exact while the guest stands still; then `hits = filtered + recorded + dropped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbeStats {
    /// Times it was hit.
    pub hits: u64,
    /// Hits that its filter left out.
    pub filtered: u64,
    /// Hits that are, or were, in a ring.
    pub recorded: u64,
    /// Hits lost to a full ring.
    pub dropped: u64,
    /// Its places that stand no more, since this host could not execute their instruction in the state that a program
    /// was in. Hits there are not seen any more.
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

/// Counts of a session. Exact while the guest stands still and the rings are drained; then `recorded = read`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SessionStats {
    /// All its probes together, disabled ones included.
    pub probes: ProbeStats,
    /// Events drained.
    pub read: u64,
}

/// A probe that is enabled.
pub(super) struct Active {
    pub(super) enabled: Arc<Enabled>,
    pub(super) places: Vec<ArmedAt>,
}

/// A session cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// Its rings are of no usable size.
    #[error(transparent)]
    Ring(#[from] RingSizeError),
    /// There is no room for them.
    #[error(transparent)]
    Memory(#[from] OverBudget),
}

/// A user of the engine.
pub struct Session {
    /// The memory of the rings.
    _held: Held,
    engine: Engine,
    shared: Arc<SessionShared>,
    active: Vec<Option<Active>>,
    /// Counts of probes that were disabled.
    past: ProbeStats,
    /// Probes that were disabled and may still be counting a hit that had begun before.
    retired: Vec<Arc<Enabled>>,
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
        Ok(Self {
            _held: held,
            engine,
            shared: Arc::new(SessionShared {
                rings,
                skipped_ticks: Arc::default(),
            }),
            active: Vec::new(),
            past: ProbeStats::default(),
            retired: Vec::new(),
        })
    }

    /// Enables a probe; gives its number, by which its events name it.
    ///
    /// # Errors
    /// If a trap it needs cannot be armed; none is left behind then.
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

    /// Enables a probe at whose hits `program` runs, in place of their being recorded.
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
        let number = self.next_number();
        let enabled = Arc::new(Enabled::new(
            number,
            probe.target.kind(),
            self.engine.hit_filter(filter),
            capture,
            program,
            self.shared.clone(),
            vmm::host_tsc(),
        ));
        let places = self.engine.arm(probe, &enabled)?;
        self.active.push(Some(Active { enabled, places }));
        Ok(number)
    }

    /// The number that the next probe gets which is enabled.
    #[must_use]
    pub fn next_number(&self) -> u32 {
        u32::try_from(self.active.len()).unwrap_or(u32::MAX)
    }

    /// Disables a probe, whose events that were recorded can still be drained; `false` if it is none of the enabled ones.
    pub fn disable(&mut self, number: u32) -> bool {
        let disabled = self.end(number);
        self.engine.let_go();
        self.settle();
        disabled
    }

    fn end(&mut self, number: u32) -> bool {
        let place = usize::try_from(number).ok();
        let Some(active) = place.and_then(|at| self.active.get_mut(at)?.take()) else {
            return false;
        };
        self.engine.disarm(&active.enabled, &active.places);
        self.retired.push(active.enabled);
        true
    }

    /// Adds up the counts of the probes that no hit counts at any more.
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
        for number in 0..self.active.len() {
            self.end(u32::try_from(number).unwrap_or(u32::MAX));
        }
        self.engine.let_go();
        self.settle();
    }

    /// Gives what was recorded since the last time, in time order (see [`crate::merge`]); gives how many. Never waits.
    pub fn drain(&mut self, mut each: impl FnMut(Event)) -> usize {
        self.engine.follow_up();
        drain_in_order(&self.shared.rings, vmm::host_tsc, |_, tsc, words| {
            if let Some(event) = Event::decode(tsc, words) {
                each(event);
            }
        })
    }

    /// As [`drain`](Self::drain), of what programs have put into the rings: vCPU, time stamp counter and words of each record.
    pub fn drain_records(&mut self, each: impl FnMut(usize, u64, &[u64])) -> usize {
        self.engine.follow_up();
        drain_in_order(&self.shared.rings, vmm::host_tsc, each)
    }

    /// Records that programs could not put into a full ring.
    #[must_use]
    pub fn dropped_records(&self) -> u64 {
        self.shared.rings.iter().map(|r| r.stats().dropped).sum()
    }

    /// Counts of one enabled probe.
    #[must_use]
    pub fn probe_stats(&self, number: u32) -> Option<ProbeStats> {
        let active = self.active.get(usize::try_from(number).ok()?)?.as_ref()?;
        Some(stats(&active.enabled.counters))
    }

    /// Counts of all of them.
    #[must_use]
    pub fn stats(&self) -> SessionStats {
        let mut probes = self.past;
        let active = self.active.iter().flatten().map(|active| &active.enabled);
        for enabled in active.chain(&self.retired) {
            probes += stats(&enabled.counters);
        }
        SessionStats {
            probes,
            read: self.shared.rings.iter().map(|ring| ring.stats().read).sum(),
        }
    }

    /// Ticks of its timers, those of disabled ones included, that came too late and were joined with others.
    #[must_use]
    pub fn skipped_ticks(&self) -> u64 {
        self.shared.skipped_ticks.load(Ordering::Relaxed)
    }

    /// The engine that this is a session of.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.disable_all();
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
