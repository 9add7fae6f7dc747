//! What a machine's process gives up before a guest runs in it.
//!
//! It gains no privileges by what it executes (PR_SET_NO_NEW_PRIVS), leaves no core dump behind, and other processes of the
//! same user do not read its memory, which holds all that the guest knows (PR_SET_DUMPABLE). Of the guest's memory nothing
//! is dumped in any case (`vmm`). Sources: prctl(2), core(5), ptrace(2).

use std::io;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::set_no_new_privs;

/// The host refuses to confine this process.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}; `--confine off` runs without")]
pub struct ConfinementError {
    what: &'static str,
    source: io::Error,
}

/// Confines this process, and all threads that it makes from now on.
///
/// # Errors
/// If the kernel refuses.
pub fn confine() -> Result<(), ConfinementError> {
    let failed = |what| {
        move |error: rustix::io::Errno| ConfinementError {
            what,
            source: error.into(),
        }
    };
    set_no_new_privs(true).map_err(failed("PR_SET_NO_NEW_PRIVS"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("PR_SET_DUMPABLE"))
}
