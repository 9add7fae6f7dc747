//! Calls that have not returned yet, keyed by task and stack.
//!
//! A call's frame is identified by its task and by the stack pointer after the return. A task may
//! move to another vCPU, so all vCPUs share the table. It is split into shards with a lock each,
//! held for some ten nanoseconds. Memory is bounded and allocated at the start, except for
//! functions that share a frame. A full shard gives up its oldest call, which is counted as lost.
//! Finding it takes a search of the shard under its lock. Calls that never return (the task ended
//! in them) leave in this way, or when their place on the stack is used again.
//!
//! Kernels reuse the memory of a dead task and its stack at once. So a frame also keeps the
//! thread's number. Another thread at the same place is no return, and ends the wait.
//!
//! A function that ends with a jump to another one shares its frame. Both wait at the same place
//! and return together, the later entered first.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use self::shard::{Found, Shard};
use crate::event::MAX_ARGUMENTS;

mod shard;

/// The largest number of functions that share one frame.
const CHAIN: usize = 4;
/// The number of locks; a power of two.
const SHARDS: usize = 64;
/// The first of the hash bits that select the shard.
const SHARD_SHIFT: u32 = 58;
/// The smallest capacity of a shard: calls spread over the shards by chance.
const SHARD_ROOM: usize = 16;
/// The largest total capacity; the tables then take 200 MiB.
const MAX_ROOM: usize = 1 << 20;

/// The place of a pending return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    /// The address of the task; 0 if there is none.
    pub(super) task: u64,
    /// The stack pointer after the return.
    pub(super) stack: u64,
}

/// A hash by two multiplications with factors that are random for each table. A guest, which
/// chooses its stack pointers, cannot know which of them collide.
#[derive(Debug)]
struct Mixing {
    /// Both odd.
    factors: [u64; 2],
}

impl Default for Mixing {
    fn default() -> Self {
        let number = |n: u64| RandomState::new().hash_one(n) | 1;
        Self {
            factors: [number(1), number(2)],
        }
    }
}

/// Folds the two halves of a product together: each bit of the result depends on all bits of the
/// factors.
fn folded(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

impl Mixing {
    #[inline]
    fn hash(&self, key: Key) -> u64 {
        let [first, second] = self.factors;
        let half = folded(key.stack ^ second, first);
        folded(key.task ^ half, second)
    }
}

/// The key of a function: the entry address in the kernel, or the physical address in a program. A
/// system call has its number in a range that is neither.
pub(super) type FunctionKey = u64;

/// A call at its entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Call {
    /// The number of the thread.
    pub(super) thread: u64,
    pub(super) return_address: u64,
    pub(super) function: FunctionKey,
    pub(super) arguments: [u64; MAX_ARGUMENTS],
    pub(super) tsc: u64,
}

/// A function that returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Returning {
    pub(super) function: FunctionKey,
    /// The arguments of the call.
    pub(super) arguments: [u64; MAX_ARGUMENTS],
    /// The time stamp counter at the entry.
    pub(super) entered: u64,
}

/// A frame that functions will return from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    key: Key,
    hash: u64,
    thread: u64,
    return_address: u64,
    /// The function entered first. Its entry time is the frame's age in its shard.
    first: Returning,
    /// The functions entered later; at most [`CHAIN`] with the first.
    later: Vec<Returning>,
}

impl Frame {
    fn is_of(&self, thread: u64, return_address: u64) -> bool {
        self.thread == thread && self.return_address == return_address
    }

    fn count(&self) -> u64 {
        1 + self.later.len() as u64
    }

    /// Removes a function. Returns whether any is left.
    fn remove(&mut self, function: FunctionKey) -> bool {
        self.later.retain(|call| call.function != function);
        if self.first.function != function {
            return true;
        }
        if self.later.is_empty() {
            return false;
        }
        self.first = self.later.remove(0);
        true
    }

    /// Returns the function that was entered first, and returns last.
    pub(super) fn first(&self) -> &Returning {
        &self.first
    }

    /// Returns the other functions, the last entered first.
    pub(super) fn later(&self) -> impl Iterator<Item = &Returning> {
        self.later.iter().rev()
    }
}

/// All pending returns.
pub(super) struct PendingReturns {
    mixing: Mixing,
    shards: Vec<Mutex<Shard>>,
    /// The number of calls given up.
    lost: AtomicU64,
}

impl PendingReturns {
    /// Creates a table for about `limit` calls at a time, at least 1024.
    pub(super) fn new(limit: usize) -> Self {
        let per_shard = limit.min(MAX_ROOM).div_ceil(SHARDS).max(SHARD_ROOM);
        let shard = || Mutex::new(Shard::new(per_shard));
        Self {
            mixing: Mixing::default(),
            shards: (0..SHARDS).map(|_| shard()).collect(),
            lost: AtomicU64::new(0),
        }
    }

    /// Adds a call whose return is expected at `key`.
    #[inline]
    pub(super) fn enter(&self, key: Key, call: &Call) {
        let hash = self.mixing.hash(key);
        let Some(shard) = self.shard(hash) else {
            return;
        };
        let mut shard = shard.lock();
        let entered = Returning {
            function: call.function,
            arguments: call.arguments,
            entered: call.tsc,
        };
        let fresh = Frame {
            key,
            hash,
            thread: call.thread,
            return_address: call.return_address,
            first: entered,
            later: Vec::new(),
        };
        match shard.find(hash, key) {
            Found::Free(place) if !shard.is_full() => shard.insert(place, fresh),
            Found::Free(_) => {
                if let Some(frame) = shard.remove_oldest() {
                    self.lose(&frame);
                }
                // The removal may have freed a place further ahead.
                if let Found::Free(place) = shard.find(hash, key) {
                    shard.insert(place, fresh);
                }
            }
            Found::At { index, .. } => {
                let Some(frame) = shard.frame_mut(index) else {
                    return;
                };
                match frame.is_of(call.thread, call.return_address) {
                    true => self.chain(frame, entered),
                    // Another return address: the frame was written over, so the earlier call is
                    // gone.
                    false => self.lose(&std::mem::replace(frame, fresh)),
                }
            }
        }
    }

    /// Removes and returns the functions that return now to `return_address`, if `key` is pending
    /// for it.
    #[inline]
    pub(super) fn take(&self, key: Key, thread: u64, return_address: u64) -> Option<Frame> {
        let hash = self.mixing.hash(key);
        let mut shard = self.shard(hash)?.lock();
        let Found::At { place, index } = shard.find(hash, key) else {
            return None;
        };
        let frame = shard.frame_mut(index)?;
        if frame.is_of(thread, return_address) {
            return shard.remove(place, index);
        }
        if frame.thread != thread
            && let Some(frame) = shard.remove(place, index)
        {
            self.lose(&frame);
        }
        None
    }

    /// Forgets the calls of `function`, whose return is not probed any more. A later call at the
    /// same place is another one.
    pub(super) fn forget(&self, function: FunctionKey) {
        for shard in &self.shards {
            shard.lock().retain(|frame| frame.remove(function));
        }
    }

    /// Returns the number of calls given up, whose return was not seen.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Returns the number of pending calls.
    pub(super) fn waiting(&self) -> u64 {
        self.shards
            .iter()
            .map(|shard| shard.lock().frames().map(Frame::count).sum::<u64>())
            .sum()
    }

    /// Adds a function to a pending frame: it was entered by a jump from the one before. The same
    /// function again at the same place means that the earlier call never returned.
    fn chain(&self, frame: &mut Frame, entered: Returning) {
        if frame.first.function == entered.function {
            self.lose(frame);
            (frame.first, frame.later) = (entered, Vec::new());
            return;
        }
        let again = |waits: &Returning| waits.function == entered.function;
        if let Some(position) = frame.later.iter().position(again) {
            let lost = frame.later.len() - position;
            self.lost.fetch_add(lost as u64, Ordering::Relaxed);
            frame.later.truncate(position);
        }
        if 1 + frame.later.len() < CHAIN {
            frame.later.push(entered);
        } else {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn lose(&self, frame: &Frame) {
        self.lost.fetch_add(frame.count(), Ordering::Relaxed);
    }

    #[inline]
    fn shard(&self, hash: u64) -> Option<&Mutex<Shard>> {
        self.shards.get((hash >> SHARD_SHIFT) as usize % SHARDS)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const THREAD: u64 = 57;
    const KEY: Key = Key {
        task: 0x1000,
        stack: 0x8000,
    };

    fn call(return_address: u64, function: u64, tsc: u64) -> Call {
        Call {
            thread: THREAD,
            return_address,
            function,
            arguments: [function * 10; MAX_ARGUMENTS],
            tsc,
        }
    }

    /// Returns the functions that return; each has the arguments of its entry.
    fn functions(frame: Option<Frame>) -> Option<Vec<u64>> {
        let function = |r: &Returning| {
            assert_eq!(r.arguments, [r.function * 10; MAX_ARGUMENTS]);
            r.function
        };
        frame.map(|frame| frame.later().chain([frame.first()]).map(function).collect())
    }

    #[test]
    fn a_call_returns_once_to_where_it_was_called_on_its_own_stack() {
        let returns = PendingReturns::new(64);
        returns.enter(KEY, &call(0x500, 7, 1));
        for (key, address) in [
            (
                Key {
                    task: 0x1001,
                    ..KEY
                },
                0x500,
            ),
            (
                Key {
                    stack: 0x8008,
                    ..KEY
                },
                0x500,
            ),
            (KEY, 0x501),
        ] {
            assert_eq!(
                returns.take(key, THREAD, address),
                None,
                "{key:?} {address:#x}"
            );
        }
        assert_eq!(returns.waiting(), 1);
        assert_eq!(functions(returns.take(KEY, THREAD, 0x500)), Some(vec![7]));
        assert_eq!(returns.take(KEY, THREAD, 0x500), None);
        assert_eq!((returns.waiting(), returns.lost()), (0, 0));
    }

    #[test]
    fn recursion_returns_from_the_inside_out() {
        let returns = PendingReturns::new(64);
        let frames: Vec<Key> = (0..5)
            .map(|n| Key {
                stack: 0x8000 - n * 32,
                ..KEY
            })
            .collect();
        for (time, key) in frames.iter().enumerate() {
            returns.enter(*key, &call(0x500, 7, time as u64));
        }
        for key in frames.iter().rev() {
            assert_eq!(functions(returns.take(*key, THREAD, 0x500)), Some(vec![7]));
        }
        assert_eq!((returns.waiting(), returns.lost()), (0, 0));
    }

    #[test]
    fn functions_that_jump_to_each_other_return_together() {
        let returns = PendingReturns::new(64);
        for function in [1, 2, 3] {
            returns.enter(KEY, &call(0x500, function, 1));
        }
        assert_eq!(
            functions(returns.take(KEY, THREAD, 0x500)),
            Some(vec![3, 2, 1])
        );
        assert_eq!(returns.lost(), 0);
    }

    #[test]
    fn calls_that_cannot_return_any_more_are_counted() {
        for (entered, left, lost) in [
            // Another call has reused the place on the stack.
            (&[(0x500, 1), (0x600, 2)][..], (0x600, vec![2]), 1),
            // The same call again at the same place: the earlier task ended in it.
            (&[(0x500, 1), (0x500, 1)], (0x500, vec![1]), 1),
            (&[(0x500, 1), (0x500, 2), (0x500, 1)], (0x500, vec![1]), 2),
            // More functions in one frame than are kept.
            (
                &[(0x500, 1), (0x500, 2), (0x500, 3), (0x500, 4), (0x500, 5)],
                (0x500, vec![4, 3, 2, 1]),
                1,
            ),
        ] {
            let returns = PendingReturns::new(64);
            for (address, function) in entered {
                returns.enter(KEY, &call(*address, *function, 1));
            }
            let (address, expected) = left;
            assert_eq!(
                functions(returns.take(KEY, THREAD, address)),
                Some(expected),
                "{entered:?}"
            );
            assert_eq!(returns.lost(), lost, "{entered:?}");
        }
    }

    #[test]
    fn a_new_task_in_the_memory_of_a_dead_one_returns_from_nothing() {
        let returns = PendingReturns::new(64);
        returns.enter(KEY, &call(0x500, 7, 1));
        assert_eq!(returns.take(KEY, THREAD + 1, 0x500), None);
        assert_eq!((returns.waiting(), returns.lost()), (0, 1));
    }

    #[test]
    fn a_function_whose_return_is_not_probed_any_more_is_forgotten() {
        let returns = PendingReturns::new(64);
        for function in [1, 2, 3] {
            returns.enter(KEY, &call(0x500, function, 1));
        }
        let alone = Key {
            stack: 0x9000,
            ..KEY
        };
        returns.enter(alone, &call(0x600, 2, 1));
        returns.forget(2);
        assert_eq!((returns.waiting(), returns.lost()), (2, 0));
        assert_eq!(returns.take(alone, THREAD, 0x600), None);
        assert_eq!(
            functions(returns.take(KEY, THREAD, 0x500)),
            Some(vec![3, 1])
        );
    }

    #[test]
    fn a_full_table_gives_up_the_oldest() {
        let returns = PendingReturns::new(1);
        let keys: Vec<Key> = (0..20_000)
            .map(|n| Key {
                task: n * 0x2480,
                ..KEY
            })
            .collect();
        for (time, key) in keys.iter().enumerate() {
            returns.enter(*key, &call(0x500, 7, time as u64));
        }
        let room = (SHARDS * SHARD_ROOM) as u64;
        assert!(
            (room / 2..=room).contains(&returns.waiting()),
            "{}",
            returns.waiting()
        );
        assert_eq!(returns.waiting() + returns.lost(), 20_000);
        // In every shard, the last few keys are among its latest 16.
        for key in keys.iter().rev().take(SHARD_ROOM) {
            assert!(returns.take(*key, THREAD, 0x500).is_some(), "{key:?}");
        }
        assert!(returns.take(keys[0], THREAD, 0x500).is_none());
    }
}
