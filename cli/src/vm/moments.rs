//! The moments of a VM that are kept as snapshots.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm::snapshot::{HistoryError, Kept, Source};

use super::Vm;
use crate::history::{self, KeepError, Moment};

impl Vm {
    /// Begins the history of the machine, unless there is one.
    ///
    /// # Errors
    /// As [`Keeper::begin`](crate::history::Keeper::begin).
    pub(crate) fn begin_history(self: &Arc<Self>) -> Result<(), KeepError> {
        let weak = Arc::downgrade(self);
        let follow = move || {
            let vm = weak.upgrade().filter(|vm| !vm.has_ended());
            vm.is_some_and(|vm| vm.with_source(|source| vm.keeper.follow(source)))
        };
        self.with_source(|source| self.keeper.begin(source, Box::new(follow)))
    }

    /// Keeps the machine as it is, which its caller has paused if it is a certain moment. It is
    /// written to the folder for snapshots while the guest runs on.
    ///
    /// # Errors
    /// If there is no such folder, or the machine cannot be saved.
    pub(crate) fn keep(&self, name: &str) -> Result<Moment, KeepError> {
        self.with_source(|source| self.keeper.keep(source, name))
    }

    /// Keeps the machine as it was `ago` before `from`, in the same way.
    ///
    /// # Errors
    /// If there is no folder for snapshots, or no history.
    pub(crate) fn keep_before(
        &self,
        name: &str,
        from: Instant,
        ago: Duration,
    ) -> Result<Moment, KeepError> {
        self.keeper.rewind(name, from, ago)
    }

    /// Returns the machine as it is, to be written by the caller. `None` if it has no history.
    ///
    /// # Errors
    /// If the machine cannot be read.
    pub(crate) fn present(&self) -> Result<Option<Kept>, HistoryError> {
        self.with_source(|source| self.keeper.present(source))
    }

    /// Saves the VM as it was `ago` to a new folder: the newest checkpoint that is so old, else the
    /// oldest one. The guest runs on.
    ///
    /// # Errors
    /// If it has no history ([`VmBuilder::history`](crate::VmBuilder::history)), or the folder
    /// exists or cannot be written.
    pub fn rewind(&self, folder: &Path, ago: Duration) -> Result<(), KeepError> {
        history::write(&self.keeper.past(ago)?, folder)
    }

    fn with_source<R>(&self, with: impl FnOnce(Source<'_>) -> R) -> R {
        with(Source {
            kvm: &self.host.kvm,
            machine: &self.machine,
            info: &self.snapshot_info(),
        })
    }
}
