//! The records of ptrace(3): 28 bytes each, little endian, packed (`PTraceevent` of ptrace(2)).
//!
//! | Offset | Bytes | Field |
//! |---|---|---|
//! | 0 | 4 | process |
//! | 4 | 4 | type of event |
//! | 8 | 4 | machine: the CPU on which it was recorded |
//! | 12 | 8 | time in nanoseconds since the epoch |
//! | 20 | 8 | argument |

/// The size of a record in bytes (`PTsize`).
pub const RECORD_BYTES: usize = 28;
/// A page fault (`STrapRPF`, and the manual page's `STrapWPF`, which has the same value).
pub const TRAP_FAULT: u64 = 0x1000_0000_0000_0000;
/// Set besides [`TRAP_FAULT`] if the access was a write. The manual page cannot express this;
/// readers that know only the manual page ignore this bit.
pub const TRAP_WRITE: u64 = 0x4000_0000_0000_0000;
/// A system call (`STrapSC`), with its number.
pub const TRAP_SYSTEM_CALL: u64 = 0x2000_0000_0000_0000;
/// The bits that hold an address or a number (`STrapMask`).
pub const TRAP_MASK: u64 = 0x0fff_ffff_ffff_ffff;

/// The types of events (`PTevent`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum EventType {
    /// The task was admitted to deadline scheduling.
    Admit = 0,
    /// A new period has begun.
    Release,
    /// The task runs under deadline scheduling.
    Edf,
    /// The task runs.
    Run,
    /// The task can run but does not.
    Ready,
    /// The task waits; see [`SleepState`].
    Sleep,
    /// The task has given up the rest of its period.
    Yield,
    /// The task has used up its slice.
    Slice,
    /// The task's deadline: recorded with the release, at a time in the future.
    Deadline,
    /// The task has left deadline scheduling.
    Expel,
    /// The task begins to exit.
    Dead,
    /// An interrupt begins; the argument is its vector.
    Ints,
    /// An interrupt ends; the argument is its vector.
    Inte,
    /// A page fault, a system call, or another trap of the program's.
    Trap,
    /// A marker of the program's.
    User,
    /// The task's name: eight characters in the argument.
    Name,
}

/// The manual page's names of the event types, by number.
const NAMES: [&str; EventType::ALL.len()] = [
    "Admit", "Release", "Edf", "Run", "Ready", "Sleep", "Yield", "Slice", "Deadline", "Expel",
    "Dead", "Ints", "Inte", "Trap", "User", "Name",
];

impl EventType {
    /// All types, by number.
    pub const ALL: [Self; 16] = [
        Self::Admit,
        Self::Release,
        Self::Edf,
        Self::Run,
        Self::Ready,
        Self::Sleep,
        Self::Yield,
        Self::Slice,
        Self::Deadline,
        Self::Expel,
        Self::Dead,
        Self::Ints,
        Self::Inte,
        Self::Trap,
        Self::User,
        Self::Name,
    ];

    /// Returns the type with this number.
    #[must_use]
    pub fn of(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Returns the type's number in a record.
    #[must_use]
    pub fn number(self) -> u32 {
        self as u32
    }

    /// Returns the type's name as ptrace(1) prints it.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[self as usize]
    }
}

/// The reason for a sleep: the low byte of the argument, with Plan 9's numbers of scheduling
/// states. The upper seven bytes hold the address of the waiting kernel code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SleepState {
    /// Waits for a mutex.
    Queueing = 5,
    /// Waits for a readers-writer lock, to read.
    QueueingR = 6,
    /// Waits for a readers-writer lock, to write.
    QueueingW = 7,
    /// Waits for anything else, until it is woken.
    Wakeme = 8,
    /// Stopped by a signal or a debugger.
    Stopped = 10,
    /// Waits for a futex.
    Rendezvous = 11,
    /// Waits for its next period.
    Waitrelease = 12,
}

/// The names of Plan 9's scheduling states, by number.
pub const STATE_NAMES: [&str; 13] = [
    "Dead",
    "Moribund",
    "Ready",
    "Scheding",
    "Running",
    "Queueing",
    "QueueingR",
    "QueueingW",
    "Wakeme",
    "Broken",
    "Stopped",
    "Rendezvous",
    "Waitrelease",
];

/// Returns the argument of a sleep: state and program counter, whose top byte is lost.
#[must_use]
pub fn sleep_argument(state: SleepState, pc: u64) -> u64 {
    pc << 8 | u64::from(state as u8)
}

/// Returns the state and program counter of a sleep's argument. The top byte, all ones in the
/// kernel's addresses, is restored.
#[must_use]
pub fn sleep_parts(argument: u64) -> (u8, u64) {
    let pc = argument >> 8;
    let top = if pc >> 55 == 1 { 0xff << 56 } else { 0 };
    (argument as u8, pc | top)
}

/// Returns the argument of a name: up to eight bytes, the first in the lowest, padded with NUL.
#[must_use]
pub fn name_argument(name: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let text = name.iter().take_while(|byte| **byte != 0);
    for (place, byte) in bytes.iter_mut().zip(text) {
        *place = *byte;
    }
    u64::from_le_bytes(bytes)
}

/// Returns the name in such an argument.
#[must_use]
pub fn name_of(argument: u64) -> Vec<u8> {
    let bytes = argument.to_le_bytes();
    bytes.into_iter().take_while(|byte| *byte != 0).collect()
}

/// One record. The type is kept as a number, because readers show numbers that they do not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The process: a Linux thread id, since Plan 9's processes are threads.
    pub pid: u32,
    /// The type; see [`EventType`].
    pub event: u32,
    /// The CPU.
    pub machine: u32,
    /// The time in nanoseconds since the epoch.
    pub time: i64,
    /// The argument; its meaning depends on the type.
    pub argument: u64,
}

impl Record {
    /// Encodes the record as readers get it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let fields = [
            &self.pid.to_le_bytes()[..],
            &self.event.to_le_bytes(),
            &self.machine.to_le_bytes(),
            &self.time.to_le_bytes(),
            &self.argument.to_le_bytes(),
        ];
        for (place, byte) in bytes.iter_mut().zip(fields.concat()) {
            *place = byte;
        }
        bytes
    }

    /// Decodes a record.
    #[must_use]
    pub fn parse(bytes: &[u8; RECORD_BYTES]) -> Self {
        let word = |at: usize| {
            let word = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
            u32::from_le_bytes(word.unwrap_or_default())
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Self {
            pid: word(0),
            event: word(4),
            machine: word(8),
            time: long(12).cast_signed(),
            argument: long(20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_has_the_bytes_of_the_manual_page() {
        let record = Record {
            pid: 0x0403_0201,
            event: EventType::Trap.number(),
            machine: 2,
            time: 0x1817_1615_1413_1211,
            argument: TRAP_SYSTEM_CALL | 59,
        };
        let bytes = [
            1, 2, 3, 4, 13, 0, 0, 0, 2, 0, 0, 0, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18,
            59, 0, 0, 0, 0, 0, 0, 0x20,
        ];
        assert_eq!(record.to_bytes(), bytes);
        assert_eq!(Record::parse(&bytes), record);
    }

    #[test]
    fn types_have_the_numbers_of_the_manual_page() {
        for (number, event) in (0..).zip(EventType::ALL) {
            assert_eq!(event.number(), number, "{}", event.name());
            assert_eq!(EventType::of(number), Some(event));
        }
        assert_eq!(EventType::of(16), None);
        assert_eq!(EventType::Inte.number(), 12);
        assert_eq!(EventType::Name.number(), 15);
    }

    #[test]
    fn arguments_hold_names_and_sleeps() {
        for (name, argument, back) in [
            (&b"sh\0old"[..], 0x6873, &b"sh"[..]),
            (b"kworker/0:1", 0x2f72_656b_726f_776b, b"kworker/"),
            (b"", 0, b""),
        ] {
            assert_eq!(name_argument(name), argument);
            assert_eq!(name_of(argument), back);
        }
        let pc = 0xffff_ffff_8123_4567;
        let argument = sleep_argument(SleepState::Wakeme, pc);
        assert_eq!(argument, 0xffff_ff81_2345_6708);
        assert_eq!(sleep_parts(argument), (8, pc));
        assert_eq!(sleep_parts(0x4012_340b), (11, 0x40_1234));
    }

    proptest! {
        #[test]
        fn every_record_is_28_bytes_and_reads_back(
            pid: u32, event: u32, machine: u32, time: i64, argument: u64,
        ) {
            let record = Record { pid, event, machine, time, argument };
            let bytes = record.to_bytes();
            prop_assert_eq!(bytes.len(), RECORD_BYTES);
            prop_assert_eq!(Record::parse(&bytes), record);
        }
    }
}
