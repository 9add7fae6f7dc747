//! Reports modules that the kernel has loaded: for probes of a module that is not there yet.
//!
//! The kernel function `do_init_module` is watched while there is a listener. At its entry the
//! module's text is final: it is relocated, and its alternatives and its tracer's calls are in
//! place. None of it has run. The guest is paused there until the listeners of that name have
//! looked, so probes that are enabled meanwhile see the module's initialisation, too.
//!
//! Sites of a module that goes are evicted by [`guest_text`](super::guest_text).
//!
//! Source: `load_module`, `do_init_module` (kernel/module/main.c).

use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use introspect::kernel::loaded_modules::ModuleSymbols;
use introspect::kernel::module_readers::ModuleReaders;
use introspect::kernel::modules::ModuleState;
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gva, MemoryView, PausedMemory};
use vmm::machine::Paused;

use super::Engine;
use super::hit::{Hit, HitPath};
use super::session::Waiter;
use super::watch::Watch;
use crate::kernel_view::KernelView;

/// A module that was loaded. The guest is paused until this is dropped.
pub struct NewModule {
    /// The module with its symbols. Those of its initialisation are among them.
    pub symbols: ModuleSymbols,
    _held: Option<Arc<Paused>>,
}

impl fmt::Debug for NewModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewModule")
            .field("module", &self.symbols.module)
            .finish_non_exhaustive()
    }
}

/// The listeners for new modules.
#[derive(Default)]
pub(super) struct Waiting {
    listeners: Mutex<Vec<Listener>>,
}

/// A module that is about to be initialised: the address of its `struct module`.
struct Coming {
    address: Gva,
    held: Arc<Paused>,
}

/// The sending side of a [`Listening`].
struct Listener {
    names: Arc<[String]>,
    modules: Sender<Coming>,
    waiter: Arc<Waiter>,
}

pub(super) type ModuleListeners = Arc<Waiting>;

/// One of the listeners, until it is dropped.
struct Listening {
    waiting: ModuleListeners,
    names: Arc<[String]>,
    modules: Receiver<Coming>,
    /// The same as the listener's.
    waiter: Arc<Waiter>,
}

/// A listener for modules of some names. The guest is paused for each until the listener has taken
/// and dropped it. Drop the listener to stop.
pub struct NewModules {
    engine: Engine,
    readers: ModuleReaders,
    listening: Listening,
}

impl fmt::Debug for NewModules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewModules")
            .field("names", &self.listening.names)
            .finish_non_exhaustive()
    }
}

impl Waiting {
    fn listeners(&self) -> MutexGuard<'_, Vec<Listener>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener {
    fn awaits(&self, name: &str) -> bool {
        self.names.iter().any(|awaited| awaited == name)
    }
}

impl Listening {
    fn new(waiting: &ModuleListeners, names: Vec<String>, waiter: Waiter) -> Self {
        let (sender, modules) = channel();
        let (waiter, names) = (Arc::new(waiter), Arc::from(names));
        waiting.listeners().push(Listener {
            names: Arc::clone(&names),
            modules: sender,
            waiter: waiter.clone(),
        });
        Self {
            waiting: waiting.clone(),
            names,
            modules,
            waiter,
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // It must not keep the session's rings until a next module, which may never come.
        let mut listeners = self.waiting.listeners();
        listeners.retain(|listener| !Arc::ptr_eq(&listener.waiter, &self.waiter));
    }
}

impl NewModules {
    /// Listens for modules of these names, for a session whose drainer waits by `waiter`.
    pub(super) fn listen(engine: &Engine, names: Vec<String>, waiter: Waiter) -> Option<Self> {
        let readers = engine.0.view.module_readers()?;
        let listening = Listening::new(&engine.0.module_listeners, names, waiter);
        engine.watch_modules().then(|| Self {
            engine: engine.clone(),
            readers,
            listening,
        })
    }

    /// Returns the next module, if one was loaded. Never waits. A module that cannot be read is
    /// reported in the log and passed over.
    #[must_use]
    pub fn next(&self) -> Option<NewModule> {
        loop {
            let Coming { address, held } = self.listening.modules.try_recv().ok()?;
            let read = self.look(|view| self.readers.module_at(view, address));
            match read {
                Ok(symbols) => {
                    let _held = Some(held);
                    return Some(NewModule { symbols, _held });
                }
                Err(error) => log::warn!("a new module is not traced: {error}"),
            }
        }
    }

    /// Returns the modules of these names that are there already: one may have been loaded since
    /// the kernel was looked at last. The guest is not paused for them.
    #[must_use]
    pub fn present(&self) -> Vec<NewModule> {
        let is_there = |state| matches!(state, ModuleState::Live | ModuleState::Coming);
        let found: Vec<_> = self.look(|view| {
            let listed = self.readers.list(view).items.into_iter();
            let awaited = listed.filter(|module| {
                is_there(module.state) && self.listening.names.contains(&module.name)
            });
            let read = awaited.map(|module| self.readers.module_at(view, module.address));
            read.collect()
        });
        let mut present = Vec::new();
        for symbols in found {
            match symbols {
                Ok(symbols) => present.push(NewModule {
                    symbols,
                    _held: None,
                }),
                Err(error) => log::warn!("a module is not traced: {error}"),
            }
        }
        present
    }

    /// Pauses the guest and has its kernel's memory read.
    fn look<T>(&self, read: impl FnOnce(MemoryView<'_>) -> T) -> T {
        let machine = self.engine.machine();
        let _paused = machine.pause();
        let memory = PausedMemory::new(machine.ram());
        read(memory.view(self.engine.0.view.kernel.space))
    }
}

impl Drop for NewModules {
    fn drop(&mut self) {
        self.engine.end_listening();
    }
}

/// Returns the watches with the functions to put them on.
pub(super) fn watches(
    view: &KernelView,
    listeners: &ModuleListeners,
) -> Vec<(Gva, Arc<dyn Watch>)> {
    let watch = || {
        let watch: Arc<dyn Watch> = Arc::new(ModuleWatch {
            readers: view.module_readers()?,
            space: view.kernel.space,
            waiting: listeners.clone(),
        });
        Some((view.module_start()?, watch))
    };
    watch().into_iter().collect()
}

struct ModuleWatch {
    readers: ModuleReaders,
    space: AddressSpace,
    waiting: ModuleListeners,
}

impl Watch for ModuleWatch {
    fn on_entry(&self, _: &HitPath, hit: &Hit<'_>) -> bool {
        let Some(cpu) = hit.cpu else { return false };
        let [address, ..] = hit.arguments();
        let memory = PausedMemory::brief(hit.memory);
        let name = self.readers.name_at(memory.view(self.space), Gva(address));
        let Ok(name) = name else { return false };
        let mut listeners = self.waiting.listeners();
        if !listeners.iter().any(|listener| listener.awaits(&name)) {
            return false;
        }
        let held = Arc::new(cpu.hold());
        listeners.retain(|listener| {
            if !listener.awaits(&name) {
                return true;
            }
            let coming = Coming {
                address: Gva(address),
                held: held.clone(),
            };
            let sent = listener.modules.send(coming);
            listener.waiter.wake();
            sent.is_ok()
        });
        false
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::doorbell::Doorbell;
    use crate::engine::session::SessionShared;

    #[test]
    fn a_listener_hears_of_its_modules_and_holds_nothing_once_it_has_ended() {
        let shared = Arc::new(SessionShared {
            rings: Vec::new(),
            skipped_ticks: Arc::default(),
            doorbell: Doorbell::new().unwrap(),
        });
        let waiting = ModuleListeners::default();
        let listen = |name: &str| {
            let names = vec!["kvm".to_owned(), name.to_owned()];
            Listening::new(&waiting, names, Waiter::of(&shared))
        };
        let (others, ended) = (listen("brd"), listen("ext4"));
        for (name, expected) in [("kvm", 2), ("brd", 1), ("ext4", 1), ("kvm_amd", 0)] {
            let listeners = waiting.listeners();
            let found = listeners.iter().filter(|listener| listener.awaits(name));
            assert_eq!(found.count(), expected, "{name}");
        }
        let held = Arc::strong_count(&shared);
        drop(ended);
        assert_eq!(Arc::strong_count(&shared), held - 1);
        assert_eq!(waiting.listeners().len(), 1);
        drop(others);
        assert_eq!(Arc::strong_count(&shared), 1);
    }
}
