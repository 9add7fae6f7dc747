//! What can be said about a script's tree without a guest.
//!
//! The parser says what is no sentence of the language; this, what is one but cannot be meant. Nothing is said about types, which
//! only the guest's kernel knows. Of the strict dialect OpenBSD says little before it runs a script: see `strict`.

mod calls;
mod maps;
mod probes;
mod strict;
mod variables;

use super::ast::{Block, Dialect, Expression, ExpressionKind, Script, Statement, StatementKind};
use super::diagnostic::Diagnostic;
use super::walk;

/// What is wrong with `script`, in no order.
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
        rule.filter.iter().for_each(&mut *each);
        walk::statements(&rule.body, &mut |statement| {
            walk::expressions(statement, each);
        });
    }
    for (_, value) in script.translators.iter().flat_map(|one| &one.members) {
        each(value);
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
