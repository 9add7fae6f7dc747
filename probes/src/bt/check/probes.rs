//! Probes of a rule: what may stand in the rules of `BEGIN` and `END`, and the numbers of timers.

use super::super::ast::{Builtin, ExpressionKind, ProbeKind, ProbeSpec, Rule, Script};
use super::super::diagnostic::Diagnostic;
use super::super::names;
use super::super::walk;

/// Units of timers, and the most of each: a period is a number of nanoseconds without sign in 63 bits.
const UNITS: &[(&str, u64)] = &[
    ("hz", 1_000_000),
    ("us", i64::MAX.unsigned_abs() / 1_000),
    ("ms", i64::MAX.unsigned_abs() / 1_000_000),
    ("s", i64::MAX.unsigned_abs() / 1_000_000_000),
];

/// Adds what is wrong with a rule's probes.
pub fn check(rule: &Rule, errors: &mut Vec<Diagnostic>) {
    for probe in &rule.probes {
        timer(probe, errors);
    }
    let is_pattern = |probe: &ProbeSpec| matches!(probe.kind, ProbeKind::Pattern(_));
    if rule.probes.iter().all(is_pattern) {
        return;
    }
    let mut tell = |expression: &super::super::ast::Expression| {
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
                        "the {} builtin cannot be used with BEGIN or END probes",
                        names::builtin_name(builtin)
                    ),
                ));
            }
        });
    };
    rule.filter.iter().for_each(&mut tell);
    walk::statements(&rule.body, &mut |statement| {
        walk::expressions(statement, &mut tell);
    });
}

/// `BEGIN` and `END` occur once.
pub fn check_once(script: &Script, errors: &mut Vec<Diagnostic>) {
    for (kind, name) in [(ProbeKind::Begin, "BEGIN"), (ProbeKind::End, "END")] {
        let probes = script.rules.iter().flat_map(|rule| &rule.probes);
        for again in probes.filter(|probe| probe.kind == kind).skip(1) {
            let message = format!("a second {name}; put its statements into the first one");
            errors.push(Diagnostic::new(again.span, message));
        }
    }
}

/// `profile:hz:99`, `interval:s:1` and the same with a number alone, or with its unit behind it.
fn timer(probe: &ProbeSpec, errors: &mut Vec<Diagnostic>) {
    let ProbeKind::Pattern(text) = &probe.kind else {
        return;
    };
    let parts: Vec<&str> = text.split(':').collect();
    let (provider, unit, number) = match parts.as_slice() {
        [
            provider @ ("profile" | "interval" | "p" | "i"),
            unit,
            number,
        ] => (*provider, *unit, *number),
        [provider @ ("profile" | "interval" | "p" | "i"), number] => {
            let digits = number.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let unit = number.get(digits.len()..).unwrap_or_default();
            (*provider, if unit.is_empty() { "hz" } else { unit }, digits)
        }
        _ => return,
    };
    let mut wrong = |message: String| errors.push(Diagnostic::new(probe.span, message));
    let Some((_, most)) = UNITS.iter().find(|(known, _)| *known == unit) else {
        let known: Vec<&str> = UNITS.iter().map(|(known, _)| *known).collect();
        return wrong(format!(
            "Invalid unit: {unit}; known are {}, as in {provider}:hz:99",
            known.join(", ")
        ));
    };
    let is_number = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
    if !is_number {
        return wrong(format!(
            "Number is invalid: {number}; a timer is written as {provider}:hz:99"
        ));
    }
    match number.parse::<u64>() {
        Ok(0) => wrong("Number is invalid: 0; 1 is the least".to_owned()),
        Ok(value) if value <= *most => {}
        _ => wrong(format!(
            "Number is too large: {number}; {most} {unit} is the most"
        )),
    }
}
