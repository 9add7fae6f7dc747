//! The guest that a command is about, if exotrace does not run it: read here, in the command's own
//! process. A guest of QEMU is paused meanwhile.

use std::path::PathBuf;
use std::time::Duration;

use super::remote::find;
use crate::args::GuestSelector;
use crate::protocol::error::{ErrorKind, RequestError};
use crate::qemu::QemuGuest;
use crate::report::{Failure, say};
use crate::saved_guest::SavedGuest;

/// A guest that was read.
pub(super) struct Read {
    /// Its file, folder or monitor.
    pub(super) path: PathBuf,
    /// How long it was paused; `None` if it did not run.
    pub(super) paused: Option<Duration>,
}

impl Read {
    /// Reports the pause to the user.
    pub(super) fn tell(&self) {
        if let Some(paused) = self.paused {
            let (path, paused) = (self.path.display(), paused.as_micros());
            say(format_args!("{path}: the guest was paused for {paused} us"));
        }
    }
}

/// Checks whether the selected guest is there: a machine runs, or another guest is named.
pub(super) fn is_there(selector: &GuestSelector) -> bool {
    let is_named = selector.qemu.is_some() || selector.core.is_some();
    is_named || find(selector.which.clone()).is_ok()
}

/// Reads the selected guest with `ask`; returns `None` if the selection is a machine.
///
/// # Errors
/// If the guest cannot be read, or what `ask` returns.
pub(super) fn read<T>(
    selector: &GuestSelector,
    ask: impl FnOnce(&SavedGuest) -> Result<T, RequestError>,
) -> Result<Option<(Read, T)>, Failure> {
    let kernel = selector.kernel.as_deref();
    let (path, answer, paused) = match (&selector.qemu, &selector.core) {
        (Some(path), _) => {
            let mut paused = QemuGuest::pause(path)?;
            let saved = SavedGuest::of_qemu(path, paused.read()?, kernel)?;
            let answer = ask(&saved);
            (path, answer, paused.resume()?)
        }
        (None, Some(path)) => (path, ask(&SavedGuest::open(path, kernel)?), None),
        (None, None) => return Ok(None),
    };
    let advice = |error: &RequestError| match (error.kind, kernel) {
        (ErrorKind::Unreadable, None) => "; the kernel's file may have more: --kernel FILE",
        _ => "",
    };
    let named = |error| {
        let advice = advice(&error);
        Failure::new(format_args!("{}: {error}{advice}", path.display()))
    };
    let read = Read {
        path: path.clone(),
        paused,
    };
    Ok(Some((read, answer.map_err(named)?)))
}
