//! Files whose pages the guest's kernel passes on without a copy. All traps in such a file are
//! suspended meanwhile.
//!
//! The caller reports the start and end of each such call, and every trap that is armed in a file.
//! Sites stay armed, but hits are missed meanwhile.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use introspect::{Gpa, Gva};
use vmm::trap::{SiteId, SuspendedUser, TrapTable};

#[derive(Default)]
struct Spliced {
    /// The number of calls in progress.
    calls: usize,
    out: SuspendedUser,
}

/// By the file's `address_space`.
#[derive(Default)]
pub(crate) struct Splices(Mutex<HashMap<Gva, Spliced>>);

impl Splices {
    fn lock(&self) -> MutexGuard<'_, HashMap<Gva, Spliced>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Suspends a file's traps before its pages are passed on. `is_of_file` checks whether a page
    /// of memory belongs to the file. Returns the number of suspended traps. If it, or that of an
    /// earlier call, is not 0, the caller must call [`Self::end`].
    pub(crate) fn begin(
        &self,
        table: &TrapTable,
        mapping: Gva,
        is_of_file: impl FnMut(Gpa) -> bool,
    ) -> usize {
        let mut files = self.lock();
        let file = files.entry(mapping).or_default();
        let out = table.suspend_user(is_of_file);
        let count = out.len();
        file.calls += 1;
        file.out.append(out);
        count
    }

    /// Ends a call that [`Self::begin`] has counted. With the last one the traps are resumed.
    pub(crate) fn end(&self, table: &TrapTable, mapping: Gva) {
        let mut files = self.lock();
        let Some(file) = files.get_mut(&mapping) else {
            return;
        };
        file.calls -= 1;
        if file.calls == 0
            && let Some(file) = files.remove(&mapping)
        {
            table.resume_user(file.out);
        }
    }

    /// Forgets all calls. To be called only when no end will be reported any more and no file has a
    /// trap.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// Suspends a trap that was armed in a file, if the file's pages are being passed on.
    pub(crate) fn take_out(&self, table: &TrapTable, mapping: Gva, site: Option<SiteId>) {
        if let Some(site) = site
            && let Some(file) = self.lock().get_mut(&mapping)
        {
            file.out.append(table.suspend_user_site(site));
        }
    }
}
