//! The engine's own probes: functions of the guest's kernel by which it changes text, pages and processes.
//!
//! They are hit like any other, before the probes at the same site, and leave no events. A watch may arm and remove sites from where it
//! is called: on the vCPU's own thread, while the guest waits.

use introspect::Gva;
use vmm::trap::TrapTable;

use super::hit::{Hit, HitPath};
use super::returns::Returning;

/// What is done when a function is entered, and when it returns.
pub(crate) trait Watch: Send + Sync {
    /// The function is entered; whether its return is wanted.
    fn on_entry(&self, path: &HitPath, hit: &Hit<'_>) -> bool;

    /// It returns. `call` is what it was entered with; `from_stack` is the stack pointer after the return.
    fn on_return(&self, path: &HitPath, hit: &Hit<'_>, call: &Returning, from_stack: Gva) {
        let _ = (path, hit, call, from_stack);
    }

    /// Releases what is held for calls in progress. Called when the watch was removed, so no return will be reported.
    fn on_unwatch(&self, traps: &TrapTable) {
        let _ = traps;
    }
}
