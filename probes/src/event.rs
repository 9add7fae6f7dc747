//! One event of a function tracer: plain data of eight words, the size of a cache line.
//!
//! The caller knows what a function id stands for (the tracer that made the event tells). An event holds no
//! pointers and no text, so it is copied and never freed.

/// The process id of an event that belongs to no process: interrupt context, or a guest without tasks. trace(3)
/// prints it as 16 digits `f`.
pub const NO_PROCESS: u64 = u64::MAX;

/// Words of an event in a ring.
pub const EVENT_WORDS: usize = 8;

/// What an event stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A function was entered.
    Entry,
    /// A function has returned.
    Exit,
}

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Entry or exit.
    pub kind: EventKind,
    /// Index of the vCPU it happened on.
    pub vcpu: u16,
    /// The tracer's number of the function.
    pub function: u32,
    /// Entry: address of the function. Exit: the return address, where the caller goes on.
    pub pc: u64,
    /// Time stamp counter at the hit, in ticks.
    pub tsc: u64,
    /// Number of the thread (the kernel's pid, in the initial namespace; 0 is the idle task), or [`NO_PROCESS`].
    pub pid: u64,
    /// Entry: the first four arguments, zero past those that the function is known to have. Exit: the return
    /// value, then zeros.
    pub arguments: [u64; 4],
}

const KIND_BIT: u64 = 1 << 63;
const VCPU_SHIFT: u32 = 32;

impl Event {
    /// The event as a ring holds it.
    #[must_use]
    pub fn to_words(&self) -> [u64; EVENT_WORDS] {
        let kind = match self.kind {
            EventKind::Entry => 0,
            EventKind::Exit => KIND_BIT,
        };
        let head = kind | u64::from(self.vcpu) << VCPU_SHIFT | u64::from(self.function);
        let [a, b, c, d] = self.arguments;
        [head, self.pc, self.tsc, self.pid, a, b, c, d]
    }

    /// The event that [`to_words`](Self::to_words) gave.
    #[must_use]
    pub fn from_words(words: [u64; EVENT_WORDS]) -> Self {
        let [head, pc, tsc, pid, a, b, c, d] = words;
        Self {
            kind: match head & KIND_BIT {
                0 => EventKind::Entry,
                _ => EventKind::Exit,
            },
            vcpu: (head >> VCPU_SHIFT) as u16,
            function: head as u32,
            pc,
            tsc,
            pid,
            arguments: [a, b, c, d],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_their_words() {
        for (kind, vcpu, function, pid) in [
            (EventKind::Entry, 0, 0, 0),
            (EventKind::Exit, 3, 7, 1234),
            (EventKind::Entry, u16::MAX, u32::MAX, NO_PROCESS),
            (EventKind::Exit, u16::MAX, u32::MAX, NO_PROCESS),
        ] {
            let event = Event {
                kind,
                vcpu,
                function,
                pc: 0xffff_ffff_8100_0000,
                tsc: u64::MAX - 1,
                pid,
                arguments: [1, u64::MAX, 3, 1 << 63],
            };
            assert_eq!(Event::from_words(event.to_words()), event);
        }
    }
}
