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
use std::sync::Arc;

use introspect::kernel::loaded_modules::ModuleSymbols;
use introspect::kernel::module_readers::ModuleReaders;
use introspect::kernel::modules::ModuleState;
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gva, MemoryView, PausedMemory};
use vmm::machine::Paused;

use super::Engine;
use super::hit::{Hit, HitPath};
use super::listeners::{Listeners, Listening};
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

/// The listeners for new modules, each with the names that it waits for.
pub(super) type ModuleListeners = Listeners<Arc<[String]>, Coming>;

/// A module that is about to be initialised: the address of its `struct module`.
pub(super) struct Coming {
    address: Gva,
    held: Arc<Paused>,
}

/// A listener for modules of some names. The guest is paused for each until the listener has taken
/// and dropped it. Drop the listener to stop.
pub struct NewModules {
    engine: Engine,
    readers: ModuleReaders,
    names: Arc<[String]>,
    listening: Listening<Arc<[String]>, Coming>,
}

impl fmt::Debug for NewModules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewModules")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl NewModules {
    /// Listens for modules of these names, for a session whose drainer waits by `waiter`.
    pub(super) fn listen(engine: &Engine, names: Vec<String>, waiter: Waiter) -> Option<Self> {
        let readers = engine.0.view.module_readers()?;
        let names: Arc<[String]> = names.into();
        let listening = engine.0.module_listeners.listen(names.clone(), waiter);
        engine.watch_modules().then(|| Self {
            engine: engine.clone(),
            readers,
            names,
            listening,
        })
    }

    /// Returns the next module, if one was loaded. Never waits. A module that cannot be read is
    /// reported in the log and passed over.
    #[must_use]
    pub fn next(&self) -> Option<NewModule> {
        loop {
            let Coming { address, held } = self.listening.next()?;
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
            let awaited =
                listed.filter(|module| is_there(module.state) && self.names.contains(&module.name));
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
            listeners: listeners.clone(),
        });
        Some((view.module_start()?, watch))
    };
    watch().into_iter().collect()
}

struct ModuleWatch {
    readers: ModuleReaders,
    space: AddressSpace,
    listeners: ModuleListeners,
}

impl Watch for ModuleWatch {
    fn on_entry(&self, _: &HitPath, hit: &Hit<'_>) -> bool {
        let Some(cpu) = hit.cpu else { return false };
        let [address, ..] = hit.arguments();
        let memory = PausedMemory::brief(hit.memory);
        let name = self.readers.name_at(memory.view(self.space), Gva(address));
        let Ok(name) = name else { return false };
        let report = |held| Coming {
            address: Gva(address),
            held,
        };
        self.listeners
            .report(|names| names.contains(&name), || cpu.hold(), report);
        false
    }
}
