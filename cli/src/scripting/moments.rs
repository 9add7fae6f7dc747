//! The moments of the machine that a script keeps: `snapshot()` and `rewind()`.

use std::sync::Arc;
use std::time::Instant;

use bt::moments::{Keeps, Moment, Wish};

use crate::history::{self, KeepError};
use crate::protocol::error::{ErrorKind, RequestError};
use crate::vm::Vm;

/// The maximum number of lost moments that are reported with their reasons; others are counted.
const MOST_TOLD: u64 = 10;

/// Prepares the machine for what a script keeps.
///
/// # Errors
/// If it has no folder for snapshots, or no history.
pub(super) fn begin(vm: &Arc<Vm>, keeps: Keeps) -> Result<(), RequestError> {
    if !keeps.hits && !keeps.past {
        return Ok(());
    }
    let call = if keeps.past { "rewind()" } else { "snapshot()" };
    let refused =
        |error: KeepError| RequestError::new(ErrorKind::Invalid, format_args!("{call}: {error}"));
    vm.keeper.can_keep(keeps.past).map_err(refused)?;
    vm.begin_history().map_err(refused)
}

/// Refuses what a script keeps, for want of a machine.
///
/// # Errors
/// If it keeps anything.
pub(super) fn refuse(keeps: Keeps) -> Result<(), RequestError> {
    match keeps.hits || keeps.past {
        true => Err(RequestError::new(
            ErrorKind::Invalid,
            "snapshot() and rewind() keep a machine, and this script runs without one",
        )),
        false => Ok(()),
    }
}

/// The moments of a script.
#[derive(Debug, Default)]
pub(super) struct Moments {
    /// The messages that were not told yet.
    messages: String,
    lost: u64,
}

impl Moments {
    /// Keeps a moment, and lets the guest go on.
    pub(super) fn keep(&mut self, vm: &Vm, moment: Moment) {
        let (call, kept) = match moment.wish {
            Wish::Snapshot => ("snapshot", vm.keep(&moment.name)),
            Wish::Rewind(ago) => {
                let ago = ago.unwrap_or(history::BEFORE_END);
                ("rewind", vm.keep_before(&moment.name, Instant::now(), ago))
            }
        };
        drop(moment.hold);
        let message = match kept {
            Ok(kept) => format!("{call} {kept}\n"),
            Err(error) => {
                self.lost += 1;
                if self.lost > MOST_TOLD {
                    return;
                }
                format!("{call} {}: not kept: {error}\n", moment.name)
            }
        };
        self.messages += "exotrace: ";
        self.messages += &message;
    }

    /// Adds the messages since the last call.
    pub(super) fn tell(&mut self, err: &mut Vec<u8>) {
        err.extend(std::mem::take(&mut self.messages).into_bytes());
    }

    /// Returns the number of moments that were not kept.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }
}
