//! The memory of running rules that a thread keeps from one run to the next, so that a hit rarely
//! allocates: the stack, the local variables, and the last texts and stacks of calls.
//!
//! Most hits read the same few texts again, such as the name of the thread that runs.

use std::cell::Cell;
use std::sync::Arc;

use probes::event::{COMM_LENGTH, MAX_FRAMES};

use super::MOST_BYTES;
use crate::value::Value;

/// The number of texts, and of stacks of calls, that are kept.
const KEPT: usize = 4;
/// The greatest number of values for which room is kept.
const MOST_ROOM: usize = 1 << 10;

thread_local! {
    static KEPT_HERE: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// The memory of one run.
pub(super) struct Scratch {
    pub(super) stack: Vec<Value>,
    pub(super) locals: Vec<Value>,
    /// The items of the loops that run, the innermost last.
    pub(super) iterations: Vec<std::vec::IntoIter<Value>>,
    /// Room to read a text into.
    bytes: [u8; MOST_BYTES],
    /// Room to read a stack into.
    addresses: [u64; MAX_FRAMES],
    texts: Recent<Arc<[u8]>>,
    frames: Recent<Arc<[u64]>>,
    /// Names of threads, NUL-padded, with their texts.
    names: Recent<([u8; COMM_LENGTH], Arc<[u8]>)>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            stack: Vec::new(),
            locals: Vec::new(),
            iterations: Vec::new(),
            bytes: [0; MOST_BYTES],
            addresses: [0; MAX_FRAMES],
            texts: Recent::default(),
            frames: Recent::default(),
            names: Recent::default(),
        }
    }
}

impl Scratch {
    /// Takes this thread's memory, with so many local variables, all 0.
    #[inline(always)]
    pub(super) fn take(locals: usize) -> Box<Self> {
        let mut scratch = KEPT_HERE.take().unwrap_or_default();
        if locals > 0 {
            scratch.locals.resize(locals, Value::ZERO);
        }
        scratch
    }

    /// Leaves the memory to the next run of this thread.
    #[inline(always)]
    pub(super) fn give_back(mut self: Box<Self>) {
        // Most rules leave nothing.
        let left = self.stack.len() | self.locals.len() | self.iterations.len();
        if left > 0 || self.stack.capacity() > MOST_ROOM {
            self.clear();
        }
        KEPT_HERE.set(Some(self));
    }

    #[inline(never)]
    fn clear(&mut self) {
        self.stack.clear();
        self.locals.clear();
        self.iterations.clear();
        self.stack.shrink_to(MOST_ROOM);
        self.locals.shrink_to(MOST_ROOM);
    }

    /// Returns a text that `read` puts into a buffer of at most this length, returning its own. It
    /// is shared with the last ones if it is equal to one of them.
    #[inline]
    pub(super) fn text(&mut self, most: usize, read: impl FnOnce(&mut [u8]) -> usize) -> Arc<[u8]> {
        self.texts.read(&mut self.bytes, most, read)
    }

    /// Returns the addresses of a stack, read and shared in the same way.
    #[inline]
    pub(super) fn frames(
        &mut self,
        most: usize,
        read: impl FnOnce(&mut [u64]) -> usize,
    ) -> Arc<[u64]> {
        self.frames.read(&mut self.addresses, most, read)
    }

    /// Returns the name of a thread, shared in the same way.
    pub(super) fn name(&mut self, padded: &[u8; COMM_LENGTH]) -> Arc<[u8]> {
        let wanted = u128::from_le_bytes(*padded);
        let found = (self.names).find(|(known, _)| u128::from_le_bytes(*known) == wanted);
        if let Some((_, name)) = found {
            return name.clone();
        }
        let name = padded.split(|byte| *byte == 0).next();
        let name: Arc<[u8]> = name.unwrap_or_default().into();
        self.names.keep((*padded, name)).1
    }
}

/// The last values of some kind.
struct Recent<T> {
    values: [Option<T>; KEPT],
    /// The place of the oldest.
    oldest: usize,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self {
            values: std::array::from_fn(|_| None),
            oldest: 0,
        }
    }
}

impl<T: Clone> Recent<T> {
    fn find(&self, is_it: impl Fn(&T) -> bool) -> Option<&T> {
        self.values.iter().flatten().find(|known| is_it(known))
    }

    /// Keeps a value instead of the oldest.
    fn keep(&mut self, new: T) -> T {
        if let Some(place) = self.values.get_mut(self.oldest) {
            *place = Some(new.clone());
        }
        self.oldest = (self.oldest + 1) % KEPT;
        new
    }
}

impl<T: Copy + PartialEq> Recent<Arc<[T]>> {
    #[inline]
    fn read(
        &mut self,
        buffer: &mut [T],
        most: usize,
        read: impl FnOnce(&mut [T]) -> usize,
    ) -> Arc<[T]> {
        let most = most.min(buffer.len());
        let room = buffer.get_mut(..most).unwrap_or_default();
        let length = read(room);
        let found = room.get(..length).unwrap_or_default();
        let known = self.find(|known| **known == *found).cloned();
        known.unwrap_or_else(|| self.keep(found.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_texts_are_shared() {
        let mut scratch = Scratch::default();
        let read = |scratch: &mut Scratch, text: &[u8]| {
            scratch.text(64, |room| {
                room[..text.len()].copy_from_slice(text);
                text.len()
            })
        };
        let first = read(&mut scratch, b"sh");
        assert!(Arc::ptr_eq(&first, &read(&mut scratch, b"sh")));
        for other in [b"a", b"b", b"c", b"d"] {
            assert_eq!(*read(&mut scratch, other), other[..]);
        }
        let again = read(&mut scratch, b"sh");
        assert_eq!(again, first);
        assert!(!Arc::ptr_eq(&again, &first));
        let frames = scratch.frames(2, |room| {
            room.copy_from_slice(&[1, 2]);
            2
        });
        assert_eq!(*frames, [1, 2]);
        let mut padded = [0; COMM_LENGTH];
        padded[..2].copy_from_slice(b"sh");
        let name = scratch.name(&padded);
        assert_eq!(*name, *b"sh");
        assert!(Arc::ptr_eq(&name, &scratch.name(&padded)));
        assert_eq!(*scratch.name(&[b'x'; COMM_LENGTH]), [b'x'; COMM_LENGTH]);
    }

    #[test]
    fn nothing_of_a_run_is_left_to_the_next() {
        let mut first = Scratch::take(2);
        first.stack.push(Value::Int(1));
        first.locals[1] = Value::Int(2);
        first.give_back();
        let next = Scratch::take(3);
        assert!(next.stack.is_empty());
        assert_eq!(next.locals, [Value::ZERO, Value::ZERO, Value::ZERO]);
    }
}
