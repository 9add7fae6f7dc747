//! Checks the probes of a rule: the contents of `BEGIN` and `END` rules, and that these occur once.

use crate::ast::{Builtin, Expression, ExpressionKind, ProbeKind, ProbeSpec, Rule, Script};
use crate::diagnostic::Diagnostic;
use crate::names;
use crate::walk;

/// Adds the errors of a rule's probes.
pub fn check(rule: &Rule, errors: &mut Vec<Diagnostic>) {
    let is_pattern = |probe: &ProbeSpec| matches!(probe.kind, ProbeKind::Pattern(_));
    if rule.probes.iter().all(is_pattern) {
        return;
    }
    let mut tell = |expression: &Expression| {
        walk::below(expression, &mut |part| {
            if let ExpressionKind::Builtin(builtin) = part.kind
                && matches!(
                    builtin,
                    Builtin::Argument(_)
                        | Builtin::Arguments
                        | Builtin::ReturnValue
                        | Builtin::Function
                )
            {
                errors.push(Diagnostic::new(
                    part.span,
                    format!(
                        "the {} builtin cannot be used with BEGIN, END or iter:task probes",
                        names::builtin_name(builtin)
                    ),
                ));
            }
        });
    };
    walk::of_rule(rule, &mut tell);
}

/// Checks that `BEGIN` and `END` occur once.
pub fn check_once(script: &Script, errors: &mut Vec<Diagnostic>) {
    for (kind, name) in [(ProbeKind::Begin, "BEGIN"), (ProbeKind::End, "END")] {
        let probes = script.rules.iter().flat_map(|rule| &rule.probes);
        for again in probes.filter(|probe| probe.kind == kind).skip(1) {
            let message = format!("a second {name}; put its statements into the first one");
            errors.push(Diagnostic::new(again.span, message));
        }
    }
}
