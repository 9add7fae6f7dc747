//! A session's probes of kernel modules that are named: enabled when a module comes, gone when it
//! goes, and enabled again under their old numbers when it comes back.
//!
//! The owner of the session calls [`ModuleProbes::take_up`] when it is woken. The guest is held
//! meanwhile, before the module's initialisation runs.

use std::collections::HashMap;
use std::fmt;

use introspect::kernel::loaded_modules::ModuleSymbols;

use crate::engine::{EnableError, NewModule, NewModules, Session};
use crate::name::{ProbeName, ProbePattern};
use crate::probe::{Probe, Target};
use crate::provider::module;

/// The most probes that are enabled for modules of one session. A guest decides how many functions
/// a module has, and can load others of the same name.
const MOST_PROBES: usize = 1 << 16;
/// The most failures that are put in the log for one session.
const MOST_TOLD: usize = 16;

/// Enables a probe in the session, and returns its number. Returns `None` for a probe that is not
/// wanted.
pub type Enable<'e> = dyn FnMut(&mut Session, Probe) -> Result<Option<u32>, EnableError> + 'e;

/// Probes of a session by the names of their modules.
pub struct ModuleProbes {
    patterns: Vec<ProbePattern>,
    listener: NewModules,
    numbers: Numbers,
    told: usize,
}

impl fmt::Debug for ModuleProbes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModuleProbes")
            .field("patterns", &self.patterns)
            .finish_non_exhaustive()
    }
}

/// The numbers of enabled probes by their names. Functions of one module may share a name: each
/// probe of it has a number of its own.
#[derive(Debug, Default)]
struct Numbers {
    of_name: HashMap<ProbeName, Vec<u32>>,
    count: usize,
}

impl Numbers {
    fn add(&mut self, name: &ProbeName, number: u32) {
        self.of_name.entry(name.clone()).or_default().push(number);
        self.count += 1;
    }

    /// Returns the number of the probe that is the `nth` of its name.
    fn of(&self, name: &ProbeName, nth: usize) -> Option<u32> {
        self.of_name.get(name)?.get(nth).copied()
    }

    fn has_module(&self, module: &str) -> bool {
        self.of_name.keys().any(|name| name.module == module)
    }
}

impl ModuleProbes {
    /// Follows the modules that these patterns name. `enabled` are probes of such modules that the
    /// session has already, with their numbers. Returns `None` if no pattern names a module, or the
    /// kernel cannot be watched.
    #[must_use]
    pub fn follow<'p>(
        session: &Session,
        patterns: Vec<ProbePattern>,
        enabled: impl IntoIterator<Item = (&'p Probe, u32)>,
    ) -> Option<Self> {
        let mut names: Vec<String> = Vec::new();
        for name in patterns.iter().filter_map(module::named) {
            if !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
        if names.is_empty() {
            return None;
        }
        let mut numbers = Numbers::default();
        for (probe, number) in enabled {
            if names.contains(&probe.name.module) {
                numbers.add(&probe.name, number);
            }
        }
        Some(Self {
            listener: session.new_modules(names)?,
            patterns,
            numbers,
            told: 0,
        })
    }

    /// Enables the probes of modules that are loaded and have none yet: they may have come while
    /// the session was being made. `enable` is that of [`take_up`](Self::take_up).
    pub fn take_up_present(&mut self, session: &mut Session, enable: &mut Enable<'_>) {
        for module in self.listener.present() {
            if !self.numbers.has_module(&module.symbols.module.name) {
                self.place(session, &module.symbols, enable);
            }
        }
    }

    /// Enables the probes of the modules that were loaded since the last call; `enable` is called
    /// for each new one. A probe that cannot be enabled is reported in the log.
    pub fn take_up(&mut self, session: &mut Session, enable: &mut Enable<'_>) {
        // The guest is held until the module is dropped.
        while let Some(NewModule { symbols, .. }) = &self.listener.next() {
            self.place(session, symbols, enable);
        }
    }

    fn place(&mut self, session: &mut Session, symbols: &ModuleSymbols, enable: &mut Enable<'_>) {
        let engine = session.engine().clone();
        let (view, machine) = (engine.view(), engine.machine());
        let name = &symbols.module.name;
        let mut seen: HashMap<ProbeName, Vec<Target>> = HashMap::new();
        for pattern in self.patterns.clone() {
            if module::named(&pattern) != Some(name) {
                continue;
            }
            let probes = module::probes(view, machine, symbols, &pattern);
            if probes.is_empty() {
                self.tell(&format!("{pattern}: the module {name} has no such probe"));
            }
            for probe in probes {
                let same = seen.entry(probe.name.clone()).or_default();
                // Of several patterns.
                if same.contains(&probe.target) {
                    continue;
                }
                let known = self.numbers.of(&probe.name, same.len());
                same.push(probe.target.clone());
                let placed = match known {
                    Some(number) => session.move_to(number, &probe),
                    None => self.enable(session, probe, enable),
                };
                if let Err(error) = placed {
                    self.tell(&error.to_string());
                }
            }
        }
    }

    fn enable(
        &mut self,
        session: &mut Session,
        probe: Probe,
        enable: &mut Enable<'_>,
    ) -> Result<(), EnableError> {
        if self.numbers.count >= MOST_PROBES {
            return Ok(());
        }
        let name = probe.name.clone();
        if let Some(number) = enable(session, probe)? {
            self.numbers.add(&name, number);
        }
        Ok(())
    }

    /// Puts a failure in the log. A guest that loads a module again and again does not fill it.
    fn tell(&mut self, why: &str) {
        self.told += 1;
        if self.told <= MOST_TOLD {
            log::warn!("{why}");
        }
    }

    /// Returns the patterns whose module has not come yet.
    pub fn waiting(&self) -> impl Iterator<Item = &ProbePattern> {
        let has_come = |pattern: &ProbePattern| self.numbers.has_module(&pattern.module);
        let named = self.patterns.iter().filter(|p| module::named(p).is_some());
        named.filter(move |pattern| !has_come(pattern))
    }
}
