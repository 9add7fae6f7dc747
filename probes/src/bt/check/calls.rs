//! Calls of functions: how many arguments they have, what the first one is, and whether they stand where they can.

use super::super::ast::{Call, Expression, ExpressionKind, Function, PlaceKind, Span};
use super::super::diagnostic::Diagnostic;
use super::super::names::{self, FirstArgument, Signature};
use super::super::walk;
use super::format;

/// Checks an expression whose value is used.
pub fn check_value(of: &Expression, errors: &mut Vec<Diagnostic>) {
    walk::below(of, &mut |part| {
        let ExpressionKind::Call(call) = &part.kind else {
            return;
        };
        let Some(signature) = of_call(call) else {
            return;
        };
        if !signature.gives_value {
            errors.push(Diagnostic::new(
                call.name_span,
                format!("{}() is a statement and has no value", signature.name),
            ));
        }
        arguments(call, signature, part.span, errors);
    });
}

/// Checks a call that is a statement.
pub fn check_statement(call: &Call, span: Span, errors: &mut Vec<Diagnostic>) {
    let Some(signature) = of_call(call) else {
        return;
    };
    if signature.gives_value {
        errors.push(Diagnostic::new(
            span,
            format!(
                "the value of {}() is not used; print it or put it into a variable",
                signature.name
            ),
        ));
    }
    arguments(call, signature, span, errors);
    for argument in &call.arguments {
        check_value(argument, errors);
    }
}

/// The first one with that function: the others differ by name alone.
fn of_call(call: &Call) -> Option<&'static Signature> {
    names::FUNCTIONS
        .iter()
        .find(|signature| signature.function == call.function)
}

fn arguments(call: &Call, signature: &Signature, span: Span, errors: &mut Vec<Diagnostic>) {
    let Signature {
        name, usage, first, ..
    } = signature;
    let count = call.arguments.len();
    if !(signature.least..=signature.most).contains(&count) {
        let s = if count == 1 { "" } else { "s" };
        errors.push(Diagnostic::new(
            span,
            format!("{name}() with {count} argument{s}; it is written {usage}"),
        ));
        return;
    }
    let Some(argument) = call.arguments.first() else {
        return;
    };
    let mut wrong = |message: String| errors.push(Diagnostic::new(argument.span, message));
    match first {
        FirstArgument::Any => {}
        FirstArgument::Text => {
            if !matches!(argument.kind, ExpressionKind::Text(_)) {
                wrong(format!(
                    "the first argument of {name}() must be a string as such: {usage}"
                ));
            }
        }
        FirstArgument::Format => match &argument.kind {
            ExpressionKind::Text(text) => match format::conversions(text) {
                Ok(wanted) if wanted != count - 1 => wrong(format!(
                    "the format of {name}() shows {wanted} value{}, but {} follow{} it",
                    if wanted == 1 { "" } else { "s" },
                    count - 1,
                    if count == 2 { "s" } else { "" },
                )),
                Ok(_) => {}
                Err(message) => wrong(message),
            },
            _ => wrong(format!(
                "the first argument of {name}() must be a string as such: {usage}"
            )),
        },
        FirstArgument::Map => {
            if keys_of_map(argument) != Some(0) {
                wrong(format!("{name}() is of a whole map: {usage}"));
            }
        }
        FirstArgument::Entry => {
            let Some(keys) = keys_of_map(argument) else {
                return wrong(format!("{name}() is of an entry of a map: {usage}"));
            };
            if count == 2 && keys > 0 {
                wrong(format!(
                    "{name}() has keys in brackets and behind them; leave one out: {usage}"
                ));
            }
        }
    }
    if call.function == Function::Print && count > 1 && keys_of_map(argument) != Some(0) {
        errors.push(Diagnostic::new(
            span,
            "only a whole map can be printed with a number of entries: print(@map, top, divisor)",
        ));
    }
}

/// How many keys a global variable is written with; None if it is something else.
fn keys_of_map(expression: &Expression) -> Option<usize> {
    let ExpressionKind::Place(place) = &expression.kind else {
        return None;
    };
    match &place.kind {
        PlaceKind::Global { keys, .. } => Some(keys.len()),
        PlaceKind::Local(_) => None,
    }
}
