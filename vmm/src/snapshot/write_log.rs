//! The log of pages that the guest, or the host for it, writes.
//!
//! Dirty pages have two sources. KVM's log has the guest's writes, if the host record says that it
//! works ([`vm::log_written_pages`]). The notes of
//! [`GuestRam::watch_writes`](crate::memory::GuestRam::watch_writes) have the host's own. A machine
//! has one log, which one owner reads.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::machine::shared::Shared;
use crate::memory::PageSet;
use crate::vm::{self, KvmError};

/// A watch of all writes to a machine's memory, the guest's and the host's. Dropping it ends the
/// watch.
pub(crate) struct WriteLog {
    shared: Arc<Shared>,
}

impl WriteLog {
    /// Starts the watch. Returns `None` if the host's KVM does not log writes, or the log has
    /// another owner.
    pub(super) fn start(shared: &Arc<Shared>) -> Option<Self> {
        if !shared.profile.write_log || shared.log_owned.swap(true, Ordering::AcqRel) {
            return None;
        }
        let log = Self {
            shared: shared.clone(),
        };
        if let Err(error) = log.set_kvm(true) {
            log::warn!("the guest's writes are not logged: {error}");
            return None;
        }
        let paused = shared.control.pause();
        shared.ram.watch_writes(true);
        drop(paused);
        Some(log)
    }

    fn set_kvm(&self, log: bool) -> Result<(), KvmError> {
        vm::log_written_pages(self.shared.vm()?, &self.shared.ram, log)
    }

    /// Returns the pages that were written since the last call.
    pub(super) fn take(&self) -> Result<PageSet, KvmError> {
        let mut written = vm::written_pages(self.shared.vm()?, &self.shared.ram)?;
        written.merge(&self.shared.ram.take_written());
        Ok(written)
    }
}

impl Drop for WriteLog {
    fn drop(&mut self) {
        self.shared.ram.watch_writes(false);
        if let Err(error) = self.set_kvm(false) {
            log::warn!("the guest's writes are logged on, which costs time: {error}");
        }
        self.shared.log_owned.store(false, Ordering::Release);
    }
}
