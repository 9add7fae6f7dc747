//! Checks that OpenBSD's btrace(8) makes when it has read a script: before it traces, and at the
//! operators that it comes to. `-n` makes none of them.

use crate::ast::{
    Expression, ExpressionKind, ProbeKind, ProbeSpec, Script, Statement, StatementKind,
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
