//! The memory of running rules that a thread keeps from one run to the next, so that a hit rarely
//! allocates: the stack, the local variables, and the last texts and stacks of calls.
//!
//! Most hits read the same few texts again, such as the name of the thread that runs.

use std::cell::Cell;
use std::sync::Arc;

use crate::value::Value;

/// The number of texts, and of stacks of calls, that are kept.
const KEPT: usize = 4;
/// The greatest number of values for which room is kept.
const MOST_ROOM: usize = 1 << 10;

thread_local! {
    static KEPT_HERE: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// The memory of one run.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) stack: Vec<Value>,
    pub(super) locals: Vec<Value>,
    texts: Recent<u8>,
    frames: Recent<u64>,
}

impl Scratch {
    /// Takes this thread's memory, with so many local variables, all 0.
    pub(super) fn take(locals: usize) -> Box<Self> {
        let mut scratch = KEPT_HERE.take().unwrap_or_default();
        scratch.locals.resize(locals, Value::ZERO);
        scratch
    }

    /// Leaves the memory to the next run of this thread.
    pub(super) fn give_back(mut self: Box<Self>) {
        self.stack.clear();
        self.locals.clear();
        self.stack.shrink_to(MOST_ROOM);
        self.locals.shrink_to(MOST_ROOM);
        KEPT_HERE.set(Some(self));
    }

    /// Returns a text, shared with the last ones if it is equal to one of them.
    pub(super) fn text(&mut self, text: &[u8]) -> Arc<[u8]> {
        self.texts.shared(text)
    }

    /// Returns the addresses of a stack, shared in the same way.
    pub(super) fn frames(&mut self, frames: &[u64]) -> Arc<[u64]> {
        self.frames.shared(frames)
    }
}

/// The last slices of some kind.
struct Recent<T> {
    slices: [Option<Arc<[T]>>; KEPT],
    /// The place of the oldest.
    oldest: usize,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self {
            slices: std::array::from_fn(|_| None),
            oldest: 0,
        }
    }
}

impl<T: Copy + PartialEq> Recent<T> {
    fn shared(&mut self, slice: &[T]) -> Arc<[T]> {
        let mut known = self.slices.iter().flatten();
        if let Some(found) = known.find(|known| ***known == *slice) {
            return found.clone();
        }
        let new: Arc<[T]> = slice.into();
        if let Some(place) = self.slices.get_mut(self.oldest) {
            *place = Some(new.clone());
        }
        self.oldest = (self.oldest + 1) % KEPT;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_texts_are_shared() {
        let mut scratch = Scratch::default();
        let first = scratch.text(b"sh");
        assert!(Arc::ptr_eq(&first, &scratch.text(b"sh")));
        for other in [b"a", b"b", b"c", b"d"] {
            assert_eq!(*scratch.text(other), other[..]);
        }
        let again = scratch.text(b"sh");
        assert_eq!(again, first);
        assert!(!Arc::ptr_eq(&again, &first));
        assert_eq!(*scratch.frames(&[1, 2]), [1, 2]);
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
