//! An inspectable guest, as the compiler of scripts sees it.

use introspect::kernel::btf::Btf;
use probes::name::ProbePattern;
use probes::probe::Probe;
use probes::provider::{self, Inspectable, module};

use super::{Finder, NotFound};
use crate::compile::Guest;

/// Most similar names that are suggested for a symbol.
const SUGGESTIONS: usize = 3;

impl Guest for &dyn Inspectable {
    fn types(&self) -> Option<&Btf> {
        self.view().kernel.btf()
    }

    fn symbol(&self, name: &str) -> Option<u64> {
        let view = self.view();
        let of_modules = || view.modules.all_of(name, None).map(|of| of.symbol.address);
        let own = view.kernel.symbols.address_of(name);
        own.or_else(|| of_modules().next())
    }

    fn cgroup(&self, path: &str) -> Result<Option<u64>, String> {
        let mut found = Err(String::new());
        self.inspect(&mut |system| {
            found = match system.cgroup_at(path.as_bytes()) {
                Ok(Ok(id)) => Ok(id),
                Ok(Err(broken)) => Err(broken.to_string()),
                Err(unknown) => Err(unknown.to_string()),
            };
        })?;
        found
    }

    fn nearest_symbols(&self, name: &str) -> Vec<String> {
        let found = self.view().kernel.symbols.nearest_names(name, SUGGESTIONS);
        found.into_iter().map(str::to_owned).collect()
    }
}

impl Finder for &dyn Inspectable {
    fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound> {
        let pattern = ProbePattern::parse(pattern);
        let pattern = pattern.map_err(|error| NotFound::from(error.to_string()))?;
        provider::find(*self, &pattern)
    }

    fn to_come(&self, pattern: &str) -> Vec<Probe> {
        let Ok(pattern) = ProbePattern::parse(pattern) else {
            return Vec::new();
        };
        if module::to_come(self.view(), &pattern).is_some() {
            return module::forms(self.view(), &pattern);
        }
        match self.running() {
            Some(_) => provider::to_come(*self, &pattern),
            // No process starts there.
            None => Vec::new(),
        }
    }
}
