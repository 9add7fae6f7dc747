//! The code for probes of kernel modules that are not loaded yet.
//!
//! It is compiled before the module is known, for each kind of probe that a pattern may match
//! there. When the module has come, its probes get the code of the kinds that they are of.

use std::sync::Arc;

use probes::name::matches_part;
use probes::probe::Probe;

use crate::program::Code;

/// The code that runs at probes of one kind, of a module to come.
pub(super) struct ToCome {
    /// The kind. A part of its name may be a pattern.
    pub(super) form: Probe,
    pub(super) code: Arc<Code>,
    /// Whether the pattern names it as bpftrace does.
    pub(super) is_foreign: bool,
}

impl ToCome {
    /// Checks whether the code is for this probe.
    fn fits(&self, probe: &Probe) -> bool {
        let (form, name) = (&self.form.name, &probe.name);
        self.form.kind() == probe.kind()
            && form.provider == name.provider
            && form.module == name.module
            && matches_part(&form.function, &name.function)
            && matches_part(&form.name, &name.name)
    }
}

/// Returns the code for a probe of a module that has come: each rule's once, in their order. Also
/// returns whether a pattern names it as bpftrace does.
pub(super) fn codes_for<'c>(
    to_come: impl Iterator<Item = &'c ToCome>,
    probe: &Probe,
) -> (Vec<Arc<Code>>, bool) {
    let mut codes: Vec<Arc<Code>> = Vec::new();
    let mut is_foreign = false;
    for wanted in to_come.filter(|wanted| wanted.fits(probe)) {
        is_foreign |= wanted.is_foreign;
        if !codes.iter().any(|known| Arc::ptr_eq(known, &wanted.code)) {
            codes.push(wanted.code.clone());
        }
    }
    (codes, is_foreign)
}
