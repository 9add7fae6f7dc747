//! Checks that OpenBSD's btrace(8) makes of a parsed script, before and while it runs it.

use crate::ast::{Expression, ExpressionKind, ProbeKind, ProbeSpec, Script, StatementKind};
use crate::diagnostic::Diagnostic;
use crate::walk;
use std::collections::BTreeSet;

/// The depth of nested operators, counted from the outermost, at which btrace gives up.
const TOO_DEEP: usize = 5;

/// Adds the errors of a script.
pub fn check(script: &Script, errors: &mut Vec<Diagnostic>) {
    once(script, errors);
    for rule in &script.rules {
        // btrace compares every condition with 0, which is one more operator.
        if let Some(filter) = &rule.filter {
            operators(filter, 1, errors);
        }
        walk::statements(&rule.body, &mut |statement| {
            let around = usize::from(matches!(statement.kind, StatementKind::If { .. }));
            walk::expressions(statement, &mut |value| operators(value, around, errors));
        });
    }
}

/// Checks that each probe, one timer of each kind, `BEGIN` and `END` occur once.
fn once(script: &Script, errors: &mut Vec<Diagnostic>) {
    let mut seen = BTreeSet::new();
    for probe in script.rules.iter().flat_map(|rule| &rule.probes) {
        let name = name(probe);
        // All units of a timer are one probe of the kernel.
        let key = match name.split(':').next() {
            Some(timer @ ("interval" | "profile")) => timer,
            _ => name,
        };
        if !seen.insert(key) {
            errors.push(Diagnostic::strict(
                probe.span,
                format!("Cannot register multiple probes of the same type: '{name}'"),
            ));
        }
    }
}

fn name(probe: &ProbeSpec) -> &str {
    match &probe.kind {
        ProbeKind::Begin => "BEGIN",
        ProbeKind::End => "END",
        ProbeKind::Iteration(iteration) => iteration.name(),
        ProbeKind::Pattern(text) => text,
    }
}

/// Adds an error if operators are nested too deep; `around` of them enclose `of`.
fn operators(of: &Expression, around: usize, errors: &mut Vec<Diagnostic>) {
    let depth = around + usize::from(matches!(of.kind, ExpressionKind::Binary(..)));
    if depth >= TOO_DEEP {
        errors.push(Diagnostic::strict(
            of.span,
            format!("too many operands (>{TOO_DEEP}) in expression"),
        ));
        return;
    }
    walk::children(of, &mut |child| operators(child, depth, errors));
}
