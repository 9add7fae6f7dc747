//! Arguments of a script where they must be known before it is compiled: in the names of its probes
//! (`kprobe:$1`), and as bounds of histograms.

use std::borrow::Cow;

use crate::ast::{
    Aggregation, Block, Expression, ExpressionKind, ProbeKind, Rule, Script, Span, Statement,
    StatementKind,
};
use crate::compile::{argument_number, positional};
use crate::diagnostic::Diagnostic;
use crate::parse::{has_argument, linear_histogram, probe_kind};
use crate::walk;

/// Returns the script with its arguments in place of `$1` and so on.
///
/// # Errors
/// A probe or a bound names an argument that was not given, or that makes no sense there.
pub(super) fn placed<'s>(
    script: &'s Script,
    arguments: &[Vec<u8>],
) -> Result<Cow<'s, Script>, Vec<Diagnostic>> {
    let is_named =
        |kind: &ProbeKind| matches!(kind, ProbeKind::Pattern(text) if has_argument(text));
    let waits = |rule: &Rule| {
        let mut waits = rule.probes.iter().any(|spec| is_named(&spec.kind));
        walk::statements_of_rule(rule, &mut |statement| {
            waits |= matches!(&statement.kind, StatementKind::Aggregate { range, .. } if !range.is_empty());
        });
        waits
    };
    if !script.rules.iter().any(waits) {
        return Ok(Cow::Borrowed(script));
    }
    let given: Vec<&[u8]> = positional(script, arguments).collect();
    let mut placed = script.clone();
    let mut wrong = Vec::new();
    for rule in &mut placed.rules {
        for spec in &mut rule.probes {
            if let ProbeKind::Pattern(text) = &spec.kind
                && has_argument(text)
            {
                let kind = replaced(text, &given, spec.span).and_then(|text| {
                    probe_kind(&text).map_err(|message| Diagnostic::new(spec.span, message))
                });
                match kind {
                    Ok(kind) => spec.kind = kind,
                    Err(error) => wrong.push(error),
                }
            }
        }
        bounds(&mut rule.body, &given, &mut wrong);
    }
    match wrong.is_empty() {
        true => Ok(Cow::Owned(placed)),
        false => Err(wrong),
    }
}

/// Sets the bounds of histograms in a block that arguments give.
fn bounds(of: &mut Block, given: &[&[u8]], wrong: &mut Vec<Diagnostic>) {
    for statement in &mut of.statements {
        if let Err(error) = bounds_of(statement, given) {
            wrong.push(error);
        }
        walk::expressions_mut(statement, &mut |value| bounds_within(value, given, wrong));
        for inner in walk::blocks_mut(statement).into_iter().flatten() {
            bounds(inner, given, wrong);
        }
    }
}

/// Sets the bounds of histograms in the blocks of an expression.
fn bounds_within(of: &mut Expression, given: &[&[u8]], wrong: &mut Vec<Diagnostic>) {
    if let ExpressionKind::Block(inner) = &mut of.kind {
        bounds(&mut inner.block, given, wrong);
    }
    walk::children_mut(of, &mut |child| bounds_within(child, given, wrong));
}

fn bounds_of(of: &mut Statement, given: &[&[u8]]) -> Result<(), Diagnostic> {
    let StatementKind::Aggregate {
        aggregation: aggregation @ Aggregation::LinearHistogram { .. },
        range,
        ..
    } = &mut of.kind
    else {
        return Ok(());
    };
    if range.is_empty() {
        return Ok(());
    }
    for bound in range.iter_mut() {
        if let ExpressionKind::Argument(number) = bound.kind {
            let text = number.checked_sub(1).and_then(|at| given.get(at));
            // As everywhere, an argument that is not given is 0.
            let found = text.map_or(Some(0), |text| argument_number(text));
            let number = found.ok_or_else(|| {
                let message = format!("argument {number} of the script is no number");
                Diagnostic::new(bound.span, message)
            })?;
            bound.kind = ExpressionKind::Number(number);
        }
    }
    *aggregation = linear_histogram(range)?;
    range.clear();
    Ok(())
}

/// Returns a pattern with arguments in the place of `$` and a number. Another `$` is part of a
/// name.
fn replaced(text: &str, arguments: &[&[u8]], span: Span) -> Result<String, Diagnostic> {
    let mut parts = text.split('$');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = part.split_at_checked(digits).unwrap_or((part, ""));
        let Some(at) = number.parse::<usize>().ok().and_then(|n| n.checked_sub(1)) else {
            out.push('$');
            out.push_str(part);
            continue;
        };
        let given = arguments.get(at).map(|given| std::str::from_utf8(given));
        let Some(Ok(given)) = given else {
            let message =
                format!("the probe takes argument {number} of the script, which is not given");
            return Err(Diagnostic::new(span, message));
        };
        out.push_str(given);
        out.push_str(rest);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_stand_in_the_place_of_their_numbers() {
        let arguments: [&[u8]; 2] = [b"vfs_read", b"4"];
        for (text, expected) in [
            ("kprobe:$1", Some("kprobe:vfs_read")),
            ("kprobe:$1+$2", Some("kprobe:vfs_read+4")),
            ("uprobe:/bin/x:a$b", Some("uprobe:/bin/x:a$b")),
            ("kprobe:vfs_*", Some("kprobe:vfs_*")),
            ("kprobe:$3", None),
        ] {
            let found = replaced(text, &arguments, Span::default()).ok();
            assert_eq!(found.as_deref(), expected, "{text}");
        }
    }
}
