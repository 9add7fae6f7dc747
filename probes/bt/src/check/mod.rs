//! Checks a script's tree without a guest.
//!
//! The parser reports what the grammar does not allow; this module reports what it allows but
//! cannot be meant. Types are not checked, since only the guest's kernel knows them. The strict
//! dialect is checked when it has been parsed: see `strict`.

mod calls;
pub(crate) mod differences;
mod maps;
mod probes;
pub(crate) mod strict;
mod variables;

use crate::ast::{Block, Expression, ExpressionKind, Script, Span, Statement, StatementKind};
use crate::diagnostic::{Diagnostic, MOST_ERRORS};
use crate::walk;
use std::collections::BTreeSet;

/// Returns the errors of a script of the normal dialect, in no order. There may be more than the
/// [`MOST_ERRORS`] that are reported.
#[must_use]
pub fn check(script: &Script) -> Vec<Diagnostic> {
    let mut errors = Vec::new();
    for rule in &script.rules {
        probes::check(rule, &mut errors);
        if let Some(filter) = &rule.filter {
            calls::check_value(filter, &mut errors);
            blocks_in(filter, false, &mut errors);
        }
        block(&rule.body, false, &mut errors);
        variables::check(rule, &mut errors);
    }
    probes::check_once(script, &mut errors);
    for (_, value) in script.translators.iter().flat_map(|one| &one.members) {
        calls::check_value(value, &mut errors);
    }
    maps::check(script, &mut errors);
    errors
}

/// Calls `each` with every expression of a script that is not part of another one.
fn expressions<'a>(script: &'a Script, each: &mut dyn FnMut(&'a Expression)) {
    for rule in &script.rules {
        walk::of_rule(rule, each);
    }
    for (_, value) in script.translators.iter().flat_map(|one| &one.members) {
        each(value);
    }
}

/// Adds variables that are in `read` but not in `set`; their names begin with `sign`. It adds at
/// most as many as are ever shown, because each is compared with all names.
fn unset<'a>(
    sign: char,
    read: impl Iterator<Item = (&'a str, Span)>,
    set: &BTreeSet<&'a str>,
    errors: &mut Vec<Diagnostic>,
) {
    let mut unset: Vec<(&str, Span)> = read.filter(|(name, _)| !set.contains(name)).collect();
    unset.sort_by_key(|(_, span)| span.start);
    for (name, span) in unset.into_iter().take(MOST_ERRORS) {
        let message = format!("{sign}{name} is read here but set nowhere");
        let mut told = Diagnostic::new(span, message).suggest(name, set.iter().copied());
        for suggestion in &mut told.suggestions {
            suggestion.insert(0, sign);
        }
        errors.push(told);
    }
}

/// Checks the statements of a block of the normal dialect.
fn block(of: &Block, in_loop: bool, errors: &mut Vec<Diagnostic>) {
    for statement in &of.statements {
        let looping = match &statement.kind {
            StatementKind::While { .. }
            | StatementKind::Repeat { .. }
            | StatementKind::ForMap { .. }
            | StatementKind::ForRange { .. } => true,
            StatementKind::Break if !in_loop => {
                errors.push(Diagnostic::new(statement.span, "break outside of a loop"));
                false
            }
            StatementKind::Continue if !in_loop => {
                errors.push(Diagnostic::new(
                    statement.span,
                    "continue outside of a loop",
                ));
                false
            }
            _ => in_loop,
        };
        one(statement, errors);
        walk::expressions(statement, &mut |value| blocks_in(value, looping, errors));
        for inner in walk::blocks(statement).into_iter().flatten() {
            block(inner, looping, errors);
        }
    }
}

/// Checks the statements of the blocks in an expression.
fn blocks_in(of: &Expression, in_loop: bool, errors: &mut Vec<Diagnostic>) {
    walk::below(of, &mut |part| {
        if let ExpressionKind::Block(inner) = &part.kind {
            block(&inner.block, in_loop && !inner.is_function, errors);
        }
    });
}

/// The greatest number of times that `unroll` repeats, as in bpftrace.
const MOST_UNROLLED: i64 = 100;

/// Checks the expressions of a statement.
fn one(statement: &Statement, errors: &mut Vec<Diagnostic>) {
    if let StatementKind::Repeat { times, .. } = &statement.kind
        && let Some(number) = times.as_number()
        && !(1..=MOST_UNROLLED).contains(&number)
    {
        let message =
            format!("unroll {number} times: 1 is the least and {MOST_UNROLLED} the most; take for");
        errors.push(Diagnostic::new(times.span, message));
    }
    let StatementKind::Expression(expression) = &statement.kind else {
        walk::expressions(statement, &mut |value| calls::check_value(value, errors));
        return;
    };
    match &expression.kind {
        ExpressionKind::Call(call) => calls::check_statement(call, expression.span, errors),
        _ if calls::has_effect(expression) => calls::check_effect(expression, errors),
        _ => {
            errors.push(Diagnostic::new(
                expression.span,
                "this does nothing; print it or put it into a variable",
            ));
            calls::check_value(expression, errors);
        }
    }
}
