//! Reports files that are mapped for execution: for probes of a program that does not run yet, or a
//! library that is not loaded.
//!
//! The kernel function `mmap_region` is watched while there is a listener. The guest is paused at
//! its return, before the process can execute anything of the file, until all listeners have
//! looked. So probes that are enabled meanwhile miss nothing.

use std::collections::HashSet;
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use introspect::Gva;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use vmm::machine::Paused;

use super::Engine;
use super::calls::Calls;
use super::hit::{Hit, HitPath};
use super::returns::Returning;
use super::session::Waiter;
use super::watch::Watch;
use crate::kernel_view::{KernelView, parameter};

/// `vm_area_struct.vm_flags` (include/linux/mm.h).
const VM_EXEC: u64 = 4;
/// The lowest result of a failed call: minus 4095.
const LOWEST_ERROR: u64 = 4095u64.wrapping_neg();
/// The number of files that are remembered. If the guest maps more, it is paused for some of them
/// again.
const MOST_FILES: usize = 1 << 14;

/// A file that was mapped. The guest is paused until this is dropped.
pub struct NewFile {
    /// The file's `address_space`.
    pub mapping: Gva,
    _held: Arc<Paused>,
}

impl fmt::Debug for NewFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewFile")
            .field("mapping", &self.mapping)
            .finish_non_exhaustive()
    }
}

/// The listeners for new files.
#[derive(Default)]
pub(super) struct Waiting {
    listeners: Mutex<Vec<Listener>>,
    /// Files that were reported.
    known: Mutex<HashSet<Gva>>,
}

/// The sending side of a [`Listening`].
struct Listener {
    files: Sender<NewFile>,
    waiter: Arc<Waiter>,
}

pub(super) type Listeners = Arc<Waiting>;

/// One of the listeners, until it is dropped.
struct Listening {
    waiting: Listeners,
    files: Receiver<NewFile>,
    /// The same as the listener's.
    waiter: Arc<Waiter>,
}

/// A listener for new files. The guest is paused for each file until the listener has taken and
/// dropped it. Drop the listener to stop.
pub struct NewFiles {
    engine: Engine,
    listening: Listening,
}

impl fmt::Debug for NewFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewFiles").finish_non_exhaustive()
    }
}

impl Waiting {
    fn listeners(&self) -> MutexGuard<'_, Vec<Listener>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, HashSet<Gva>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listening {
    fn new(waiting: &Listeners, waiter: Waiter) -> Self {
        let (sender, files) = channel();
        let waiter = Arc::new(waiter);
        // No file was reported to a new listener yet.
        waiting.known().clear();
        waiting.listeners().push(Listener {
            files: sender,
            waiter: waiter.clone(),
        });
        Self {
            waiting: waiting.clone(),
            files,
            waiter,
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // It must not keep the session's rings until a next file, which may never be mapped.
        let mut listeners = self.waiting.listeners();
        listeners.retain(|listener| !Arc::ptr_eq(&listener.waiter, &self.waiter));
    }
}

impl NewFiles {
    /// Listens for a session whose drainer waits by `waiter`.
    pub(super) fn listen(engine: &Engine, waiter: Waiter) -> Option<Self> {
        let listening = Listening::new(&engine.0.listeners, waiter);
        engine.watch_files().then(|| Self {
            engine: engine.clone(),
            listening,
        })
    }

    /// Returns the next file, if one was mapped. Never waits.
    #[must_use]
    pub fn next(&self) -> Option<NewFile> {
        self.listening.files.try_recv().ok()
    }
}

impl Drop for NewFiles {
    fn drop(&mut self) {
        self.engine.end_listening();
    }
}

/// Returns the watches with the functions to put them on.
pub(super) fn watches(view: &KernelView, listeners: &Listeners) -> Vec<(Gva, Arc<dyn Watch>)> {
    const FUNCTION: &str = "mmap_region";
    let watch = || {
        let btf = view.kernel.btf()?;
        let watch: Arc<dyn Watch> = Arc::new(FileWatch {
            flags: parameter(btf, FUNCTION, "vm_flags")?,
            file_mapping: btf.member("file.f_mapping").ok()?.byte_offset,
            space: view.kernel.space,
            waiting: listeners.clone(),
            calls: Calls::default(),
        });
        Some((Gva(view.kernel.symbols.address_of(FUNCTION)?), watch))
    };
    watch().into_iter().collect()
}

struct FileWatch {
    /// The position of the flags among the arguments; the file is the first.
    flags: usize,
    file_mapping: u64,
    space: AddressSpace,
    waiting: Listeners,
    /// The files of calls in progress.
    calls: Calls<Gva>,
}

impl Watch for FileWatch {
    fn on_entry(&self, _: &HitPath, hit: &Hit<'_>) -> bool {
        let arguments = hit.arguments();
        let [file, ..] = arguments;
        let executable = arguments
            .get(self.flags)
            .is_some_and(|flags| flags & VM_EXEC != 0);
        if file == 0 || !executable {
            return false;
        }
        let place = Gva(file.wrapping_add(self.file_mapping));
        let Ok(mapping) = read_u64(hit.memory, self.space, place).map(Gva) else {
            return false;
        };
        let known = self.waiting.known();
        if known.contains(&mapping) {
            return false;
        }
        drop(known);
        self.calls.enter(hit, mapping).is_ok()
    }

    fn on_return(&self, _: &HitPath, hit: &Hit<'_>, _: &Returning, from_stack: Gva) {
        let Some(cpu) = hit.cpu else { return };
        let Some(mapping) = self.calls.leave(hit, from_stack) else {
            return;
        };
        if hit.registers.rax >= LOWEST_ERROR {
            return;
        }
        let mut known = self.waiting.known();
        if known.len() >= MOST_FILES {
            known.clear();
        }
        known.insert(mapping);
        drop(known);
        let mut listeners = self.waiting.listeners();
        if listeners.is_empty() {
            return;
        }
        let held = Arc::new(cpu.hold());
        listeners.retain(|listener| {
            let _held = held.clone();
            let sent = listener.files.send(NewFile { mapping, _held });
            listener.waiter.wake();
            sent.is_ok()
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::doorbell::Doorbell;
    use crate::engine::session::SessionShared;

    #[test]
    fn a_listener_that_has_ended_holds_nothing_of_its_session() {
        let shared = Arc::new(SessionShared {
            rings: Vec::new(),
            skipped_ticks: Arc::default(),
            doorbell: Doorbell::new().unwrap(),
        });
        let waiting = Listeners::default();
        let others = Listening::new(&waiting, Waiter::of(&shared));
        let ended = Listening::new(&waiting, Waiter::of(&shared));
        let held = Arc::strong_count(&shared);
        drop(ended);
        assert_eq!(Arc::strong_count(&shared), held - 1);
        assert_eq!(waiting.listeners().len(), 1);
        drop(others);
        assert_eq!(Arc::strong_count(&shared), 1);
    }
}
