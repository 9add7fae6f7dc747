//! The program at the hits of a trace: selects watched processes, and writes a record of seven
//! words for each line.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use probes::engine::{HitOutcome, ProbeHit, Program, TaskIdentity};
use probes::event::EventKind;

use super::functions::LINE_ARGUMENTS;
use crate::trace_line::{LineKind, NO_PROCESS, TraceLine};

/// The number of words of a record: kind, program counter, process, arguments.
pub(super) const WORDS: usize = 3 + LINE_ARGUMENTS;

/// The settings that all traces of a device share; changes take effect at the next hit.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// Whether interrupts and the idle task are recorded, and the list below is ignored.
    pub(super) all: AtomicBool,
    /// The only processes that are recorded, unless the list is empty; ascending.
    pub(super) watched: ArcSwap<Vec<u32>>,
    pub(super) entries: AtomicU64,
    pub(super) exits: AtomicU64,
}

impl Settings {
    fn admits(&self, who: TaskIdentity) -> bool {
        if self.all.load(Ordering::Relaxed) {
            return true;
        }
        let watched = self.watched.load();
        let is_watched = |id: Option<u32>| id.is_some_and(|id| watched.binary_search(&id).is_ok());
        !is_nobody(who) && (watched.is_empty() || is_watched(who.thread) || is_watched(who.process))
    }
}

/// Checks for interrupts and the idle task, which are no process. If the kernel's tasks are not
/// known, nothing is ignored.
fn is_nobody(who: TaskIdentity) -> bool {
    who.interrupted || who.thread == Some(0)
}

/// A program that records entries and returns of one function.
pub(super) struct Recorder {
    pub(super) settings: Arc<Settings>,
    /// The number of its arguments that lines show.
    pub(super) arguments: usize,
}

impl Program for Recorder {
    fn wants_return(&self, who: TaskIdentity) -> bool {
        self.settings.admits(who)
    }

    fn run(&self, hit: &ProbeHit<'_>) -> HitOutcome {
        let who = hit.who();
        if !self.settings.admits(who) {
            return HitOutcome::Filtered;
        }
        let mut arguments = [0; LINE_ARGUMENTS];
        let (kind, counter) = match hit.kind() {
            EventKind::Return => {
                arguments[0] = hit.returned().unwrap_or_default();
                (1, &self.settings.exits)
            }
            _ => {
                let given = hit.arguments().iter().take(self.arguments);
                for (place, argument) in arguments.iter_mut().zip(given) {
                    *place = *argument;
                }
                (0, &self.settings.entries)
            }
        };
        let pid = match who.thread.filter(|_| !is_nobody(who)) {
            Some(thread) => u64::from(thread),
            None => NO_PROCESS,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        hit.emit(|slot| {
            let mut words = [kind, hit.pc(), pid].into_iter().chain(arguments);
            // Slots are made for them.
            let _all_fit = words.all(|word| slot.push_word(word));
        });
        HitOutcome::Accepted
    }
}

/// Returns the line of a record.
pub(super) fn line(tsc: u64, words: &[u64]) -> Option<TraceLine> {
    let [kind, pc, pid, arguments @ ..] = words else {
        return None;
    };
    Some(TraceLine {
        kind: match kind {
            0 => LineKind::Entry,
            _ => LineKind::Exit,
        },
        pc: *pc,
        ticks: tsc,
        pid: *pid,
        arguments: arguments.try_into().ok()?,
    })
}
