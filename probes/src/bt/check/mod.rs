//! What can be said about a script's tree without a guest.
//!
//! The parser says what is no sentence of the language; this, what is one but cannot be meant. Nothing is said about types, which
//! only the guest's kernel knows. Of the strict dialect OpenBSD says little before it runs a script: see `strict`.

mod calls;
mod maps;
mod probes;
mod strict;
mod variables;

use super::ast::{
    Block, Dialect, Expression, ExpressionKind, Script, Span, Statement, StatementKind,
};
use super::diagnostic::{Diagnostic, MOST_ERRORS};
use super::walk;
use std::collections::BTreeSet;

/// What is wrong with `script`, in no order. It may be more than the [`MOST_ERRORS`] that are told.
#[must_use]
pub fn check(script: &Script, dialect: Dialect) -> Vec<Diagnostic> {
    let mut errors = Vec::new();
    match dialect {
        Dialect::Strict => strict::check(script, &mut errors),
        Dialect::Normal => {
            for rule in &script.rules {
                probes::check(rule, &mut errors);
                if let Some(filter) = &rule.filter {
                    calls::check_value(filter, &mut errors);
                }
                block(&rule.body, false, &mut errors);
                variables::check(rule, &mut errors);
            }
            probes::check_once(script, &mut errors);
            for (_, value) in script.translators.iter().flat_map(|one| &one.members) {
                calls::check_value(value, &mut errors);
            }
            maps::check(script, &mut errors);
        }
    }
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

/// Adds variables that are `read` but not among those that are `set`, whose names begin with `sign`. As many as are ever shown: each is
/// compared with all names.
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

/// The statements of a block of the normal dialect.
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
        for inner in walk::blocks(statement).into_iter().flatten() {
            block(inner, looping, errors);
        }
    }
}

/// The expressions of a statement.
fn one(statement: &Statement, errors: &mut Vec<Diagnostic>) {
    let StatementKind::Expression(expression) = &statement.kind else {
        walk::expressions(statement, &mut |value| calls::check_value(value, errors));
        return;
    };
    match &expression.kind {
        ExpressionKind::Call(call) => calls::check_statement(call, expression.span, errors),
        ExpressionKind::Step { .. } => calls::check_value(expression, errors),
        _ => {
            errors.push(Diagnostic::new(
                expression.span,
                "this does nothing; print it or put it into a variable",
            ));
            calls::check_value(expression, errors);
        }
    }
}
