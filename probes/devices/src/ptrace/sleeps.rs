//! Finds the reason of a task's sleep from the functions on its stack.

use std::ops::Range;

use introspect::kernel::symbols::Symbols;

use super::record::SleepState;

/// The number of frames examined: the deepest way from a lock into the scheduler has eight.
pub(super) const FRAMES: usize = 12;
/// The sections that the kernel itself counts as the scheduler (`in_sched_functions`), and spinning
/// locks.
const SCHEDULER: [(&str, &str); 2] = [
    ("__sched_text_start", "__sched_text_end"),
    ("__lock_text_start", "__lock_text_end"),
];
/// Prefixes of the names of functions in which a task waits for a lock or a futex.
const WAITS: [(&str, SleepState); 8] = [
    ("__mutex_lock", SleepState::Queueing),
    ("__ww_mutex_lock", SleepState::Queueing),
    ("rt_mutex_slowlock", SleepState::Queueing),
    ("__rt_mutex_slowlock", SleepState::Queueing),
    ("rwsem_down_read_slowpath", SleepState::QueueingR),
    ("rwsem_down_write_slowpath", SleepState::QueueingW),
    ("futex_wait", SleepState::Rendezvous),
    ("__futex_wait", SleepState::Rendezvous),
];

/// The addresses of such functions in one kernel.
#[derive(Debug, Default)]
pub(super) struct Sleeps {
    scheduler: Vec<Range<u64>>,
    /// The ranges, ascending and without overlaps.
    waits: Vec<(Range<u64>, SleepState)>,
}

impl Sleeps {
    pub(super) fn new(symbols: &Symbols) -> Self {
        let bounds = SCHEDULER.iter().filter_map(|(start, end)| {
            let range = symbols.address_of(start)?..symbols.address_of(end)?;
            (!range.is_empty()).then_some(range)
        });
        let waits = symbols.text_functions().filter_map(|function| {
            let name = function.symbol.name;
            let (_, state) = WAITS.iter().find(|(start, _)| name.starts_with(start))?;
            let start = function.symbol.address;
            Some((start..start.saturating_add(function.size), *state))
        });
        Self {
            scheduler: bounds.collect(),
            waits: waits.collect(),
        }
    }

    /// Returns the reason for the sleep of the task with this stack, and the first address outside
    /// the scheduler. The innermost frame is where tasks are switched.
    pub(super) fn of(&self, frames: &[u64]) -> (SleepState, u64) {
        let callers = frames.get(1..).unwrap_or_default();
        let state = callers.iter().find_map(|frame| self.waits_in(*frame));
        let outside = callers
            .iter()
            .find(|frame| !self.scheduler.iter().any(|range| range.contains(frame)));
        let pc = outside.or(callers.last()).copied().unwrap_or_default();
        (state.unwrap_or(SleepState::Wakeme), pc)
    }

    fn waits_in(&self, address: u64) -> Option<SleepState> {
        let after = self
            .waits
            .partition_point(|(range, _)| range.start <= address);
        let (range, state) = self.waits.get(after.checked_sub(1)?)?;
        range.contains(&address).then_some(*state)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::kernel::symbols::SymbolsBuilder;

    use super::*;

    #[test]
    fn locks_and_futexes_are_told_by_the_stack() {
        let mut builder = SymbolsBuilder::default();
        for (name, address) in [
            ("vfs_read", 0x1000u64),
            ("futex_wait_queue", 0x2000),
            ("rwsem_down_read_slowpath.cold", 0x2800),
            ("pipe_read", 0x3000),
            ("__sched_text_start", 0x8000),
            ("__schedule", 0x8000),
            ("schedule", 0x8400),
            ("rwsem_down_read_slowpath", 0x9000),
            ("rwsem_down_write_slowpath", 0x9200),
            ("__mutex_lock.constprop.0", 0x9400),
            ("__sched_text_end", 0x9800),
            ("later", 0x9800),
        ] {
            builder.push(name.as_bytes(), address, b'T', false).unwrap();
        }
        let sleeps = Sleeps::new(&builder.finish(None));
        let switch = 0xffff;
        for (frames, expected) in [
            (
                &[switch, 0x8010, 0x8410, 0x3010, 0x1010][..],
                (SleepState::Wakeme, 0x3010),
            ),
            (
                &[switch, 0x8010, 0x8410, 0x2010],
                (SleepState::Rendezvous, 0x2010),
            ),
            (
                &[switch, 0x8010, 0x8410, 0x9010, 0x1010],
                (SleepState::QueueingR, 0x1010),
            ),
            (
                &[switch, 0x8010, 0x8410, 0x9210, 0x1010],
                (SleepState::QueueingW, 0x1010),
            ),
            (
                &[switch, 0x8010, 0x9410, 0x3010],
                (SleepState::Queueing, 0x3010),
            ),
            // A stack that cannot be followed out of the scheduler, or not at all.
            (&[switch, 0x8010], (SleepState::Wakeme, 0x8010)),
            (&[switch], (SleepState::Wakeme, 0)),
            (&[], (SleepState::Wakeme, 0)),
        ] {
            assert_eq!(sleeps.of(frames), expected, "{frames:x?}");
        }
    }
}
