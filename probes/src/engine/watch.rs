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
    fn enter(&self, path: &HitPath, hit: &Hit<'_>) -> bool;

    /// It returns. `call` is what it was entered with; `from_stack` is the stack pointer after the return.
    fn leave(&self, path: &HitPath, hit: &Hit<'_>, call: &Returning, from_stack: Gva) {
        let _ = (path, hit, call, from_stack);
    }

    /// Lets go of what is held for calls that are under way: the watch was taken off its function, and is told of no return.
    fn taken_off(&self, traps: &TrapTable) {
        let _ = traps;
    }
}
