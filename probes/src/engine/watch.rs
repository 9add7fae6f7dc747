//! Watches: the engine's own probes on functions of the guest's kernel that change text, pages and
//! processes.
//!
//! They are hit like any other probe, before the probes at the same site, and record no events. A
//! watch may arm and remove sites in its calls: they run on the vCPU's own thread, while the guest
//! waits.

use introspect::Gva;
use vmm::trap::TrapTable;

use super::hit::{Hit, HitPath};
use super::returns::Returning;

/// The actions at a function's entry and return.
pub(crate) trait Watch: Send + Sync {
    /// Handles the function's entry. Returns whether its return is wanted.
    fn on_entry(&self, path: &HitPath, hit: &Hit<'_>) -> bool;

    /// Handles the function's return. `call` has the state at its entry; `from_stack` is the stack
    /// pointer after the return.
    fn on_return(&self, path: &HitPath, hit: &Hit<'_>, call: &Returning, from_stack: Gva) {
        let _ = (path, hit, call, from_stack);
    }

    /// Releases everything held for calls in progress. Called when the watch was removed, so no
    /// return will be reported.
    fn on_unwatch(&self, traps: &TrapTable) {
        let _ = traps;
    }
}
