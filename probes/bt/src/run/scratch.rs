//! The memory of running rules that a thread keeps from one run to the next, so that a hit rarely
//! allocates: the stack, the local variables, and the last texts and stacks of calls.
//!
//! Most hits read the same few texts again, such as the name of the thread that runs.

use std::cell::Cell;
use std::sync::Arc;

use probes::event::COMM_LENGTH;

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
    texts: Recent<Arc<[u8]>>,
    frames: Recent<Arc<[u64]>>,
    /// Names of threads, NUL-padded, with their texts.
    names: Recent<([u8; COMM_LENGTH], Arc<[u8]>)>,
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
        let found = self.texts.find(|known| **known == *text);
        found
            .cloned()
            .unwrap_or_else(|| self.texts.keep(text.into()))
    }

    /// Returns the addresses of a stack, shared in the same way.
    pub(super) fn frames(&mut self, frames: &[u64]) -> Arc<[u64]> {
        let found = self.frames.find(|known| **known == *frames);
        found
            .cloned()
            .unwrap_or_else(|| self.frames.keep(frames.into()))
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
