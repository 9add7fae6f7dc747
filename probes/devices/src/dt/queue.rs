//! Queues of events for a client: one of fixed capacity for each CPU. If it is full, the newest
//! event is dropped and counted.
//!
//! The engine's records are moved here in order of time at every request of the client. Nothing
//! leaves the queues between two requests. So this drops the same events as rings of that size that
//! the hits fill themselves.

use std::collections::VecDeque;

/// The queues of all CPUs.
#[derive(Debug)]
pub struct Queues {
    each: Vec<VecDeque<(u64, Vec<u8>)>>,
    most: usize,
    /// The CPU to be served first.
    next: usize,
    waiting: usize,
    dropped: u64,
}

impl Queues {
    /// Creates queues for `cpus` CPUs, of `most` events each.
    #[must_use]
    pub fn new(cpus: usize, most: usize) -> Self {
        Self {
            each: (0..cpus).map(|_| VecDeque::new()).collect(),
            most,
            next: 0,
            waiting: 0,
            dropped: 0,
        }
    }

    /// Adds an event of `cpu` at `time` (in ticks), if there is room. `event` is called only then.
    pub fn put(&mut self, cpu: usize, time: u64, event: impl FnOnce() -> Vec<u8>) {
        match self.each.get_mut(cpu) {
            Some(queue) if queue.len() < self.most => {
                queue.push_back((time, event()));
                self.waiting += 1;
            }
            _ => self.dropped += 1,
        }
    }

    /// Removes and returns at most `most` events, CPU after CPU, beginning behind the one that was
    /// served last.
    pub fn take_by_cpu(&mut self, most: usize) -> Vec<Vec<u8>> {
        let mut taken = Vec::new();
        let cpus = self.each.len();
        for turn in 0..cpus {
            let cpu = (self.next + turn) % cpus;
            let Some(queue) = self.each.get_mut(cpu) else {
                break;
            };
            let count = queue.len().min(most - taken.len());
            taken.extend(queue.drain(..count).map(|(_, event)| event));
            if taken.len() == most {
                self.next = (cpu + 1) % cpus;
                break;
            }
        }
        self.waiting -= taken.len();
        taken
    }

    /// Removes and returns at most `most` events in order of time.
    pub fn take_by_time(&mut self, most: usize) -> Vec<Vec<u8>> {
        let mut taken = Vec::new();
        while taken.len() < most {
            let waiting = self.each.iter_mut().filter(|queue| !queue.is_empty());
            let first = waiting.min_by_key(|queue| queue.front().map(|(time, _)| *time));
            let Some((_, event)) = first.and_then(VecDeque::pop_front) else {
                break;
            };
            taken.push(event);
        }
        self.waiting -= taken.len();
        taken
    }

    /// Returns the number of queued events.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the number of dropped events.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(most: usize, events: &[(usize, u64)]) -> Queues {
        let mut queues = Queues::new(2, most);
        for (cpu, time) in events {
            queues.put(*cpu, *time, || vec![*time as u8]);
        }
        queues
    }

    fn flat(events: Vec<Vec<u8>>) -> Vec<u8> {
        events.concat()
    }

    const EVENTS: [(usize, u64); 6] = [(0, 1), (1, 2), (0, 3), (1, 4), (0, 5), (0, 6)];

    #[test]
    fn the_newest_of_a_full_cpu_is_dropped_and_counted() {
        let mut queues = filled(2, &EVENTS);
        assert_eq!((queues.waiting(), queues.dropped()), (4, 2));
        assert_eq!(flat(queues.take_by_time(10)), [1, 2, 3, 4]);
        queues.put(0, 7, || vec![7]);
        assert_eq!((queues.waiting(), queues.dropped()), (1, 2));
        queues.put(9, 8, || vec![8]);
        assert_eq!((queues.waiting(), queues.dropped()), (1, 3), "no such CPU");
    }

    #[test]
    fn cpus_are_served_in_turn() {
        let mut queues = filled(8, &EVENTS);
        assert_eq!(flat(queues.take_by_cpu(3)), [1, 3, 5]);
        assert_eq!(flat(queues.take_by_cpu(1)), [2], "the next one's turn");
        assert_eq!(flat(queues.take_by_cpu(9)), [6, 4]);
        assert_eq!(queues.waiting(), 0);
        assert!(queues.take_by_cpu(9).is_empty());
    }

    #[test]
    fn events_of_all_cpus_come_in_order_of_time() {
        let mut queues = filled(8, &EVENTS);
        assert_eq!(flat(queues.take_by_time(4)), [1, 2, 3, 4]);
        assert_eq!(flat(queues.take_by_time(4)), [5, 6]);
    }
}
