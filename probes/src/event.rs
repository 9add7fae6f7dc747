//! Events: the words of a record in a ring, and the event decoded from them.
//!
//! The hit path writes a record with `Recorder`, word by word and without allocation. A consumer
//! decodes it to an [`Event`]. The session that enabled a probe knows its number's meaning.
//!
//! The words of a record are: probe, vCPU, kind and flags; process and thread; program counter; the
//! lengths of the parts that follow. The parts are arguments, thread name, kernel stack, user
//! stack, and strings (each its argument, length and state, then its bytes). The ring keeps the
//! time beside the record.

use crate::ring::{SlotWriter, Visit};

/// The number of argument registers of a function (System V ABI), and of a system call.
pub const MAX_ARGUMENTS: usize = 6;
/// The number of arguments of a program's static probe; its notes say where they are.
pub const MAX_STATIC_ARGUMENTS: usize = introspect::user::static_probes::MAX_ARGUMENTS;
/// The size of a thread's name in bytes (`TASK_COMM_LEN` of Linux).
pub const COMM_LENGTH: usize = 16;
/// The most frames of a stack in an event.
pub const MAX_FRAMES: usize = 127;
/// The most bytes of a string in an event.
pub const MAX_STRING: usize = 1024;

/// The process id of a hit without a process: in interrupt context, or in a guest without tasks.
const NO_PROCESS: u32 = u32::MAX;
/// The number of words before the parts.
pub const HEADER_WORDS: usize = 4;

const VCPU_SHIFT: u32 = 32;
const KIND_SHIFT: u32 = 48;
const KERNEL_STACK_SHIFT: u32 = 8;
const USER_STACK_SHIFT: u32 = 16;
const STRINGS_SHIFT: u32 = 24;
const COMM_SHIFT: u32 = 32;

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A function or system call was entered.
    Entry,
    /// A function or system call has returned.
    Return,
    /// An instruction inside a function, or a static probe, was reached.
    Point,
    /// A timer has ticked.
    Tick,
}

impl EventKind {
    fn code(self) -> u64 {
        match self {
            Self::Entry => 0,
            Self::Return => 1,
            Self::Point => 2,
            Self::Tick => 3,
        }
    }

    fn of(code: u64) -> Self {
        match code & 3 {
            0 => Self::Entry,
            1 => Self::Return,
            2 => Self::Point,
            _ => Self::Tick,
        }
    }
}

/// The completeness of a string argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StringState {
    /// The whole string.
    Whole,
    /// The first bytes; more follow.
    Cut,
    /// Memory was missing, at the first byte or after the bytes read. A string that is missing at a
    /// function's entry is read again at the return, if that is traced.
    Absent,
}

/// The string that an argument points to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgumentText {
    /// The number of the argument, from 0.
    pub argument: usize,
    /// The bytes read, without the NUL.
    pub bytes: Vec<u8>,
    /// Whether the string is complete.
    pub state: StringState,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The number of the probe in its session.
    pub probe: u32,
    /// The kind of the event.
    pub kind: EventKind,
    /// The index of the vCPU.
    pub vcpu: u16,
    /// The time stamp counter at the hit, in ticks.
    pub tsc: u64,
    /// The number of the process (the kernel's tgid, in the initial namespace; 0 is the idle task).
    /// `None` in interrupt context and in a guest without tasks.
    pub pid: Option<u32>,
    /// The number of the thread (the kernel's pid).
    pub tid: Option<u32>,
    /// The address of the function entered, of the caller's next instruction at a return, or of the
    /// instruction that a timer interrupted.
    pub pc: u64,
    /// The captured arguments; at a return, the returned value only.
    pub arguments: Vec<u64>,
    /// The thread's name, padded with NULs, if captured and known.
    pub comm: Option<[u8; COMM_LENGTH]>,
    /// The return addresses in the kernel, innermost first, if captured.
    pub kernel_stack: Vec<u64>,
    /// The return addresses in the program, in the same way.
    pub user_stack: Vec<u64>,
    /// The strings that arguments point to.
    pub strings: Vec<ArgumentText>,
}

/// The start of every record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    pub(crate) probe: u32,
    pub(crate) kind: EventKind,
    pub(crate) vcpu: usize,
    pub(crate) pid: Option<u32>,
    pub(crate) tid: Option<u32>,
    pub(crate) pc: u64,
}

impl Header {
    /// Returns the words of the header; `parts` has the lengths of what follows.
    #[inline(always)]
    fn words(&self, parts: u64) -> [u64; HEADER_WORDS] {
        let vcpu = self.vcpu as u64 & 0xffff;
        let number = |id: Option<u32>| u64::from(id.unwrap_or(NO_PROCESS));
        [
            u64::from(self.probe) | vcpu << VCPU_SHIFT | self.kind.code() << KIND_SHIFT,
            number(self.pid) | number(self.tid) << 32,
            self.pc,
            parts,
        ]
    }

    /// Adds the record of this header and all of `arguments`. Returns `None`, without effect, if it
    /// does not fit into a slot.
    #[inline(always)]
    pub(crate) fn push_with<const N: usize>(
        &self,
        visit: &Visit<'_>,
        arguments: &[u64; N],
    ) -> Option<bool> {
        visit.push_both(&self.words(N as u64 & 0xff), arguments)
    }
}

/// A writer of one record into its slot. Parts come in the order of the methods. Values that do not
/// fit are left out.
pub(crate) struct Recorder<'w, 's> {
    slot: &'w mut SlotWriter<'s>,
    /// The word with the lengths of the parts.
    parts: u64,
}

impl<'w, 's> Recorder<'w, 's> {
    pub(crate) fn new(slot: &'w mut SlotWriter<'s>, header: &Header) -> Self {
        // A slot has room for at least a header: see `Capture::words`.
        let _ = slot.push_all(&header.words(0));
        Self { slot, parts: 0 }
    }

    /// Adds the first `most` of these arguments, as many as fit.
    pub(crate) fn arguments(&mut self, arguments: &[u64], most: usize) {
        let kept = arguments.get(..most).unwrap_or(arguments);
        self.parts |= self.slot.push_words(kept) as u64 & 0xff;
    }

    pub(crate) fn comm(&mut self, comm: [u8; COMM_LENGTH]) {
        let number = u128::from_le_bytes(comm);
        if self.slot.room() >= 2 {
            let _ = self.slot.push_word(number as u64);
            let _ = self.slot.push_word((number >> 64) as u64);
            self.parts |= 1 << COMM_SHIFT;
        }
    }

    pub(crate) fn kernel_stack(&mut self, frames: &[u64]) {
        self.parts |= self.stack(frames) << KERNEL_STACK_SHIFT;
    }

    pub(crate) fn user_stack(&mut self, frames: &[u64]) {
        self.parts |= self.stack(frames) << USER_STACK_SHIFT;
    }

    fn stack(&mut self, frames: &[u64]) -> u64 {
        let most = frames.len().min(MAX_FRAMES);
        self.slot.push_words(frames.get(..most).unwrap_or_default()) as u64
    }

    pub(crate) fn string(&mut self, argument: usize, bytes: &[u8], state: StringState) {
        let room = self.slot.room().saturating_sub(1) * 8;
        if self.slot.room() == 0 || self.parts >> STRINGS_SHIFT & 0xff == 0xff {
            return;
        }
        let (bytes, state) = match bytes.get(..room) {
            Some(part) if part.len() < bytes.len() => (part, StringState::Cut),
            _ => (bytes, state),
        };
        let state = match state {
            StringState::Whole => 0,
            StringState::Cut => 1,
            StringState::Absent => 2u64,
        };
        let _ = self
            .slot
            .push_word(argument as u64 & 0xff | (bytes.len() as u64) << 8 | state << 56);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            for (place, byte) in word.iter_mut().zip(chunk) {
                *place = *byte;
            }
            let _ = self.slot.push_word(u64::from_le_bytes(word));
        }
        self.parts += 1 << STRINGS_SHIFT;
    }

    /// Completes the record.
    #[inline]
    pub(crate) fn finish(self) {
        self.slot.set(HEADER_WORDS - 1, self.parts);
    }
}

impl Event {
    /// Decodes a record with its time; `None` if the words are invalid.
    #[must_use]
    pub fn decode(tsc: u64, words: &[u64]) -> Option<Self> {
        let (header, rest) = words.split_at_checked(HEADER_WORDS)?;
        let &[head, process, pc, parts] = header else {
            return None;
        };
        let number = |id: u64| Some(id as u32).filter(|id| *id != NO_PROCESS);
        let length = |shift: u32| (parts >> shift & 0xff) as usize;
        let (arguments, rest) = rest.split_at_checked(length(0))?;
        let (comm, rest) = match length(COMM_SHIFT) {
            0 => (None, rest),
            _ => {
                let (comm, rest) = rest.split_at_checked(2)?;
                (Some(comm), rest)
            }
        };
        let (kernel_stack, rest) = rest.split_at_checked(length(KERNEL_STACK_SHIFT))?;
        let (user_stack, mut rest) = rest.split_at_checked(length(USER_STACK_SHIFT))?;
        let mut strings = Vec::new();
        for _ in 0..length(STRINGS_SHIFT) {
            let (text, behind) = string(rest)?;
            strings.push(text);
            rest = behind;
        }
        Some(Self {
            probe: head as u32,
            kind: EventKind::of(head >> KIND_SHIFT),
            vcpu: (head >> VCPU_SHIFT) as u16,
            tsc,
            pid: number(process & u64::from(u32::MAX)),
            tid: number(process >> 32),
            pc,
            arguments: arguments.to_vec(),
            comm: comm.map(|words| {
                let mut bytes = [0; COMM_LENGTH];
                for (place, byte) in bytes
                    .iter_mut()
                    .zip(words.iter().flat_map(|w| w.to_le_bytes()))
                {
                    *place = byte;
                }
                bytes
            }),
            kernel_stack: kernel_stack.to_vec(),
            user_stack: user_stack.to_vec(),
            strings,
        })
    }

    /// Returns the thread's name without its padding; empty if it was not captured.
    #[must_use]
    pub fn comm(&self) -> &[u8] {
        let bytes = self.comm.as_ref().map_or(&[][..], |comm| comm);
        let end = bytes.iter().position(|byte| *byte == 0);
        bytes.get(..end.unwrap_or(bytes.len())).unwrap_or_default()
    }
}

fn string(words: &[u64]) -> Option<(ArgumentText, &[u64])> {
    let (head, rest) = words.split_first()?;
    let length = (head >> 8 & 0xffff_ffff) as usize;
    let (words, rest) = rest.split_at_checked(length.div_ceil(8))?;
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    let text = ArgumentText {
        argument: (head & 0xff) as usize,
        bytes: bytes.take(length).collect(),
        state: match head >> 56 {
            0 => StringState::Whole,
            1 => StringState::Cut,
            _ => StringState::Absent,
        },
    };
    Some((text, rest))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ring::Ring;

    const HEADER: Header = Header {
        probe: 7,
        kind: EventKind::Return,
        vcpu: 3,
        pid: Some(41),
        tid: Some(42),
        pc: 0xffff_ffff_8100_0000,
    };

    fn recorded(words: usize, header: &Header, parts: impl FnOnce(&mut Recorder<'_, '_>)) -> Event {
        let ring = Ring::new(2, words).unwrap();
        assert!(ring.visit(|| 99).push_with(|slot| {
            let mut recorder = Recorder::new(slot, header);
            parts(&mut recorder);
            recorder.finish();
        }));
        let mut record = Vec::new();
        let tsc = ring.pop(&mut record).unwrap();
        Event::decode(tsc, &record).unwrap()
    }

    #[test]
    fn an_event_survives_its_words() {
        let event = recorded(64, &HEADER, |r| {
            r.arguments(&[1, u64::MAX, 3], 3);
            r.comm(*b"busybox\0\0\0\0\0\0\0\0\0");
            r.kernel_stack(&[10, 11]);
            r.user_stack(&[20]);
            r.string(1, b"/etc/passwd", StringState::Whole);
            r.string(2, b"", StringState::Absent);
        });
        let text = |argument, bytes: &[u8], state| ArgumentText {
            argument,
            bytes: bytes.to_vec(),
            state,
        };
        let expected = Event {
            probe: 7,
            kind: EventKind::Return,
            vcpu: 3,
            tsc: 99,
            pid: Some(41),
            tid: Some(42),
            pc: 0xffff_ffff_8100_0000,
            arguments: vec![1, u64::MAX, 3],
            comm: Some(*b"busybox\0\0\0\0\0\0\0\0\0"),
            kernel_stack: vec![10, 11],
            user_stack: vec![20],
            strings: vec![
                text(1, b"/etc/passwd", StringState::Whole),
                text(2, b"", StringState::Absent),
            ],
        };
        assert_eq!(event, expected);
        assert_eq!(event.comm(), b"busybox");
    }

    #[test]
    fn an_event_without_a_process_has_no_number() {
        for kind in [EventKind::Entry, EventKind::Point, EventKind::Tick] {
            let header = Header {
                kind,
                pid: None,
                tid: None,
                ..HEADER
            };
            let event = recorded(8, &header, |_| {});
            assert_eq!((event.kind, event.pid, event.tid), (kind, None, None));
            assert!(event.arguments.is_empty() && event.comm().is_empty());
        }
    }

    #[test]
    fn what_does_not_fit_into_the_slot_is_left_out() {
        let event = recorded(HEADER_WORDS + 5, &HEADER, |r| {
            r.arguments(&[1, 2], 2);
            r.string(0, b"0123456789abcdefghij", StringState::Whole);
            r.string(1, b"no room", StringState::Whole);
        });
        assert_eq!(event.arguments, [1, 2]);
        assert_eq!(event.strings.len(), 1);
        assert_eq!(event.strings[0].bytes, b"0123456789abcdef");
        assert_eq!(event.strings[0].state, StringState::Cut);
    }

    #[test]
    fn words_that_are_no_record_are_none() {
        assert_eq!(Event::decode(0, &[0; HEADER_WORDS - 1]), None);
        assert_eq!(
            Event::decode(0, &[0, 0, 0, 6, 1]),
            None,
            "six arguments, one word"
        );
    }
}
