//! The work that is left for the returns of watched calls.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use introspect::Gva;

use super::hit::Hit;

/// The most watched calls in progress at once. Further ones are not handled.
const MOST_CALLS: usize = 4096;
/// The size of a return address in bytes.
const RETURN_ADDRESS: u64 = 8;

/// By task, and stack pointer after the return.
pub(crate) struct Calls<T>(Mutex<HashMap<(u64, u64), T>>);

impl<T> Default for Calls<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Calls<T> {
    /// Keeps `pending` for the return of the function that is entered at `hit`. Returns the value
    /// of an earlier call at the same place, whose return was not seen.
    ///
    /// # Errors
    /// If too many calls are in progress: returns `pending`.
    pub(crate) fn enter(&self, hit: &Hit<'_>, pending: T) -> Result<Option<T>, T> {
        let stack = hit.registers.rsp.wrapping_add(RETURN_ADDRESS);
        let mut calls = self.lock();
        if calls.len() >= MOST_CALLS {
            return Err(pending);
        }
        Ok(calls.insert((hit.current.task().address, stack), pending))
    }

    /// Removes and returns the value that was kept for the return at `hit`.
    pub(crate) fn leave(&self, hit: &Hit<'_>, from_stack: Gva) -> Option<T> {
        self.lock()
            .remove(&(hit.current.task().address, from_stack.0))
    }

    /// Removes and returns the values of all calls in progress. To be called when no return will be
    /// reported any more.
    pub(crate) fn take(&self) -> impl Iterator<Item = T> {
        std::mem::take(&mut *self.lock()).into_values()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(u64, u64), T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
