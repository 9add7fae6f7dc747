//! Checks global variables: each is a number, a map with so many keys, or one function's
//! aggregation, throughout the script.

use super::{expressions, unset};
use crate::ast::{
    Aggregation, Call, Expression, ExpressionKind, Function, Lvalue, LvalueKind, Script, Span,
    Statement, StatementKind,
};
use crate::diagnostic::Diagnostic;
use crate::names;
use crate::walk;
use std::collections::{BTreeMap, BTreeSet};

/// The properties of a global variable known so far.
#[derive(Default)]
struct Known {
    /// The number of keys of its first use.
    keys: Option<usize>,
    /// Its first assignment.
    set: Option<Set>,
}

/// A kind of assignment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Set {
    Value,
    Gathered(Aggregation),
}

/// A use of a global variable in the script.
struct Use<'a> {
    name: &'a str,
    span: Span,
    /// The number of keys; `None` for the whole map, or if one key may be a tuple.
    keys: Option<usize>,
    /// The kind of assignment; `None` if the variable is read.
    set: Option<Set>,
}

/// Adds an error for each use that contradicts an earlier one, and for each variable that is never
/// set.
pub fn check<'a>(script: &'a Script, errors: &mut Vec<Diagnostic>) {
    let mut uses = Vec::new();
    expressions(script, &mut |expression| {
        in_expression(expression, &mut uses);
    });
    for rule in &script.rules {
        walk::statements_of_rule(rule, &mut |statement| {
            in_statement(statement, &mut uses);
        });
    }
    let is_gathered = |name: &str| {
        let mut of_it = uses.iter().filter(|one: &&Use| one.name == name);
        of_it.any(|one| matches!(one.set, Some(Set::Gathered(_))))
    };
    for size in script.map_sizes.iter().filter(|size| size.evicts) {
        if is_gathered(&size.name) {
            let message = format!(
                "@{} aggregates, so no entry of it is dropped for another; write hash()",
                size.name
            );
            errors.push(Diagnostic::new(size.span, message));
        }
    }
    uses.sort_by_key(|one: &Use| one.span.start);
    let mut known: BTreeMap<&str, Known> = BTreeMap::new();
    for one in &uses {
        fit(one, known.entry(one.name).or_default(), errors);
    }
    let is_set = |(name, known): (&&'a str, &Known)| known.set.is_some().then_some(*name);
    let set = known.iter().filter_map(is_set).collect();
    let mut seen = BTreeSet::new();
    let read = uses.iter().filter(|one| seen.insert(one.name));
    unset('@', read.map(|one| (one.name, one.span)), &set, errors);
}

/// Compares a use with the known properties, and updates these.
fn fit(one: &Use, known: &mut Known, errors: &mut Vec<Diagnostic>) {
    let name = one.name;
    match (one.keys, known.keys) {
        (Some(keys), Some(before)) if keys != before => {
            errors.push(Diagnostic::new(
                one.span,
                format!(
                    "@{name} with {}, but with {} before",
                    count(keys),
                    count(before)
                ),
            ));
        }
        (Some(keys), None) => known.keys = Some(keys),
        _ => {}
    }
    match (one.set, known.set) {
        (Some(set), Some(before)) if set != before => {
            let with = |set| match set {
                Set::Value => "a value".to_owned(),
                Set::Gathered(aggregation) => {
                    format!("what {} gathers", names::aggregation_name(aggregation))
                }
            };
            let message = match (set, before) {
                (
                    Set::Gathered(Aggregation::LinearHistogram { .. }),
                    Set::Gathered(Aggregation::LinearHistogram { .. }),
                ) => format!("@{name} is a histogram with other bounds before"),
                (
                    Set::Gathered(Aggregation::TimeSeries(_)),
                    Set::Gathered(Aggregation::TimeSeries(_)),
                ) => format!("@{name} is a time series of another form before"),
                _ => format!(
                    "@{name} is set to {}, but to {} before",
                    with(set),
                    with(before)
                ),
            };
            errors.push(Diagnostic::new(one.span, message));
        }
        (Some(set), None) => known.set = Some(set),
        _ => {}
    }
}

fn count(keys: usize) -> String {
    match keys {
        0 => "no key".to_owned(),
        1 => "1 key".to_owned(),
        _ => format!("{keys} keys"),
    }
}

/// Returns the use of a variable at this place.
fn of_place(place: &Lvalue, set: Option<Set>) -> Option<Use<'_>> {
    let LvalueKind::Global { name, keys } = &place.kind else {
        return None;
    };
    let keys = match keys.as_slice() {
        // A variable may hold a tuple, which stands for all keys.
        [only] if may_be_tuple(only) => None,
        _ => Some(keys.len()),
    };
    Some(Use {
        name,
        span: place.span,
        keys,
        set,
    })
}

fn may_be_tuple(key: &Expression) -> bool {
    matches!(
        key.kind,
        ExpressionKind::Lvalue(_)
            | ExpressionKind::Item { .. }
            | ExpressionKind::Conditional { .. }
    )
}

fn in_statement<'a>(statement: &'a Statement, uses: &mut Vec<Use<'a>>) {
    match &statement.kind {
        StatementKind::Assign { place, .. } => uses.extend(of_place(place, Some(Set::Value))),
        StatementKind::Aggregate {
            place, aggregation, ..
        } => uses.extend(of_place(place, Some(Set::Gathered(*aggregation)))),
        StatementKind::ForMap { map, .. } => uses.push(Use {
            name: map,
            span: statement.span,
            keys: None,
            set: None,
        }),
        _ => {}
    }
}

fn in_expression<'a>(expression: &'a Expression, uses: &mut Vec<Use<'a>>) {
    match &expression.kind {
        ExpressionKind::Lvalue(place) => uses.extend(of_place(place, None)),
        ExpressionKind::Step { place, .. } => uses.extend(of_place(place, Some(Set::Value))),
        ExpressionKind::Call(call) if of_whole_map(call.function) => {
            return in_call(call, uses);
        }
        _ => {}
    }
    walk::children(expression, &mut |child| in_expression(child, uses));
}

/// Checks whether a function's first argument, without keys, is a whole map.
fn of_whole_map(function: Function) -> bool {
    matches!(
        function,
        Function::Print
            | Function::Clear
            | Function::Zero
            | Function::Delete
            | Function::HasKey
            | Function::Len
    )
}

fn in_call<'a>(call: &'a Call, uses: &mut Vec<Use<'a>>) {
    for (number, argument) in call.arguments.iter().enumerate() {
        if number == 0
            && let Some((name, [])) = argument.as_global()
        {
            uses.push(Use {
                name,
                span: argument.span,
                keys: None,
                set: None,
            });
        } else {
            in_expression(argument, uses);
        }
    }
}
