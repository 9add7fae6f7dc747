//! The probes that the patterns of a script stand for, and the kinds for which rules are compiled.

use std::collections::{HashMap, HashSet};

use probes::name::ProbePattern;
use probes::probe::Probe;
use probes::provider::module;

use super::prepared::{Finder, NotFound};
use crate::ast::{Dialect, MissingProbes, ProbeKind, Rule, Script};
use crate::compile::ProbeKindInfo;
use crate::compile::places::asks_for_number;
use crate::diagnostic::Diagnostic;

/// The probes that match each pattern of a script.
pub(super) type Resolved<'s> = HashMap<&'s str, Found>;

/// The probes of a pattern.
pub(super) struct Found {
    pub(super) probes: Vec<Probe>,
    /// Whether these are the forms of probes of a module that is not loaded, or a file that is not
    /// mapped.
    pub(super) to_come: bool,
}

/// Returns the patterns that name a module of the kernel.
pub(super) fn of_modules(resolved: &Resolved<'_>) -> Vec<ProbePattern> {
    let parsed = resolved.keys().map(|text| ProbePattern::parse(text));
    let named = parsed.flatten().filter(|p| module::named(p).is_some());
    let mut named: Vec<ProbePattern> = named.collect();
    named.sort_by(|one, other| one.text.cmp(&other.text));
    named
}

/// Returns the patterns of files that no process has mapped.
pub(super) fn of_files(resolved: &Resolved<'_>) -> Vec<ProbePattern> {
    let to_come = resolved.iter().filter(|(_, found)| found.to_come);
    let parsed = to_come.map(|(text, _)| ProbePattern::parse(text));
    let named = parsed.flatten().filter(|p| module::named(p).is_none());
    let mut named: Vec<ProbePattern> = named.collect();
    named.sort_by(|one, other| one.text.cmp(&other.text));
    named
}

/// Finds the probes of a script's patterns. Also returns messages about probes that do not exist.
///
/// # Errors
/// Probes that do not exist, where the script needs them: see [`MissingProbes`].
pub(super) fn resolve<'s>(
    script: &'s Script,
    finder: &dyn Finder,
    dialect: Dialect,
) -> Result<(Resolved<'s>, Vec<String>), Vec<Diagnostic>> {
    let mut resolved = Resolved::new();
    let (mut wrong, mut missing, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
    let mut any = false;
    for rule in &script.rules {
        let (mut found, mut none) = (0, Vec::new());
        for spec in &rule.probes {
            let ProbeKind::Pattern(pattern) = &spec.kind else {
                found += 1;
                continue;
            };
            if resolved.contains_key(pattern.as_str()) {
                found += 1;
                continue;
            }
            match find(pattern, finder) {
                Ok(probes) => {
                    resolved.insert(pattern, probes);
                    found += 1;
                }
                Err(not_found) => none.push(Diagnostic {
                    suggestions: not_found.nearest,
                    ..Diagnostic::new(spec.span, not_found.message)
                }),
            }
        }
        any |= found > 0;
        match script.missing_probes {
            MissingProbes::Warn => {
                missing.extend(none.iter().map(|none| none.message.clone()));
                left_out.extend(none);
            }
            MissingProbes::Ignore => left_out.extend(none),
            // The probes of a rule are alternatives: names differ between kernels.
            MissingProbes::Alternatives if found > 0 && dialect == Dialect::Normal => {
                missing.extend(none.into_iter().map(|none| none.message));
            }
            MissingProbes::Alternatives | MissingProbes::Error => wrong.extend(none),
        }
    }
    if !any {
        wrong.extend(left_out);
    }
    match wrong.is_empty() {
        true => Ok((resolved, missing)),
        false => Err(wrong),
    }
}

/// Returns the probes of a pattern, or the forms of those to come.
fn find(pattern: &str, finder: &dyn Finder) -> Result<Found, NotFound> {
    finder
        .find(pattern)
        .map(|probes| Found {
            probes,
            to_come: false,
        })
        .or_else(|none| match finder.to_come(pattern) {
            probes if probes.is_empty() => Err(none),
            probes => Ok(Found {
                probes,
                to_come: true,
            }),
        })
}

/// Returns the kinds of probe for which a rule is compiled.
pub(super) fn kinds_of(rule: &Rule, resolved: &Resolved<'_>) -> Vec<ProbeKindInfo> {
    let mut kinds = Vec::new();
    let mut seen = HashSet::new();
    let with_number = asks_for_number(rule);
    for spec in &rule.probes {
        let found = match &spec.kind {
            ProbeKind::Begin | ProbeKind::End => vec![ProbeKindInfo::default()],
            ProbeKind::Iteration(one) => vec![ProbeKindInfo::of_iteration(*one)],
            ProbeKind::Pattern(pattern) => {
                let found = resolved.get(pattern.as_str()).into_iter();
                let probes = found.flat_map(|found| &found.probes);
                probes
                    .map(|probe| ProbeKindInfo::of(probe, with_number))
                    .collect()
            }
        };
        for kind in found {
            if seen.insert(kind.clone()) {
                kinds.push(kind);
            }
        }
    }
    kinds
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::Gva;
    use probes::name::ProbeName;
    use probes::probe::{Moment, Target};

    use super::*;
    use crate::parse::parse;

    /// A guest with one function.
    struct OneFunction;

    impl Finder for OneFunction {
        fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound> {
            match pattern {
                "kprobe:there" => Ok(vec![Probe {
                    name: ProbeName::new("kprobe", "vmlinux", "there", "entry"),
                    signature: None,
                    target: Target::Kernel {
                        address: Gva(0),
                        moment: Moment::Entry,
                    },
                }]),
                other => Err(NotFound::from(format!("no probe {other}"))),
            }
        }
    }

    #[test]
    fn the_probes_of_a_rule_are_alternatives() {
        for (rules, expected) in [
            (
                "kprobe:there, kprobe:not { }",
                Ok(vec!["no probe kprobe:not"]),
            ),
            ("kprobe:not, kprobe:neither { }", Err(2)),
            ("kprobe:there { } kprobe:not { }", Err(1)),
            (
                "config = { missing_probes = error } kprobe:there, kprobe:not { }",
                Err(1),
            ),
            (
                "config = { missing_probes = warn } kprobe:there { } kprobe:not { }",
                Ok(vec!["no probe kprobe:not"]),
            ),
            (
                "config = { missing_probes = \"ignore\" } BEGIN { } kprobe:not { }",
                Ok(vec![]),
            ),
            (
                "config = { missing_probes = ignore } kprobe:not { }",
                Err(1),
            ),
        ] {
            let script = parse(rules.as_bytes(), Dialect::Normal).unwrap();
            let found = resolve(&script, &OneFunction, Dialect::Normal);
            let found = found
                .map(|(_, missing)| missing)
                .map_err(|wrong| wrong.len());
            let expected =
                expected.map(|of: Vec<&str>| of.into_iter().map(str::to_owned).collect());
            assert_eq!(found, expected, "{rules}");
        }
    }
}
