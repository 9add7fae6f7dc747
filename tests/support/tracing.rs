//! Probes of a Linux guest: engine, sessions, probes by name, and counts that must agree.
//! [`Tracing`] is for kernel functions' entries and returns.

use std::time::{Duration, Instant};

use probes::engine::{Capture, Engine, EngineStats, Filter, ProbeStats, RingSize, Session};
use probes::event::{Event, EventKind};
use probes::kernel_view::KernelView;
use probes::name::ProbePattern;
use probes::probe::{Probe, Target};
use probes::provider;

use crate::linux::Linux;
use crate::shell::COMMAND_LIMIT;

/// The number of slots of rings that drop nothing in a test.
pub const SLOTS: usize = 1 << 16;

/// A session with entry and return probes of some functions. Probes 0 and 1 are of the first
/// function, and so on.
pub struct Tracing<'l> {
    linux: &'l Linux,
    session: Session,
    probes: Vec<Probe>,
    traps: u64,
}

/// Parses a pattern.
///
/// # Panics
/// If the text is none.
pub fn pattern(text: &str) -> ProbePattern {
    ProbePattern::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Returns the one probe that a pattern matches.
///
/// # Panics
/// If there is none, or several.
pub fn probe(view: &KernelView, text: &str) -> Probe {
    let found = provider::kernel_probes(view, &pattern(text));
    let [probe] = found.probes.as_slice() else {
        panic!("{text}: {found:?}")
    };
    probe.clone()
}

/// Makes a session with rings of `slots` slots.
///
/// # Panics
/// If there is no memory for it.
pub fn session(engine: &Engine, slots: usize) -> Session {
    let size = RingSize {
        slots,
        ..RingSize::default()
    };
    engine.session(size).unwrap_or_else(|e| panic!("{e}"))
}

/// Enables a probe that captures nothing, and returns its number.
///
/// # Panics
/// If it cannot be enabled.
pub fn enable(session: &mut Session, probe: &Probe, filter: &Filter) -> u32 {
    let enabled = session.enable(probe, filter.clone(), Capture::default());
    enabled.unwrap_or_else(|e| panic!("{e}"))
}

/// Returns all that a session has recorded, in time order. Its probes are disabled, and its rings
/// were not read before. Its counts must agree.
///
/// # Panics
/// If they do not.
pub fn all_events(session: &mut Session) -> Vec<Event> {
    let mut events = Vec::new();
    session.drain(|event| events.push(event));
    let stats = session.stats();
    let all = stats.probes;
    let told = format!("{stats:?}, {:?}", session.engine().stats());
    assert_eq!(
        all.hits,
        all.filtered + all.recorded + all.dropped,
        "{told}"
    );
    assert_eq!(stats.read, all.recorded, "{told}");
    assert_eq!(events.len() as u64, all.recorded, "{told}");
    assert!(events.is_sorted_by_key(|event| event.tsc), "{told}");
    events
}

impl<'l> Tracing<'l> {
    /// Probes `functions` in a session of its own.
    ///
    /// # Panics
    /// If one is not known, or cannot be trapped.
    pub fn new(
        linux: &'l Linux,
        engine: &Engine,
        functions: &[&str],
        filter: &Filter,
        slots: usize,
    ) -> Self {
        // No call comes between the first probe and the last.
        let _paused = linux.machine().pause();
        let traps = linux.machine().stats().traps;
        let mut session = session(engine, slots);
        let mut probes = Vec::new();
        for function in functions {
            for moment in ["entry", "return"] {
                let probe = probe(engine.view(), &format!("kprobe::{function}:{moment}"));
                enable(&mut session, &probe, filter);
                probes.push(probe);
            }
        }
        Self {
            linux,
            session,
            probes,
            traps,
        }
    }

    /// Returns the probes, by their numbers.
    pub fn probes(&self) -> &[Probe] {
        &self.probes
    }

    /// Returns the address of the function of a probe.
    ///
    /// # Panics
    /// If there is no such probe.
    pub fn address(&self, probe: usize) -> u64 {
        match self.probes.get(probe).map(|probe| &probe.target) {
            Some(Target::Kernel { address, .. }) => address.0,
            other => panic!("probe {probe}: {other:?}"),
        }
    }

    /// Returns the counts of entries and returns.
    pub fn stats(&self) -> [ProbeStats; 2] {
        let mut of = [ProbeStats::default(); 2];
        for (number, probe) in (0..).zip(&self.probes) {
            let stats = self.session.probe_stats(number).unwrap_or_default();
            let is_return = probe.name.name == "return";
            let [entries, returns] = &mut of;
            *(if is_return { returns } else { entries }) += stats;
        }
        of
    }

    /// Waits for an entry that the filter accepts.
    ///
    /// # Panics
    /// If none comes within [`COMMAND_LIMIT`].
    pub fn wait_for_hit(&self) {
        let deadline = Instant::now() + COMMAND_LIMIT;
        while self.stats()[0].recorded == 0 {
            assert!(
                Instant::now() < deadline,
                "no hit in {COMMAND_LIMIT:?}\n{}",
                self.linux.situation()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the session and returns all its events, in time order, with the counts of entries and
    /// returns. These are checked against each other, the engine's and the machine's. No other
    /// session of the engine may have had a probe meanwhile.
    ///
    /// # Panics
    /// If they do not agree, or an event is missing.
    pub fn finish(mut self, before: &EngineStats) -> (Vec<Event>, [ProbeStats; 2]) {
        let paused = self.linux.machine().pause();
        let stats = self.stats();
        let engine = self.session.engine().stats();
        let traps = self.linux.machine().stats().traps - self.traps;
        let sites = self.linux.machine().traps().stats().into_iter();
        let symbols = &self.session.engine().view().kernel.symbols;
        let hit: Vec<_> = sites
            .filter(|site| site.hits > 0)
            .map(|site| {
                (
                    symbols
                        .resolve(site.address.0)
                        .map(|it| it.0.name.to_owned()),
                    site.hits,
                )
            })
            .collect();
        self.session.disable_all();
        drop(paused);
        let events = all_events(&mut self.session);
        let [entries, returns] = stats;
        let told = format!("entries {entries:?}, returns {returns:?}, {engine:?}, {hit:?}");
        let mut all = entries;
        all += returns;
        assert_eq!(self.session.stats().probes, all, "{told}");
        let unpaired = engine.unpaired_returns - before.unpaired_returns;
        assert_eq!(traps, all.hits + unpaired, "{told}");
        assert_eq!(
            entries.hits - entries.filtered,
            returns.hits + engine.waiting_returns,
            "{told}"
        );
        let unseen = engine.lost_returns + engine.without_return + engine.unknown_task;
        assert_eq!(unseen, 0, "{told}");
        assert_eq!(
            self.session.engine().stats().waiting_returns,
            0,
            "nobody waits any more"
        );
        (events, stats)
    }
}

/// Returns whether an event is an entry.
pub fn is_entry(event: &Event) -> bool {
    event.kind == EventKind::Entry
}
