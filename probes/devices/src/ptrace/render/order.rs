//! Sorts records by time, as far as that is possible.
//!
//! A deadline is recorded when its period begins, with its time in the future. It is held back
//! until a record of that time arrives.

use std::collections::BTreeMap;

use crate::ptrace::record::{EventType, Record};

/// The greatest number of deadlines held back. Beyond it, the earliest is shown at once.
const MAX_HELD: usize = 4096;

/// A queue that holds deadlines back.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The held records, by time and order of arrival.
    held: BTreeMap<(i64, u64), Record>,
    arrived: u64,
    latest: Option<i64>,
}

impl Order {
    /// Returns the time of the latest record that was not a deadline.
    pub(super) fn latest(&self) -> Option<i64> {
        self.latest
    }

    /// Accepts a record and returns, in order, those that can now be shown.
    pub(super) fn push(&mut self, record: Record) -> Vec<Record> {
        if EventType::of(record.event) == Some(EventType::Deadline) {
            self.arrived += 1;
            self.held.insert((record.time, self.arrived), record);
            if self.held.len() <= MAX_HELD {
                return Vec::new();
            }
            return (self.held.pop_first().into_iter())
                .map(|(_, record)| record)
                .collect();
        }
        let latest = self.latest.map_or(record.time, |l| l.max(record.time));
        self.latest = Some(latest);
        let mut ready = Vec::new();
        while let Some(first) = self.held.first_entry() {
            if first.key().0 > record.time {
                break;
            }
            ready.push(first.remove());
        }
        ready.push(record);
        ready
    }

    /// Returns the records still held, in order.
    pub(super) fn rest(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.held).into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(event: EventType, time: i64) -> Record {
        Record {
            pid: 1,
            event: event.number(),
            machine: 0,
            time,
            argument: 0,
        }
    }

    fn times(records: &[Record]) -> Vec<i64> {
        records.iter().map(|record| record.time).collect()
    }

    #[test]
    fn deadlines_wait_for_their_time_and_nothing_else_does() {
        let mut order = Order::default();
        for (event, time, shown) in [
            (EventType::Release, 10, &[10][..]),
            (EventType::Deadline, 30, &[]),
            (EventType::Deadline, 20, &[]),
            (EventType::Run, 15, &[15]),
            (EventType::Run, 12, &[12]),
            (EventType::Sleep, 20, &[20, 20]),
            (EventType::Deadline, 99, &[]),
            (EventType::Run, 40, &[30, 40]),
        ] {
            assert_eq!(times(&order.push(record(event, time))), shown);
        }
        assert_eq!(order.latest(), Some(40));
        assert_eq!(times(&order.rest()), [99]);
    }

    #[test]
    fn only_so_many_deadlines_wait() {
        let mut order = Order::default();
        let mut shown = Vec::new();
        let many = i64::try_from(MAX_HELD).unwrap_or(0);
        for time in 1..=many + 2 {
            shown.extend(order.push(record(EventType::Deadline, time)));
        }
        assert_eq!(times(&shown), [1, 2]);
        assert_eq!(order.rest().len(), MAX_HELD);
    }
}
