//! Checks calls of functions: the number of arguments, the kind of the first one, and the place of
//! the call.

use crate::ast::{Call, Dialect, Expression, ExpressionKind, Function, Span};
use crate::diagnostic::Diagnostic;
use crate::format::Format;
use crate::names::{self, FirstArgument, Signature};
use crate::walk;

/// Checks an expression whose value is dropped: a call, or a choice or a block of them.
pub fn check_effect(of: &Expression, errors: &mut Vec<Diagnostic>) {
    match &of.kind {
        ExpressionKind::Call(call)
            if names::signature_of(call.function).is_some_and(|known| !known.gives_value) =>
        {
            check_statement(call, of.span, errors);
        }
        ExpressionKind::Conditional {
            condition,
            then: Some(then),
            otherwise,
        } => {
            check_value(condition, errors);
            check_effect(then, errors);
            check_effect(otherwise, errors);
        }
        // Its statements are checked as such.
        ExpressionKind::Block(inner) if !inner.is_function => {
            if let Some(value) = &inner.value {
                check_effect(value, errors);
            }
        }
        _ => check_value(of, errors),
    }
}

/// Checks whether an expression does something, whatever its value.
pub fn has_effect(of: &Expression) -> bool {
    match &of.kind {
        ExpressionKind::Call(call) => {
            names::signature_of(call.function).is_some_and(|known| !known.gives_value)
        }
        ExpressionKind::Step { .. } | ExpressionKind::Block(_) => true,
        ExpressionKind::Conditional {
            then, otherwise, ..
        } => has_effect(otherwise) || then.as_ref().is_some_and(|then| has_effect(then)),
        _ => false,
    }
}

/// Checks an expression whose value is used.
pub fn check_value(of: &Expression, errors: &mut Vec<Diagnostic>) {
    walk::below(of, &mut |part| {
        let ExpressionKind::Call(call) = &part.kind else {
            return;
        };
        let Some(signature) = names::signature_of(call.function) else {
            return;
        };
        // Whether there was such an entry.
        if !signature.gives_value && call.function != Function::Delete {
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
    let Some(signature) = names::signature_of(call.function) else {
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

fn arguments(call: &Call, signature: &Signature, span: Span, errors: &mut Vec<Diagnostic>) {
    let Signature {
        name, usage, first, ..
    } = signature;
    let count = call.arguments.len();
    if !(signature.least..=signature.most).contains(&count) {
        let message = names::wrong_count(name, count, usage);
        return errors.push(Diagnostic::new(span, message));
    }
    let Some(argument) = call.arguments.first() else {
        return;
    };
    let mut wrong = |message: String| errors.push(Diagnostic::new(argument.span, message));
    match (first, &argument.kind) {
        (FirstArgument::Any, _) | (FirstArgument::Text, ExpressionKind::Text(_)) => {}
        // An argument of the script is known, too.
        (FirstArgument::Text, ExpressionKind::Call(given))
            if given.function == Function::Str
                && matches!(
                    given.arguments.as_slice(),
                    [Expression {
                        kind: ExpressionKind::Argument(_),
                        ..
                    }]
                ) => {}
        (FirstArgument::Format, ExpressionKind::Text(text)) => {
            match Format::parse(text, Dialect::Normal).map(|format| format.takes().len()) {
                Ok(wanted) if wanted != count - 1 => wrong(format!(
                    "the format of {name}() shows {wanted} value{}, but {} follow{} it",
                    if wanted == 1 { "" } else { "s" },
                    count - 1,
                    if count == 2 { "s" } else { "" },
                )),
                Ok(_) => {}
                Err(error) => wrong(error.to_string()),
            }
        }
        (FirstArgument::Text | FirstArgument::Format, _) => wrong(format!(
            "the first argument of {name}() must be a string as such: {usage}"
        )),
        (FirstArgument::Map, _) => {
            if !argument.is_whole_global() {
                wrong(format!("{name}() is of a whole map: {usage}"));
            }
        }
        (FirstArgument::Entry, _) => {
            let Some((_, keys)) = argument.as_global() else {
                return wrong(format!("{name}() is of an entry of a map: {usage}"));
            };
            if count == 2 && !keys.is_empty() {
                wrong(format!(
                    "{name}() has keys in brackets and after them; omit one: {usage}"
                ));
            }
        }
    }
    if call.function == Function::Print && count > 1 && !argument.is_whole_global() {
        errors.push(Diagnostic::new(
            span,
            "only a whole map can be printed with a number of entries: print(@map, top, divisor)",
        ));
        return;
    }
    literals(call, signature, errors);
}

/// Adds an error for each argument that must be a literal number or string but is not.
fn literals(call: &Call, signature: &Signature, errors: &mut Vec<Diagnostic>) {
    let (from, text) = match call.function {
        Function::Print | Function::Join | Function::Assert => {
            (1, call.function != Function::Print)
        }
        Function::KernelStack | Function::UserStack => (0, false),
        _ => return,
    };
    let is_mode =
        |argument: &&Expression| from == 0 && matches!(argument.kind, ExpressionKind::Text(_));
    let from = from + usize::from(call.arguments.first().is_some_and(|first| is_mode(&first)));
    for argument in call.arguments.iter().skip(from) {
        let (is_literal, what) = match text {
            true => (matches!(argument.kind, ExpressionKind::Text(_)), "string"),
            false => {
                let is_argument = matches!(argument.kind, ExpressionKind::Argument(_));
                (is_argument || argument.as_number().is_some(), "number")
            }
        };
        if !is_literal {
            let Signature { name, usage, .. } = signature;
            let message = format!("this argument of {name}() must be a {what} as such: {usage}");
            errors.push(Diagnostic::new(argument.span, message));
        }
    }
}
