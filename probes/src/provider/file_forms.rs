//! The kinds of probe that a pattern may match in a program or library that nobody has mapped yet.

use super::{uprobe, usdt};
use crate::name::{ProbeName, ProbePattern};
use crate::probe::Probe;

/// Returns a probe for each kind of probe that a pattern may match in a file to come. A part of
/// its name may be a pattern, and its place is unknown: it cannot be enabled.
pub(super) fn forms(pattern: &ProbePattern) -> Vec<Probe> {
    let targets = match usdt::is_meant(pattern) {
        true => vec![usdt::target_to_come()],
        false => uprobe::targets_to_come(pattern),
    };
    let whole = |part: &str| match part {
        "" => "*".to_owned(),
        part => part.to_owned(),
    };
    let (function, name) = (whole(&pattern.function), whole(&pattern.name));
    let forms = targets.into_iter().map(|target| Probe {
        // A file's name in a pattern may be just a part of its path.
        name: ProbeName::new(&pattern.provider, "*", &function, &name),
        signature: None,
        target,
    });
    forms.collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::event::EventKind::{Entry, Point, Return};

    #[test]
    fn a_pattern_has_a_form_for_each_kind_of_probe_that_it_may_match() {
        for (pattern, function, kinds) in [
            ("uprobe:/tmp/y:f:", "f", &[Entry, Return][..]),
            ("uprobe:/tmp/y::return", "*", &[Return]),
            ("uretprobe:/tmp/y:f", "f", &[Return]),
            ("pid1:y:f:entry", "f", &[Entry]),
            ("uprobe:/tmp/y:f+4", "f", &[Point]),
            ("uprobe:/tmp/y:0x1000", "0x1000", &[Entry, Point]),
            ("uprobe:/tmp/y:-:0x10", "-", &[Point]),
            ("uprobe:/tmp/y:-:entry", "-", &[]),
            ("uprobe:/tmp/y:f:retrun", "f", &[]),
            ("usdt:/tmp/y:p:n", "p", &[Point]),
        ] {
            let forms = forms(&ProbePattern::parse(pattern).unwrap());
            let found: Vec<_> = forms.iter().map(Probe::kind).collect();
            assert_eq!(found, kinds, "{pattern}");
            let named = forms.iter().all(|form| form.name.function == function);
            assert!(named, "{pattern}: {forms:?}");
        }
    }
}
