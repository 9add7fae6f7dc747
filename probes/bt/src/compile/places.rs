//! Finds a script's maps: every `@name` that it writes, reads, or passes to a function.

use std::collections::HashSet;

use crate::ast::{
    Aggregation, Builtin, Expression, ExpressionKind, Function, Lvalue, LvalueKind, Rule, Script,
    Statement, StatementKind,
};
use crate::walk::{below, expressions, of_rule, statements_of_rule};

type Found<'f> = &'f mut dyn FnMut(&str, Option<Aggregation>, bool);

/// Reports each map's name, its aggregation, and whether it has keys. A map with two uses is
/// reported twice.
pub(super) fn declare(script: &Script, found: Found<'_>) {
    for rule in &script.rules {
        if let Some(filter) = &rule.filter {
            read(filter, found);
        }
        statements_of_rule(rule, &mut |statement| {
            written(statement, found);
            expressions(statement, &mut |of| read(of, found));
        });
    }
    for translator in &script.translators {
        for (_, value) in &translator.members {
            read(value, found);
        }
    }
}

/// Returns the names of the options that a script asks for by `getopt()`.
pub(super) fn options(script: &Script) -> HashSet<&[u8]> {
    let mut names = HashSet::new();
    for rule in &script.rules {
        of_rule(rule, &mut |of| {
            below(of, &mut |part| {
                if let ExpressionKind::Call(call) = &part.kind
                    && call.function == Function::Option
                    && let Some(ExpressionKind::Text(name)) =
                        call.arguments.first().map(|of| &of.kind)
                {
                    names.insert(name.as_slice());
                }
            });
        });
    }
    names
}

/// The names by which tracepoints of system calls have the number of the call.
pub(crate) const CALL_NUMBERS: [&str; 3] = ["__syscall_nr", "nr", "id"];

/// Checks whether a rule asks for the number of a system call.
pub(crate) fn asks_for_number(rule: &Rule) -> bool {
    let mut asks = false;
    of_rule(rule, &mut |of| {
        below(of, &mut |part| {
            asks |= matches!(&part.kind, ExpressionKind::Member { of, name, .. }
                if of.kind == ExpressionKind::Builtin(Builtin::Arguments)
                    && CALL_NUMBERS.contains(&name.as_str()));
        });
    });
    asks
}

fn written(statement: &Statement, found: Found<'_>) {
    match &statement.kind {
        StatementKind::Assign { place, .. } => met(place, None, found),
        StatementKind::Aggregate {
            place, aggregation, ..
        } => met(place, Some(*aggregation), found),
        StatementKind::ForMap { map, .. } => found(map, None, true),
        _ => {}
    }
}

fn read(of: &Expression, found: Found<'_>) {
    below(of, &mut |of| match &of.kind {
        ExpressionKind::Lvalue(place) | ExpressionKind::Step { place, .. } => {
            met(place, None, found);
        }
        _ => {}
    });
}

fn met(place: &Lvalue, aggregation: Option<Aggregation>, found: Found<'_>) {
    if let LvalueKind::Global { name, keys } = &place.kind {
        found(name, aggregation, !keys.is_empty());
    }
}
