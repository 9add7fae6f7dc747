//! The code for probes of kernel modules that are not loaded yet, and of programs and libraries
//! that no process has mapped yet.
//!
//! It is compiled before the module or file is known, for each kind of probe that a pattern may
//! match there. When it has come, its probes get the code of the kinds that they are of.

use std::sync::Arc;

use probes::engine::Filter;
use probes::name::{ProbePattern, matches_part};
use probes::probe::Probe;

use crate::program::Code;

/// The code that runs at probes of one kind, of a module or file to come.
pub(super) struct ToCome {
    /// The pattern's text.
    pub(super) pattern: String,
    /// The kind. A part of its name may be a pattern.
    pub(super) form: Probe,
    pub(super) code: Arc<Code>,
    /// Whether the pattern names it as bpftrace does.
    pub(super) is_foreign: bool,
    /// The filter for its hits.
    pub(super) filter: Filter,
}

/// The rules for a probe that has come.
#[derive(Default)]
pub(super) struct Rules {
    /// Each rule's code once, in the script's order.
    pub(super) codes: Vec<Arc<Code>>,
    /// Whether a pattern names the probe as bpftrace does.
    pub(super) is_foreign: bool,
    pub(super) filter: Filter,
}

impl ToCome {
    /// Checks whether the code is for this probe of a module.
    fn fits(&self, probe: &Probe) -> bool {
        let (form, name) = (&self.form.name, &probe.name);
        self.form.kind() == probe.kind()
            && form.provider == name.provider
            && form.module == name.module
            && matches_part(&form.function, &name.function)
            && matches_part(&form.name, &name.name)
    }

    /// Checks whether the code is for this probe of a file, which these patterns match.
    fn is_of(&self, patterns: &[&ProbePattern], probe: &Probe) -> bool {
        self.form.kind() == probe.kind() && patterns.iter().any(|of| of.text == self.pattern)
    }
}

/// Returns the rules for a probe of a module that has come.
pub(super) fn of_module(to_come: &[ToCome], probe: &Probe) -> Rules {
    rules(to_come.iter().filter(|wanted| wanted.fits(probe)))
}

/// Returns the rules for a probe of a file that has come, which these patterns match.
pub(super) fn of_file(to_come: &[ToCome], patterns: &[&ProbePattern], probe: &Probe) -> Rules {
    rules((to_come.iter()).filter(|wanted| wanted.is_of(patterns, probe)))
}

fn rules<'c>(wanted: impl Iterator<Item = &'c ToCome>) -> Rules {
    let mut rules = Rules::default();
    for wanted in wanted {
        rules.is_foreign |= wanted.is_foreign;
        if !(rules.codes.iter()).any(|known| Arc::ptr_eq(known, &wanted.code)) {
            rules.codes.push(wanted.code.clone());
        }
        rules.filter = wanted.filter.clone();
    }
    rules
}
