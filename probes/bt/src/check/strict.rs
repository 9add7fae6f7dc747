//! The strict dialect's rules about a whole script: the checks that OpenBSD's btrace(8) makes
//! before it traces and at the operators that it comes to, and the maps that it prints at the end.
//! `-n` makes none of the checks.

use crate::ast::{
    Expression, ExpressionKind, LvalueKind, ProbeKind, ProbeSpec, Script, Statement, StatementKind,
};
use crate::diagnostic::Diagnostic;
use crate::walk;
use std::collections::BTreeSet;

/// The depth of nested operators, counted from the outermost, at which btrace gives up.
const TOO_DEEP: usize = 5;

/// The message about operators that are nested too deep.
pub(crate) const TOO_MANY_OPERANDS: &str = "too many operands (>5) in expression";

/// Returns an error if a probe, a timer of one kind, `BEGIN` or `END` occurs twice. btrace ends at
/// the first.
pub(crate) fn repeated(script: &Script) -> Option<Diagnostic> {
    let mut seen = BTreeSet::new();
    let mut probes = script.rules.iter().flat_map(|rule| &rule.probes);
    let again = probes.find(|probe| {
        let name = name(probe);
        // All units of a timer are one probe of the kernel.
        !seen.insert(match name.split(':').next() {
            Some(timer @ ("interval" | "profile")) => timer,
            _ => name,
        })
    })?;
    let message = format!(
        "Cannot register multiple probes of the same type: '{}'",
        name(again)
    );
    Some(Diagnostic::unplaced(again.span, message))
}

fn name(probe: &ProbeSpec) -> &str {
    match &probe.kind {
        ProbeKind::Begin => "BEGIN",
        ProbeKind::End => "END",
        ProbeKind::Iteration(iteration) => iteration.name(),
        ProbeKind::Pattern(text) => text,
    }
}

/// Checks whether a predicate has operators that are nested too deep.
pub(crate) fn is_too_deep(predicate: &Expression) -> bool {
    // btrace compares every condition with 0, which is one more operator.
    is_deep(predicate, 1)
}

/// Checks whether a statement has operators that are nested too deep, not those of its blocks.
pub(crate) fn has_too_deep(statement: &Statement) -> bool {
    let around = usize::from(matches!(statement.kind, StatementKind::If { .. }));
    let mut is = false;
    walk::expressions(statement, &mut |value| is |= is_deep(value, around));
    is
}

/// Checks whether operators are nested too deep; `around` of them enclose `of`.
fn is_deep(of: &Expression, around: usize) -> bool {
    let depth = around + usize::from(matches!(of.kind, ExpressionKind::Binary(..)));
    let mut is = depth >= TOO_DEEP;
    if !is {
        walk::children(of, &mut |child| is |= is_deep(child, depth));
    }
    is
}

/// Returns the names of the maps that bt(5) prints at the end, in that order. They are assigned to
/// in the outermost statements of rules, or are arguments there with a key.
pub(crate) fn printed(script: &Script) -> Vec<&str> {
    let mut names = Vec::new();
    for statement in script.rules.iter().flat_map(|rule| &rule.body.statements) {
        let values = match &statement.kind {
            StatementKind::Assign { place, value, .. } => match &place.kind {
                LvalueKind::Global { name, keys } if !keys.is_empty() => {
                    names.push(name.as_str());
                    &[]
                }
                _ => std::slice::from_ref(value),
            },
            StatementKind::Aggregate { place, .. } => {
                if let LvalueKind::Global { name, .. } = &place.kind {
                    names.push(name.as_str());
                }
                &[]
            }
            StatementKind::Expression(of) => match &of.kind {
                ExpressionKind::Call(call) => call.arguments.as_slice(),
                _ => &[],
            },
            _ => &[],
        };
        let entries = values.iter().filter_map(Expression::as_global);
        names.extend(
            entries
                .filter(|(_, keys)| !keys.is_empty())
                .map(|(name, _)| name),
        );
    }
    names
}
