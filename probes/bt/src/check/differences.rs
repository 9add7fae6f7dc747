//! Finds places where a script means something else here than in bpftrace, though it is accepted.
//!
//! They are no errors: `exotrace trace -n` tells them. Differences that show only in a guest are in
//! the language's manual.

use crate::ast::{
    BinaryOperator, Builtin, Expression, ExpressionKind, Function, LvalueKind, Script, Statement,
    StatementKind,
};
use crate::diagnostic::Diagnostic;
use crate::names;
use crate::walk;

/// Returns the places, in order of the text, each with what is different.
#[must_use]
pub fn differences(script: &Script) -> Vec<Diagnostic> {
    let notes = script.notes.iter();
    let mut found: Vec<Diagnostic> = notes
        .map(|(span, message)| Diagnostic::new(*span, message.as_str()))
        .collect();
    for rule in &script.rules {
        if let Some(of) = &rule.filter {
            clock(of, &mut found);
            refused(of, &mut found);
        }
        walk::statements_of_rule(rule, &mut |statement| {
            walk::expressions(statement, &mut |of| refused(of, &mut found));
            match kept(statement) {
                // It is kept for a difference later on.
                Some(ExpressionKind::Builtin(Builtin::Nsecs)) => {}
                _ => walk::expressions(statement, &mut |of| clock(of, &mut found)),
            }
        });
    }
    found.sort_by_key(|note| note.span.start);
    found.dedup();
    found
}

/// Adds the calls of functions that do not exist for a guest. They are errors once a guest is
/// there, but for those in branches that are left out.
fn refused(of: &Expression, found: &mut Vec<Diagnostic>) {
    walk::below(of, &mut |part| {
        let ExpressionKind::Call(call) = &part.kind else {
            return;
        };
        if let Function::Refused(why) = call.function {
            let name = names::signature_of(call.function).map_or("it", |signature| signature.name);
            let message = format!("{name}() is not offered: {why}");
            found.push(Diagnostic::new(call.name_span, message));
        }
    });
}

/// Returns the value that a statement puts into a variable.
fn kept(of: &Statement) -> Option<&ExpressionKind> {
    match &of.kind {
        StatementKind::Assign {
            place,
            operator: None,
            value,
        } => match &place.kind {
            // A key may be a time, too.
            LvalueKind::Global { keys, .. } if keys.iter().any(is_time) => None,
            _ => Some(&value.kind),
        },
        _ => None,
    }
}

fn is_time(of: &Expression) -> bool {
    of.kind == ExpressionKind::Builtin(Builtin::Nsecs)
}

/// Adds the uses of `nsecs` as a time of its own, and not for a difference or as a date.
fn clock(of: &Expression, found: &mut Vec<Diagnostic>) {
    match &of.kind {
        ExpressionKind::Builtin(Builtin::Nsecs) => {
            let message =
                "nsecs counts from 1970 here, and from the start of the system in bpftrace";
            found.push(Diagnostic::new(of.span, message));
        }
        ExpressionKind::Binary(BinaryOperator::Subtract, left, right)
            if is_time(left) || is_time(right) => {}
        ExpressionKind::Call(call) if call.function == Function::Strftime => {}
        _ => walk::children(of, &mut |child| clock(child, found)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ast::Dialect;
    use crate::parse::parse;

    #[test]
    fn what_differs_is_told() {
        let clock = "nsecs counts from 1970 here, and from the start of the system in bpftrace";
        for (script, expected) in [
            (
                "BEGIN { @start[tid] = nsecs; $d = nsecs - @start[tid]; print($d / 2) }",
                None,
            ),
            (
                "BEGIN { printf(\"%s %d\", strftime(\"%T\", nsecs), 1) }",
                None,
            ),
            ("BEGIN { printf(\"%d\", nsecs) }", Some(clock)),
            ("BEGIN { @[nsecs] = 1 }", Some(clock)),
            ("kprobe:f:entry /nsecs > 5/ { }", Some(clock)),
            (
                "config = { perf_rb_pages = 64 } BEGIN { }",
                Some("perf_rb_pages changes nothing here"),
            ),
            ("config = { max_map_keys = 64 } BEGIN { }", None),
            (
                "BEGIN { if (1) { system(\"ls\"); } }",
                Some(
                    "system() is not offered: nothing is run in a guest that is only watched; run the script's output through a program of the host",
                ),
            ),
            (
                "BEGIN /cpid() == 1/ { }",
                Some(
                    "cpid() is not offered: no command is started in a guest that is only watched",
                ),
            ),
        ] {
            let script = parse(script.as_bytes(), Dialect::Normal).unwrap();
            let found = differences(&script);
            let found: Vec<&str> = found.iter().map(|note| &*note.message).collect();
            assert_eq!(found, expected.into_iter().collect::<Vec<_>>());
        }
    }
}
