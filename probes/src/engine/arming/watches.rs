//! Arms and removes watches, the engine's own probes, as sessions need them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};

use introspect::Gva;
use vmm::trap::ArmError;

use super::super::watch::Watch;
use super::super::{Engine, guest_files, guest_modules, guest_processes, guest_text};
use super::{Armed, KernelSite};
use crate::probe::Moment;

impl Engine {
    /// Arms watches on the functions by which the guest changes its text.
    pub(super) fn watch_text(&self, armed: &mut Armed) {
        let watches = guest_text::watches(&self.0.view);
        let lost = "changes of the guest's text are not all seen";
        armed.text_watches = self.watch_all(armed, watches, lost);
        if self.0.text_locks.are_held(self.0.machine.ram()) {
            let watched = armed.text_watches.iter().map(|spot| spot.address);
            let patched = guest_text::any_patched(watched.collect());
            armed.kept_free = self.0.machine.traps().suspend_chosen(patched);
            self.0.keeps_free.store(true, Ordering::Relaxed);
        }
    }

    /// Resumes the sites that were suspended because the guest was changing its text when the first
    /// probe was enabled, if that change is done. Never waits.
    pub(in crate::engine) fn follow_up(&self) {
        if !self.0.keeps_free.load(Ordering::Relaxed)
            || self.0.text_locks.are_held(self.0.machine.ram())
        {
            return;
        }
        match self.0.armed.try_lock() {
            Ok(mut armed) => self.resume_kept(&mut armed),
            Err(TryLockError::Poisoned(armed)) => self.resume_kept(&mut armed.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// Resumes those sites, even if the change is not done.
    pub(super) fn resume_kept(&self, armed: &mut Armed) {
        let suspended = std::mem::take(&mut armed.kept_free);
        self.0.path.count_suspended(suspended.len());
        self.0
            .machine
            .traps()
            .resume_sites(suspended, None, self.0.view.kernel.space);
        self.0.keeps_free.store(false, Ordering::Relaxed);
    }

    /// Arms watches on mapped files, for as long as there is any probe or listener. Returns whether
    /// the kernel has such a function.
    pub(in crate::engine) fn watch_files(&self) -> bool {
        self.watch_for_listener(|armed| {
            if armed.file_watches.is_empty() {
                let watches = guest_files::watches(&self.0.view, &self.0.file_listeners);
                armed.file_watches = self.watch_all(armed, watches, "new programs are not seen");
            }
            !armed.file_watches.is_empty()
        })
    }

    /// Arms watches on loaded modules, in the same way.
    pub(in crate::engine) fn watch_modules(&self) -> bool {
        self.watch_for_listener(|armed| {
            if armed.module_watches.is_empty() {
                let watches = guest_modules::watches(&self.0.view, &self.0.module_listeners);
                armed.module_watches = self.watch_all(armed, watches, "new modules are not seen");
            }
            !armed.module_watches.is_empty()
        })
    }

    /// Counts one listener more, unless `watch` returns that it has armed no watch.
    fn watch_for_listener(&self, watch: impl FnOnce(&mut Armed) -> bool) -> bool {
        let mut armed = self.armed();
        self.one_more(&mut armed);
        let found = watch(&mut armed);
        if !found {
            self.one_less(&mut armed);
        }
        found
    }

    /// Counts one listener fewer.
    pub(in crate::engine) fn end_listening(&self) {
        let mut armed = self.armed();
        self.one_less(&mut armed);
    }

    /// Arms watches on the start and end of processes, for as long as there is any probe.
    pub(in crate::engine) fn watch_processes(&self) {
        let mut armed = self.armed();
        if !armed.process_watches.is_empty() {
            return;
        }
        let watches = guest_processes::watches(&self.0.view, &self.0.followers);
        let lost = "new processes are not all followed";
        armed.process_watches = self.watch_all(&mut armed, watches, lost);
    }

    /// Arms watches on the kernel's handling of pages of programs' text.
    pub(super) fn watch_pages(&self, armed: &mut Armed) {
        let Some(pages) = &self.0.pages else { return };
        let watches = pages.watches(&self.0.view);
        let lost = "not all changes of the guest to text pages are seen";
        armed.page_watches = self.watch_all(armed, watches, lost);
    }

    /// Arms watches on kernel functions, and returns where. If one cannot be armed, the user is
    /// told what is `lost`.
    fn watch_all(
        &self,
        armed: &mut Armed,
        watches: Vec<(Gva, Arc<dyn Watch>)>,
        lost: &str,
    ) -> Vec<KernelSite> {
        let spots = watches.into_iter().filter_map(|(address, watch)| {
            let spot = self.watch(armed, address, watch);
            spot.inspect_err(|error| log::warn!("{lost}: {error}")).ok()
        });
        spots.collect()
    }

    /// Arms a watch on the kernel function at `address`.
    pub(super) fn watch(
        &self,
        armed: &mut Armed,
        address: Gva,
        watch: Arc<dyn Watch>,
    ) -> Result<KernelSite, ArmError> {
        let spot = self.kernel_spot(address, Moment::Entry);
        self.add_return(address.0, |plan| plan.watches.push(watch.clone()));
        let entered = self.change(armed, spot, |plan| {
            plan.watches.push(watch);
            plan.returns = Some(address.0);
        });
        if entered.is_err() {
            self.unwatch(armed, spot);
        }
        entered.map(|()| spot)
    }

    /// Removes the watches from a kernel function.
    pub(super) fn unwatch(&self, armed: &mut Armed, spot: KernelSite) {
        let function = spot.reported.0;
        let mut on_unwatch = Vec::new();
        self.less_at_return(
            function,
            |plan| on_unwatch = std::mem::take(&mut plan.watches),
            |last| {
                let _ = self.change(armed, spot, |plan| {
                    plan.watches.clear();
                    if last {
                        plan.returns = None;
                    }
                });
            },
        );
        for watch in on_unwatch {
            watch.on_unwatch(self.0.machine.traps());
        }
    }
}
