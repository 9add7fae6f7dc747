//! Files whose pages the guest's kernel hands on as they are, without a copy: all traps in such a file are out of memory meanwhile.
//!
//! The caller tells when that begins and ends, and of every trap that comes to stand in a file. Sites stay armed; what passes them
//! meanwhile is not seen.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use introspect::{Gpa, Gva};
use vmm::trap::{SiteId, SuspendedUser, TrapTable};

#[derive(Default)]
struct Spliced {
    /// Calls under way.
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

    /// A file's pages are about to be handed on. `is_of_file` tells whether a page of memory is one of them. Gives how many traps were
    /// taken out; [`Self::end`] is to be called if that, or what others took out before, is not nothing.
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

    /// A call that [`Self::begin`] was told of is over: with the last one the traps go back.
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

    /// Nobody is told of ends any more, and no trap stands in any file.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// A trap was put into a file.
    pub(crate) fn take_out(&self, table: &TrapTable, mapping: Gva, site: Option<SiteId>) {
        if let Some(site) = site
            && let Some(file) = self.lock().get_mut(&mapping)
        {
            file.out.append(table.suspend_user_site(site));
        }
    }
}
