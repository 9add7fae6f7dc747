//! Reports files that are mapped for execution: for probes of a program that does not run yet, or a
//! library that is not loaded.
//!
//! The kernel function `mmap_region` is watched while there is a listener. The guest is paused at
//! its return, before the process can execute anything of the file, until all listeners have
//! looked. So probes that are enabled meanwhile miss nothing.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use introspect::Gva;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use vmm::machine::Paused;

use super::Engine;
use super::calls::Calls;
use super::hit::{Hit, HitPath};
use super::listeners::{Listeners, Listening};
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

/// The listeners for new files, and the files that were reported to all of them.
#[derive(Default)]
pub(super) struct FileListeners {
    listeners: Listeners<(), NewFile>,
    known: Mutex<HashSet<Gva>>,
}

/// A listener for new files. The guest is paused for each file until the listener has taken and
/// dropped it. Drop the listener to stop.
pub struct NewFiles {
    engine: Engine,
    listening: Listening<(), NewFile>,
}

impl fmt::Debug for NewFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewFiles").finish_non_exhaustive()
    }
}

impl FileListeners {
    fn known(&self) -> MutexGuard<'_, HashSet<Gva>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self, waiter: Waiter) -> Listening<(), NewFile> {
        // No file was reported to a new listener yet.
        self.known().clear();
        self.listeners.listen((), waiter)
    }
}

impl NewFiles {
    /// Listens for a session whose drainer waits by `waiter`.
    pub(super) fn listen(engine: &Engine, waiter: Waiter) -> Option<Self> {
        let listening = engine.0.file_listeners.listen(waiter);
        engine.watch_files().then(|| Self {
            engine: engine.clone(),
            listening,
        })
    }

    /// Returns the next file, if one was mapped. Never waits.
    #[must_use]
    pub fn next(&self) -> Option<NewFile> {
        self.listening.next()
    }
}

impl Drop for NewFiles {
    fn drop(&mut self) {
        self.engine.end_listening();
    }
}

/// Returns the watches with the functions to put them on.
pub(super) fn watches(
    view: &KernelView,
    listeners: &Arc<FileListeners>,
) -> Vec<(Gva, Arc<dyn Watch>)> {
    const FUNCTION: &str = "mmap_region";
    let watch = || {
        let btf = view.kernel.btf()?;
        let watch: Arc<dyn Watch> = Arc::new(FileWatch {
            flags: parameter(btf, FUNCTION, "vm_flags")?,
            file_mapping: btf.member("file.f_mapping").ok()?.byte_offset,
            space: view.kernel.space,
            listeners: listeners.clone(),
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
    listeners: Arc<FileListeners>,
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
        let known = self.listeners.known();
        if known.contains(&mapping) {
            return false;
        }
        drop(known);
        self.calls.enter(hit, mapping).is_kept
    }

    fn on_return(&self, _: &HitPath, hit: &Hit<'_>, _: &Returning, from_stack: Gva) {
        let Some(cpu) = hit.cpu else { return };
        let Some(mapping) = self.calls.leave(hit, from_stack) else {
            return;
        };
        if hit.registers.rax >= LOWEST_ERROR {
            return;
        }
        let mut known = self.listeners.known();
        if known.len() >= MOST_FILES {
            known.clear();
        }
        known.insert(mapping);
        drop(known);
        let report = |held| NewFile {
            mapping,
            _held: held,
        };
        let listeners = &self.listeners.listeners;
        listeners.report(|()| true, || cpu.hold(), report);
    }
}
