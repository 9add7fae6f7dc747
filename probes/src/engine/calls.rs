//! The work that is left for the returns of watched calls.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use introspect::Gva;

use super::hit::Hit;

/// The most watched calls in progress at once. Further ones are not handled.
const MOST_CALLS: usize = 4096;
/// The size of a return address in bytes.
const RETURN_ADDRESS: u64 = 8;
/// The least size and the alignment of a task's kernel stack (`THREAD_SIZE`,
/// arch/x86/include/asm/page_64_types.h).
const STACK: u64 = 16 << 10;

/// The place of a call: its task, and the stack pointer after the return.
type Place = (u64, u64);

/// The values that are kept for the calls in progress, until they are closed.
pub(crate) struct Calls<T>(Mutex<Option<HashMap<Place, T>>>);

/// The outcome of a call's entry.
pub(crate) struct Entered<T> {
    /// Whether the value is kept, so that the return is to be reported.
    pub(crate) is_kept: bool,
    /// The values of calls whose return will not be reported, a refused one's among them.
    pub(crate) unreturned: Vec<T>,
}

impl<T> Entered<T> {
    fn refused(mut unreturned: Vec<T>, pending: T) -> Self {
        unreturned.push(pending);
        Self {
            is_kept: false,
            unreturned,
        }
    }
}

impl<T> Default for Calls<T> {
    fn default() -> Self {
        Self(Mutex::new(Some(HashMap::new())))
    }
}

impl<T> Calls<T> {
    /// Keeps `pending` for the return of the function that is entered at `hit`. The values of the
    /// task's earlier calls whose return was not seen are no longer kept: they stand at the same
    /// place of its stack, or at one that it has left since.
    ///
    /// Refuses `pending` if too many calls are in progress, or these are closed.
    pub(crate) fn enter(&self, hit: &Hit<'_>, pending: T) -> Entered<T> {
        let stack = hit.registers.rsp.wrapping_add(RETURN_ADDRESS);
        let task = hit.current.task().address;
        let mut kept = self.lock();
        let Some(calls) = kept.as_mut() else {
            return Entered::refused(Vec::new(), pending);
        };
        let ended = calls.extract_if(|call, _| has_ended(*call, (task, stack)));
        let unreturned = ended.map(|(_, pending)| pending).collect();
        if calls.len() >= MOST_CALLS {
            return Entered::refused(unreturned, pending);
        }
        calls.insert((task, stack), pending);
        Entered {
            is_kept: true,
            unreturned,
        }
    }

    /// Removes and returns the value that was kept for the return at `hit`.
    pub(crate) fn leave(&self, hit: &Hit<'_>, from_stack: Gva) -> Option<T> {
        let place = (hit.current.task().address, from_stack.0);
        self.lock().as_mut()?.remove(&place)
    }

    /// Removes and returns the values of all calls in progress, and keeps none from now on. To be
    /// called when no return will be reported any more: a vCPU may still be at an entry.
    pub(crate) fn close(&self) -> impl Iterator<Item = T> {
        let calls = self.lock().take();
        calls.into_iter().flat_map(HashMap::into_values)
    }

    fn lock(&self) -> MutexGuard<'_, Option<HashMap<Place, T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks whether a call must have ended, since its task enters another one at `entered`. An
/// interrupt has a stack of its own, which says nothing of the task's.
fn has_ended((task, stack): Place, entered: Place) -> bool {
    task == entered.0 && stack <= entered.1 && stack / STACK == entered.1 / STACK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_has_ended_if_its_task_enters_another_at_the_same_depth_or_further_out() {
        const CALL: Place = (0x1000, 0xffff_c900_0001_3e00);
        for (entered, expected) in [
            (CALL, true),
            ((CALL.0, CALL.1 + 0x100), true),
            // Called by it.
            ((CALL.0, CALL.1 - 0x100), false),
            ((CALL.0 + 0x40, CALL.1), false),
            // On an interrupt's stack.
            ((CALL.0, CALL.1 + STACK), false),
        ] {
            assert_eq!(has_ended(CALL, entered), expected, "{entered:x?}");
        }
    }
}
